"""The store as a service: how fast, and what is left of clients that die."""
