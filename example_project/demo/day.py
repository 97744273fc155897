"""A day in the life of the shop, from opening to the check of its books."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django_eventbus.models import QueuedEvent

from demo.books import Books
from demo.customers import Customers
from demo.processes import ChildDiedError, Children, free_port, wait_until_open
from demo.watching import Watch
from shop.models import Card

LOOK_EVERY = 0.1
DRAIN_SECONDS = 60


class Day:
    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.options = options
        self.children = Children(directory)
        self.watch = Watch()

    def run(self) -> int:
        """The exit code: 0 if all went well. Without ``--check`` only Ctrl-C ends the day."""
        self.furnish()
        try:
            with self.children:
                self.open_shop()
                self.take_orders()
                self.wait_for_worker()
        except ChildDiedError as error:
            print(error)
            return 1
        return self.close_books()

    def furnish(self) -> None:
        """Tables, products, and somebody who may enter the admin."""
        call_command("migrate", verbosity=0)
        get_user_model().objects.create_superuser("admin", "admin@example.com", "admin")
        self.books = Books()

    def open_shop(self) -> None:
        port = free_port()
        web = self.children.start("web-server", "runserver", "--noreload", f"127.0.0.1:{port}")
        self.worker = self.children.start("worker", "run_event_worker", "--no-reload")
        wait_until_open(port, web)
        url = f"http://127.0.0.1:{port}/"
        self.customers = Customers(url)
        print(
            f"Storefront  {url}\n"
            f"Admin       {url}admin/  (user admin, password admin)\n"
            f"Worker log  {self.worker.log}  (receipts too)\n"
            f"Stop with Ctrl-C.\n",
            flush=True,
        )

    def take_orders(self) -> None:
        opened = time.monotonic()
        closes = opened + self.options.seconds if self.options.check else float("inf")
        kills = self.kill_times(opened)
        next_order = opened
        self.customers.order(card=Card.EMPTY)  # a dead letter to look at, whatever chance brings
        while (now := time.monotonic()) < closes:
            if now >= next_order:
                self.customers.order()
                next_order = now + 1 / self.options.rate
            if kills and now >= kills[0]:
                kills.pop(0)
                self.kill_worker()
            self.look()

    def kill_times(self, opened: float) -> list[float]:
        step = self.options.seconds / (self.options.kill_worker + 1)
        return [opened + step * (n + 1) for n in range(self.options.kill_worker)]

    def kill_worker(self) -> None:
        for _ in range(5):
            self.customers.order()  # it shall die with its hands full
        self.worker.kill()
        print(
            f"{time.strftime('%H:%M:%S')}  SIGKILL for the worker; another one starts", flush=True
        )
        self.worker.start()

    def look(self) -> None:
        self.children.require_alive()
        for line in self.watch.news():
            print(line, flush=True)
        time.sleep(LOOK_EVERY)

    def wait_for_worker(self) -> None:
        """No more orders; whatever is queued has a minute to be handled."""
        give_up_at = time.monotonic() + DRAIN_SECONDS
        while QueuedEvent.objects.exists() and time.monotonic() < give_up_at:
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
