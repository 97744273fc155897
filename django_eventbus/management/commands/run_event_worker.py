"""``manage.py run_event_worker``: run a supervisor, or a worker in this process."""

from __future__ import annotations

import atexit
import shutil
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings as django_settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import autoreload

from django_eventbus.conf import settings
from django_eventbus.delivery.batch import Tally
from django_eventbus.errors.failpoints import reached
from django_eventbus.errors.suggestions import check_queue
from django_eventbus.exceptions import UnknownQueueError
from django_eventbus.internals.django import runs_under_reloader
from django_eventbus.management.console import CLEAR_LINE, database
from django_eventbus.management.ports import Ports, add_ports
from django_eventbus.registry import registry
from django_eventbus.signals import delivery_succeeded
from django_eventbus.store import name_sessions, store_for
from django_eventbus.worker.health import HealthMonitor
from django_eventbus.worker.process import STOP_SIGNALS
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.supervisor import Supervisor
from django_eventbus.worker.systemd import Notifier
from django_eventbus.worker.worker import Worker, leave_pools, run_here, stop_on_signals

STATUS_EVERY = 1.0
LOG_EVERY = 10.0
DEPTH_AT_MOST = 100_000
LARGEST_BATCH = 10_000


class Command(BaseCommand):
    help = "Handle events until stopped by Ctrl-C or SIGTERM; a second signal stops immediately."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--queues", help="comma-separated; default: all of EVENTBUS['QUEUES']")
        parser.add_argument("--database", help="alias of the database whose events are handled")
        parser.add_argument(
            "--processes",
            type=int,
            default=1,
            help="worker processes under one supervisor (default: 1); "
            "0: run the handlers in this process",
        )
        parser.add_argument(
            "--concurrency",
            type=int,
            default=1,
            help="threads per process, for I/O-bound handlers (default: 1)",
        )
        parser.add_argument(
            "--batch-size",
            type=int,
            help="maximum number of events per claim; default: EVENTBUS['BATCH_SIZE']",
        )
        parser.add_argument(
            "--poll-interval",
            type=float,
            help="seconds between two polls of an idle queue; default: EVENTBUS['POLL_INTERVAL']",
        )
        parser.add_argument("--drain", action="store_true", help="stop when no event is ready")
        parser.add_argument("--max-events", type=int, help="stop after about this many events")
        parser.add_argument(
            "--no-reload",
            action="store_true",
            help="do not restart on code changes; by default, a single process restarts if "
            "DEBUG is True",
        )
        add_ports(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with code 0 if a stop signal arrives before the worker has its signal handlers."""
        for each in STOP_SIGNALS:
            signal.signal(each, lambda *_: sys.exit(0))
        super().run_from_argv(argv)

    def handle(self, *args: Any, **options: Any) -> None:
        reached("start.command")
        reload = (
            django_settings.DEBUG
            and not options["no_reload"]
            and not options["drain"]
            and options["processes"] == 1
        )
        leave_pools()
        name_sessions("deliver" if reload or options["processes"] == 0 else "supervisor")
        worker_options = self._worker_options(options)
        if reload and not runs_under_reloader():
            # This process only starts another one, which calls this method again and opens the
            # ports.
            self._run_with_reloader(worker_options)
            return
        self.monitor = HealthMonitor()
        notifier = Notifier()
        with Ports(options, worker_options.using, self.monitor) as self.ports:
            notifier.start(self.monitor.health)
            try:
                self._run(worker_options, options["processes"], reload=reload)
            finally:
                notifier.stop()

    def _run(self, options: WorkerOptions, processes: int, *, reload: bool) -> None:
        if reload:
            self._run_with_reloader(options)
        elif processes == 0:
            self._print_start(options)
            self._run_here(options)
        else:
            self._print_start(options)
            self._supervise(options, processes)

    def _run_with_reloader(self, options: WorkerOptions) -> None:
        # Django's reloader expects a KeyboardInterrupt for Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        autoreload.run_with_reloader(self._run_and_reload, options)

    def _worker_options(self, options: dict[str, Any]) -> WorkerOptions:
        for name in ("concurrency", "batch_size", "poll_interval", "max_events"):
            if options[name] is not None and options[name] <= 0:
                option = f"--{name.replace('_', '-')}"
                raise CommandError(f"{option} must be greater than 0, not {options[name]}")
        if (options["batch_size"] or 0) > LARGEST_BATCH:
            size = options["batch_size"]
            raise CommandError(f"--batch-size must be at most {LARGEST_BATCH:,}, not {size:,}")
        if options["processes"] < 0:
            raise CommandError(f"--processes must be 0 or more, not {options['processes']}")
        return WorkerOptions(
            using=database(options["database"]),
            queues=self._queues(options["queues"]),
            concurrency=options["concurrency"],
            batch_size=options["batch_size"] or settings.BATCH_SIZE,
            poll_interval=options["poll_interval"] or settings.POLL_INTERVAL,
            drain=options["drain"],
            max_events=options["max_events"],
        )

    @staticmethod
    def _queues(named: str | None) -> tuple[str, ...]:
        queues = tuple(settings.QUEUES) if named is None else tuple(named.split(","))
        try:
            for each in queues:
                check_queue(each)
        except UnknownQueueError as error:
            raise CommandError(str(error)) from None
        return queues

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _print_start(self, options: WorkerOptions) -> None:
        of_project = [
            each for each in registry.all() if not each.name.startswith("django_eventbus.")
        ]
        self._say(
            f"Serving queues {', '.join(options.queues)} on database {options.using!r} "
            f"with {_count(len(of_project), 'handler')}. Press Ctrl-C to stop."
        )
        for address in self.ports.addresses():
            self._say(f"Listening on {address}")

    def _run_and_reload(self, options: WorkerOptions) -> None:
        """Run a worker that prints each success; the reloader restarts it on code changes."""
        self._print_start(options)
        self._say(
            "A code reload or Ctrl-C interrupts a running handler; the event is handled again."
        )
        delivery_succeeded.connect(self._print_success)
        self._run_here(options)

    def _print_success(
        self, sender: Any, *, event: Any, handler: str, seconds: float, **kwargs: Any
    ) -> None:
        milliseconds = f"{seconds * 1000:.0f} ms"
        self._say(f"{handler} handled {event.type} {event.event_id} in {milliseconds}")

    def _run_here(self, options: WorkerOptions) -> None:
        """Run a worker in this process.

        A code reload exits the process without stopping the worker. The claims of the worker are
        then released by the function that is registered with atexit.
        """

        def on_start(worker: Worker) -> None:
            self.monitor.observe_worker(worker)
            stop_on_signals(worker)
            atexit.register(_abandon, worker)

        self._print_totals(run_here(options, on_start))

    def _supervise(self, options: WorkerOptions, processes: int) -> None:
        report = StatusLine(self.stdout) if self.stdout.isatty() else StatusLog(self.stdout)
        supervisor = Supervisor(options, processes=processes, report=report, say=report.say)
        self.monitor.observe_supervisor(supervisor)
        code = supervisor.run()
        report.end()
        handled, failed, dead = supervisor.counted()
        self._print_totals(Tally(handled=handled, failed=failed, dead=dead))
        if code:
            sys.exit(code)

    def _print_totals(self, tally: Tally) -> None:
        self._say(
            f"Handled {_count(tally.handled, 'event')}, "
            f"{_count(tally.failed, 'failed attempt')}, {_count(tally.dead, 'dead letter')}."
        )


def _abandon(worker: Worker) -> None:
    """Release the claims of a worker that was interrupted."""
    store_for(worker.options.using).dismiss(worker.worker_id)


class StatusLog:
    """Status output for a pipe: a line every ``every`` seconds, if the counts have changed."""

    every = LOG_EVERY

    def __init__(self, stdout: Any) -> None:
        self.stdout = stdout
        self._reported_at = time.monotonic()
        self._reported = (0, 0, 0)

    def __call__(self, supervisor: Supervisor) -> None:
        now = time.monotonic()
        if now - self._reported_at < self.every:
            return
        counted = supervisor.counted()
        speed = (counted[0] - self._reported[0]) / (now - self._reported_at)
        if self.wants(counted):
            self.write(counted, speed, _depth(supervisor))
        self._reported_at, self._reported = now, counted

    def wants(self, counted: tuple[int, int, int]) -> bool:
        return counted != self._reported

    def write(self, counted: tuple[int, int, int], speed: float, depth: str) -> None:
        self.say(_status(counted, speed, depth))

    def say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def end(self) -> None:
        """Do nothing: there is no line to clear."""


class StatusLine(StatusLog):
    """Status output for a terminal: one line that is rewritten every second."""

    every = STATUS_EVERY

    def __init__(self, stdout: Any) -> None:
        super().__init__(stdout)
        # The supervisor's renewal thread writes the status line, and the main thread writes other
        # texts. The lock keeps the two outputs apart.
        self._lock = threading.Lock()
        self._ended = False

    def wants(self, counted: tuple[int, int, int]) -> bool:
        return True

    def write(self, counted: tuple[int, int, int], speed: float, depth: str) -> None:
        # Some terminals wrap a line that fills the last column. A wrapped line cannot be cleared,
        # so the text is one character shorter.
        text = _fitting(counted, speed, depth, shutil.get_terminal_size().columns - 1)
        with self._lock:
            if not self._ended:
                # "\r" moves the cursor to the start of the line, so that a log record overwrites
                # the status.
                self.stdout.write(f"{CLEAR_LINE}{text}\r", ending="")
                self.stdout.flush()

    def say(self, text: str) -> None:
        with self._lock:
            self.stdout.write(f"{CLEAR_LINE}{text}")
            self.stdout.flush()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self.stdout.write(CLEAR_LINE, ending="")
            self.stdout.flush()


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _status(counted: tuple[int, int, int], speed: float, depth: str) -> str:
    handled, failed, dead = counted
    return (
        f"{speed:,.0f} events/s · {depth} queued · {handled:,} handled · "
        f"{failed:,} failed attempts · {dead:,} dead"
    )


def _fitting(counted: tuple[int, int, int], speed: float, depth: str, width: int) -> str:
    """Return the longest form of the status that fits. If none fits, truncate the shortest form."""
    long = _status(counted, speed, depth)
    short = long.replace(" events/s", "/s").replace(" failed attempts", " failed")
    fitting = [each for each in (long, short) if len(each) <= width]
    return fitting[0] if fitting else f"{short[: max(0, width - 1)]}…"


def _depth(supervisor: Supervisor) -> str:
    try:
        depth = supervisor.store.depth(at_most=DEPTH_AT_MOST)
    except Exception:
        return "?"
    return f"{depth:,}" if depth < DEPTH_AT_MOST else f"{DEPTH_AT_MOST:,}+"
