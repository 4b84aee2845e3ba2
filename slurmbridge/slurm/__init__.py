"""The Slurm side: how slurmctld is asked, and how its answers become records.

`command` runs Slurm's commands, `text`, `queue` and `jobtext` read what they print (pure), `reader`
makes whole snapshots of it. `claims` makes, ends and covers claims: in steps of `claim_tool`, on
given GPUs by `cover` and its pure `cover_plan`; `claim_argv` and `refusal` are its words.
"""
