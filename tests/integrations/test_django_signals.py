"""M33: from Django's signals to events."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.contrib.auth.signals import user_logged_in
from django.core import serializers
from django.core.checks import run_checks
from django.core.files.base import ContentFile
from django.core.management import call_command
from django.db import IntegrityError, transaction
from django.db.models import F
from django.db.models.signals import (
    class_prepared,
    m2m_changed,
    post_delete,
    post_save,
    pre_save,
)
from django.dispatch import Signal
from django.test.utils import isolate_apps

from django_eventbus import BridgeError, Event, bridge_model, bridge_signal, handler
from django_eventbus.integrations.django_querysets import BridgedQuerySet
from django_eventbus.integrations.django_signals import check_bridges
from django_eventbus.models import QueuedEvent
from django_eventbus.testing import assert_published, drain, published
from tests.shop.models import Customer, ExpressOrder, Order, OrderProxy, Parcel

pytestmark = pytest.mark.django_db

NAMES = {"created": "order.created", "updated": "order.updated", "deleted": "order.deleted"}

shop_opened = Signal()


@pytest.fixture
def orders(bridge):
    return bridge(bridge_model, Order, **NAMES, fields=["status", "total"])


def types():
    return [each.type for each in published()]


def changes():
    return assert_published("order.updated").payload["changed"]


# -- any signal


def test_any_signal_can_become_an_event(bridge):
    bridge(
        bridge_signal,
        shop_opened,
        "shop.opened",
        serialize=lambda sender, keys, **_: {"by": sender, "keys": keys},
        key="shop:{by}",
    )
    shop_opened.send("Ann", keys=3)
    event = assert_published("shop.opened")
    assert event.payload == {"by": "Ann", "keys": 3}
    assert event.key == "shop:Ann"


def test_a_bridge_may_listen_to_one_sender(bridge):
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: {}, sender=Order)
    shop_opened.send(Parcel)
    assert types() == []
    shop_opened.send(Order)
    assert types() == ["x"]


def test_a_payload_of_none_publishes_no_event(bridge):
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: None)
    shop_opened.send(None)
    assert types() == []


def test_a_disconnected_bridge_publishes_no_events(orders):
    one = bridge_signal(shop_opened, "x", serialize=lambda **_: {})
    one.disconnect()
    orders.disconnect()
    shop_opened.send(None)
    Order.objects.create().delete()
    Order.objects.bulk_create([Order()])
    assert types() == []


def test_a_failing_serialize_raises_in_the_sender(bridge):
    bridge(bridge_signal, shop_opened, "shop.opened", serialize=lambda **_: {}["keys"])
    with pytest.raises(
        BridgeError, match=r"bridge to 'shop\.opened' could not serialize"
    ) as raised:
        shop_opened.send(None)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("payload", "key"), [({"x": object()}, None), ({}, "shop:{name}"), ([], "{x}")]
)
def test_the_error_for_an_invalid_payload_names_the_bridge(bridge, payload, key):
    bridge(bridge_signal, shop_opened, "shop.opened", serialize=lambda **_: payload, key=key)
    with transaction.atomic():
        with pytest.raises(BridgeError, match=r"bridge to 'shop\.opened' could not publish"):
            shop_opened.send(None)
        assert Customer.objects.count() == 0, "the transaction is still usable"


def test_the_event_is_part_of_the_senders_transaction(bridge):
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: {})
    with transaction.atomic():
        shop_opened.send(None)
        transaction.set_rollback(True)
    assert types() == []


def test_a_log_in_can_be_an_event(bridge, client):
    """As in the documentation."""
    bridge(
        bridge_signal,
        user_logged_in,
        "user.logged_in",
        serialize=lambda user, request, **_: {
            "user_id": user.pk,
            "address": request.META.get("REMOTE_ADDR"),
        },
        key="user:{user_id}",
    )
    user = get_user_model().objects.create_user("ann", password="secret")
    assert client.login(username="ann", password="secret")
    assert assert_published("user.logged_in", user_id=user.pk).key == f"user:{user.pk}"


def test_a_changed_many_to_many_relation_can_be_an_event(bridge):
    """From both sides and for clear(), with the code of the documentation."""

    def serialize(action, instance, reverse, pk_set, using, **_):
        if action == "pre_clear":
            others = instance.user_set if reverse else instance.groups
            pk_set = set(others.using(using).values_list("pk", flat=True))
        elif action not in ("post_add", "post_remove"):
            return None
        here, there = [instance.pk], sorted(pk_set)
        users, groups = (there, here) if reverse else (here, there)
        return {"action": action, "users": users, "groups": groups}

    user = get_user_model()
    bridge(
        bridge_signal,
        m2m_changed,
        "user.groups_changed",
        sender=user.groups.through,
        serialize=serialize,
    )
    ann, bob = user.objects.create_user("ann"), user.objects.create_user("bob")
    staff, night = Group.objects.create(name="staff"), Group.objects.create(name="night")
    ann.groups.add(staff, night)
    staff.user_set.add(bob)
    ann.groups.remove(night)
    staff.user_set.clear()
    payloads = [each.payload for each in published("user.groups_changed")]
    assert [(each["action"], each["users"], each["groups"]) for each in payloads] == [
        ("post_add", [ann.pk], [staff.pk, night.pk]),
        ("post_add", [bob.pk], [staff.pk]),
        ("post_remove", [ann.pk], [night.pk]),
        ("pre_clear", [ann.pk, bob.pk], [staff.pk]),
    ]


def test_a_failed_clear_publishes_no_event(bridge):
    """The event of pre_clear is part of the transaction that clears."""
    user = get_user_model()
    through = user.groups.through
    bridge(
        bridge_signal,
        m2m_changed,
        "user.groups_changed",
        sender=through,
        serialize=lambda action, **_: {} if action == "pre_clear" else None,
    )
    staff = Group.objects.create(name="staff")

    def fail(action, **_):
        if action == "post_clear":
            raise ConnectionError

    m2m_changed.connect(fail, sender=through)
    try:
        with pytest.raises(ConnectionError), transaction.atomic():
            staff.user_set.clear()
    finally:
        m2m_changed.disconnect(fail, sender=through)
    assert published() == []


# -- created, updated and deleted rows


def test_a_created_row_publishes_an_event(orders):
    order = Order.objects.create(total=Decimal("9.90"))
    event = assert_published("order.created")
    assert event.payload == {"pk": order.pk, "status": "new", "total": "9.90"}
    assert event.key == f"shop.order:{order.pk}"


def test_an_updated_row_publishes_an_event_with_its_changes(orders):
    order = Order.objects.create(total=Decimal("9.90"))
    order.status = "paid"
    order.save()
    assert assert_published("order.updated").payload == {
        "pk": order.pk,
        "status": "paid",
        "total": "9.90",
        "changed": {"status": {"old": "new", "new": "paid"}},
    }


def test_a_deleted_row_publishes_an_event(orders):
    order = Order.objects.create()
    pk = order.pk
    order.delete()
    assert assert_published("order.deleted").payload == {"pk": pk, "status": "new", "total": "0"}


def test_rows_deleted_by_a_queryset_or_a_cascade_publish_events(orders):
    customer = Customer.objects.create()
    Order.objects.create(customer=customer)
    Order.objects.create()
    customer.delete()
    assert len(published("order.deleted")) == 1
    Order.objects.all().delete()
    assert len(published("order.deleted")) == 2


def test_the_events_of_a_row_are_handled_in_order(orders):
    seen = []
    handler("order.*", name="h")(lambda event: seen.append(event.type))
    order = Order.objects.create()
    order.status = "paid"
    order.save()
    order.delete()
    drain()
    assert seen == ["order.created", "order.updated", "order.deleted"]


def test_a_bridge_can_publish_a_typed_event(bridge):
    class OrderMade(Event, type="signals.order_made"):
        pk: int
        total: Decimal
        placed_at: datetime | None

    got = []
    handler(OrderMade, name="h")(lambda event: got.append(event.data))
    bridge(bridge_model, Order, created="signals.order_made", fields=["total", "placed_at"])
    moment = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
    order = Order.objects.create(total=Decimal("1.50"), placed_at=moment)
    drain()
    assert got == [OrderMade(pk=order.pk, total=Decimal("1.50"), placed_at=moment)]


def test_an_unchanged_row_publishes_no_event(orders):
    order = Order.objects.create(total=Decimal("9.90"))
    order.note = "not bridged"
    order.save()
    order.total = "9.9"
    order.save()
    assert types() == ["order.created"]


def test_only_the_named_kinds_of_changes_publish_events(bridge):
    bridge(bridge_model, Order, updated="order.updated", fields=["status"])
    order = Order.objects.create()
    order.status = "paid"
    order.save()
    order.delete()
    assert types() == ["order.updated"]


def test_a_save_after_a_rolled_back_save_publishes_an_event(orders):
    order = Order.objects.create()
    order.status = "paid"
    with transaction.atomic():
        order.save()
        transaction.set_rollback(True)
    assert types() == ["order.created"]
    order.save()
    assert changes() == {"status": {"old": "new", "new": "paid"}}


def test_a_failed_save_publishes_no_event(orders):
    order = Order.objects.create()
    with pytest.raises(IntegrityError), transaction.atomic():
        Order(pk=order.pk, status="paid").save(force_insert=True)
    assert types() == ["order.created"]
    order.status = "paid"
    order.save()
    assert changes() == {"status": {"old": "new", "new": "paid"}}


def test_values_read_by_refresh_from_db_are_not_changes(orders):
    order = Order.objects.create()
    Order._base_manager.update(status="paid")
    order.refresh_from_db()
    order.save()
    assert types() == ["order.created"]


def test_a_save_of_a_stale_instance_publishes_the_changes_of_the_row(orders):
    order = Order.objects.create()
    Order._base_manager.update(status="paid")
    order.save()
    assert changes() == {"status": {"old": "paid", "new": "new"}}


def test_only_update_fields_are_compared(orders):
    order = Order.objects.create()
    order.status, order.total = "paid", Decimal(5)
    order.save(update_fields=["total"])
    payload = assert_published("order.updated").payload
    assert payload["changed"] == {"total": {"old": "0.00", "new": "5"}}
    assert payload["status"] == "new", "as it is in the database"


def test_a_save_of_other_fields_sends_no_query_and_no_event(orders, django_assert_num_queries):
    order = Order.objects.create()
    with django_assert_num_queries(1):
        order.save(update_fields=["note"])
    assert types() == ["order.created"]


def test_a_save_costs_one_query_and_one_insert(orders, django_assert_num_queries):
    order = Order.objects.create()
    order.status = "paid"
    with django_assert_num_queries(3):
        order.save()
    with django_assert_num_queries(2):
        Order.objects.create()


def test_deferred_fields_cause_no_queries(orders, django_assert_num_queries):
    Order.objects.create(total=Decimal(5))
    order = Order.objects.only("status").get()
    order.status = "paid"
    with django_assert_num_queries(3):
        order.save()
    assert changes() == {"status": {"old": "new", "new": "paid"}}
    assert assert_published("order.updated").payload["total"] == "5.00"
    assert order.get_deferred_fields() >= {"total"}


def test_a_deferred_field_is_missing_from_a_deletion(orders):
    Order.objects.create()
    order = Order.objects.only("status").get()
    order.delete()
    assert "total" not in assert_published("order.deleted").payload


def test_values_computed_by_the_database_are_published(orders):
    order = Order.objects.create(total=Decimal(5))
    order.total = F("total") + 1
    order.save()
    assert changes() == {"total": {"old": "5.00", "new": "6.00"}}


def test_a_receiver_may_save_again(orders):
    def correct(instance, **_):
        if instance.status == "paid":
            instance.status = "shipped"
            instance.save()

    order = Order.objects.create()
    order.status = "paid"
    pre_save.connect(correct, sender=Order)
    try:
        order.save()
    finally:
        pre_save.disconnect(correct, sender=Order)
    stored = Order.objects.get().status
    assert assert_published("order.updated").payload["status"] == stored


def test_fixtures_publish_no_events(orders, tmp_path):
    order = Order.objects.create()
    fixture = tmp_path / "orders.json"
    fixture.write_text(serializers.serialize("json", [order]).replace('"new"', '"old"'))
    call_command("loaddata", fixture, verbosity=0)
    assert Order.objects.get().status == "old"
    assert types() == ["order.created"]


def test_fixtures_publish_no_events_through_a_signal_bridge(bridge):
    bridge(bridge_signal, post_save, "x", serialize=lambda **_: {}, sender=Order)
    order = Order.objects.create()
    order.save_base(raw=True)
    assert types() == ["x"]


def test_raw_is_a_fixture_in_signals_of_models_only(bridge):
    bridge(bridge_signal, shop_opened, "x", serialize=lambda raw, **_: {"raw": raw})
    shop_opened.send(None, raw=True)
    assert assert_published("x").payload == {"raw": True}


def test_every_kind_of_value_is_published(bridge, settings, tmp_path):
    settings.MEDIA_ROOT = tmp_path
    fields = ["customer", "customer_id", "details", "placed_at", "took", "receipt"]
    bridge(bridge_model, Order, **NAMES, fields=fields)
    customer = Customer.objects.create()
    order = Order(
        customer=customer,
        details={"a": [1]},
        placed_at=datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC),
        took=timedelta(hours=1),
    )
    order.receipt.save("receipt.txt", ContentFile("paid"), save=False)
    order.save()
    assert assert_published("order.created").payload == {
        "pk": order.pk,
        "customer": customer.pk,
        "customer_id": customer.pk,
        "details": {"a": [1]},
        "placed_at": "2026-01-01T12:00:00.123456+00:00",
        "took": "P0DT01H00M00S",
        "receipt": "receipt.txt",
    }
    Order.objects.get().save()
    assert not published("order.updated")
    order.details["a"].append(2)
    order.placed_at += timedelta(microseconds=1)
    order.save()
    assert changes() == {
        "details": {"old": {"a": [1]}, "new": {"a": [1, 2]}},
        "placed_at": {
            "old": "2026-01-01T12:00:00.123456+00:00",
            "new": "2026-01-01T12:00:00.123457+00:00",
        },
    }


def test_a_primary_key_from_a_default_needs_no_query(bridge, django_assert_num_queries):
    bridge(bridge_model, Parcel, created="parcel.created", updated="u", fields=["weight"])
    with django_assert_num_queries(2):
        parcel = Parcel.objects.create()
    assert_published("parcel.created", pk=parcel.pk, weight=0)
    parcel.weight = 2
    parcel.save()
    assert assert_published("u").payload["changed"] == {"weight": {"old": 0, "new": 2}}
    Parcel(pk=parcel.pk, weight=3).save(force_update=True)
    assert assert_published("u").payload["changed"] == {"weight": {"new": 3}}


def test_a_new_instance_with_the_key_of_a_row_is_an_update(orders):
    order = Order.objects.create()
    Order(pk=order.pk, status="paid").save()
    Order(pk=order.pk + 1).save()
    assert changes() == {"status": {"old": "new", "new": "paid"}}
    assert len(published("order.created")) == 2


def test_key_and_queue_are_the_callers_choice(bridge, settings):
    settings.EVENTBUS = {"QUEUES": ["default", "audit"]}
    bridge(
        bridge_model,
        Order,
        created="order.created",
        fields=["customer"],
        key="customer:{customer}",
        queue="audit",
    )
    customer = Customer.objects.create()
    Order.objects.create(customer=customer)
    Order.objects.create()
    first, second = published("order.created")
    assert (first.key, first.queue) == (f"customer:{customer.pk}", "audit")
    assert second.key == "customer:"


def test_without_a_key_there_is_no_order(bridge):
    bridge(bridge_model, Order, created="order.created", fields=[], key=None)
    Order.objects.create()
    assert assert_published("order.created").key is None


# -- signals that other applications send


def set_status_as_oscar_does(order, status):
    """django-oscar writes stock by update() and sends the signals of a save itself: ``created``
    in both, ``update_fields`` in none."""
    arguments = {"instance": order, "created": False, "raw": False, "using": "default"}
    pre_save.send(sender=Order, **arguments)
    Order._base_manager.filter(pk=order.pk).update(status=status)
    order.refresh_from_db(fields=["status"])
    post_save.send(sender=Order, **arguments)


def test_signals_of_a_save_may_be_sent_by_other_code(orders):
    order = Order.objects.create()
    set_status_as_oscar_does(order, "paid")
    assert changes() == {"status": {"old": "new", "new": "paid"}}
    set_status_as_oscar_does(order, "paid")
    assert types() == ["order.created", "order.updated"]


def test_signals_of_a_model_may_bring_nothing_but_the_instance(orders):
    order = Order.objects.create()
    pre_save.send(Order, instance=order)
    order.status = "paid"
    post_save.send(Order, instance=order)
    assert changes() == {"status": {"old": "new", "new": "paid"}}
    post_delete.send(Order, instance=order)
    assert_published("order.deleted", pk=order.pk)


def test_without_created_an_instance_that_was_new_before_the_save_is_a_created_row(orders):
    order = Order()
    pre_save.send(Order, instance=order)
    order.save_base(raw=True)
    post_save.send(Order, instance=order)
    assert types() == ["order.created"]


def test_post_save_without_pre_save_is_an_update_of_unknown_values(orders):
    order = Order.objects.create()
    post_save.send(Order, instance=order, created=False)
    assert changes() == {"status": {"new": "new"}, "total": {"new": "0"}}


@pytest.mark.parametrize("signal", [pre_save, post_save, post_delete])
@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"instance": None},
        {"instance": object()},
        {"instance": Customer(pk=1)},
        {"instance": Order()},
        {"instance": Customer(pk=1), "reason": "import"},
    ],
    ids=["nothing", "none", "object", "another model", "unsaved", "more"],
)
def test_a_signal_about_no_row_of_the_model_is_ignored(orders, signal, sent):
    signal.send(Order, **sent)
    assert types() == []


def test_a_row_deleted_during_its_save_publishes_no_event(orders):
    order = Order.objects.create(total=Decimal(5))
    Order._base_manager.all()._raw_delete("default")
    order.total = F("total") + 1
    post_save.send(Order, instance=order)
    assert types() == ["order.created"]


def test_update_fields_may_be_one_name(orders):
    order = Order.objects.create()
    pre_save.send(Order, instance=order, update_fields="status")
    order.status = "paid"
    post_save.send(Order, instance=order, update_fields="status")
    assert changes() == {"status": {"old": "new", "new": "paid"}}


def test_more_arguments_than_django_sends_are_accepted(orders):
    order = Order.objects.create()
    arguments = {"instance": order, "signals": 1, "model": Order, "request": None}
    pre_save.send(Order, **arguments)
    order.status = "paid"
    post_save.send(Order, **arguments)
    assert changes() == {"status": {"old": "new", "new": "paid"}}


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize(
    "sender", ["shop.Order", None, Order(pk=1)], ids=["text", "none", "instance"]
)
def test_a_sender_of_class_prepared_need_not_be_a_class(sender):
    class_prepared.send(sender)


page_published = Signal()


@pytest.mark.parametrize("sender", [Order, "shop", None, Customer(pk=1)])
def test_a_signal_of_another_app_can_be_bridged(bridge, sender):
    """Wagtail sends the class of the page, the page, and its revision, which may be None."""
    bridge(
        bridge_signal,
        page_published,
        "page.published",
        serialize=lambda instance, revision, **_: {"page_id": instance.pk, "revision": revision},
        key="page:{page_id}",
    )
    order = Order.objects.create()
    page_published.send(sender=sender, instance=order, revision=None)
    page_published.send(sender=sender, instance=order, revision=2, raw=True, using=object())
    assert [each.payload["revision"] for each in published("page.published")] == [None, 2]


@pytest.mark.parametrize(
    "serialize", [lambda: {}, lambda instance, revision: {}, partial(lambda page, signal: {}, 1)]
)
def test_serialize_must_accept_the_arguments_that_a_sender_adds(serialize):
    with pytest.raises(BridgeError, match=r"bridge to 'page\.published' must accept \*\*kwargs"):
        bridge_signal(page_published, "page.published", serialize=serialize)


def test_a_serialize_without_a_signature_is_accepted(bridge):
    seen = {}
    bridge(bridge_signal, page_published, "page.published", serialize=seen.update)
    page_published.send(None, revision=1)
    assert seen["revision"] == 1


# -- inheritance


def test_a_proxy_publishes_events_of_its_model(orders):
    order = OrderProxy.objects.create()
    order.status = "paid"
    order.save()
    order.delete()
    assert types() == ["order.created", "order.updated", "order.deleted"]


def test_a_child_publishes_one_event_of_its_parent(orders):
    express = ExpressOrder.objects.create(courier="Ann")
    express.status = "paid"
    express.save()
    pk = express.pk
    express.delete()
    assert [(each.type, each.payload["pk"]) for each in published()] == [
        ("order.created", pk),
        ("order.updated", pk),
        ("order.deleted", pk),
    ]


def test_deleting_a_child_and_keeping_its_parent_publishes_no_event(orders):
    ExpressOrder.objects.create().delete(keep_parents=True)
    assert types() == ["order.created"]


def test_a_child_added_to_an_existing_row_is_not_a_created_row(orders):
    order = Order.objects.create()
    ExpressOrder(order_ptr=order, status="paid", courier="Ann").save()
    assert types() == ["order.created", "order.updated"]


def test_the_bridge_of_a_child_knows_the_fields_of_its_parent(bridge):
    bridge(bridge_model, ExpressOrder, **NAMES, fields=["courier", "status"])
    express = ExpressOrder.objects.create(courier="Ann")
    express.courier = "Bob"
    express.save()
    assert changes() == {"courier": {"old": "Ann", "new": "Bob"}}
    Order.objects.create()
    assert len(published("order.created")) == 1


@isolate_apps("tests.shop")
def test_a_subclass_declared_later_publishes_events(orders):
    class LateProxy(Order):
        class Meta:
            proxy = True
            app_label = "shop"

    LateProxy.objects.create()
    assert types() == ["order.created"]


# -- errors


def test_an_event_is_published_to_the_database_of_its_row(bridge, settings, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "django_eventbus.integrations.model_events.publish",
        lambda *args, using, **options: asked.append(using),
    )
    bridge(bridge_model, Order, created="x", fields=[])
    Order.objects.using("default").create()
    settings.EVENTBUS = {"DATABASES": ["other"]}
    Order.objects.create()
    assert asked == ["default", None], "None: publish() chooses, and warns if it is another"


def test_a_payload_that_cannot_be_stored_keeps_the_row_from_being_written(bridge):
    bridge(bridge_model, Order, created="order.created", fields=["details"])
    wrong = r"from shop\.Order to 'order\.created' could not publish: payload\.details\.n has more"
    with pytest.raises(BridgeError, match=wrong), transaction.atomic():
        Order.objects.create(details={"n": 10**400})
    assert not Order.objects.exists()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"created": "x", "fields": ["statsu"]}, "no field 'statsu'; did you mean 'status'"),
        ({"created": "x", "fields": "status"}, "must be a list of names"),
        ({"created": "x", "fields": ["expressorder"]}, "is not a column"),
        ({"fields": ["status"]}, "shop.Order has no event type"),
        ({"updated": "x", "fields": []}, "needs the fields of shop.Order"),
        (
            {"created": "x", "fields": [], "key": "{status}"},
            "uses 'status', which is not",
        ),
        ({"created": "x", "fields": [], "key": "{pk:05}"}, "invalid placeholder"),
        ({"created": "x", "fields": [], "key": "{}"}, "invalid placeholder"),
    ],
)
def test_an_invalid_bridge_is_refused_when_it_is_built(options, wrong):
    with pytest.raises(BridgeError, match=wrong.replace("{", r"\{")):
        bridge_model(Order, **options)


def test_a_model_of_the_bus_is_refused():
    with pytest.raises(BridgeError, match="each event would publish another one"):
        bridge_model(QueuedEvent, created="x", fields=[])


def test_two_model_bridges_cannot_publish_the_same_type(orders):
    with pytest.raises(BridgeError, match=r"from shop\.Order to .* exists already"):
        bridge_model(Order, created="order.created", fields=[])


def test_a_bridge_built_again_replaces_the_previous_one(bridge, orders):
    """Django calls ready() again when a test changes INSTALLED_APPS."""
    bridge(bridge_model, Order, **NAMES, fields=["note"])
    for answer in (1, 2):
        bridge(bridge_signal, shop_opened, "x", serialize=lambda answer=answer, **_: answer)
    order = Order.objects.create(note="hello")
    shop_opened.send(None)
    assert [each.payload for each in published()] == [{"pk": order.pk, "note": "hello"}, 2]


@pytest.mark.parametrize(
    "other",
    [{"serialize": lambda **_: 2}, {"key": "k"}, {"queue": "default"}],
    ids=["serialize", "key", "queue"],
)
def test_a_second_bridge_from_a_signal_to_a_type_is_refused(bridge, other):
    """Otherwise it would silently replace the first."""
    first = {"serialize": lambda **_: 1}
    bridge(bridge_signal, shop_opened, "x", **first)
    with pytest.raises(BridgeError, match="bridge to 'x' exists already, from the same signal"):
        bridge_signal(shop_opened, "x", **(first | other))
    shop_opened.send(None)
    assert [each.payload for each in published()] == [1]


def test_another_type_or_sender_is_another_bridge(bridge):
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: 1, sender=Order)
    bridge(bridge_signal, shop_opened, "y", serialize=lambda **_: 2, sender=Order)
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: 3, sender=Parcel)
    shop_opened.send(Order)
    shop_opened.send(Parcel)
    assert [each.payload for each in published()] == [1, 2, 3]


def test_a_bridge_of_a_partial_can_be_built_again(bridge):
    def answer(number, **_):
        return number

    for _ in range(2):
        bridge(bridge_signal, shop_opened, "x", serialize=partial(answer, 1))
    shop_opened.send(None)
    assert [each.payload for each in published()] == [1]


def test_a_disconnected_bridge_can_be_replaced(bridge):
    bridge_signal(shop_opened, "x", serialize=lambda **_: 1).disconnect()
    bridge(bridge_signal, shop_opened, "x", serialize=lambda **_: 2)
    shop_opened.send(None)
    assert [each.payload for each in published()] == [2]


# -- the check


def test_bulk_writes_without_events_cause_a_warning(bridge):
    bridge(bridge_model, Parcel, created="parcel.created", fields=[])
    (warning,) = check_bridges()
    assert warning.id == "django_eventbus.W201"
    assert "shop.Parcel is bridged" in warning.msg
    assert "'objects'" in warning.msg
    assert "BridgedQuerySet.as_manager()" in warning.hint


def test_a_bridged_queryset_silences_the_warning(orders):
    assert isinstance(Order.objects.all(), BridgedQuerySet)
    assert check_bridges() == []


def test_the_warning_can_be_turned_off_for_one_model(bridge):
    bridge(bridge_model, Parcel, created="parcel.created", fields=[], check_bulk_writes=False)
    bridge(bridge_model, Customer, created="customer.created", fields=[])
    (warning,) = check_bridges()
    assert warning.obj is Customer
    assert "check_bulk_writes=False" in warning.hint


def test_deletions_cause_no_warning(bridge):
    bridge(bridge_model, Parcel, deleted="parcel.deleted", fields=[])
    assert check_bridges() == []


def test_the_check_is_registered(bridge):
    bridge(bridge_model, Parcel, created="parcel.created", fields=[])
    handler("parcel.created", name="h")(print)
    assert "django_eventbus.W201" in [each.id for each in run_checks(tags=["eventbus"])]
