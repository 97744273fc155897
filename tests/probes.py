"""Requests to the HTTP ports of worker processes."""

import json
import re
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from tests.workers import eventually

#: The environment of a worker that is not live as soon as a thread reports one second late.
STRICT = {"EVENTBUS_TEST_IMPORT": "tests.faults.strict"}


class Answer:
    def __init__(self, response):
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    @property
    def json(self):
        return json.loads(self.text)


def addresses(worker):
    """Wait until a worker prints its addresses; return them by path."""

    def printed():
        found = re.findall("Listening on (http://[^/]+)(/[a-z]+)\n", worker.log)
        return {path: address for address, path in found}

    return eventually(printed, lambda: worker.log)


def get(address, path, *, method="GET", accept="*/*"):
    connection = HTTPConnection(urlsplit(address).netloc, timeout=20)
    try:
        connection.request(method, path, headers={"Accept": accept})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def status(address, path):
    """Return the status of a page, or 0 if the server does not answer."""
    try:
        return get(address, path).status
    except (OSError, HTTPException):
        return 0


def becomes(worker, path, expected):
    """Wait until a page of a worker has this status."""
    address = addresses(worker)[path]
    eventually(
        lambda: status(address, path) == expected,
        lambda: f"{path} never was {expected}: {get(address, path).text}\n{worker.log}",
    )
