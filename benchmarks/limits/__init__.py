"""What this machine can do at most: a small C program of our own, fio and redis-benchmark."""
