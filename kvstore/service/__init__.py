"""The store as a service: gRPC around `TieredStore`, shared memory for engines on the same host, and its client."""
