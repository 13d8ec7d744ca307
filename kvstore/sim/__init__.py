"""A deterministic simulation of the whole store: several processes, one disk, one Redis, one clock, one scheduler."""
