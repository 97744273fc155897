"""Does a server answer? For make: prints host:port and exits with 1 if it does not.

Run as ``python -m tests.server_answers mariadb``.
"""

import os
import socket
import sys
from urllib.parse import urlsplit

from tests.databases import DEFAULT_MARIADB_URL

SERVERS = {"mariadb": ("EVENTBUS_TEST_MARIADB_URL", DEFAULT_MARIADB_URL, 3306)}


def address_of(server: str) -> tuple[str, int]:
    variable, default_url, default_port = SERVERS[server]
    parts = urlsplit(os.environ.get(variable) or default_url)
    return parts.hostname or "127.0.0.1", parts.port or default_port


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    address = address_of(sys.argv[1])
    print("{}:{}".format(*address))
    sys.exit(not answers(address))
