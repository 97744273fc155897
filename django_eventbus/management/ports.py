"""The ports of ``run_event_worker``: health checks and metrics by HTTP."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.core.management.base import CommandError

from django_eventbus.management.console import number
from django_eventbus.worker.health import HealthMonitor
from django_eventbus.worker.http_server import HttpServer, Page, listen
from django_eventbus.worker.pages import MetricsPage, Render, health_pages

LARGEST_PORT = 65_535


def add_ports(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--health-port",
        type=number(0, LARGEST_PORT),
        metavar="PORT",
        help="serve /livez and /readyz on this port; 0 chooses a free port",
    )
    parser.add_argument(
        "--metrics-port",
        type=number(0, LARGEST_PORT),
        metavar="PORT",
        help="serve /metrics for Prometheus on this port; may be the same as --health-port",
    )
    parser.add_argument(
        "--http-host",
        default="127.0.0.1",
        metavar="HOST",
        help="the address of both ports (default: 127.0.0.1, this machine only); "
        "0.0.0.0 or :: is all addresses",
    )


class Ports:
    """The HTTP servers of a worker.

    The constructor opens the ports, and raises CommandError if a port is in use. So no worker is
    started in that case.
    """

    def __init__(self, options: dict[str, Any], using: str, monitor: HealthMonitor) -> None:
        host = options["http_host"]
        health, metrics = options["health_port"], options["metrics_port"]
        self.servers: list[HttpServer] = []
        if health is not None and health == metrics:
            pages = health_pages(monitor) | _metrics_pages(using)
            self._open("--health-port", host, health, pages)
            return
        if metrics is not None:
            self._open("--metrics-port", host, metrics, _metrics_pages(using))
        if health is not None:
            self._open("--health-port", host, health, health_pages(monitor))

    def _open(self, option: str, host: str, port: int, pages: dict[str, Page]) -> None:
        try:
            self.servers.append(HttpServer(listen(host, port), pages))
        except OSError as error:
            self.close()
            # Python adds "(while attempting to bind on address …)".
            reason = str(error.strerror).partition(" (")[0]
            raise CommandError(
                f"{option}: cannot listen on {host} port {port}: {reason}. "
                "Choose another port or --http-host, or stop the process that uses the port."
            ) from None

    def addresses(self) -> Iterator[str]:
        """Yield the address of each page."""
        for server in self.servers:
            yield from (f"{server.address}{path}" for path in server.pages)

    def __enter__(self) -> Ports:
        for each in self.servers:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for each in self.servers:
            each.stop()


def _metrics_pages(using: str) -> dict[str, Page]:
    return {"/metrics": MetricsPage(using, _renderer(using))}


def _renderer(using: str) -> Render:
    if find_spec("prometheus_client") is None:
        raise CommandError(
            "--metrics-port: prometheus_client is not installed. "
            'Run pip install "django-durable-events[prometheus]".'
        )
    # The module is imported only if the option is given, because the library is optional.
    module = import_module("django_eventbus.integrations.prometheus")
    render: Callable[..., tuple[bytes, str]] = module.render
    return lambda accept: render(using, accept=accept)
