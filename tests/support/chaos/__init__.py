"""Chaos on the real test cluster: load, faults, and a judge that shares no code with the product."""
