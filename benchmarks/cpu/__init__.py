"""`pagetier bench cpu`: the CPU engine against its peers, the machine and its own promises."""
