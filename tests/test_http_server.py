"""The HTTP server of a worker: requests, limits, slow and broken clients."""

import contextlib
import socket
import threading

import pytest
from django.db import OperationalError

from django_eventbus.worker import http_server, pages
from django_eventbus.worker.health import HealthMonitor
from django_eventbus.worker.http_server import HttpServer, listen, text
from django_eventbus.worker.pages import MetricsPage, health_pages
from tests.probes import get
from tests.workers import eventually


@contextlib.contextmanager
def serving(found, host="127.0.0.1", port=0):
    server = HttpServer(listen(host, port), found)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def hello(request):
    return text(200, f"hello {request.query} {request.headers.get('accept')}")


@pytest.fixture
def server():
    with serving({"/hello": hello}) as server:
        yield server


def connect(server):
    host, port = server.address.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=20)


def sent(server, data):
    """Send bytes and return the status line of the response, empty if there is none."""
    with connect(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(data)
        return client.makefile("rb").readline().decode()
    return ""


def test_a_page_gets_the_query_and_the_headers(server):
    answer = get(server.address, "/hello?a=b", accept="text/html")
    assert (answer.status, answer.text) == (200, "hello a=b text/html\n")
    assert answer.headers["Connection"] == "close"
    assert answer.headers["Cache-Control"] == "no-store"


def test_head_has_the_same_headers_and_no_body(server):
    answer = get(server.address, "/hello", method="HEAD")
    assert (answer.status, answer.text) == (200, "")
    assert answer.headers["Content-Length"] == str(len(get(server.address, "/hello").text))


def test_an_unknown_path_lists_the_known_paths(server):
    answer = get(server.address, "/")
    assert (answer.status, answer.text) == (404, "There is no page '/', only /hello.\n")


def test_another_method_is_refused(server):
    answer = get(server.address, "/hello", method="POST")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /hello\r\n\r\n",
        b"GET hello HTTP/1.1\r\n\r\n",
        b"GET /hello HTTP/2.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        bytes(range(256)) + b"\r\n\r\n",
    ],
)
def test_garbage_is_refused(server, garbage):
    assert sent(server, garbage) == "HTTP/1.1 400 Bad Request\r\n"
    assert get(server.address, "/hello").status == 200


def test_headers_without_a_colon_and_other_encodings_are_ignored(server):
    request = b"GET /hello HTTP/1.1\r\nnonsense\r\nX: \xff\xfe\r\n: \r\n\r\n"
    assert sent(server, request) == "HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("size", [http_server.MAX_REQUEST_BYTES, 10_000_000])
def test_a_request_that_is_too_large_is_refused(server, size):
    request = b"GET /hello HTTP/1.1\r\nX: " + size * b"x" + b"\r\n\r\n"
    # The client may get the response or a reset, because the server does not read the rest.
    assert sent(server, request) in ("HTTP/1.1 431 Request Header Fields Too Large\r\n", "")
    assert get(server.address, "/hello").status == 200


def test_a_client_that_sends_no_request_gets_a_timeout(server, monkeypatch):
    monkeypatch.setattr(http_server, "READ_WITHIN", 0.1)
    assert sent(server, b"GET /hello HTTP/1.1\r\n") == "HTTP/1.1 408 Request Timeout\r\n"


def test_a_client_that_does_not_read_its_response_is_disconnected(monkeypatch):
    async def endless(request):
        return http_server.Response(200, 50_000_000 * b"x")

    monkeypatch.setattr(http_server, "WRITE_WITHIN", 0.1)
    with serving({"/endless": endless, "/hello": hello}) as server, connect(server) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\n\r\n")
        received = len(client.recv(1))  # The server has begun to send.
        eventually(lambda: not server._connections)
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1_000_000):
                received += len(data)
        assert received < 50_000_000
        assert get(server.address, "/hello").status == 200


def test_slow_clients_do_not_block_a_probe(server):
    """There are more slow clients than connections; the server closes the oldest of them."""
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(http_server.MOST_CONNECTIONS + 44):
            stack.enter_context(connect(server)).sendall(b"GET /hello HTTP/1.1\r\n")
        for _ in range(10):
            assert get(server.address, "/hello").status == 200
        assert len(server._connections) <= http_server.MOST_CONNECTIONS
        assert threading.active_count() == before


def test_a_page_that_fails_does_not_end_the_server(capture):
    async def broken(request):
        raise KeyError("x")

    with serving({"/broken": broken}) as server:
        for _ in range(2):
            answer = get(server.address, "/broken")
            assert (answer.status, "KeyError" in answer.text) == (500, False)
    assert "the page /broken failed" in capture.text


def test_a_page_that_takes_too_long_is_given_up(monkeypatch):
    async def slow(request):
        await http_server.asyncio.sleep(600)

    monkeypatch.setattr(http_server, "RENDER_WITHIN", 0.05)
    with serving({"/slow": slow}) as server:
        assert get(server.address, "/slow").status == 503


def test_a_stopped_server_closes_its_connections_and_its_port_can_be_used_again(server):
    port = int(server.address.rsplit(":", 1)[1])
    with connect(server) as client:
        client.sendall(b"GET /hello HTTP/1.1\r\n")
        eventually(lambda: server._connections)
        server.stop()
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""
    with serving({"/hello": hello}, port=port) as again:
        assert again.address == server.address
        assert get(again.address, "/hello").status == 200


def test_all_addresses_of_both_families_are_served():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with serving({"/hello": hello}, host="::") as server:
        port = server.address.rsplit(":", 1)[1]
        assert server.address == f"http://[::]:{port}"
        assert get(f"http://127.0.0.1:{port}", "/hello").status == 200


# -- the pages of a worker


def test_health_is_text_or_json():
    with serving(health_pages(HealthMonitor())) as server:
        live, ready = get(server.address, "/livez"), get(server.address, "/readyz")
        assert (live.status, live.text) == (200, "live\n")
        assert (ready.status, ready.text) == (503, "not ready: the worker is starting\n")
        for asked in (
            get(server.address, "/readyz?format=json"),
            get(server.address, "/readyz", accept="text/html, application/json;q=0.9"),
        ):
            assert asked.status == 503
            assert asked.json == {
                "check": "ready",
                "ok": False,
                "reasons": ["the worker is starting"],
                "processes": [],
            }


@pytest.mark.django_db
def test_metrics_are_rendered_for_the_accept_header():
    page = MetricsPage("default", lambda accept: (accept.encode(), "text/x"))
    with serving({"/metrics": page}) as server:
        answer = get(server.address, "/metrics", accept="text/y")
        assert (answer.status, answer.text) == (200, "text/y")
        assert answer.headers["Content-Type"] == "text/x"


@pytest.mark.django_db
def test_a_database_error_makes_metrics_unavailable():
    def fail(accept):
        raise OperationalError("connection refused")

    with serving({"/metrics": MetricsPage("default", fail)}) as server:
        answer = get(server.address, "/metrics")
        assert (answer.status, "connection refused" in answer.text) == (503, True)


@pytest.mark.django_db
def test_renderings_without_a_reply_of_the_database_do_not_block_health_or_later_metrics(
    monkeypatch,
):
    monkeypatch.setattr(http_server, "RENDER_WITHIN", 0.05)
    answered = threading.Event()
    renderings = []

    def wait(accept):
        renderings.append(accept)
        answered.wait(60)
        return b"", "text/plain"

    found = {"/metrics": MetricsPage("default", wait), **health_pages(HealthMonitor())}
    with serving(found) as server:
        for _ in range(pages.MOST_RENDERINGS + 2):
            assert get(server.address, "/metrics").status == 503
        assert "other requests for metrics are running" in get(server.address, "/metrics").text
        assert len(renderings) == pages.MOST_RENDERINGS
        assert get(server.address, "/livez").status == 200
        monkeypatch.setattr(pages.deadlines, "NO_ANSWER_AFTER", 0.0)
        assert get(server.address, "/metrics").status == 503
        assert len(renderings) == pages.MOST_RENDERINGS + 1
        answered.set()
        monkeypatch.setattr(http_server, "RENDER_WITHIN", 20.0)
        assert get(server.address, "/metrics").status == 200
