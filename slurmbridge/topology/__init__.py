"""Where nodes stand, and how a gang is laid on them: values and pure functions, no I/O.

sources (labels, topology.conf, topology.yaml, `scontrol show topology`)
  -> `source` records -> `merge` -> `graph` (NetworkX, once per generation) -> `index` (arrays)
  -> `pack`, `score` (numpy only, inside requests).

The steps are told in docs/topology.md.
"""
