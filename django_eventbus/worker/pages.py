"""The pages that a worker serves by HTTP: /livez, /readyz and /metrics."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

from django.db import Error, connections

from django_eventbus.delivery import deadlines
from django_eventbus.errors import failures
from django_eventbus.store import name_own_sessions
from django_eventbus.worker.health import Health, HealthMonitor
from django_eventbus.worker.http_server import Page, Request, Response, text

#: The largest number of renderings of metrics that query the database at the same time.
MOST_RENDERINGS = 4

#: Returns the metrics and their content type, for the value of the Accept header.
Render = Callable[[str], tuple[bytes, str]]


def health_pages(monitor: HealthMonitor) -> dict[str, Page]:
    async def livez(request: Request) -> Response:
        found = monitor.health()
        return _answer(request, "live", found, found.not_live)

    async def readyz(request: Request) -> Response:
        found = monitor.health()
        return _answer(request, "ready", found, found.not_ready)

    return {"/livez": livez, "/readyz": readyz}


def _answer(request: Request, check: str, found: Health, reasons: Sequence[str]) -> Response:
    status = 503 if reasons else 200
    if _wants_json(request):
        record = {
            "check": check,
            "ok": not reasons,
            "reasons": list(reasons),
            "processes": [asdict(each) for each in found.processes],
        }
        return Response(status, f"{json.dumps(record)}\n".encode(), "application/json")
    lines = [f"not {check}: {each}" for each in reasons] or [check]
    lines += [
        f"process {each.pid}: {each.state}, progress {each.seconds_since_progress:.1f} s ago"
        for each in found.processes
    ]
    return text(status, "\n".join(lines))


def _wants_json(request: Request) -> bool:
    in_query = "format=json" in request.query.split("&")
    return in_query or "application/json" in request.headers.get("accept", "")


class MetricsPage:
    """Renders metrics in a new thread, because the event loop must not wait for the database."""

    def __init__(self, using: str, render: Render) -> None:
        self._using = using
        self._render = render
        self._running: dict[Future[tuple[bytes, str]], float] = {}

    async def __call__(self, request: Request) -> Response:
        self._forget_old_renderings()
        if len(self._running) >= MOST_RENDERINGS:
            return text(503, f"{MOST_RENDERINGS} other requests for metrics are running.")
        outcome: Future[tuple[bytes, str]] = Future()
        self._running[outcome] = time.monotonic()
        accept = request.headers.get("accept", "")
        threading.Thread(
            target=self._run, args=(outcome, accept), name="eventbus-metrics", daemon=True
        ).start()
        try:
            # If the client waits no longer, the rendering must still count as running.
            body, content_type = await asyncio.shield(asyncio.wrap_future(outcome))
        except Error as error:
            return text(503, f"database error: {failures.in_a_line(error)}")
        return Response(200, body, content_type)

    def _forget_old_renderings(self) -> None:
        """Remove renderings that have ended, or began more than NO_ANSWER_AFTER seconds ago."""
        oldest = time.monotonic() - deadlines.NO_ANSWER_AFTER
        self._running = {
            outcome: began
            for outcome, began in self._running.items()
            if not outcome.done() and began > oldest
        }

    def _run(self, outcome: Future[tuple[bytes, str]], accept: str) -> None:
        try:
            name_own_sessions(self._using, "metrics")
            outcome.set_result(self._render(accept))
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            connections.close_all()
