"""``manage.py run_event_worker``: options in, a supervisor (or a worker in this process) out."""

from __future__ import annotations

import atexit
import sys
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings as django_settings
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connections
from django.utils import autoreload

from django_eventbus.batch import Tally
from django_eventbus.conf import settings
from django_eventbus.models import QueuedEvent
from django_eventbus.registry import did_you_mean, registry
from django_eventbus.signals import delivery_succeeded
from django_eventbus.store import default_alias, store_for
from django_eventbus.supervisor import Supervisor
from django_eventbus.worker import (
    Worker,
    WorkerOptions,
    leave_pools,
    run_here,
    stop_on_signals,
)

STATUS_EVERY = 1.0
LOG_EVERY = 10.0
DEPTH_AT_MOST = 100_000
LARGEST_BATCH = 10_000


class Command(BaseCommand):
    help = "Handle published events until stopped (Ctrl-C or SIGTERM; twice to force)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--queues", help="comma-separated; default: all of EVENTBUS['QUEUES']")
        parser.add_argument("--database", help="the alias whose events to handle")
        parser.add_argument(
            "--processes",
            type=int,
            default=1,
            help="worker processes under one supervisor, default 1; 0 works in this very process",
        )
        parser.add_argument(
            "--concurrency",
            type=int,
            default=1,
            help="threads per process, for I/O-bound handlers; default 1",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            help="the most events one claim takes; default: EVENTBUS['BATCH_SIZE']",
        )
        parser.add_argument(
            "--poll-interval",
            type=float,
            help="seconds between looks when idle; default: EVENTBUS['POLL_INTERVAL']",
        )
        parser.add_argument("--drain", action="store_true", help="stop when nothing is ready")
        parser.add_argument("--max-events", type=int, help="stop after about this many events")
        parser.add_argument(
            "--no-reload",
            action="store_true",
            help="do not restart on code changes (which one process does under DEBUG)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        leave_pools()
        worker_options = self._worker_options(options)
        self._require_tables(worker_options.using)
        reload = (
            django_settings.DEBUG
            and not options["no_reload"]
            and not options["drain"]
            and options["processes"] == 1
        )
        if reload:
            autoreload.run_with_reloader(self._run_and_reload, worker_options)
        elif options["processes"] == 0:
            self._say_hello(worker_options)
            self._run_here(worker_options)
        else:
            self._say_hello(worker_options)
            self._supervise(worker_options, options["processes"])

    def _worker_options(self, options: dict[str, Any]) -> WorkerOptions:
        for name in ("concurrency", "batch_size", "poll_interval", "max_events"):
            if options[name] is not None and options[name] <= 0:
                raise CommandError(f"--{name.replace('_', '-')} must be positive")
        if (options["batch_size"] or 0) > LARGEST_BATCH:
            raise CommandError(f"--batch-size must be at most {LARGEST_BATCH:,}")
        if options["processes"] < 0:
            raise CommandError("--processes must not be negative")
        alias = options["database"] or default_alias()
        if alias not in django_settings.DATABASES:
            hint = did_you_mean(alias, django_settings.DATABASES)
            raise CommandError(f"there is no database {alias!r}{hint}")
        return WorkerOptions(
            using=alias,
            queues=self._queues(options["queues"]),
            concurrency=options["concurrency"],
            batch_size=options["batch_size"] or settings.BATCH_SIZE,
            poll_interval=options["poll_interval"] or settings.POLL_INTERVAL,
            drain=options["drain"],
            max_events=options["max_events"],
        )

    @staticmethod
    def _require_tables(alias: str) -> None:
        try:
            tables = connections[alias].introspection.table_names()
        except OperationalError:
            return  # the worker waits for a database that is not there yet
        if QueuedEvent._meta.db_table not in tables:
            raise CommandError(
                f"the database {alias!r} has no tables of the event bus: run manage.py migrate"
            )

    @staticmethod
    def _queues(named: str | None) -> tuple[str, ...]:
        queues = tuple(settings.QUEUES) if named is None else tuple(named.split(","))
        for each in queues:
            if each not in settings.QUEUES:
                hint = did_you_mean(each, settings.QUEUES)
                raise CommandError(f"{each!r} is not in EVENTBUS['QUEUES']{hint}")
        return queues

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _say_hello(self, options: WorkerOptions) -> None:
        self._say(
            f"Serving {', '.join(options.queues)} on {options.using!r} "
            f"with {_count(len(registry.all()), 'handler')}. Stop with Ctrl-C."
        )

    def _run_and_reload(self, options: WorkerOptions) -> None:
        """For development: every delivery is told, a saved file starts it all over."""
        self._say_hello(options)
        self._say("Development: a reload or Ctrl-C cuts a running handler off; it is run again.")
        delivery_succeeded.connect(self._tell_of_success)
        self._run_here(options)

    def _tell_of_success(
        self, sender: Any, *, event: Any, handler: str, seconds: float, **kwargs: Any
    ) -> None:
        milliseconds = f"{seconds * 1000:.0f} ms"
        self._say(f"{handler} handled {event.type} {event.event_id} in {milliseconds}")

    def _run_here(self, options: WorkerOptions) -> None:
        """In this process. A code reload ends it without notice, so clean up at exit."""

        def on_start(worker: Worker) -> None:
            stop_on_signals(worker)
            atexit.register(_abandon, worker)

        self._say_goodbye(run_here(options, on_start))

    def _supervise(self, options: WorkerOptions, processes: int) -> None:
        report = StatusLine(self.stdout) if self.stdout.isatty() else StatusLog(self.stdout)
        supervisor = Supervisor(options, processes=processes, report=report, say=self._say)
        code = supervisor.run()
        report.end()
        handled, failed, dead = supervisor.counted()
        self._say_goodbye(Tally(handled=handled, failed=failed, dead=dead))
        if code:
            sys.exit(code)

    def _say_goodbye(self, tally: Tally) -> None:
        self._say(
            f"{_count(tally.handled, 'event')} handled, "
            f"{_count(tally.failed, 'failed attempt')}, {_count(tally.dead, 'dead letter')}."
        )


def _abandon(worker: Worker) -> None:
    """Give back what a worker holds that is ended in the middle of things."""
    store_for(worker.options.using).dismiss(worker.worker_id)


class StatusLog:
    """For a pipe: a plain line now and then, while there is something to tell."""

    every = LOG_EVERY

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout
        self._told_at = time.monotonic()
        self._told = (0, 0, 0)

    def __call__(self, supervisor: Supervisor) -> None:
        now = time.monotonic()
        if now - self._told_at < self.every:
            return
        counted = supervisor.counted()
        speed = (counted[0] - self._told[0]) / (now - self._told_at)
        if self.wants(counted):
            self.write(_status(counted, speed, _depth(supervisor)))
        self._told_at, self._told = now, counted

    def wants(self, counted: tuple[int, int, int]) -> bool:
        return counted != self._told

    def write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def end(self) -> None:
        """Nothing to clear."""


class StatusLine(StatusLog):
    """For a terminal: one line that is always true."""

    every = STATUS_EVERY

    def wants(self, counted: tuple[int, int, int]) -> bool:
        return True

    def write(self, text: str) -> None:
        # The cursor waits at the beginning of the line, where a log record may overwrite it.
        self.stdout.write(f"\r\x1b[2K{text}\r", ending="")
        self.stdout.flush()

    def end(self) -> None:
        self.stdout.write("\r\x1b[2K", ending="")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _status(counted: tuple[int, int, int], speed: float, depth: str) -> str:
    handled, failed, dead = counted
    return (
        f"{speed:,.0f} events/s · {depth} queued · {handled:,} handled · "
        f"{failed:,} failed attempts · {dead:,} dead"
    )


def _depth(supervisor: Supervisor) -> str:
    try:
        depth = supervisor.store.depth(at_most=DEPTH_AT_MOST)
    except Exception:
        return "?"
    return f"{depth:,}" if depth < DEPTH_AT_MOST else f"{DEPTH_AT_MOST:,}+"
