"""A small HTTP server for probes and metrics, in a daemon thread of the worker.

One event loop reads all requests, so slow clients use no threads. The number of connections, the
size of a request and the time of each step are limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django_eventbus.errors import failures
from django_eventbus.logs import about

logger = logging.getLogger(__name__)

#: A new connection above this number closes the oldest connection, which waits for a slow client.
MOST_CONNECTIONS = 256
MAX_REQUEST_BYTES = 8192
#: Seconds in which a client must send its request, and receive the response.
READ_WITHIN = WRITE_WITHIN = 5.0
#: Seconds in which a page must be rendered. Prometheus waits for 10 seconds by default.
RENDER_WITHIN = 10.0
STOP_WITHIN = 2.0
END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    """A GET or HEAD request. The names of headers are in lower case."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Page = Callable[[Request], Awaitable[Response]]


def text(status: int, message: str) -> Response:
    return Response(status, f"{message}\n".encode())


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError if the port is in use or the host is unknown."""
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # The address "::" also accepts connections with IPv4.
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, dualstack_ipv6=both)


class HttpServer:
    """Serves pages by path on a listening socket."""

    def __init__(self, listening: socket.socket, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        host, port = listening.getsockname()[:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._socket = listening
        #: The connections that have no response yet, the oldest first.
        self._connections: dict[asyncio.Task[Any], None] = {}
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="eventbus-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections."""
        if not self._thread.is_alive():
            self._socket.close()
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(STOP_WITHIN)

    def _run(self) -> None:
        # At its end, the runner cancels the tasks of all connections.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_stopped())

    async def _serve_until_stopped(self) -> None:
        server = await asyncio.start_server(self._serve, sock=self._socket, limit=MAX_REQUEST_BYTES)
        await self._stopped.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close the connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > MOST_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        # The client may disconnect at any time.
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            try:
                await self._answer(reader, writer)
            finally:
                self._connections.pop(task, None)
                _end(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(READ_WITHIN):
                request = _parsed(await reader.readuntil(END_OF_HEAD))
        except (asyncio.LimitOverrunError, TimeoutError, ValueError) as error:
            writer.write(_encoded(_refusal(error)))
        else:
            response = await self._render(request)
            writer.write(_encoded(response, with_body=request.method != "HEAD"))
        async with asyncio.timeout(WRITE_WITHIN):
            writer.close()
            await writer.wait_closed()

    async def _render(self, request: Request) -> Response:
        page = self.pages.get(request.path)
        if page is None:
            return text(404, f"There is no page {request.path!r}, only {', '.join(self.pages)}.")
        if request.method not in ("GET", "HEAD"):
            return text(405, f"The method {request.method!r} is not allowed, only GET and HEAD.")
        try:
            async with asyncio.timeout(RENDER_WITHIN):
                return await page(request)
        except TimeoutError:
            return text(503, f"The page was not complete after {RENDER_WITHIN:g} s.")
        except Exception as error:
            logger.error(
                "the page %s failed: %s", request.path, failures.in_a_line(error), extra=about()
            )
            return text(500, "The page failed. The log of the worker contains the error.")


def _end(writer: asyncio.StreamWriter) -> None:
    """Close the connection now. abort() raises an error if the connection is already lost."""
    if writer.transport.get_write_buffer_size():
        writer.transport.abort()
    else:
        writer.close()


def _parsed(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target, _, version = rest.rpartition(" ")
    if not method.isalpha() or not target.startswith("/") or not version.startswith("HTTP/1."):
        raise ValueError("The first line is not like 'GET /path HTTP/1.1'.")
    path, _, query = target.partition("?")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Request(method, path, query, headers)


def _refusal(error: Exception) -> Response:
    if isinstance(error, asyncio.LimitOverrunError):
        return text(431, f"The request has more than {MAX_REQUEST_BYTES} bytes.")
    if isinstance(error, TimeoutError):
        return text(408, f"The request was not complete after {READ_WITHIN:g} s.")
    return text(400, str(error))


def _encoded(response: Response, *, with_body: bool = True) -> bytes:
    allowed = "Allow: GET, HEAD\r\n" if response.status == 405 else ""
    head = (
        f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{allowed}"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")
