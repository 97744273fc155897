"""Processes that publish at the same moment.

    python -m tests.publishers READY START TYPE [KEY ...]

With keys, publish one event per key; without, as many events as COUNT in the environment. Each
event has an effect in the same transaction. Prints the result of each event.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

COUNT = "EVENTBUS_TEST_COUNT"
PATIENCE = 60


class Publishers:
    """Processes that wait for ``publish()``."""

    def __init__(self, directory, number, type_name, *keys, count=1, eventbus=None, env=None):
        self.start = directory / "start"
        ready = [directory / f"ready{n}" for n in range(number)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.publishers", path, self.start, type_name, *keys],
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    "EVENTBUS_TEST_SETTINGS": json.dumps(eventbus or {}),
                    COUNT: str(count),
                    **(env or {}),
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for path in ready
        ]
        self._ready = ready

    def __enter__(self):
        from tests.workers import eventually  # Imports Django, which a publisher sets up later.

        eventually(lambda: self._came_up() or self._died(), "the publishers did not come up")
        assert self._came_up(), [each.poll() for each in self.processes]
        return self

    def _came_up(self):
        return all(path.exists() for path in self._ready)

    def _died(self):
        return any(each.poll() is not None for each in self.processes)

    def __exit__(self, *_):
        for each in self.processes:
            each.kill()
            each.communicate()

    def publish(self):
        """Start publishing; return the output and the exit code of each process."""
        self.start.touch()
        said = [each.communicate(timeout=PATIENCE)[0].split() for each in self.processes]
        return said, [each.returncode for each in self.processes]


def main(ready, start, type_name, *keys):
    import django

    django.setup()
    from django.db import connection

    connection.ensure_connection()
    Path(ready).touch()
    give_up_at = time.monotonic() + PATIENCE
    while not Path(start).exists():
        assert time.monotonic() < give_up_at, "the test did not start the publishers"
        time.sleep(0.001)
    for key in keys or [None] * int(os.environ[COUNT]):
        print(publish_with_effect(type_name, key), flush=True)


def publish_with_effect(type_name, key):
    from django.db import transaction

    from django_eventbus import BackpressureError, DuplicateEventError, publish
    from tests.shop.models import Effect

    once = {"dedup_key": key, "on_duplicate": "raise"} if key else {}
    try:
        with transaction.atomic():
            Effect.objects.create(event_id="0" * 32, handler="publisher", note=key or "")
            publish(type_name, {}, **once)
    except BackpressureError:
        return "refused"
    except DuplicateEventError:
        return "duplicate"
    return "published"


if __name__ == "__main__":
    main(*sys.argv[1:])
