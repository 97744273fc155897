"""The faults at the failpoints of a worker process, read from its environment.

A plan maps a place to a fault: ``{"settle.before_commit": {"do": "kill", "nth": 2}}``. With
``once`` (a path) it happens only in the first process that creates the file.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

from django.db import OperationalError

from django_eventbus.errors import failpoints

PLACES = (
    "start.command",
    "start.registered",
    "start.child",
    "publish.inserted",
    "claim.committed",
    "handler.before",
    "handler.after",
    "settle.before_commit",
    "settle.committed",
    "renew.sent",
    "release.before",
    "schedule.due",
    "schedule.published",
    "schedule.committed",
)
PLAN = "EVENTBUS_TEST_FAILPOINTS"

_passed = Counter()


def environment(**plan):
    """Environment variables for a worker: ``environment(claim__committed={"do": "kill"})``."""
    named = {place.replace("__", "."): fault for place, fault in plan.items()}
    unknown = named.keys() - set(PLACES)
    assert not unknown, f"no such failpoint: {unknown}"
    return {PLAN: json.dumps(named), "EVENTBUS_TEST_IMPORT": __name__}


def act(place):
    fault = _plan.get(place)
    if fault is None:
        return
    _passed[place] += 1
    if _passed[place] != fault.get("nth", 1) or not _first(fault.get("once")):
        return
    if seen := fault.get("seen"):
        Path(seen).touch()
    _FAULTS[fault["do"]](fault)


def _first(path):
    if path is None:
        return True
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def _wait(fault):
    while not Path(fault["until"]).exists():
        time.sleep(0.01)


def _fail(fault):
    raise OperationalError("a failpoint says so")


_FAULTS = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda fault: os._exit(9),
    "stop": lambda fault: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _fail,
    "wait": _wait,
}

_plan = json.loads(os.environ.get(PLAN, "{}"))
if _plan:
    failpoints.on_reaching = act
    if multiprocessing.parent_process() is not None:
        act("start.child")  # A worker process imports this module while it starts.
