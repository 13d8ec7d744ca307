"""What scheduling is worth: allocation, batching, reuse, choices, preemption. `bench.py` is the entry."""
