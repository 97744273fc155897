"""Handlers that leave an effect in the database and lines in a journal."""

import ctypes
import multiprocessing
import os
import resource
import time
from pathlib import Path

from django.db import Error, connection

from django_eventbus import handler
from tests.faults.journal import HandlerJournal
from tests.shop.models import Effect


@handler("fault.effect", name="fault.effect")
def leave_an_effect(event):
    journal = HandlerJournal.of_this_process()
    if journal:
        journal.note("start", event)
    Effect.objects.create(event_id=event.id, handler=event.handler_name)
    if journal:
        journal.note("end", event)


@handler("fault.outside", name="fault.outside", atomic=False)
def leave_an_effect_outside(event):
    leave_an_effect(event)


@handler("fault.wait", name="fault.wait", timeout=100)
def wait_for_a_file(event):
    """Wait for a file, with an open transaction if the handler is atomic."""
    journal = HandlerJournal.of_this_process()
    journal.note("start", event)
    Effect.objects.exists()
    while not Path(event.payload["go_on"]).exists():
        time.sleep(0.01)
    Effect.objects.create(event_id=event.id, handler=event.handler_name)
    journal.note("end", event)


@handler("fault.wait_outside", name="fault.wait_outside", timeout=100, atomic=False)
def wait_for_a_file_outside(event):
    wait_for_a_file(event)


@handler("fault.death", name="fault.death")
def die(event):
    DEATHS[event.payload]()


def run_out_of_memory():
    """Raise MemoryError under a temporary limit: the process may survive and run other handlers."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**28, before[1]))
    try:
        bytearray(2**34)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


DEATHS = {
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "out_of_memory": run_out_of_memory,
}


@handler("fault.update", name="fault.update")
def update_two_rows(event):
    """Update the rows in the given order: two handlers with opposite orders deadlock."""
    for row in event.payload:
        Effect.objects.filter(pk=row).update(note=str(event.id))
    Effect.objects.create(event_id=event.id, handler=event.handler_name)


@handler("fault.meet", name="fault.meet", timeout=100)
def update_what_another_updates(event):
    """Update the last row only when the other handler has updated its first rows, so that the two
    conflict. Write the error of the database to a file."""
    place, me = Path(event.payload["place"]), event.payload["me"]
    *first, last = event.payload["rows"]
    Effect.objects.exists()  # The snapshot is taken here.
    for row in first:
        Effect.objects.filter(pk=row).update(note=str(event.id))
    (place / f"{me}").touch()
    give_up_at = time.monotonic() + 60
    while not (place / f"{1 - me}").exists() and time.monotonic() < give_up_at:
        time.sleep(0.01)
    try:
        Effect.objects.filter(pk=last).update(note=str(event.id))
    except Error as error:
        (place / f"error{me}").write_text(str(error))
        raise
    Effect.objects.create(event_id=event.id, handler=event.handler_name)


@handler("fault.fork", name="fault.fork")
def fork(event):
    """Fork a process that does not use the inherited connection and opens its own."""
    Effect.objects.create(event_id=event.id, handler=event.handler_name)
    child = multiprocessing.get_context("fork").Process(target=ask_the_database)
    child.start()
    child.join()
    assert child.exitcode == 0


def ask_the_database():
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("SELECT 1")
    other.close()
    os._exit(0)


@handler("fault.leak", name="fault.leak")
def leak(event):
    leaked.append(os.urandom(2**19))


leaked = []
