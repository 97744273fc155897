"""Check whether a server answers, for make. Prints host:port and exits with 1 if it does not.

Run as ``python -m tests.server_answers mariadb``, or with ``--url`` to print the URL.
"""

import os
import socket
import sys
from urllib.parse import urlsplit

from tests.databases import DEFAULT_MARIADB_URL

SERVERS = {
    "mariadb": ("EVENTBUS_TEST_MARIADB_URL", DEFAULT_MARIADB_URL, 3306),
    "redis": ("EVENTBUS_TEST_REDIS_URL", "redis://127.0.0.1:6379/5", 6379),
    "rabbitmq": ("EVENTBUS_TEST_RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672//", 5672),
}


def url_of(server: str) -> str:
    variable, default_url, _default_port = SERVERS[server]
    return os.environ.get(variable) or default_url


def address_of(server: str) -> tuple[str, int]:
    _variable, _default_url, default_port = SERVERS[server]
    parts = urlsplit(url_of(server))
    return parts.hostname or "127.0.0.1", parts.port or default_port


def answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    *options, server = sys.argv[1:]
    address = address_of(server)
    print(url_of(server) if options else "{}:{}".format(*address))
    sys.exit(not answers(address))
