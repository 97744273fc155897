"""Handlers for worker processes that tests start. The test process removes them."""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from django.db import connection

from django_eventbus import CircuitBreaker, handler, once_per, publish
from tests.shop.models import Effect


def effect(event, note=""):
    Effect.objects.create(event_id=event.id, handler=event.handler_name, note=note)


@handler("process.effect", name="effect")
def write(event):
    effect(event, str(event.payload))


@handler("process.once", name="once")
@once_per("payload")
def write_once(event):
    effect(event, str(event.payload))


@handler("process.slow_effect", name="slow_effect")
def write_slowly(event):
    effect(event, str(event.payload))
    time.sleep(event.payload)


@handler("process.outside", name="outside", atomic=False)
def write_outside(event):
    effect(event)


@handler("process.celery", name="celery_effect", executor="celery")
def write_in_celery(event):
    effect(event, str(event.payload))


@handler("process.celery_slow", name="celery_slow", executor="celery")
def write_slowly_in_celery(event):
    time.sleep(1.2)
    effect(event, str(event.payload))


@handler("process.task", name="task_effect", executor="task")
def write_in_a_task(event):
    effect(event, str(event.payload))


@handler("process.celery_signal", name="celery_signal", executor="celery", timeout=100)
def signal_and_wait_in_celery(event):
    """Create a file with the id of the process when it runs, and wait for another file."""
    effect(event, "started")
    Path(event.payload["started"]).write_text(str(os.getpid()))
    while not Path(event.payload["go_on"]).exists():
        time.sleep(0.01)


@handler("process.exit", name="exit")
def leave(event):
    effect(event)
    os._exit(7)


@handler("process.kill_group", name="kill_group")
def kill_the_supervisor_too(event):
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@handler("process.hold_the_gil", name="hold_the_gil", timeout=0.5, retry={"max_retries": 0})
def hold_the_gil(event):
    ctypes.PyDLL(None).sleep(600)


@handler("process.signal", name="signal")
def signal_and_wait(event):
    """Create a file when it runs, and wait for another file."""
    effect(event, "started")
    Path(event.payload["started"]).touch()
    while not Path(event.payload["go_on"]).exists():
        time.sleep(0.01)


@handler("process.signal_outside", name="signal_outside", atomic=False, timeout=100)
def signal_and_wait_outside(event):
    Path(event.payload["started"]).touch()
    while not Path(event.payload["go_on"]).exists():
        time.sleep(0.01)
    effect(event, "done")


@handler("process.environment", name="environment")
def write_the_environment_of_a_subprocess(event):
    Path(event.payload).write_text(subprocess.check_output("env", text=True))


@handler("process.parent", name="parent")
def publish_children(event):
    for n in range(3):
        publish("process.effect", n)


@handler("process.exit_as_if_done", name="exit_as_if_done")
def leave_as_if_done(event):
    os._exit(0)


@handler("process.ignore_deadline", name="ignore_deadline", timeout=0.3, retry={"max_retries": 0})
@handler(
    "process.ignore_deadline_twice",
    name="ignore_deadline_twice",
    timeout=0.3,
    retry={"max_retries": 1, "base_delay": 0},
)
def ignore_the_deadline(event):
    if event.payload:
        with Path(event.payload).open("a") as runs:
            runs.write(f"{event.attempt}\n")
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


@handler("process.pg_sleep", name="pg_sleep", timeout=0.3, retry={"max_retries": 0})
def sleep_in_the_database(event):
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(60)")


@handler("process.limited", name="limited", atomic=False, max_running=2)
def count_running_calls(event):
    """Record the number of running calls. The first call waits until a second one runs."""
    directory = Path(event.payload)
    mine, met = directory / str(event.id), directory.with_name("met")
    mine.touch()
    together = len(list(directory.iterdir()))
    effect(event, str(together))
    if together > 1:
        met.touch()
    give_up_at = time.monotonic() + 20
    while not met.exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    mine.unlink()


@handler("process.alone", name="alone", atomic=False, max_running=1, timeout=100)
def run_alone(event):
    Path(event.payload["started"]).touch()
    while not Path(event.payload["go_on"]).exists():
        time.sleep(0.01)
    effect(event)


@handler(
    "process.down",
    name="down",
    atomic=False,
    breaker=CircuitBreaker(min_calls=1000, open_for=3600),
    retry={"max_retries": 1000, "base_delay": 0},
)
def call_a_failing_service(event):
    effect(event)
    if not Path(event.payload).exists():
        raise ConnectionError("no route")


@handler(
    "process.broken",
    name="broken",
    atomic=False,
    breaker=CircuitBreaker(min_calls=10, window=3600, open_for=3600),
    retry={"base_delay": 3600, "max_delay": 3600},
)
def fail_always(event):
    effect(event)
    raise ConnectionError("no route")


@handler("process.rated", name="rated", atomic=False, rate="20/s")
def run_at_a_rate(event):
    effect(event, repr(time.time()))
