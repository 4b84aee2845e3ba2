"""Generated from slurmbridge/link/pool.proto by `make proto`; not edited by hand."""
