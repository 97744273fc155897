"""One day of the shop, from its opening to the check of its books."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from urllib.error import URLError

from django.core.management import call_command
from django.db import connection
from django_eventbus import dead_letters, schedules
from django_eventbus.models import QueuedEvent

from demo import broker, users
from demo.books import Books
from demo.customers import Customers
from demo.processes import ChildDiedError, Children, reserve_port, wait_until_open
from demo.watching import Watch
from shop.models import Card, Product

LOOK_EVERY = 0.1
CELERY_WORKER = (
    *("celery", "-A", "config", "worker", "--concurrency", "2", "--loglevel", "info"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)
NO_METRICS = 'not served: run pip install "django-durable-events[prometheus]"'
DRAIN_SECONDS = 180
FIRST_DEAD_LETTER_SECONDS = 20


def has_metrics() -> bool:
    """Return whether the extra ``prometheus`` is installed."""
    try:
        import_module("django_eventbus.integrations.prometheus")
    except ImportError:
        return False
    return True


class Day:
    def __init__(
        self,
        directory: Path,
        options: argparse.Namespace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.clock = clock
        self.children = Children(directory)
        self.watch = Watch()

    def run(self) -> int:
        """Return the exit code: 0 for success. Without ``--check`` only Ctrl-C ends the day."""
        self.furnish()
        try:
            with self.children:
                self.open_shop()
                self.leave_a_dead_letter()
                self.welcome()
                self.take_orders()
                self.wait_for_worker()
        except ChildDiedError as error:
            print(error)
            return 1
        except URLError as error:
            print(f"the storefront failed: {error}\n{self.web.last_words()}")
            return 1
        finally:
            if self.options.celery:
                broker.delete_queue()
        return self.close_books()

    def furnish(self) -> None:
        call_command("migrate", verbosity=0)
        users.create_users()
        self.books = Books()
        self.change_a_price()
        if self.options.check:
            schedules.run("nightly report")

    def change_a_price(self) -> None:
        """Save a product, so that the bridge publishes an event."""
        product = Product.objects.get(name="Forest honey")
        product.price -= Decimal("0.60")
        product.save()

    def open_shop(self) -> None:
        self.reservation = reserve_port()
        port = self.reservation.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        os.environ["SHOP_PARTNER_URL"] = f"{self.url}partner/"
        self.web = self.children.start("web-server", "runserver", "--noreload", f"127.0.0.1:{port}")
        self.worker = self.children.start(
            *("worker", "run_event_worker", "--no-reload", "--concurrency", "4"),
            *self.worker_ports(),
        )
        if self.options.celery:
            self.celery = self.children.start("celery", *CELERY_WORKER)
        wait_until_open(port, self.web)
        self.customers = Customers(self.url)

    def worker_ports(self) -> list[str]:
        """Return the options for a port with the health, and if possible the metrics, of a worker.

        A worker that replaces a killed one gets the same port.
        """
        self.worker_reservation = reserve_port(8001)
        port = str(self.worker_reservation.getsockname()[1])
        self.worker_url = f"http://127.0.0.1:{port}/"
        metrics = ["--metrics-port", port] if has_metrics() else []
        return ["--health-port", port, *metrics]

    def leave_a_dead_letter(self) -> None:
        self.customers.order(card=Card.EMPTY)
        give_up_at = self.clock() + FIRST_DEAD_LETTER_SECONDS
        while not dead_letters.list(limit=1) and self.clock() < give_up_at:
            self.children.require_alive()
            time.sleep(LOOK_EVERY)

    def welcome(self) -> None:
        print(
            f"\n"
            f"Storefront   {self.url}\n"
            f"Admin        {self.url}admin/\n"
            f"             user {users.ADMIN[0]}, password {users.ADMIN[1]}: may do everything\n"
            f"             user {users.VIEWER[0]}, password {users.VIEWER[1]}: may only look\n"
            f"Worker log   {self.worker.log} (receipts too)\n"
            f"Health       {self.worker_url}readyz\n"
            f"Metrics      {f'{self.worker_url}metrics' if has_metrics() else NO_METRICS}\n"
            f"{self.celery_line()}"
            f"Database     {connection.display_name}, deleted when the shop closes\n"
            f"\n"
            f"One order is a dead letter already: its card was declined. Ctrl-C closes the shop.\n",
            flush=True,
        )

    def celery_line(self) -> str:
        return f"Celery log   {self.celery.log} (it ships)\n" if self.options.celery else ""

    def take_orders(self) -> None:
        """Take orders until closing time, and until everything planned has happened.

        All planned failures happen, even if one order takes longer than ``--seconds`` on a busy
        machine. There is at least one order between two failures.
        """
        opened = self.clock()
        closes = opened + self.options.seconds if self.options.check else float("inf")
        plan = self.plan() if self.options.check else []
        next_order = opened
        while (now := self.clock()) < closes or plan:
            if now >= next_order:
                self.customers.order()
                next_order = now + 1 / self.options.rate
            if plan and now >= opened + plan[0][0] * self.options.seconds:
                plan.pop(0)[1]()
            self.look()

    def plan(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the planned failures and their times."""
        kills = self.options.kill_worker
        return sorted(
            [
                (0.35, self.break_payments),
                (0.65, self.repair_payments),
                *(((n + 1) / (kills + 1), self.kill_worker) for n in range(kills)),
            ],
            key=lambda each: each[0],
        )

    def break_payments(self) -> None:
        self.customers.break_payments()
        self.report("the payment provider goes down")

    def repair_payments(self) -> None:
        self.customers.repair_payments()
        self.report("the payment provider is back")

    def kill_worker(self) -> None:
        for _ in range(5):
            self.customers.order()  # These orders make sure that the killed worker has events.
        self.worker.kill()
        self.report("SIGKILL for the worker; another one starts")
        self.worker.start()
        if self.options.celery:
            self.celery.kill()
            self.report("SIGKILL for the Celery worker; another one starts")
            self.celery.start()

    @staticmethod
    def report(news: str) -> None:
        print(f"{time.strftime('%H:%M:%S', time.gmtime())}  {news}", flush=True)

    def look(self) -> None:
        self.children.require_alive()
        for line in self.watch.news():
            print(line, flush=True)
        time.sleep(LOOK_EVERY)

    def wait_for_worker(self) -> None:
        """Stop taking orders, and wait until the worker has handled the queued events."""
        give_up_at = self.clock() + DRAIN_SECONDS
        while QueuedEvent.objects.exists() and self.clock() < give_up_at:
            self.look()
        self.look()

    def close_books(self) -> int:
        for name, value in self.books.figures().items():
            print(f"{name:>20}  {value:>6,}")
        mistakes = self.books.mistakes()
        for mistake in mistakes:
            print(f"WRONG: {mistake}")
        print("The books do not balance." if mistakes else "The books balance.")
        return 1 if mistakes else 0
