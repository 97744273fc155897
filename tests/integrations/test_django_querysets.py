"""M33: bulk writes of a bridged model publish events."""

import threading
from decimal import Decimal

import pytest
from django.db import NotSupportedError, connection, transaction
from django.db.models import F, Value
from django.db.models.functions import Concat

from django_eventbus import BridgeError, bridge_model
from django_eventbus.testing import assert_published, published
from tests.shop.models import Customer, ExpressOrder, Order, OrderProxy

pytestmark = pytest.mark.django_db

NAMES = {"created": "order.created", "updated": "order.updated", "deleted": "order.deleted"}


@pytest.fixture
def orders(bridge):
    return bridge(bridge_model, Order, **NAMES, fields=["status", "total"])


def changes():
    return [each.payload["changed"] for each in published("order.updated")]


def test_rows_created_in_bulk_publish_events(orders):
    made = Order.objects.bulk_create(Order(total=n) for n in range(3))
    events = published("order.created")
    assert [each.payload["pk"] for each in events] == [each.pk for each in made]
    assert [each.payload["total"] for each in events] == ["0", "1", "2"]
    assert events[2].key == f"shop.order:{made[2].pk}"


def test_many_rows_cost_one_statement_for_their_events(orders, django_assert_num_queries):
    with django_assert_num_queries(2):
        Order.objects.bulk_create(Order() for _ in range(20))


def test_values_computed_by_the_database_are_read(orders):
    Order.objects.bulk_create([Order(status=Concat(Value("a"), Value("b"))), Order()])
    assert [each.payload["status"] for each in published("order.created")] == ["ab", "new"]


@pytest.mark.parametrize("how", [{"ignore_conflicts": True}, {"update_conflicts": True}])
def test_bulk_create_that_ignores_conflicts_is_refused(orders, how):
    with pytest.raises(BridgeError, match="does not return which rows of Order it created"):
        Order.objects.bulk_create([Order()], **how)
    with pytest.raises(BridgeError, match="does not return which rows"):
        Order.objects.bulk_create([Order()], None, True)
    Order._base_manager.bulk_create([Order()])
    assert published() == []


def test_an_update_publishes_one_event_per_row(orders):
    first = Order.objects.create(status="paid", total=5)
    second = Order.objects.create(status="new", total=7)
    Order.objects.create(status="shipped")
    assert Order.objects.exclude(status="shipped").update(status="paid", total=F("total") + 1) == 2
    events = {each.payload["pk"]: each for each in published("order.updated")}
    assert events[first.pk].payload["changed"] == {"total": {"old": "5.00", "new": "6.00"}}
    assert events[second.pk].payload["changed"] == {
        "status": {"old": "new", "new": "paid"},
        "total": {"old": "7.00", "new": "8.00"},
    }
    assert events[second.pk].payload["status"] == "paid"
    assert events[second.pk].key == f"shop.order:{second.pk}"


def test_an_update_of_other_fields_sends_no_query_and_no_event(orders, django_assert_num_queries):
    Order.objects.create()
    with django_assert_num_queries(1):
        Order.objects.update(note="not bridged")
    assert published("order.updated") == []


def test_an_update_without_changes_publishes_no_event(orders):
    Order.objects.create(status="paid")
    assert Order.objects.update(status="paid") == 1
    assert Order.objects.filter(pk=0).update(status="x") == 0
    assert published("order.updated") == []


def test_bulk_update_publishes_events(orders):
    made = [Order.objects.create(total=n) for n in range(3)]
    for each in made:
        each.status = "paid"
    made[1].total = Decimal(9)
    assert Order.objects.bulk_update(made, ["status", "total"]) == 3
    assert changes()[0] == {"status": {"old": "new", "new": "paid"}}
    assert changes()[1] == {
        "status": {"old": "new", "new": "paid"},
        "total": {"old": "1.00", "new": "9.00"},
    }


def test_more_rows_than_a_statement_has_parameters_can_be_updated(orders):
    Order._base_manager.bulk_create(Order() for _ in range(1200))
    assert Order.objects.update(status="paid") == 1200
    assert len(published("order.updated")) == 1200


def test_a_foreign_key_can_be_named_with_and_without_id(bridge):
    bridge(bridge_model, Order, updated="order.updated", fields=["customer"])
    customer = Customer.objects.create()
    order = Order.objects.create()
    Order.objects.update(customer=customer)
    Order.objects.update(customer_id=None)
    assert changes() == [
        {"customer": {"old": None, "new": customer.pk}},
        {"customer": {"old": customer.pk, "new": None}},
    ]
    assert assert_published("order.updated").payload["pk"] == order.pk


def test_a_query_over_other_tables_can_be_updated(orders):
    ann = Customer.objects.create(name="Ann")
    Order.objects.create(customer=ann)
    Order.objects.create(customer=Customer.objects.create(name="Bob"))
    rows = Order.objects.filter(customer__name="Ann").annotate(name=F("customer__name"))
    assert rows.distinct().order_by("-total").update(status="paid") == 1
    assert len(changes()) == 1


def test_updates_that_django_refuses_are_refused(orders):
    Order.objects.create()
    with pytest.raises(TypeError, match="slice"):
        Order.objects.all()[:1].update(status="x")
    with pytest.raises(NotSupportedError):
        Order.objects.union(Order.objects.all()).update(status="x")


def test_proxies_and_children_publish_events_of_their_model(orders):
    OrderProxy.objects.bulk_create([OrderProxy()])
    ExpressOrder.objects.create(courier="Ann")
    ExpressOrder.objects.update(status="paid", courier="Bob")
    OrderProxy.objects.filter(status="new").update(status="paid")
    assert len(published("order.created")) == 2
    assert changes() == [{"status": {"old": "new", "new": "paid"}}] * 2


def test_each_bridge_of_a_model_is_served(bridge, orders):
    bridge(bridge_model, Order, updated="order.noted", fields=["note", "status"])
    Order.objects.create()
    Order.objects.update(status="paid")
    Order.objects.update(note="hello")
    assert len(published("order.updated")) == 1
    assert len(published("order.noted")) == 2


@pytest.mark.django_db(transaction=True)
def test_rows_and_events_are_committed_together(bridge):
    bridge(
        bridge_model, Order, created="order.created", updated="order.updated", fields=["details"]
    )
    too_large = {"n": 10**400}
    with pytest.raises(BridgeError, match="could not publish"):
        Order.objects.bulk_create([Order(), Order(details=too_large)])
    assert not Order.objects.exists()
    Order._base_manager.bulk_create([Order()])
    with pytest.raises(BridgeError, match="could not publish"):
        Order.objects.update(details=too_large)
    assert Order.objects.get().details == {}
    assert published() == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(not connection.features.has_select_for_update, reason="one writer at a time")
@pytest.mark.parametrize("how", ["save", "update"])
def test_the_events_of_two_concurrent_writers_are_consistent(bridge, how):
    """The second writer waits for the first, and its event has the changes since then."""
    bridge(bridge_model, Order, updated="order.updated", fields=["status"])
    order = Order.objects.create()

    def ship():
        try:
            with transaction.atomic():
                if how == "save":
                    late = Order(pk=order.pk, status="shipped")
                    late._state.adding = False
                    started.set()
                    late.save()
                else:
                    started.set()
                    Order.objects.update(status="shipped")
        finally:
            connection.close()

    started = threading.Event()
    second = threading.Thread(target=ship)
    with transaction.atomic():
        order.status = "paid"
        order.save()
        second.start()
        assert started.wait(10)
    second.join(10)
    assert changes() == [
        {"status": {"old": "new", "new": "paid"}},
        {"status": {"old": "paid", "new": "shipped"}},
    ]
