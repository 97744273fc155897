"""Attacks of a user who can publish, send NOTIFY, or write a row.

The numbers are those of the security requirements. S10 is in test_redaction.py, the rules checked
with ast (S07, S09) are in test_architecture.py, S13 is in test_registry.py.
"""

import os
import pickle
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import DataError, IntegrityError, OperationalError, connection, transaction
from django.db.models import Q

from django_eventbus import dead_letters, handler, publish, publish_many
from django_eventbus.exceptions import BackpressureError, InvalidPayloadError
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.registry import registry
from django_eventbus.schema.names import MAX_NAME_LENGTH
from django_eventbus.schema.payloads import LARGEST_PAYLOAD, LARGEST_STORED
from tests.bus import drain, drain_with_retries, logged
from tests.shop.models import Effect
from tests.workers import PATIENT, eventually

pytestmark = pytest.mark.django_db

ONCE = {"max_retries": 0}
INJECTIONS = [
    "x' OR '1'='1",
    'x" OR "1"="1',
    "x'; DELETE FROM django_eventbus_eventlog; --",
    "%",
    "_",
    "%%%s%(a)s",
    "x\\",
    "x\\'",
    "x --",
    "#",
    "type__contains",
    "payload__password__startswith",
    "id=1) OR (1=1",
    "{0}{__class__}",
    "$1",
    "?",
]


def bury(type_name="x", **options):
    @handler(type_name, name="h", retry=ONCE)
    def fail(event):
        raise ValueError

    event = publish(type_name, {}, **options)
    drain()
    registry._handlers.clear()
    registry._by_type = {}
    return event


# -- S07: a value is never executed


@pytest.mark.parametrize("text", INJECTIONS)
@pytest.mark.parametrize("filter_name", ["type", "handler", "queue", "key", "error_type"])
def test_a_filter_of_dead_letters_is_compared_and_never_executed(text, filter_name):
    bury()
    assert dead_letters.list(**{filter_name: text}) == []
    assert dead_letters.retry(**{filter_name: text}) == 0
    assert dead_letters.purge(**{filter_name: text}) == 0
    assert EventLog.objects.count() == 1


@pytest.mark.parametrize("text", INJECTIONS)
def test_a_hostile_name_is_found_by_itself_alone(text):
    """This includes the prefix before a star, which has no wildcards."""
    bury()
    odd = bury(text, key=text)
    for filters in ({"type": text}, {"key": text}, {"type": f"{text}*"}):
        assert [each.event_id for each in dead_letters.list(**filters)] == [odd.event_id]


@pytest.mark.parametrize("text", INJECTIONS)
def test_the_command_treats_a_hostile_filter_as_text(text, capsys):
    bury()
    for action in (["list"], ["retry"], ["purge", "--yes"]):
        call_command("dead_events", *action, f"--type={text}")
        call_command("dead_events", *action, f"--key={text}")
    assert EventLog.objects.count() == 1


@pytest.mark.parametrize(
    "name", ["payload__password", "type__contains", "_connector", "pk", "using__x", "extra"]
)
def test_a_filter_of_an_unknown_name_is_refused(name):
    """Never expanded into the ORM's lookups."""
    bury()
    for act in (dead_letters.list, dead_letters.retry, dead_letters.purge):
        with pytest.raises(TypeError):
            act(**{name: Q()})
    assert EventLog.objects.count() == 1


def test_the_command_refuses_an_invalid_event_id():
    with pytest.raises(CommandError, match="is not an event id"):
        call_command("dead_events", "retry", "1 OR 1=1")


@pytest.mark.parametrize("text", INJECTIONS)
def test_an_event_with_a_hostile_name_is_handled(text):
    handler(text, name=text)(
        lambda event: Effect.objects.create(event_id=event.id, handler="h", note=event.key)
    )
    event = publish(text, {text: text}, key=text, headers={text: text}, dedup_key=text)
    drain()
    assert logged(event).payload == {text: text}
    assert list(Effect.objects.values_list("note", flat=True)) == [text]


# -- S08, S09: stored values are data


@pytest.mark.parametrize("name", ["os.system", "tests.shop.handlers.leave", "builtins.exec"])
def test_a_stored_name_is_never_imported(name, settings):
    """Neither a type nor the name of a due handler is imported."""
    settings.EVENTBUS = {"UNHANDLED_RETRY": ONCE}
    handler("x", name="h", retry={"max_retries": 1})(lambda event: 1 / 0)
    named, owed = publish(name, "touch /tmp/x"), publish("x", {})
    drain()
    QueuedEvent.objects.filter(event_id=owed.event_id).update(
        deliveries={name: {"state": "retry", "failures": 1, "due": "2000-01-01T00:00:00+00:00"}}
    )
    drain_with_retries()
    assert "no handler is registered" in logged(named).errors[0]["message"]
    messages = [error["message"] for error in logged(owed).errors]
    assert any(f"{name!r}, which is not registered" in message for message in messages)


def test_a_pickle_is_refused():
    with pytest.raises(InvalidPayloadError):
        publish("x", pickle.dumps(os.system))


# -- S11: constraints of the database are the second line of defence
#
# The columns of types, keys and queues have a length, which PostgreSQL and MariaDB enforce. For
# payloads there is a CHECK, wider than any setting: triggers and other programs write rows, too.


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has no length of columns")
@pytest.mark.parametrize("column", ["type", "key", "dedup_key", "queue", "namespace"])
def test_a_row_past_the_publisher_cannot_be_longer_than_allowed(column):
    longest = QueuedEvent._meta.get_field(column).max_length
    values = {"namespace": "n", "queue": "q", "type": "t", "producer": "p", "payload": {}}
    QueuedEvent.objects.create(**{**values, column: "x" * longest})
    with pytest.raises(DataError), transaction.atomic():
        QueuedEvent.objects.create(**{**values, column: "x" * (longest + 1)})


@pytest.mark.parametrize("option", ["event", "key", "dedup_key"])
def test_a_name_is_refused_if_it_is_one_character_too_long(option):
    longest = {"event": "x", "payload": {}} | {option: "x" * MAX_NAME_LENGTH}
    assert publish(**longest) is not None
    with pytest.raises(InvalidPayloadError):
        publish(**longest | {option: "x" * (MAX_NAME_LENGTH + 1)})


@pytest.mark.parametrize("what", ["payload", "headers"])
def test_a_payload_is_refused_if_it_is_one_byte_or_level_too_large(settings, what):
    settings.EVENTBUS = {"MAX_PAYLOAD_BYTES": 100, "MAX_PAYLOAD_DEPTH": 3}
    fits, too_large = ({"a": "x" * (100 - len('{"a": ""}') + more)} for more in (0, 1))
    flat, too_deep = {"a": {"b": {"c": 1}}}, {"a": {"b": {"c": {"d": 1}}}}
    for good in (fits, flat):
        publish("x", **{"payload": {}} | {what: good})
    for bad in (too_large, too_deep):
        with pytest.raises(InvalidPayloadError):
            publish("x", **{"payload": {}} | {what: bad})


@pytest.mark.parametrize("column", ["payload", "headers"])
def test_a_row_past_the_publisher_cannot_be_larger_than_the_database_allows(column):
    values = {"namespace": "n", "queue": "q", "type": "t", "producer": "p", "payload": {}}
    # Three lengths of four bytes, or two quotation marks.
    longest = LARGEST_STORED - (12 if connection.vendor == "postgresql" else 2)
    QueuedEvent.objects.create(**{**values, column: "x" * longest})
    refused = pytest.raises((IntegrityError, OperationalError), match="eventbus_size")
    with refused, transaction.atomic():
        QueuedEvent.objects.create(**{**values, column: "x" * (longest + 1)})


def test_the_largest_payload_fits_the_column_of_the_database(settings):
    settings.EVENTBUS = {"MAX_PAYLOAD_BYTES": LARGEST_PAYLOAD}
    ones = [1] * (LARGEST_PAYLOAD // len("1, "))
    assert publish("x", ones) is not None
    assert publish("x", "é" * (LARGEST_PAYLOAD // 2 - 1)) is not None


@pytest.mark.django_db(transaction=True)
def test_a_transaction_cannot_publish_one_event_too_many(settings):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 3}
    for _ in range(2):
        with transaction.atomic():
            publish("x")
            assert publish_many([("x", 2), ("x", 3)]) == 2
            with pytest.raises(
                BackpressureError, match="published 3 events and would publish 1 more"
            ):
                publish("x", 4)
            with pytest.raises(BackpressureError, match="MAX_EVENTS_PER_TRANSACTION"):
                publish_many([("x", 4)])
            assert QueuedEvent.objects.filter(type="x").exists(), "the transaction is still usable"
    assert QueuedEvent.objects.count() == 6


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("window", [None, timedelta(hours=1)])
def test_duplicates_neither_count_nor_reset_the_count(settings, window):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 3}
    with transaction.atomic():
        publish("x")
        for _ in range(5):
            publish("x", dedup_key="k", dedup_for=window)
        publish("x")
        with pytest.raises(BackpressureError, match="published 3 events"):
            publish("x")
    assert QueuedEvent.objects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_rolled_back_events_do_not_count(settings):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 1}
    with transaction.atomic():
        publish("x")
        transaction.set_rollback(True)
    with transaction.atomic():
        publish("x")
    assert QueuedEvent.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_events_of_a_batch_may_each_publish_as_many_as_one_transaction_may(settings):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 2}

    @handler("parent")
    def two(event):
        publish_many([("child", n) for n in range(event.payload)])

    @handler("child")
    def nothing(event):
        pass

    for many in (2, 2, 3, 2):
        publish("parent", many)
    drain()
    assert EventLog.objects.filter(type="child").count() == 6
    assert QueuedEvent.objects.get().errors[0]["type"].endswith(".BackpressureError")


@pytest.mark.django_db(transaction=True)
def test_outside_of_a_transaction_each_event_counts_alone(settings):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 1}
    publish("x")
    publish("x")
    assert QueuedEvent.objects.count() == 2


# -- S14: a row that was written past the publisher


def test_a_hostile_row_is_logged_as_single_lines(capture, settings):
    settings.EVENTBUS = {"UNHANDLED_RETRY": ONCE}
    hostile = "a\r\nCRITICAL forged\x1b[2J\u2028"
    row = publish("x", {}, key="k")
    QueuedEvent.objects.filter(pk=row.pk).update(type=hostile, key=hostile)
    drain()
    assert EventLog.objects.get().type == hostile
    assert capture.records
    for record in capture.records:
        assert record.getMessage().isprintable()
        assert record.exc_info is None
        assert str(record.event_type).isprintable()


# -- S15: a worker opens no port


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="/proc lists the listening sockets only on Linux"
)


@on_linux
@pytest.mark.django_db(transaction=True)
def test_a_worker_listens_on_no_port(start_worker):
    worker = start_worker(eventbus=PATIENT)
    child = worker.wait_until_registered()
    assert not [port for pid in (worker.process.pid, child.pid) for port in listening(pid)]


def listening(pid):
    """The addresses at which a process accepts connections."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # It was closed meanwhile.
            sockets.add(os.readlink(file))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                yield words[1]


@on_linux
def test_a_listening_socket_is_detected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = f":{server.getsockname()[1]:04X}"
        assert any(address.endswith(port) for address in listening(os.getpid()))
    assert not any(address.endswith(port) for address in listening(os.getpid()))


# -- S16: any role may send NOTIFY


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="NOTIFY")
@pytest.mark.django_db(transaction=True)
def test_a_worker_handles_events_after_a_flood_of_spoofed_notifications(start_worker, store):
    """The content is ignored, the rate is limited (test_worker.py), the next event is handled."""
    worker = start_worker("--poll-interval", "600", eventbus=PATIENT)
    worker.wait_until_registered()
    ring = "SELECT pg_notify(%s, %s || n) FROM generate_series(1, 10) AS n"
    channel = store.channel
    with connection.cursor() as cursor:
        for n in range(1000):
            cursor.execute(ring, [channel, f"'; DROP {n} \x01"])
    publish("process.effect", "after the flood")
    eventually(Effect.objects.exists, lambda: worker.log)
    assert "Traceback" not in worker.log
    assert "failed" not in worker.log


# -- S19: a retry publishes the original event only


def test_a_retry_cannot_change_the_event():
    event = bury(key="k", headers={"h": 1})
    before = EventLog.objects.values("type", "payload", "headers", "key", "queue").get()
    for forged in ({"payload": {"a": 1}}, {"headers": {}}, {"priority": 9}):
        with pytest.raises(TypeError):
            dead_letters.retry(event.event_id, **forged)
    dead_letters.retry(event.event_id, type="x", key="k")
    after = QueuedEvent.objects.values("type", "payload", "headers", "key", "queue").get()
    assert after == before


def test_a_retry_with_another_type_finds_nothing():
    """The argument is a filter, not a new value."""
    event = bury()
    assert dead_letters.retry(event.event_id, type="os.system") == 0
    assert EventLog.objects.get().type == "x"


# -- S20: a purge deletes all data


def everywhere():
    """Every value of every table of the project, as one text."""
    return "\n".join(str(list(model._base_manager.values())) for model in apps.get_models())


@pytest.mark.parametrize("how", ["purge", "command"])
def test_a_purged_event_leaves_nothing_behind(how):
    marker = uuid.uuid4().hex

    @handler("x", name="h", retry=ONCE)
    def fail(event):
        raise ValueError(f"about {marker}")

    publish("x", {"secret": marker}, key=marker, headers={"secret": marker}, dedup_key=marker)
    drain()
    assert marker in everywhere()
    if how == "purge":
        dead_letters.purge(type="x")
    else:
        call_command("dead_events", "purge", "--all", "--yes", verbosity=0)
    assert marker not in everywhere()


# -- S21: nothing outside of the code enables failpoints


@pytest.mark.processes
def test_no_environment_and_no_setting_switches_a_failpoint_on():
    """Start a process with all likely variable names, and with the plan of the fault tests."""
    names = ("FAILPOINTS", "EVENTBUS_FAILPOINTS", "EVENTBUS_TEST_FAILPOINTS", "DEBUG", "EVENTBUS")
    code = (
        "import django; django.setup()\n"
        "from django_eventbus.delivery import deliverer\n"
        "from django_eventbus.errors import failpoints\n"
        "from django_eventbus.publishing import publisher\n"
        "from django_eventbus.worker import process\n"
        "assert failpoints.on_reaching is None\n"
        "failpoints.reached('claim.committed')"
    )
    plan = '{"claim.committed": {"do": "exit"}, "FAILPOINTS": "claim.committed=exit"}'
    environment = {**os.environ, **dict.fromkeys(names, plan)}
    environment.pop("EVENTBUS_TEST_IMPORT", None)
    environment |= {"DJANGO_SETTINGS_MODULE": "tests.settings", "EVENTBUS_TEST_SETTINGS": plan}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
