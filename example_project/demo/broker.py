"""The broker of a demo with Celery: a folder without a server, or a server on this machine.

Each demo has a queue of its own on the server, and deletes the queue when it ends.
"""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

SERVERS = {
    "redis": "redis://127.0.0.1:6379/0",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:5672//",
}
CHOICES = ("folder", *SERVERS)


def prepare(kind: str, directory: Path) -> None:
    """Set the environment of the shop's settings. Exit if Celery or the broker is missing."""
    if find_spec("celery") is None or (kind == "redis" and find_spec("redis") is None):
        sys.exit('Celery is not installed: pip install "celery[redis]"')
    if kind == "folder":
        folder = directory / "broker"
        folder.mkdir()
        os.environ["SHOP_BROKER"] = str(folder)
    else:
        require_answer(SERVERS[kind])
        os.environ["SHOP_BROKER"] = SERVERS[kind]
    os.environ["SHOP_BROKER_QUEUE"] = f"corner-shop-{os.getpid()}"


def require_answer(url: str) -> None:
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 0)
    try:
        socket.create_connection(address, timeout=3).close()
    except OSError as error:
        sys.exit(f"no broker answers at {address[0]}:{address[1]}: {error}")


def delete_queue() -> None:
    """Delete the queue of this demo, and its binding."""
    from config.celery import app

    with app.connection_for_write() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        # kombu deletes the bindings of queues that the same process has declared.
        queue.declare()
        queue.delete()
