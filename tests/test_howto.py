"""The Python code of the how-to guides and of the README works as described."""

import ast
import json
import logging
import re
import sys
import types
import unittest
from datetime import timedelta
from decimal import Decimal
from logging.config import dictConfig
from pathlib import Path
from types import SimpleNamespace

import celery
import pytest
from asgiref.sync import async_to_sync
from django.apps import AppConfig
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.contrib.auth.signals import user_logged_in
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.migrations.state import ProjectState
from django.db.models.signals import m2m_changed
from django.dispatch import Signal
from django.http import HttpResponse
from django.test.utils import isolate_apps
from django.utils import timezone
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_eventbus import (
    BackpressureError,
    DuplicateEventError,
    ForeignTransactionError,
    breakers,
    bridge_signal,
    checks,
    dead_letters,
    handler,
    lanes,
    pauses,
    publish,
    publish_many,
    schedules,
)
from django_eventbus import events as event_classes
from django_eventbus.integrations import celery as integration
from django_eventbus.integrations import (
    celery_broker,
    celery_drain,
    celery_executor,
    opentelemetry,
)
from django_eventbus.integrations.django_querysets import BridgedQuerySet
from django_eventbus.models import EventLog, FlowControl, QueuedEvent
from django_eventbus.signals import event_dead_lettered
from django_eventbus.testing import assert_published, drain, published
from django_eventbus.tracing import spans
from tests import bus
from tests.bus import make_due
from tests.shop import models as shop_models
from tests.shop.models import Customer, Order
from tests.test_dead_letters import dead_letter
from tests.test_retention import ago, completed

HOWTO = Path(__file__).parent.parent / "docs" / "howto"

pytestmark = pytest.mark.django_db


def blocks(page):
    return python_in(HOWTO / f"{page}.md")


def python_in(path):
    return re.findall(r"```python\n(.+?)```", path.read_text(), flags=re.DOTALL)


def run(code, namespace):
    exec(compile(code, namespace["__name__"], "exec"), namespace)


@pytest.fixture
def shop(monkeypatch):
    """The app ``shop`` that the guides use."""
    handlers = types.ModuleType("shop.handlers")
    monkeypatch.setitem(sys.modules, "shop", types.ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.models", shop_models)
    monkeypatch.setitem(sys.modules, "shop.handlers", handlers)
    # Other tests declare classes of the same types.
    monkeypatch.setattr(event_classes, "_classes", {})
    return handlers


@pytest.fixture
def receivers_kept():
    before = {signal: list(signal.receivers) for signal in (user_logged_in, m2m_changed)}
    yield
    for signal, receivers in before.items():
        signal.receivers = receivers
        signal.sender_receivers_cache.clear()


@pytest.mark.django_db(transaction=True)
def test_test_your_handlers(shop, eventbus):
    code, *examples = blocks("test-your-handlers")
    run(code, vars(shop))
    namespace = {"__name__": "shop.tests"}
    for each in examples:
        run(each, namespace)
    cases = [
        each
        for each in namespace.values()
        if isinstance(each, type) and each.__module__ == "shop.tests"
    ]
    assert len(cases) == 7
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    result = unittest.TestSuite(map(load, cases)).run(unittest.TestResult())
    assert [text for _, text in result.failures + result.errors] == []
    assert result.testsRun == 7
    namespace["test_shipping"](eventbus)
    namespace["test_the_report"](eventbus)


@pytest.fixture
def wagtail_signals(monkeypatch):
    """A module of that name, with the signal that a guide bridges."""
    signals = types.SimpleNamespace(page_published=Signal())
    monkeypatch.setitem(sys.modules, "wagtail", types.ModuleType("wagtail"))
    monkeypatch.setitem(sys.modules, "wagtail.signals", signals)
    return signals


def test_bridge_signals(shop, receivers_kept, wagtail_signals, client, eventbus):
    config, groups, model, page, *others = blocks("bridge-signals")
    querysets, migration, migration_of_users, disconnect = others
    namespace = {"__name__": "tests.shop.models"}

    run(config, namespace)
    assert issubclass(namespace["ShopConfig"], AppConfig)
    namespace["ShopConfig"].ready(None)
    ann = get_user_model().objects.create_user("ann", password="secret")
    client.login(username="ann", password="secret")
    assert assert_published("user.logged_in", user_id=ann.pk).key == f"user:{ann.pk}"

    run(groups, namespace)
    staff = Group.objects.create(name="staff")
    ann.groups.add(staff)
    staff.user_set.remove(ann)
    staff.user_set.add(ann)
    staff.user_set.add(ann)  # An existing member.
    ann.groups.clear()
    staff.user_set.clear()  # No member is left.
    assert [each.payload for each in published("user.groups_changed")] == [
        {"action": action, "users": [ann.pk], "groups": [staff.pk]}
        for action in ("add", "remove", "add", "clear")
    ]

    run(model, namespace)
    order = Order.objects.create(total="9.90", customer=Customer.objects.create())
    order.status = "paid"
    order.save()
    assert assert_published("order.updated").payload == {
        "pk": order.pk,
        "status": "paid",
        "total": "9.90",
        "customer": order.customer_id,
        "changed": {"status": {"old": "new", "new": "paid"}},
    }

    run(page, namespace)
    wagtail_signals.page_published.send(type(order), instance=order, revision=None)
    assert assert_published("page.published", page_id=order.pk).key == f"page:{order.pk}"
    assert assert_published("order.created").key == f"shop.order:{order.pk}"

    with isolate_apps("tests.shop"):
        run(querysets, namespace)
    assert isinstance(namespace["Shipment"].objects.all(), BridgedQuerySet)

    run(disconnect, namespace)
    order.delete()
    assert published("order.deleted") == []

    operations = []
    for each in (migration, migration_of_users):
        run(each, namespace)
        operations += namespace["Migration"].operations
    if connection.vendor == "postgresql":
        state = ProjectState.from_apps(shop_models.Order._meta.apps)
        with connection.schema_editor(atomic=False) as editor:
            for each in operations:
                each.database_forwards("shop", editor, state, state)
        order = Order.objects.create(total="9.90")
        assert assert_published("order.created").payload == {
            "pk": order.pk,
            "status": "new",
            "total": "9.90",
            "customer": None,
        }
        get_user_model().objects.bulk_create([get_user_model()(username="bob")])
        assert_published("user.created", username="bob")


class Service:
    """External services of the guides: a provider, a printer."""

    def __init__(self):
        self.is_down = False
        self.calls = 0

    def charge(self, order_id, *, idempotency_key):
        self.send(order_id)

    def send(self, what):
        self.calls += 1
        if self.is_down:
            raise ConnectionError


def test_pause():
    (code,) = blocks("pause")
    handled = []
    handler("order.paid", name="shop.mail_receipt")(handled.append)
    first, last = code.split("pauses.list()")
    namespace = {"__name__": "shop.mail"}
    run(first, namespace)
    publish("order.paid", {})
    drain()
    assert [each.reason for each in pauses.list()] == ["the API key was revoked"]
    assert handled == []
    run(last, namespace)
    drain()
    assert len(handled) == 1


def test_circuit_breaker(settings, capsys):
    declaration, by_hand, setting = blocks("circuit-breaker")
    provider = Service()
    provider.is_down = True
    run(declaration, {"__name__": "shop.handlers", "provider": provider})
    publish_many(("order.placed", {"order_id": n}) for n in range(10))
    drain(raise_errors=False)
    event = publish("order.placed", {"order_id": 10})
    drain()
    assert provider.calls == 10
    run(by_hand, {"__name__": "shop.operations"})
    assert capsys.readouterr().out == "shop.charge open 10 10\n"
    assert [each.state for each in breakers.list()] == ["closed"]
    provider.is_down = False
    drain()
    assert EventLog.objects.get(event_id=event.event_id).status == "COMPLETED"
    namespace = {"__name__": "project.settings"}
    run(setting, namespace)
    settings.EVENTBUS = namespace["EVENTBUS"]
    handler("x", name="any")(print)
    assert [each.handler for each in breakers.list()] == ["any", "shop.charge"]


def test_limit_running():
    (code,) = blocks("limit-running")
    printer = Service()
    run(code, {"__name__": "shop.handlers", "printer": printer})
    publish_many(("invoice.created", {"invoice_id": n}) for n in range(500))
    drain()
    assert EventLog.objects.count() == printer.calls > 0
    assert QueuedEvent.objects.filter(attempts=0).count() == 500 - printer.calls > 0
    assert FlowControl.objects.get().running == {}


def test_the_first_screen_of_the_readme(shop, monkeypatch):
    view, declaration = python_in(HOWTO.parent.parent / "README.md")[:2]
    assert len(view[view.index("def ") :].splitlines()) == 6
    assert len(declaration[declaration.index("@") :].splitlines()) == 4
    forms, reserved = types.ModuleType("shop.forms"), []
    forms.OrderForm = lambda data: SimpleNamespace(save=lambda: Order.objects.create(**data))
    reservation = SimpleNamespace(
        objects=SimpleNamespace(create=lambda order: reserved.append(order))
    )
    monkeypatch.setitem(sys.modules, "shop.forms", forms)
    monkeypatch.setattr(shop_models, "Reservation", reservation, raising=False)
    monkeypatch.setattr(Order, "get_absolute_url", lambda order: f"/{order.pk}", raising=False)
    views = {"__name__": "shop.views"}
    run(view, views)
    run(declaration, vars(shop))
    answer = views["place_order"](SimpleNamespace(POST={"total": 10}))
    drain()
    (order,) = reserved
    assert (order, answer.url) == (Order.objects.get(), f"/{order.pk}")


def test_delay_and_priority(shop, monkeypatch):
    later, remind, at_a_moment, priorities, change = blocks("delay-and-priority")
    mail, mailed, order_of_work = types.ModuleType("shop.mail"), [], []
    mail.mail_reminder = lambda order_id, idempotency_key: mailed.append(order_id)
    monkeypatch.setitem(sys.modules, "shop.mail", mail)
    handler("mail.*", name="mail")(lambda event: order_of_work.append(event.type))
    handler("report.*", name="report")(lambda event: None)
    views = {"__name__": "shop.views"}
    run(later, views)
    run(remind, vars(shop))
    assert drain(until=timedelta(hours=23)).handled == 0
    assert drain(until=timedelta(hours=25)).handled == 1
    assert mailed == [views["order"].pk]

    run(later, views)
    Order.objects.update(status="paid")
    drain(until=timedelta(hours=25))
    assert len(mailed) == 1

    run(at_a_moment, views)
    report = QueuedEvent.objects.get(type="report.requested")
    assert report.available_at == views["six"] > timezone.now()
    report.delete()

    run(priorities, views)
    assert drain(max_events=2000).handled == 1001
    assert order_of_work[0] == "mail.password_reset"

    run(later, views)
    run(change, views)
    assert EventLog.objects.get(type="order.remind", status="DISCARDED")


def test_keep_order(settings):
    publishing, strict, block, by_hand = blocks("keep-order")
    for each in (strict, block):
        namespace = {"__name__": "project.settings"}
        run(each, namespace)
        settings.EVENTBUS = namespace["EVENTBUS"]
        assert checks.check_settings() == []
    handler("order.placed", name="fails", retry={"max_retries": 0})(lambda event: 1 / 0)
    handler("order.paid", name="ships")(lambda event: None)
    run(publishing, {"__name__": "shop.views", "publish": publish})
    drain(raise_errors=False)
    assert [each.state for each in lanes.list()] == ["blocked"]
    list_and_release, skip = by_hand.split("lanes.skip")
    namespace = {"__name__": "shop.operations"}
    run(list_and_release, namespace)
    assert [each.state for each in lanes.list()] == ["ready"]
    run(f"lanes.skip{skip}", namespace)
    assert EventLog.objects.get(type="order.paid").status == "DISCARDED"


def test_schedules(shop):
    pytest.importorskip("cronsim")
    in_code, two_names, in_database, misfires = blocks("schedules")
    run(in_code, vars(shop))
    for each in (two_names, in_database, misfires):
        run(each, vars(shop))
    assert [each.name for each in schedules.every()] == [
        "cache.warm",
        "cleanup",
        "invoice.run",
        "monthly report",
        "report.daily",
        "weekly report",
    ]
    schedules.run("report.daily")
    drain()
    assert EventLog.objects.get(type="report.daily").status == "COMPLETED"


def test_dead_letters(shop, monkeypatch, capsys):
    mailed = []
    monkeypatch.setattr("django.core.mail.mail_admins", lambda *mail: mailed.append(mail))
    code, discard, hear = blocks("dead-letters")
    namespace = {"__name__": "shop.operations"}
    run(discard, vars(shop))
    run(hear, namespace)
    try:
        publish("card.charged", {"amount": 0})
        drain(raise_errors=False)
        assert EventLog.objects.get().status == "DISCARDED"
        event = EventLog.objects.get()
        assert mailed == [("card.charged is a dead letter", f"{event.event_id}: DISCARDED")]
    finally:
        event_dead_lettered.disconnect(namespace["mail_dead_letter"])
    dead_letter(handler_name="shop.charge", error=ConnectionError("down"))
    run(code, namespace)
    assert "1 shop.charge ConnectionError\n" in capsys.readouterr().out
    assert namespace["retried"] == 1
    assert [each.type for each in dead_letters.list()] == ["card.charged"]


@pytest.mark.django_db(transaction=True)
def test_retention(shop):
    pytest.importorskip("cronsim")
    (code,) = blocks("retention")
    completed(2, ended=ago(days=40))
    dead_letter(died_at=ago(days=40))
    run(code, vars(shop))
    schedules.run("log.purge")
    drain()
    kept = EventLog.objects.order_by("id").values_list("type", flat=True)
    assert list(kept) == ["order.placed", "log.purge"]


def test_erase_personal_data(shop):
    (code,) = blocks("erase-personal-data")
    namespace = {"__name__": "shop.privacy"}
    run(code, namespace)
    ann = SimpleNamespace(pk=7, email="ann@example.com")
    publish("mail.sent", {"customer": {"email": ann.email}}, delay=60)
    publish("order.placed", {"total": 9}, key="customer:7", delay=60)
    publish("order.placed", {"total": 10}, key="customer:8", delay=60)
    assert namespace["forget_customer"](ann)
    payloads = QueuedEvent.objects.order_by("id").values_list("payload", flat=True)
    assert list(payloads) == ["[erased]", "[erased]", {"total": 10}]


def test_pgbouncer(settings):
    notify, *others = blocks("pgbouncer")
    namespace = {"__name__": "project.settings", "DATABASES": {"default": {}}}
    for each in (notify, *others):
        run(each, namespace)
    settings.EVENTBUS = namespace["EVENTBUS"]
    assert checks.check_settings() == []
    assert namespace["DATABASES"]["default"]["PORT"] == "6432"


def test_large_tables():
    count, by_key = blocks("large-tables")
    imports, query = count.rsplit("\n\n", 1)
    publish_many(("order.placed", {}) for _ in range(3))
    publish("order.paid", {})
    namespace = {"__name__": "shop.operations"}
    run(f"{imports}\nfound = {query}", namespace)
    assert [(each["type"], each["many"]) for each in namespace["found"]] == [
        ("order.placed", 3),
        ("order.paid", 1),
    ]
    completed(key="order:4711")
    imports, query = by_key.rsplit("\n\n", 1)
    run(f"{imports}\nfound = {query}", namespace)
    assert [each.key for each in namespace["found"]] == ["order:4711"]


@pytest.fixture
def celery_project(monkeypatch):
    """A Celery app whose tasks run in the process that sends them."""
    app = celery.Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True
    before = celery.current_app._get_current_object()
    app.set_current()
    app.set_default()
    integration.register()
    yield app
    before.set_current()
    before.set_default()


@pytest.mark.django_db(transaction=True)
def test_from_celery(shop, celery_project, monkeypatch):
    task, before, call, call_with_options, view, forward, as_handler = blocks("from-celery")
    monkeypatch.setattr(
        celery, "shared_task", lambda **options: celery_project.task(shared=False, **options)
    )
    tasks, mail = map(types.ModuleType, ("shop.tasks", "shop.mail"))
    mailed = []
    mail.mail_receipt = lambda order_id, idempotency_key: mailed.append(order_id)
    for module in (tasks, mail):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    run(task, vars(tasks))
    sent = []
    monkeypatch.setattr(tasks.send_receipt, "run", lambda order_id: sent.append(order_id))
    views = {
        "__name__": "shop.views",
        "transaction": transaction,
        "Order": Order,
        "send_receipt": tasks.send_receipt,
    }
    run(before, views)
    run(call, views)
    run(call_with_options, views)
    drain()
    assert sent == [order.pk for order in Order.objects.order_by("pk")]
    make_due()
    drain()
    assert sent[-1] == views["order"].pk

    run(forward, vars(shop))
    run(as_handler, {"__name__": "shop.handlers"})
    run(view, views)
    drain()
    assert sent[-1] == views["order"].pk == mailed[0]


@pytest.mark.django_db(transaction=True)
def test_celery(shop, monkeypatch, settings):
    config, package, view, simple, with_options, instead, *_tasks = blocks("celery")
    settings.CELERY_BROKER_URL = "memory://"
    mail = types.ModuleType("shop.mail")
    mailed = []
    mail.mail_receipt = lambda order_id, idempotency_key: mailed.append(order_id)
    monkeypatch.setitem(sys.modules, "shop.mail", mail)
    monkeypatch.setattr(celery_broker, "broker", celery_broker.Broker())
    before = celery.current_app._get_current_object()
    for name in ("config", "config.celery"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    try:
        run(config, vars(sys.modules["config.celery"]))
        run(package, vars(sys.modules["config"]))
        app = sys.modules["config"].celery_app
        app.loader.import_default_modules()
        run(view, {"__name__": "shop.views"})
        run(simple, vars(shop))
        run(with_options, vars(shop))
        order = Order.objects.get()
        for queue, name in (("celery", "shop.confirm"), ("mail", "shop.send_receipt")):
            assert (order.status, mailed) == ("new" if queue == "celery" else "confirmed", [])
            bus.drain()
            message = take_message(app, queue)
            assert message["handler"] == name
            app.tasks[celery_executor.DELIVER](**message)
            order.refresh_from_db()
    finally:
        celery_broker.broker.close()
        before.set_current()
        before.set_default()
    assert mailed == [order.pk]
    assert EventLog.objects.get().status == "COMPLETED"

    namespace = {"__name__": "config.settings"}
    run(instead, namespace)
    beat = namespace["CELERY_BEAT_SCHEDULE"].values()
    assert {each["task"] for each in beat} == {celery_drain.DRAIN} <= app.tasks.keys()
    settings.EVENTBUS = namespace["EVENTBUS"]
    assert checks.check_settings() == []


def test_django_tasks_instead_of_celery(shop):
    """Without the setting TASKS, so the event worker runs the task itself."""
    *_, configured, in_a_task = blocks("celery")
    namespace = {"__name__": "config.settings", "INSTALLED_APPS": []}
    run(configured, namespace)
    assert namespace["INSTALLED_APPS"] == ["django_tasks_db"]
    # test_task_executor.py runs this backend in processes.
    assert namespace["TASKS"]["default"]["BACKEND"] == "django_tasks_db.DatabaseBackend"
    run(in_a_task, vars(shop))
    order = Order.objects.create(total=10)
    publish("order.placed", {"order_id": order.pk})
    bus.drain()
    order.refresh_from_db()
    assert order.status == "confirmed"


@pytest.mark.django_db(transaction=True)
def test_trace(monkeypatch, settings):
    config, setting = blocks("trace")
    exporter, providers = InMemorySpanExporter(), []
    monkeypatch.setattr("opentelemetry.sdk.trace.export.ConsoleSpanExporter", lambda: exporter)
    # A process can set the global provider only once.
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", providers.append)
    namespace = {"__name__": "tests.shop.apps"}
    run(config, namespace)
    namespace["ShopConfig"]("tests.shop", sys.modules["tests.shop"]).ready()
    (provider,) = providers
    before = opentelemetry.install(provider)
    try:
        handler("order.placed")(lambda event: None)
        call_command("publish_event", "order.placed", '{"order_id": 7}')
        bus.drain()
        provider.force_flush()
    finally:
        spans.install(before)
        provider.shutdown()
    names = [each.name for each in exporter.get_finished_spans()]
    assert names == ["publish order.placed", "process order.placed", "settle"]
    run(setting, found := {"__name__": "config.settings"})
    settings.EVENTBUS = found["EVENTBUS"]
    assert checks.check_settings() == []


def take_message(app, queue):
    with app.connection_for_read() as broker:
        message = app.amqp.queues[queue].bind(broker.default_channel).get(no_ack=True)
    return message.payload[1]


def test_avoid_duplicates(shop):
    while_queued, in_a_window, aloud, effect, for_a_while = blocks("avoid-duplicates")
    messages, booked = [], []
    namespace = {
        "__name__": "shop.views",
        "publish": publish,
        "body": {"id": "evt_1"},
        "user": SimpleNamespace(pk=7),
        "messages": SimpleNamespace(info=lambda request, text: messages.append(text)),
        "request": None,
        "Booking": SimpleNamespace(
            objects=SimpleNamespace(create=lambda **row: booked.append(row["payment"]))
        ),
    }
    for each in (while_queued, in_a_window, aloud):
        run(each, namespace)
        run(each, namespace)
    assert QueuedEvent.objects.count() == 3
    assert messages == ["Your report is already on its way."]
    QueuedEvent.objects.all().delete()
    run(effect, namespace)
    for _ in range(2):
        publish("payment.received", {"payment_id": 7, "amount": 10})
    drain()
    assert booked == [7]
    run(f"{for_a_while}def booked_for_a_while(event): ...", namespace)


def test_backpressure(settings):
    """The first block has all limits together, the others show them one by one."""
    _, exceptions, dropping, metric, coalescing, tick, blocking, imports, halting, transfer = (
        blocks("backpressure")
    )
    queues = ["default", "ticks", "mail", "imports"]
    for each in (exceptions, dropping, coalescing, blocking, halting):
        settings.EVENTBUS = {"QUEUES": queues, **ast.literal_eval(f"{{{each}}}")}
        assert checks.check_settings() == []
    limits = {name: {"max_size": 1, "overflow": "drop"} for name in ("type:metric.*", "imports")}
    limits |= {"ticks": {"max_size": 1, "overflow": "coalesce"}}
    limits |= {"key:account:*": {"max_size": 1, "overflow": "halt"}}
    settings.EVENTBUS = {"QUEUES": queues, "LIMITS": limits}
    account = SimpleNamespace(pk=7, book=lambda amount: SimpleNamespace(pk=1))
    namespace = {
        "__name__": "shop.views",
        "publish": publish,
        "publish_many": publish_many,
        "transaction": transaction,
        "HttpResponse": HttpResponse,
        "read": lambda path: range(3),
    }
    for each in (metric, tick, imports, transfer):
        run(each, namespace)
        run(each, namespace)
    namespace["import_file"]("rows.csv")
    request = SimpleNamespace(POST={"amount": 10})
    assert namespace["transfer"](request, account) is None
    assert namespace["transfer"](request, account).status_code == 503
    stored = QueuedEvent.objects.order_by("id").values_list("type", flat=True)
    assert list(stored) == ["metric.cpu", "tick", "row.imported", "transfer.requested"]


@pytest.fixture
def billing(transactional_db, monkeypatch, tmp_path):
    """A second database with the event tables, as created in step 3 of the guide."""
    monkeypatch.setitem(
        connections.settings,
        "billing",
        {
            **connections.settings["default"],
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "billing.sqlite3"),
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        },
    )
    connections["billing"].connect()  # A test must not open databases that it did not declare.
    call_command("migrate", "django_eventbus", database="billing", verbosity=0)
    yield connections["billing"]
    connections["billing"].close()
    del connections["billing"]


@pytest.mark.django_db(transaction=True)
def test_several_databases(shop, settings, billing):
    project, routers, service, handlers = blocks("several-databases")
    namespace = {"__name__": "shop.routers"}
    run(project, namespace)
    run(routers, namespace)
    settings.EVENTBUS = namespace["EVENTBUS"]
    settings.DATABASE_ROUTERS = [namespace["BillingRouter"]()]
    assert sorted(namespace["DATABASES"]) == sorted(connections.settings)
    assert checks.check_settings() == []
    assert [each.id for each in checks.check_databases() if each.id.endswith("E005")] == []

    order = Order.objects.create()
    invoice = SimpleNamespace(pk=1, order_id=order.pk, save=lambda using: None)
    run(service, namespace)
    namespace["pay"](invoice)
    assert QueuedEvent.objects.using("billing").count() == 1
    assert QueuedEvent.objects.using("default").count() == 0
    with transaction.atomic(using="billing"), pytest.raises(ForeignTransactionError):
        publish("invoice.paid", {}, using="default")

    run(handlers, vars(shop))
    drain(using="billing")
    order.refresh_from_db()
    assert order.status == "paid"
    assert EventLog.objects.using("billing").get().status == "COMPLETED"


def test_typing(shop, monkeypatch):
    declared, service, handlers, bare, group = blocks("typing")
    events = types.ModuleType("shop.events")
    monkeypatch.setitem(sys.modules, "shop.events", events)
    run(declared, vars(events))
    for each in (service, handlers, bare, group):
        run(each, vars(shop))
    shop.paid(7, Decimal("9.90"))
    publish(shop.OrderShipped(order_id=7, parcel="P1"))
    drain()
    assert shop.receipts == ["7: 9.90 EUR"]
    assert shop.seen == ["order.paid 7", "order.shipped 7"]
    assert shop.touched == [7]
    with pytest.raises(TypeError):
        events.OrderPaid(order_id=7, amuont=1)


@pytest.fixture
def rest_framework(monkeypatch):
    """The parts of Django REST framework that the guide uses."""
    names = ("", ".viewsets", ".exceptions", ".views")
    modules = {name: types.ModuleType(f"rest_framework{name}") for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"rest_framework{name}", module)
    modules[""].viewsets = modules[".viewsets"]
    modules[".viewsets"].ModelViewSet = object
    modules[".exceptions"].APIException = type("APIException", (Exception,), {})
    modules[".views"].exception_handler = lambda exc, context: exc


@pytest.mark.django_db(transaction=True)
def test_async_and_drf(shop, rest_framework, monkeypatch):
    pinging, ordering, handlers, api, once, limits = blocks("async-and-drf")
    posted, clients = [], types.ModuleType("shop.clients")

    class Client:
        async def post(self, path, payload, idempotency_key):
            posted.append((path, payload))

    clients.client = Client()
    monkeypatch.setitem(sys.modules, "shop.clients", clients)
    namespace = {"__name__": "shop.views"}
    for each in (pinging, ordering, handlers, api, once, limits):
        run(each, namespace)
    request = SimpleNamespace(path="/", POST={"total": 9}, headers={"Idempotency-Key": "k1"})
    assert async_to_sync(namespace["ping"])(request).status_code == 200
    assert_published("site.pinged", path="/")
    assert async_to_sync(namespace["order_view"])(request).status_code == 201
    first = Order.objects.get()
    handler("site.pinged", name="ping")(print)
    drain()
    assert posted == [("/orders", {"order_id": first.pk})]

    serializer = SimpleNamespace(save=lambda: Order.objects.create(total=1))
    namespace["OrderViewSet"]().perform_create(serializer)
    namespace["perform_create_once"](request, serializer)
    with pytest.raises(DuplicateEventError):
        namespace["perform_create_once"](request, serializer)
    assert Order.objects.count() == QueuedEvent.objects.count() + 1 == 3
    busy = namespace["answer_errors"](BackpressureError("full"), {})
    assert busy.status_code == 503


def test_bridge_third_party(monkeypatch, shop):
    config, users, replaced, own_test = blocks("bridge-third-party")
    wagtail = types.ModuleType("wagtail.signals")
    wagtail.page_published = Signal()
    monkeypatch.setitem(sys.modules, "wagtail", types.ModuleType("wagtail"))
    monkeypatch.setitem(sys.modules, "wagtail.signals", wagtail)
    namespace = {"__name__": "shop.bridges"}
    for each in (config, users, replaced, own_test):
        run(each, namespace)
    namespace["ShopConfig"].ready(None)
    page = SimpleNamespace(pk=3, title="Home")
    wagtail.page_published.send(type(page), instance=page, revision=None, alias=None)
    assert assert_published("page.published", title="Home").key == "page:3"

    order_placed = Signal()
    namespace["bridge_orders"](lambda module, name: order_placed, bridge_signal)
    order_placed.send(None, order=SimpleNamespace(number="1001"), user=None)
    assert_published("order.placed", number="1001")

    bridge = namespace["bridge_users"]()
    try:
        namespace["test_a_new_user_publishes_an_event"]()
    finally:
        bridge.disconnect()


@pytest.fixture
def root_logger_kept():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written_with(code, capsys):
    """Configure logging by the code, handle a hostile event, and return the lines of stderr."""
    namespace = {"__name__": "project.settings"}
    run(code, namespace)
    dictConfig(namespace["LOGGING"])
    event = publish("order.placed", {"items": 3}, key="order:7")
    hostile = publish("order.broken", {}, key="order:8")
    forged = {"type": "order.broken\nERROR forged", "key": "order:8\r\nERROR\x1b[2J"}
    QueuedEvent.objects.filter(pk=hostile.pk).update(**forged)
    drain(raise_errors=False)
    return event, hostile, capsys.readouterr().err.splitlines()


@pytest.fixture
def logging_shop(shop, monkeypatch):
    """The app of the guide about logging, and a handler that fails."""
    handlers, formatter = (each for each in blocks("logging") if "shop/" in each.splitlines()[0])
    json_logs = types.ModuleType("shop.json_logs")
    run(formatter, vars(json_logs))
    monkeypatch.setitem(sys.modules, "shop.json_logs", json_logs)
    monkeypatch.setattr(sys.modules["shop"], "json_logs", json_logs, raising=False)
    run(handlers, vars(shop))

    @handler("order.broken*", name="fails", retry={"max_retries": 0})
    def fail(event):
        raise ValueError("no\nERROR forged")


def test_logging_as_text(logging_shop, root_logger_kept, capsys):
    (code,) = (each for each in blocks("logging") if '"line"' in each)
    event, _, lines = written_with(code, capsys)
    assert len(lines) == 3  # One line of the project, a failed attempt and a dead letter.
    context = f"[order.placed {event.event_id} shop.reserve_stock #1]"
    assert f" INFO shop.handlers {context} reserved 3 items" in "".join(lines)
    assert "ERROR forged" not in {line[:12] for line in lines}
    logging.getLogger("shop").info("a request")
    assert " INFO shop [   #] a request" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["pythonjsonlogger", "shop.json_logs"])
def test_logging_as_json(logging_shop, root_logger_kept, capsys, library):
    if library == "pythonjsonlogger":
        pytest.importorskip(library)
    (code,) = (each for each in blocks("logging") if f'"{library}.' in each)
    event, hostile, lines = written_with(code, capsys)
    records = [json.loads(line) for line in lines]
    own = next(each for each in records if each["message"] == "reserved 3 items")
    assert own["event_id"] == str(event.event_id)
    assert (own["handler"], own["attempt"], own["key"]) == ("shop.reserve_stock", "1", "order:7")
    failed, dead = (each for each in records if each["event_id"] == str(hostile.event_id))
    assert (failed["handler"], failed["worker_id"]) == ("fails", dead["worker_id"])
    assert failed["event_type"] == "order.broken\\nERROR forged"
    assert failed["key"] == "order:8\\r\\nERROR\\x1b[2J"
    try:
        1 / 0  # noqa: B018 - it raises
    except ZeroDivisionError:
        logging.getLogger("shop").exception("a request failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError" in json.dumps(json.loads(line))


def test_a_thread_of_the_guide_about_logging_gets_the_context(logging_shop, root_logger_kept):
    (code,) = (each for each in blocks("logging") if "in_background" in each)
    namespace = {"__name__": "shop.threads"}
    run(code, namespace)
    seen = []

    @handler("order.shipped", name="ships")
    def ship(event):
        look = lambda: seen.append(event_classes.current_event_id())  # noqa: E731
        namespace["in_background"](look).join()

    event = publish("order.shipped", {})
    drain()
    assert seen == [event.event_id]


def test_celery_uses_the_logging_of_django(root_logger_kept, settings):
    (code,) = (each for each in blocks("logging") if "setup_logging" in each)
    settings.LOGGING = {"version": 1, "disable_existing_loggers": False, "root": {"level": 17}}
    namespace = {"__name__": "config.celery"}
    run(code, namespace)
    try:
        app = celery.Celery("shop", broker="memory://", set_as_current=False)
        app.log.setup_logging_subsystem()
        assert logging.getLogger().level == 17
    finally:
        celery.signals.setup_logging.disconnect(namespace["use_logging_of_django"])
