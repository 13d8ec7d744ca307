"""Eviction policies of a host tier compared on block traces; see `bench.py`."""
