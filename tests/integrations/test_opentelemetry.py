"""Spans of publishing, handling, settling and handing off, exported by OpenTelemetry's SDK."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress

import pytest
from asgiref.sync import sync_to_async
from celery.app.trace import build_tracer
from django.db import connections, transaction
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import SpanProcessor, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_eventbus import (
    BackpressureError,
    InvalidPayloadError,
    __version__,
    apublish,
    finalize,
    handler,
    poll,
    publish,
    publish_many,
    testing,
)
from django_eventbus.integrations import celery as celery_tasks
from django_eventbus.integrations import celery_executor, opentelemetry
from django_eventbus.logs import EventContextFilter
from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.tasks import deliver
from django_eventbus.tracing import spans
from tests.bus import drain, logged, make_due
from tests.celery_workers import Broker
from tests.traces import in_file, new_provider, traces_of
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

ONCE = {"max_retries": 0}
AT_ONCE = {"base_delay": 0.0}
VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(params=["link", "parent"])
def mode(request, settings):
    settings.EVENTBUS = {"TRACE_PARENT": request.param}
    return request.param


def deliver_messages(app):
    """Run all messages of hand-offs, with the headers and the code of a Celery worker."""
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        queue.declare()
        while message := queue.get(no_ack=True):
            args, kwargs, _ = message.payload
            assert message.headers["task"] == celery_executor.DELIVER
            task = app.tasks[celery_executor.DELIVER]
            run = build_tracer(task.name, task, app=app)
            run(message.headers["id"], args, kwargs, message.headers)


# -- the conventions


def test_the_spans_of_an_event_have_these_names_kinds_and_attributes(exported):
    """The conventions are in development: a change of names must be noticed."""
    handler("order.placed", name="mail")(lambda event: None)
    event = publish("order.placed", {"n": 1}, headers={"correlation_id": "cart-7"})
    drain()
    published, process, settle = (
        exported.the(name) for name in ("publish order.placed", "process order.placed", "settle")
    )
    common = {"messaging.system": "django_eventbus", "eventbus.queue": "default"}
    worker_id = process["attributes"]["messaging.client.id"]
    assert uuid.UUID(worker_id)
    assert published["kind"] == "PRODUCER"
    assert published["attributes"] == common | {
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "order.placed",
        "messaging.message.id": str(event.event_id),
    }
    assert process["kind"] == "CONSUMER"
    assert process["attributes"] == common | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "order.placed",
        "messaging.consumer.group.name": "mail",
        "messaging.message.id": str(event.event_id),
        "messaging.message.conversation_id": "cart-7",
        "messaging.client.id": worker_id,
        "eventbus.attempt": 1,
    }
    assert settle["kind"] == "CLIENT"
    assert settle["attributes"] == common | {
        "messaging.operation.name": "settle",
        "messaging.operation.type": "settle",
        "messaging.batch.message_count": 1,
        "messaging.client.id": worker_id,
    }
    assert [each["status"] for each in (published, process, settle)] == ["UNSET"] * 3
    assert len(exported.all()) == 3


def test_the_scope_of_the_spans_names_one_version_of_the_conventions(exported):
    publish("order.placed")
    (span,) = exported.exporter.get_finished_spans()
    scope = span.instrumentation_scope
    assert (scope.name, scope.version) == ("django_eventbus", __version__)
    assert scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


def test_with_links_a_handler_call_starts_a_trace_that_links_to_the_publisher(exported):
    handler("order.placed")(lambda event: None)
    publish("order.placed")
    drain()
    published, process, settle = (
        exported.the(name) for name in ("publish order.placed", "process order.placed", "settle")
    )
    assert (process["parent"], process["links"]) == (None, [published["id"]])
    assert (settle["parent"], settle["links"]) == (None, [process["id"]])
    assert len({each["trace"] for each in (published, process, settle)}) == 3


def test_with_parents_a_handler_call_continues_the_trace_of_the_publisher(exported, settings):
    settings.EVENTBUS = {"TRACE_PARENT": "parent"}
    handler("order.placed")(lambda event: None)
    publish("order.placed")
    drain()
    published, process, settle = (
        exported.the(name) for name in ("publish order.placed", "process order.placed", "settle")
    )
    assert (process["parent"], process["links"]) == (published["id"], [])
    assert (settle["parent"], settle["links"]) == (process["id"], [])
    assert len({each["trace"] for each in (published, process, settle)}) == 1


# -- one connected trace


def test_a_request_and_all_its_effects_are_one_connected_trace(exported, app, mode):
    def pay(event):
        with exported.tracer.start_as_current_span("charge card"):
            publish("order.paid")

    handler("order.placed", name="pay")(pay)
    handler("order.placed", name="stock")(lambda event: None)
    handler("order.placed", name="receipt", executor="celery")(lambda event: None)
    handler("order.paid", name="ship")(lambda event: None)
    with exported.tracer.start_as_current_span("POST /orders"), transaction.atomic():
        publish("order.placed")
    drain()
    deliver_messages(app)
    drain()
    assert EventLog.objects.filter(status="COMPLETED").count() == 2
    assert not QueuedEvent.objects.exists()
    (only,) = traces_of(exported.all())
    assert [name for name in only if name != "settle"] == [
        "POST /orders",
        "charge card",
        "process order.paid",
        *["process order.placed"] * 3,
        "publish order.paid",
        "publish order.placed",
        "send celery",
    ]
    assert only.count("settle") >= 2
    if mode == "parent":
        traces = {each["name"]: each["trace"] for each in exported.all()}
        traces.pop("settle")  # Groups of several handler calls have links.
        assert len(set(traces.values())) == 1


def test_spans_and_events_of_a_handler_are_nested_in_its_process_span(exported, mode):
    def work(event):
        with exported.tracer.start_as_current_span("own"):
            publish("order.paid")

    handler("order.placed")(work)
    with exported.tracer.start_as_current_span("request"):
        publish("order.placed")
    drain()
    process, own = exported.the("process order.placed"), exported.the("own")
    assert exported.the("publish order.placed")["parent"] == exported.the("request")["id"]
    assert own["parent"] == process["id"]
    assert exported.the("publish order.paid")["parent"] == own["id"]


def test_a_message_to_celery_has_a_span_that_the_handler_continues(exported, app):
    handler("order.placed", name="receipt", executor="celery")(lambda event: None)
    publish("order.placed")
    drain()
    published, send = exported.the("publish order.placed"), exported.the("send celery")
    assert (send["kind"], send["links"]) == ("PRODUCER", [published["id"]])
    assert send["attributes"] == {
        "messaging.system": "django_eventbus",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "celery",
        "messaging.consumer.group.name": "receipt",
        "messaging.batch.message_count": 1,
        "messaging.client.id": send["attributes"]["messaging.client.id"],
        "eventbus.queue": "default",
    }
    deliver_messages(app)
    process = exported.the("process order.placed")
    assert (process["parent"], process["links"]) == (send["id"], [published["id"]])
    assert not trace.get_current_span().get_span_context().is_valid


def test_with_parents_the_handler_in_celery_links_to_the_message(exported, app, settings):
    settings.EVENTBUS = {"TRACE_PARENT": "parent"}
    handler("order.placed", name="receipt", executor="celery")(lambda event: None)
    publish("order.placed")
    drain()
    deliver_messages(app)
    published, send = exported.the("publish order.placed"), exported.the("send celery")
    process = exported.the("process order.placed")
    assert send["parent"] == published["id"]
    assert (process["parent"], process["links"]) == (published["id"], [send["id"]])


def test_the_span_of_an_instrumented_celery_task_is_kept(exported, app):
    handler("order.placed", name="receipt", executor="celery")(lambda event: None)
    publish("order.placed")
    drain()
    with exported.tracer.start_as_current_span("run/django_eventbus.deliver"):
        deliver_messages(app)
    task = exported.the("run/django_eventbus.deliver")
    assert exported.the("process order.placed")["parent"] == task["id"]


@pytest.mark.parametrize("forged", [{"traceparent": 5}, {"traceparent": "x"}, {"traceparent": []}])
def test_a_message_with_forged_trace_headers_is_delivered(exported, app, forged):
    handler("order.placed", name="receipt", executor="celery")(lambda event: None)
    publish("order.placed")
    drain()
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        _, content, _ = queue.get(no_ack=True).payload
    deliver.apply(kwargs=content, headers=forged, throw=True)
    assert exported.the("process order.placed")["parent"] is None
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_durable_task_carries_the_trace_of_its_caller(exported, app):
    """The instrumentation of Celery reads these headers of the message."""
    with exported.tracer.start_as_current_span("request"), transaction.atomic():
        celery_tasks.delay_durably("shop.send_receipt", 7)
    drain()
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        headers = queue.get(no_ack=True).headers
    process = exported.the(f"process {celery_tasks.TASK_CALLED}")
    assert headers["traceparent"] == f"00-{process['trace']}-{process['id']}-03"


# -- handlers


def test_each_attempt_has_a_span_of_its_own(exported):
    answers = [ValueError("no stock"), None]

    def fail_once(event):
        if error := answers.pop(0):
            raise error

    handler("order.placed", name="stock", retry=AT_ONCE)(fail_once)
    publish("order.placed")
    drain()
    make_due()
    drain()
    first, second = exported.named("process order.placed")
    assert [each["attributes"]["eventbus.attempt"] for each in (first, second)] == [1, 2]
    assert (first["status"], second["status"]) == ("ERROR", "UNSET")
    assert first["attributes"]["error.type"] == "ValueError"
    assert "error.type" not in second["attributes"]
    assert first["links"] == second["links"] == [exported.the("publish order.placed")["id"]]


def test_a_span_has_the_error_as_it_is_stored(exported, settings):
    settings.EVENTBUS = {"REDACT_ERRORS": "tests.integrations.test_opentelemetry.without_iban"}
    handler("order.placed", retry=ONCE)(refuse)
    event = publish("order.placed")
    drain()
    (stored,) = logged(event).errors
    ((name, facts),) = exported.the("process order.placed")["events"]
    assert name == "exception"
    assert facts["exception.type"] == stored["type"] == "ValueError"
    assert facts["exception.message"] == stored["message"] == "no account …, password=…"
    assert "DE89" not in json.dumps(exported.all())
    assert "secret" not in facts["exception.stacktrace"]
    assert "in refuse" in facts["exception.stacktrace"]


def refuse(event):
    text = "no account DE89, password=secret"[:]
    raise ValueError(text)


def without_iban(text):
    return text.replace("DE89", "…").replace("secret", "…")


@pytest.mark.parametrize("atomic", [True, False])
def test_a_handler_past_its_deadline_ends_its_span(exported, atomic):
    def hang(event):
        with exported.tracer.start_as_current_span("own"):
            while True:
                time.sleep(0.01)

    handler("order.placed", name="hangs", timeout=0.1, retry=ONCE, atomic=atomic)(hang)
    publish("order.placed")
    drain()
    process = exported.the("process order.placed")
    assert (process["status"], process["attributes"]["error.type"]) == ("ERROR", "TimeoutError")
    assert process["events"][0][1]["exception.message"] == "hangs ran longer than 0.1 s"
    assert context.get_current() == {}
    assert len(traces_of(exported.all())) == 1


def test_an_error_that_hangs_when_it_is_described_ends_its_span(exported):
    class HangsWhenDescribed(Exception):
        def __str__(self):
            while True:
                time.sleep(0.01)

    def fail(event):
        raise HangsWhenDescribed

    handler("order.placed", timeout=0.1, retry=ONCE)(fail)
    publish("order.placed")
    drain()
    process = exported.the("process order.placed")
    assert process["attributes"]["error.type"].endswith("HangsWhenDescribed")
    assert process["events"][0][1]["exception.message"] == ""
    assert EventLog.objects.get().status == "FAILED"


def test_an_async_handler_runs_in_its_span(exported, mode):
    async def work(event):
        with exported.tracer.start_as_current_span(f"own {event.payload}"):
            await asyncio.sleep(0)
            await apublish("order.paid")
            await sync_to_async(connections.close_all)()

    handler("order.placed", name="async")(work)
    for number in range(3):
        publish("order.placed", number)
    drain()
    calls = {
        each["attributes"]["messaging.message.id"]: each
        for each in exported.all()
        if each["name"] == "process order.placed"
    }
    assert len(calls) == 3
    for event in EventLog.objects.filter(type="order.placed"):
        own = exported.the(f"own {event.payload}")
        assert own["parent"] == calls[str(event.event_id)]["id"]
    inside = {exported.the(f"own {number}")["id"] for number in range(3)}
    assert {each["parent"] for each in exported.named("publish order.paid")} == inside


def test_an_async_handler_that_fails_or_takes_too_long_ends_its_span(exported):
    async def fail(event):
        raise ValueError("no stock")

    async def hang(event):
        await asyncio.sleep(3600)

    handler("order.placed", name="fails", retry=ONCE)(fail)
    handler("order.placed", name="hangs", timeout=0.1, retry=ONCE)(hang)
    publish("order.placed")
    drain()
    errors = {
        each["attributes"]["messaging.consumer.group.name"]: each["events"][0][1]
        for each in exported.named("process order.placed")
    }
    assert errors["fails"]["exception.message"] == "no stock"
    assert errors["hangs"]["exception.type"] == "TimeoutError"
    assert errors["hangs"]["exception.message"] == "hangs ran longer than 0.1 s"


def test_a_context_that_a_handler_leaves_behind_is_removed(exported):
    seen = []

    def leave(event):
        seen.append(context.get_value("left"))
        context.attach(context.set_value("left", event.payload))

    handler("order.placed")(leave)
    publish_many([("order.placed", number) for number in range(3)])
    drain()
    assert seen == [None] * 3


def test_a_group_is_settled_with_one_span_that_links_to_its_calls(exported, monkeypatch):
    monkeypatch.setattr(opentelemetry, "MOST_LINKS", 4)
    monkeypatch.setattr("django_eventbus.delivery.grouped.GROUP_SECONDS", 600)
    handler("order.placed")(lambda event: None)
    publish_many([("order.placed", number) for number in range(6)])
    drain()
    settle, calls = exported.the("settle"), exported.named("process order.placed")
    assert settle["attributes"]["messaging.batch.message_count"] == len(calls) == 6
    assert settle["links"] == [each["id"] for each in calls[:4]]
    assert len(traces_of(exported.all())) == 1


def test_a_group_that_is_run_again_has_a_span_for_each_call(exported):
    """Only the calls of the second run are committed; the first ones happened all the same."""
    handler("order.placed", name="fine")(lambda event: None)
    handler("order.lost", name="breaks", retry=ONCE)(
        lambda event: transaction.get_connection().close()
    )
    publish("order.placed")
    publish("order.lost")
    drain()
    assert len(exported.named("process order.placed")) == 2
    assert {
        each["attributes"]["eventbus.attempt"]
        for each in exported.all()
        if each["name"].startswith("process")
    } == {1}
    assert sorted(EventLog.objects.values_list("status", flat=True)) == ["COMPLETED", "FAILED"]


def test_a_polled_event_is_settled_in_the_trace_of_the_caller(exported):
    publish("order.placed")
    with exported.tracer.start_as_current_span("own loop"):
        finalize(poll())
    settle = exported.the("settle")
    assert settle["parent"] == exported.the("own loop")["id"]
    assert settle["links"] == [exported.the("publish order.placed")["id"]]


def test_the_helpers_for_tests_record_spans_too(exported):
    handler("order.placed")(lambda event: None)
    with exported.tracer.start_as_current_span("test"):
        publish("order.placed")
        testing.drain()
    assert exported.the("process order.placed")["parent"] == exported.the("test")["id"]
    assert len(traces_of(exported.all())) == 1


# -- publishing


def test_events_of_one_call_share_one_publish_span(exported):
    publish_many(("order.placed", number) for number in range(1500))
    published = exported.the("publish order.placed")
    assert published["attributes"]["messaging.batch.message_count"] == 1500
    assert published["attributes"]["messaging.destination.name"] == "order.placed"
    headers = {each.headers["traceparent"] for each in QueuedEvent.objects.all()}
    assert headers == {f"00-{published['trace']}-{published['id']}-03"}


def test_a_call_with_several_types_names_no_destination(exported):
    publish_many([("order.placed", 1), ("order.paid", 2)])
    assert "messaging.destination.name" not in exported.the("publish")["attributes"]


def test_a_publish_that_is_rolled_back_has_a_span_and_no_effect(exported):
    handler("order.placed")(lambda event: None)
    with suppress(ZeroDivisionError), transaction.atomic():
        publish("order.placed")
        raise ZeroDivisionError
    drain()
    assert exported.names() == ["publish order.placed"]
    assert exported.the("publish order.placed")["status"] == "UNSET"


def test_a_publish_that_fails_has_an_error(exported, settings):
    settings.EVENTBUS = {"MAX_EVENTS_PER_TRANSACTION": 1}
    with transaction.atomic():
        publish("order.placed")
        with pytest.raises(BackpressureError):
            publish("order.placed")
    first, second = exported.named("publish order.placed")
    assert (first["status"], second["status"]) == ("UNSET", "ERROR")
    assert second["attributes"]["error.type"].endswith("BackpressureError")


def test_an_event_that_is_refused_before_any_sql_has_no_span(exported):
    with pytest.raises(InvalidPayloadError):
        publish("order.placed", object())
    assert exported.all() == []


def test_headers_of_the_publisher_are_kept(exported):
    event = publish("order.placed", headers={"tenant": 7})
    assert event.headers["tenant"] == 7
    assert event.headers["traceparent"].startswith("00-")


def test_a_trace_that_the_publisher_passes_is_kept(exported):
    handler("order.placed")(lambda event: None)
    event = publish("order.placed", headers={"traceparent": VALID})
    assert event.headers == {"traceparent": VALID}
    drain()
    assert exported.the("process order.placed")["links"] == ["b7ad6b7169203331"]


@pytest.mark.parametrize(
    "given", ["", "x", 5, None, [], {}, VALID[:-1], f"ff{VALID[2:]}", "0" * 999]
)
def test_a_malformed_trace_of_a_publisher_is_ignored(exported, mode, given):
    handler("order.placed")(lambda event: None)
    publish("order.placed", headers={"traceparent": given, "tracestate": 3, "correlation_id": 4})
    drain()
    process = exported.the("process order.placed")
    assert (process["parent"], process["links"]) == (None, [])
    assert EventLog.objects.get().status == "COMPLETED"


def test_an_event_without_a_trace_is_handled_in_the_current_span_alone(exported, mode):
    handler("order.placed")(lambda event: None)
    publish("order.placed", headers={"traceparent": "x"})
    with exported.tracer.start_as_current_span("test"):
        drain()
    process = exported.the("process order.placed")
    assert (process["parent"], process["links"]) == (exported.the("test")["id"], [])


def test_baggage_reaches_the_handler_if_it_continues_the_trace(exported, settings):
    settings.EVENTBUS = {"TRACE_PARENT": "parent"}
    seen = []
    handler("order.placed")(lambda event: seen.append(baggage.get_baggage("tenant")))
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    publish("order.placed")
    context.detach(token)
    drain()
    assert seen == ["acme"]


# -- without spans


def test_without_a_configured_sdk_headers_stay_empty(monkeypatch):
    monkeypatch.setattr(spans, "_installed", opentelemetry.OpenTelemetryTracer())
    handler("order.placed")(lambda event: None)
    event = publish("order.placed")
    assert spans.tracer() is None
    assert event.headers is None
    assert drain().handled == 1


def test_a_call_that_is_not_sampled_exports_nothing_and_keeps_the_context():
    exporter = InMemorySpanExporter()
    provider = new_provider(SimpleSpanProcessor(exporter), sampler=sampling.ALWAYS_OFF)
    previous = opentelemetry.install(provider)
    try:
        handler("order.placed", retry=ONCE)(refuse)
        event = publish("order.placed")
        assert event.headers["traceparent"].endswith(("-00", "-02"))
        drain()
    finally:
        spans.install(previous)
    assert exporter.get_finished_spans() == ()
    assert logged(event).status == "FAILED"


class Broken(SpanProcessor):
    def on_start(self, span, parent_context=None):
        raise RuntimeError("the exporter is broken")

    on_end = on_start


def test_an_error_of_opentelemetry_affects_no_event(monkeypatch, capture):
    monkeypatch.setattr(opentelemetry, "_logged", set())
    previous = opentelemetry.install(new_provider(Broken()))
    calls = []
    try:
        handler("order.placed")(lambda event: calls.append(event.id))
        publish("order.placed")
        publish_many([("order.placed", 1)])
        drain()
    finally:
        spans.install(previous)
    assert len(calls) == EventLog.objects.filter(status="COMPLETED").count() == 2
    assert capture.text.count("OpenTelemetry raised an error") == 1
    assert "RuntimeError" in capture.text


def test_the_id_of_the_current_trace_is_known(exported):
    seen = []
    handler("order.placed")(lambda event: seen.append(spans.current_trace_id()))
    publish("order.placed")
    assert spans.current_trace_id() == ""
    drain()
    assert seen == [exported.the("process order.placed")["trace"]]
    spans.install(None)
    assert spans.current_trace_id() == ""


# -- processes

WITHOUT_OPENTELEMETRY = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        is_hidden = name.partition(".")[0] == "opentelemetry"
        return None if is_hidden else self.finder.find_spec(name, *args)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)

import django

django.setup()

from django_eventbus import handler, publish
from tests.bus import drain

handler("order.placed")(lambda event: None)
event = publish("order.placed")
print(drain().handled, event.headers, "opentelemetry" in sys.modules)
"""


@pytest.mark.processes
def test_without_opentelemetry_events_are_handled_and_nothing_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENTELEMETRY],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1 None False\n", done.stderr


def test_a_worker_process_exports_its_last_spans_before_it_ends(start_worker, exported, tmp_path):
    path = tmp_path / "spans"
    publish("process.effect")
    worker = start_worker(
        "--drain",
        env={
            "EVENTBUS_TEST_IMPORT": "tests.traces",
            "EVENTBUS_TEST_SPANS": str(path),
            "EVENTBUS_TEST_SPANS_LATE": "1",
        },
    )
    assert worker.wait() == 0, worker.log
    assert [sorted(names) for names in traces_of([*exported.all(), *in_file(path)])] == [
        ["process process.effect", "publish process.effect", "settle"]
    ]


def test_processes_of_the_bus_and_of_celery_make_one_connected_trace(
    start_worker, start_celery, exported, tmp_path
):
    path, broker = tmp_path / "spans", Broker(tmp_path)
    traced = {
        **broker.environment,
        "EVENTBUS_TEST_IMPORT": "tests.celery_app,tests.traces",
        "EVENTBUS_TEST_SPANS": str(path),
    }
    with exported.tracer.start_as_current_span("request"):
        publish("process.celery")
    worker = start_worker("--processes", "1", env=traced)
    celery = start_celery(broker, pool="solo", env=traced)
    eventually(lambda: not QueuedEvent.objects.exists(), lambda: worker.log + celery.log)
    assert celery.stop() == 0, celery.log
    spans_of_processes = in_file(path)
    (only,) = traces_of([*exported.all(), *spans_of_processes])
    assert only == [
        "process process.celery",
        "publish process.celery",
        "request",
        "send celery",
        "settle",
    ]
    process, send = (
        next(each for each in spans_of_processes if each["name"] == name)
        for name in ("process process.celery", "send celery")
    )
    assert process["parent"] == send["id"]


# -- logs


@pytest.fixture
def with_context(caplog):
    """``caplog`` with the filter of a project."""
    context_filter = EventContextFilter()
    caplog.handler.addFilter(context_filter)
    caplog.set_level("INFO", logger="shop")
    yield caplog
    caplog.handler.removeFilter(context_filter)


def test_a_handlers_log_lines_have_the_trace_of_its_span(exported, mode, with_context):

    @handler("order.placed", name="mail", retry=ONCE)
    def mail(event):
        logging.getLogger("shop").info("mailing")
        raise ValueError("no")

    publish("order.placed", {})
    drain()
    own, failed, _ = (
        each for each in with_context.records if each.name in ("shop", "django_eventbus")
    )
    assert own.trace_id == exported.the("process order.placed")["trace"]
    # The record of the failed attempt is written after the span, so it has the event's trace.
    assert failed.trace_id == exported.the("publish order.placed")["trace"]
