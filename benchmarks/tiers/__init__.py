"""The lower tiers against the limits of the medium below them; see `bench.py`."""
