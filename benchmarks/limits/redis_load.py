"""`python -m pagetier.benchmarks.limits.redis_load SOCKET`: writes and reads large values until it is terminated.

Prints one line as soon as the first values have gone both ways.
"""

from __future__ import annotations

import socket
import sys
from contextlib import closing

from pagetier.benchmarks.limits.redis_limits import TIMEOUT_S, RedisLoop


def main(socket_path: str) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(socket_path)
        loop = RedisLoop(connection)
        for _ in range(8):
            loop.set_some()  # every key exists
        loop.get_some()
        sys.stdout.write("under load\n")
        sys.stdout.flush()
        while True:
            loop.set_some()
            loop.get_some()


if __name__ == "__main__":
    main(sys.argv[1])
