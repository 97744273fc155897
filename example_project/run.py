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
    for name in ("SIGTERM", "SIGHUP"):  # as tidy as Ctrl-C
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
        "--check", action="store_true", help="stop after --seconds and check the shop's books"
    )
    parser.add_argument("--seconds", type=float, default=20, help="how long --check takes orders")
    parser.add_argument("--rate", type=float, help="orders per second; default 1, with --check 5")
    parser.add_argument(
        "--kill-worker",
        type=int,
        default=0,
        metavar="N",
        help="SIGKILL the worker N times, spread over --seconds, and start another",
    )
    options = parser.parse_args(arguments)
    options.rate = options.rate or (5 if options.check else 1)
    return options


def run(directory: Path, options: argparse.Namespace) -> int:
    """Set up Django with a database of its own; only then can the rest be imported."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    os.environ["SHOP_DATABASE"] = str(directory / "shop.sqlite3")

    import django

    django.setup()

    from demo.day import Day

    return Day(directory, options).run()


if __name__ == "__main__":
    sys.exit(main())
