"""The agent of one pool node: device plugin, identity of pods, Epilog hold, audit.

`slurmbridge.agent` puts the parts together. Nothing here knows the other adapters.
"""
