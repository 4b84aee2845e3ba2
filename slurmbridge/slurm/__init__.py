"""The Slurm side: how slurmctld is asked, and how its answers become records.

`command` runs Slurm's commands, `text`, `queue` and `jobtext` read what they print (pure), `reader`
makes whole snapshots of it. `claim_argv` and `refusal` are the writing side's words.
"""
