"""The Redis tier: bulk RESP over plain sockets, the tier itself, and the embedded Valkey with its supervisor."""
