"""Log records name the event, the handler, the worker and the queue that they are about."""

import ast
import asyncio
import contextvars
import json
import logging
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from asgiref.sync import sync_to_async
from django.db import transaction

from django_eventbus import handler, pauses, publish, subscribe
from django_eventbus.delivery import call, deadlines
from django_eventbus.delivery.call import Caller
from django_eventbus.delivery.deadlines import Board, Watch
from django_eventbus.delivery.event_loop import AsyncLoop
from django_eventbus.events import current_envelope, set_current_envelope
from django_eventbus.exceptions import HandlerTimeout
from django_eventbus.logs import KEYS, EventContextFilter, about, trace_id_in, worker_context
from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.signals import delivery_failed, event_dead_lettered, event_dropped
from django_eventbus.tracing import spans
from tests.bus import drain, drain_with_retries
from tests.test_architecture import RULED, tree_of
from tests.test_docs import page, rows, section
from tests.test_events import claimed, envelope
from tests.test_signals import HOSTILE

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
EMPTY = dict.fromkeys(KEYS, "")

logger = logging.getLogger("shop.orders")


class Lines(logging.Handler):
    """Keeps the records, as a handler of a project with the filter gets them."""

    def __init__(self):
        super().__init__()
        self.addFilter(EventContextFilter())
        self.records = []

    def emit(self, record):
        self.records.append(record)

    def named(self, name):
        return [each for each in self.records if each.name == name]

    def of_the_project(self):
        """Return the message and the keys of each record of the project."""
        return [(each.getMessage(), keys_of(each)) for each in self.named(logger.name)]


def keys_of(record):
    return {key: getattr(record, key) for key in KEYS}


@pytest.fixture
def lines():
    handler = Lines()
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


# -- the calls in the package

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: These calls are about all workers of a supervisor, and about no event.
WITHOUT_EXTRA = {
    "a renewal of the registrations got no reply; retrying with a new connection",
    "could not renew the registrations: %s",
}


def log_calls():
    """(module, the node) of every call of a logger in the package."""
    for name, path in RULED:
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LEVELS
                and ast.unparse(node.func.value) in ("logger", "logging")
            ):
                yield name, node


def test_every_logger_is_in_the_tree_of_the_package():
    found = {
        (name, ast.unparse(node.args[0]))
        for name, path in RULED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    }
    assert len(found) > 20
    assert {each for each in found if each[1] != "__name__"} == {("signals", "'django_eventbus'")}


def test_every_log_call_says_what_it_is_about():
    calls = list(log_calls())
    assert len(calls) > 40
    without = {
        node.args[0].value
        for _, node in calls
        if "extra" not in {each.arg for each in node.keywords}
    }
    assert without == WITHOUT_EXTRA


def test_no_record_about_an_event_has_a_traceback():
    """A traceback has many lines, and the database has it already."""
    assert {node.func.attr for _, node in log_calls()} <= LEVELS - {"exception"}
    assert "exc_info" not in {each.arg for _, node in log_calls() for each in node.keywords}


def test_the_reference_lists_the_loggers_and_their_levels():
    used = {
        ("django_eventbus" if name == "signals" else f"django_eventbus.{name}", node.func.attr)
        for name, node in log_calls()
        if node.func.attr != "log"
    }
    # The one call with a variable level is about limits.
    used.add(("django_eventbus", "info"))
    listed = [
        (name, rest.split(" | ")[0].lower())
        for name, rest in rows(section(page("logging"), "Loggers"))
    ]
    assert len(listed) == len(set(listed))
    assert set(listed) == used


def test_the_reference_lists_the_keys():
    listed = [name for name, _ in rows(section(page("logging"), "Keys of records"))]
    assert listed == list(KEYS)


# -- the values


def test_a_record_about_a_claimed_event_has_its_values():
    event = claimed(headers_json=json.dumps({"traceparent": TRACEPARENT}))
    assert about(event, handler="stock", attempt=2) == {
        "event_id": "01a1e236-f1dc-7fe5-a078-051ef9380342",
        "event_type": "test-events.parcel.sent",
        "handler": "stock",
        "attempt": "2",
        "worker_id": str(event.claim.worker_id),
        "queue": "orders",
        "key": "parcel:7",
        "trace_id": TRACE,
    }


def test_a_record_about_a_published_event_has_its_values():
    event = QueuedEvent(
        event_id=uuid.UUID(int=7),
        type="order.placed",
        queue="default",
        headers={"traceparent": TRACEPARENT},
    )
    assert about(event) == {
        "event_id": "00000000-0000-0000-0000-000000000007",
        "event_type": "order.placed",
        "queue": "default",
        "trace_id": TRACE,
    }


def test_unknown_keys_are_absent_and_other_values_are_kept():
    assert about(handler="", queue=None, retry_in=None, calls=3) == {"retry_in": None, "calls": 3}


def test_a_value_of_the_projects_record_factory_is_kept(lines):
    """A log call raises KeyError if its ``extra`` would overwrite an attribute of the record."""
    standard = logging.getLogRecordFactory()

    def with_trace(*args, **kwargs):
        record = standard(*args, **kwargs)
        record.trace_id = "of the request"
        return record

    logging.setLogRecordFactory(with_trace)
    try:
        event = claimed(headers_json=json.dumps({"traceparent": TRACEPARENT}))
        event_dead_lettered.send(None, event=event, status="FAILED")
    finally:
        logging.setLogRecordFactory(standard)
    (record,) = lines.named("django_eventbus")
    assert (record.trace_id, record.event_id) == ("of the request", str(event.event_id))


@pytest.mark.parametrize(
    "headers",
    [
        None,
        {},
        [],
        {"traceparent": None},
        {"traceparent": ["00"]},
        {"traceparent": "garbage"},
        {"traceparent": f"00-{'0' * 32}-b7ad6b7169203331-01"},
        {"traceparent": f"ff-{TRACE}-b7ad6b7169203331-01"},
        {"traceparent": f"00-{TRACE.upper()}-b7ad6b7169203331-01"},
        {"traceparent": f"00-{TRACE}\n-b7ad6b7169203331-01"},
    ],
)
def test_an_invalid_trace_is_left_out(headers):
    assert trace_id_in(headers) is None
    assert "trace_id" not in about(claimed(headers_json=json.dumps(headers)))


def test_headers_that_are_no_json_have_no_trace():
    assert "trace_id" not in about(claimed(headers_json="traceparent"))


def test_a_later_version_of_the_trace_header_may_have_more_fields():
    assert trace_id_in({"traceparent": f"01-{TRACE}-b7ad6b7169203331-01-more"}) == TRACE


@pytest.fixture
def current_span():
    """A tracer that has a current span."""
    trace_id = "f" * 32
    before = spans.install(SimpleNamespace(current_trace_id=lambda: trace_id))
    yield trace_id
    spans.install(before)


def test_the_trace_of_the_current_span_precedes_that_of_the_header(lines, current_span):
    event = claimed(headers_json=json.dumps({"traceparent": TRACEPARENT}))
    logger.info("outside")
    set_current_envelope(envelope(event))
    try:
        logger.info("inside")
    finally:
        set_current_envelope(None)
    assert {keys["trace_id"] for _, keys in lines.of_the_project()} == {current_span}
    assert about(event)["trace_id"] == TRACE


# -- text from outside


def one_line_with_djangos_formatter(record):
    """Django's own LOGGING writes the message; projects add time, level and name."""
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s").format(record)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("place", ["type", "key", "handler", "error_type", "message"])
def test_hostile_text_is_one_line_in_the_message_and_in_all_keys(lines, place, text):
    """M18: no forged records, no terminal control."""
    facts = {"handler": "stock", "error_type": "ValueError", "message": "no"} | {place: text}
    event = claimed(**{place: text} if place in ("type", "key") else {})
    delivery_failed.send(
        None,
        event=event,
        handler=facts["handler"],
        attempt=1,
        seconds=0.1,
        error={"type": facts["error_type"], "message": facts["message"]},
        retry_in=None,
    )
    event_dead_lettered.send(None, event=event, status="FAILED")
    records = lines.named("django_eventbus")
    assert len(records) == 2
    for record in records:
        assert len(one_line_with_djangos_formatter(record).splitlines()) == 1
        assert record.getMessage().isprintable()
        assert all(value.isprintable() for value in keys_of(record).values())
    assert records[0].error_type.isprintable()


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_the_event_of_a_handlers_own_line_cannot_forge_a_record(lines, text):
    set_current_envelope(envelope(claimed(type=text, key=text), handler_name=text))
    try:
        logger.info("reserved")
    finally:
        set_current_envelope(None)
    ((_, keys),) = lines.of_the_project()
    assert all(value.isprintable() for value in keys.values())
    assert keys["key"]


# -- EventContextFilter


def test_outside_of_a_handler_all_keys_are_empty(lines):
    logger.info("a request")
    assert lines.of_the_project() == [("a request", EMPTY)]


def test_a_value_of_the_record_is_kept(lines):
    set_current_envelope(envelope(claimed()))
    try:
        logger.info("look", extra={"key": "mine"})
    finally:
        set_current_envelope(None)
    ((_, keys),) = lines.of_the_project()
    assert (keys["key"], keys["handler"]) == ("mine", "stock")


def test_a_record_about_another_event_has_no_values_of_the_running_handler(lines):
    """An event that a handler publishes may be dropped."""
    other = QueuedEvent(event_id=uuid.UUID(int=7), type="tick", queue="ticks", headers={})
    set_current_envelope(envelope(claimed()))
    try:
        event_dropped.send(None, event=other, limit=f"limit {uuid.uuid4()}")
    finally:
        set_current_envelope(None)
    (record,) = lines.named("django_eventbus")
    assert keys_of(record) == EMPTY | {
        "event_id": str(other.event_id),
        "event_type": "tick",
        "queue": "ticks",
    }


def test_a_pause_by_a_handler_names_the_event_and_the_paused_queue(lines):
    event = claimed()
    set_current_envelope(envelope(event))
    try:
        pauses.flow_paused.send(None, kind="queue", name="mail", by="shop", reason="full")
    finally:
        set_current_envelope(None)
    (record,) = lines.named("django_eventbus")
    assert (record.queue, record.event_id) == ("mail", str(event.event_id))


def expected(event, **changes):
    keys = {
        "event_id": str(event.event_id),
        "event_type": event.type,
        "handler": "stock",
        "attempt": "1",
        "queue": event.queue,
        "key": event.key or "",
        "trace_id": "",
    }
    return keys | changes


def without_worker(keys):
    """The keys without the worker's id, which must be there."""
    assert uuid.UUID(keys["worker_id"])
    return {key: value for key, value in keys.items() if key != "worker_id"}


@pytest.mark.django_db
def test_a_handlers_own_lines_have_the_event_the_attempt_and_the_trace(lines):
    @handler("order.placed", name="stock", retry={"max_retries": 1})
    def reserve(event):
        logger.info("reserving")
        raise ValueError("no stock")

    event = publish("order.placed", {}, key="order:7", headers={"traceparent": TRACEPARENT})
    drain_with_retries()
    own = lines.of_the_project()
    assert [message for message, _ in own] == ["reserving", "reserving"]
    assert [without_worker(keys) for _, keys in own] == [
        expected(event, attempt=attempt, trace_id=TRACE) for attempt in ("1", "2")
    ]
    failed = [each for each in lines.named("django_eventbus") if each.levelname == "WARNING"]
    assert [keys_of(each) for each in failed] == [keys for _, keys in own]
    (dead,) = [each for each in lines.named("django_eventbus") if each.levelname == "ERROR"]
    assert without_worker(keys_of(dead)) == expected(event, handler="", attempt="2", trace_id=TRACE)


@pytest.mark.django_db
def test_the_context_ends_with_the_handler(lines):
    handler("order.placed", name="stock")(lambda event: None)
    publish("order.placed", {})
    drain()
    logger.info("after")
    assert lines.of_the_project() == [("after", EMPTY)]
    assert current_envelope() is None


@pytest.mark.django_db
def test_a_handler_that_publishes_and_handles_keeps_its_own_event(lines):
    @handler("order.placed", name="stock")
    def reserve(event):
        publish("stock.reserved", {})
        logger.info("published")

    @handler("stock.reserved", name="mail")
    def mail(event):
        logger.info("mailed")

    event = publish("order.placed", {})
    drain()
    (published, first), (mailed, second) = lines.of_the_project()
    assert (published, mailed) == ("published", "mailed")
    assert without_worker(first) == expected(event)
    caused = EventLog.objects.get(type="stock.reserved")
    assert caused.caused_by == event.event_id
    assert (second["event_id"], second["handler"]) == (str(caused.event_id), "mail")


@pytest.mark.django_db(transaction=True)
def test_an_on_commit_callback_has_the_worker_only(lines):
    @handler("order.placed", name="stock")
    def reserve(event):
        transaction.on_commit(lambda: logger.info("committed"))

    publish("order.placed", {})
    drain()
    ((_, keys),) = lines.of_the_project()
    assert without_worker(keys) == without_worker(EMPTY | {"worker_id": keys["worker_id"]})


@pytest.mark.django_db(transaction=True)
def test_an_async_handler_and_its_tasks_and_threads_have_the_event(lines):
    events = {}

    @handler("order.placed", name="stock")
    async def reserve(event):
        async def log(place):
            # All coroutines meet here, so the lines of the events alternate.
            await asyncio.sleep(0)
            logger.info("%s %s", place, event.id)

        await log("coroutine")
        await asyncio.gather(log("task"), log("task"))
        await sync_to_async(logger.info)("sync_to_async %s", event.id)
        await asyncio.to_thread(logger.info, "to_thread %s", event.id)

    for _ in range(5):
        event = publish("order.placed", {})
        events[str(event.event_id)] = event
    drain()
    own = lines.of_the_project()
    assert len(own) == 5 * 5
    for message, keys in own:
        event_id = message.split()[1]
        assert without_worker(keys) == expected(events[event_id])


@pytest.mark.django_db
def test_a_thread_with_a_copy_of_the_context_has_the_event(lines):
    @handler("order.placed", name="stock")
    def reserve(event):
        run = contextvars.copy_context().run
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run, logger.info, "in a thread").result()

    event = publish("order.placed", {})
    drain()
    ((_, keys),) = lines.of_the_project()
    assert without_worker(keys) == expected(event)


@pytest.mark.django_db(transaction=True)
def test_threads_of_a_worker_do_not_mix_their_events(lines):
    all_run = threading.Barrier(4, timeout=60)

    @handler("order.placed", name="stock", atomic=False)
    def reserve(event):
        for place in ("first", "second"):
            all_run.wait()
            logger.info("%s %s", place, event.id)

    events = [publish("order.placed", {}) for _ in range(4)]
    by_id = {str(each.event_id): each for each in events}
    drain(concurrency=4, batch_size=1)
    own = lines.of_the_project()
    assert len(own) == 8
    assert len({record.thread for record in lines.named(logger.name)}) == 4
    for message, keys in own:
        assert without_worker(keys) == expected(by_id[message.split()[1]])
    assert len({keys["worker_id"] for _, keys in own}) == 1


@pytest.mark.django_db(transaction=True)
def test_a_handed_off_event_is_in_the_lines_of_its_handler(lines, outbox):
    workers = []

    def reserve(event):
        workers.append(str(EventWorker.objects.get().pk))
        logger.info("in Celery")

    subscribe("order.placed", reserve, name="stock", executor="celery")
    event = publish("order.placed", {})
    drain()
    (message,) = outbox.messages
    outbox.deliver()
    ((_, keys),) = lines.of_the_project()
    assert without_worker(keys) == expected(event)
    assert [keys["worker_id"]] == workers
    outbox.messages.append(message)  # The message arrives a second time.
    outbox.deliver()
    (ignored,) = lines.named("django_eventbus.worker.handed_off")
    assert (ignored.handler, ignored.queue) == ("stock", "default")
    assert uuid.UUID(ignored.worker_id) != uuid.UUID(workers[0])


def test_the_worker_of_a_thread_is_known_outside_of_handlers(lines):
    worker_id = uuid.uuid4()
    with worker_context(worker_id):
        logger.info("inside")
    logger.info("outside")
    (_, inside), (_, outside) = lines.of_the_project()
    assert inside == EMPTY | {"worker_id": str(worker_id)}
    assert outside == EMPTY


# -- a timeout at any instruction


def interrupted_at(number, caller, run, registered):
    """Call the handler, and raise HandlerTimeout at this instruction of the code of the call.

    Return whether there are so many instructions. As with a real watch, nothing is raised when the
    watch has been stopped.
    """
    files = {call.__file__, deadlines.__file__}
    count, was_raised = 0, False

    def trace(frame, what, argument):
        nonlocal count, was_raised
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if what == "opcode" and caller.watch._deadline is not None and not was_raised:
            count += 1
            if count == number:
                was_raised = True
                raise HandlerTimeout
        return trace

    before = sys.gettrace()
    # Python 3.12 sends the events of instructions only if a frame asked for them before settrace().
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        caller.call(run, registered)
    except HandlerTimeout:
        pass
    finally:
        sys.settrace(before)
    return was_raised


def test_a_timeout_at_any_instruction_of_a_call_clears_the_context():
    registered = SimpleNamespace(
        name="stock", stored_name=b"stock", deadline=600.0, func=lambda event: None
    )
    run = SimpleNamespace(event=claimed(), current=None, attempt_of=lambda name: 1)
    caller = Caller(Watch(Board.local(1)), AsyncLoop())
    number = 1
    while interrupted_at(number, caller, run, registered):
        assert current_envelope() is None, f"instruction {number}"
        assert caller.watch._deadline is None, f"instruction {number}"
        number += 1
    assert number > 20
