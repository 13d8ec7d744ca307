"""The NVMe tier: an append-only log of segments below one folder (proto/FORMAT.md, section "NVMe")."""
