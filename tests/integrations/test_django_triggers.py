"""M33: a trigger publishes an event for every write by any client."""

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from django.apps import apps
from django.contrib.auth import get_user_model
from django.db import NotSupportedError, connection, migrations, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter

from django_eventbus import BridgeError, Event, handler
from django_eventbus.integrations.django_triggers import BridgeTrigger, RemoveBridgeTrigger
from django_eventbus.models import QueuedEvent
from django_eventbus.testing import assert_published, drain, published
from tests.shop.models import Customer, ExpressOrder, Order

pytestmark = pytest.mark.django_db

NAMES = {"created": "order.created", "updated": "order.updated", "deleted": "order.deleted"}
only_postgresql = pytest.mark.skipif(
    connection.vendor != "postgresql", reason="only PostgreSQL has this trigger"
)


def migrate(operation, *, backwards=False, state=None):
    state = state or ProjectState.from_apps(apps)
    run = operation.database_backwards if backwards else operation.database_forwards
    with connection.schema_editor(atomic=False) as editor:
        run("shop", editor, state, state)


@pytest.fixture
def orders():
    operation = BridgeTrigger("Order", **NAMES, fields=["status", "total"])
    migrate(operation)
    return operation


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def types():
    return [each.type for each in published()]


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor == "postgresql", reason="PostgreSQL has")
def test_other_databases_refuse_triggers():
    with pytest.raises(NotSupportedError, match=r"only PostgreSQL can.*BridgedQuerySet"):
        migrate(BridgeTrigger("Order", created="x", fields=[]))


def test_the_trigger_sets_every_required_column():
    """A column added later needs a default in the database, because triggers are not rewritten."""
    given = BridgeTrigger("Order", created="x", fields=[]).trigger(Order)._row()
    needed = {
        field.column
        for field in QueuedEvent._meta.local_concrete_fields
        if not (field.null or field.has_db_default() or field.primary_key)
    }
    assert needed <= given.keys()


def test_a_migration_can_be_written_and_described():
    operation = BridgeTrigger("Order", created="x", fields=["status"])
    migration = type("Migration", (migrations.Migration,), {"operations": [operation]})
    text = MigrationWriter(migration("0002", "shop")).as_string()
    assert "django_eventbus.integrations.django_triggers.BridgeTrigger(" in text
    assert operation.describe() == "Create the event trigger of Order"
    assert operation.migration_name_fragment == "bridge_order"
    removal = RemoveBridgeTrigger("Order", created="x", fields=["status"])
    assert removal.describe() == "Remove the event trigger of Order"
    assert removal.migration_name_fragment == "unbridge_order"


def test_an_invalid_trigger_is_refused():
    with pytest.raises(BridgeError, match="no field 'nothing'"):
        BridgeTrigger("Order", created="x", fields=["nothing"]).trigger(Order)
    with pytest.raises(BridgeError, match="is in the table 'shop_order', which a trigger on"):
        BridgeTrigger("ExpressOrder", created="x", fields=["status"]).trigger(ExpressOrder)


def state_at(*targets):
    return MigrationLoader(connection).project_state(list(targets))


AUTH = ("auth", "0012_alter_user_first_name_max_length")


@only_postgresql
@pytest.mark.parametrize("name", ["auth.User", "auth.user"])
def test_a_model_of_another_app_can_be_bridged(name):
    operation = BridgeTrigger(
        name, created="user.created", updated="user.updated", fields=["username"]
    )
    migrate(operation, state=state_at(AUTH))
    user = get_user_model().objects.create_user("ann")
    get_user_model().objects.update(username="bob")
    assert [(each.type, each.key) for each in published()] == [
        ("user.created", f"auth.user:{user.pk}"),
        ("user.updated", f"auth.user:{user.pk}"),
    ]
    migrate(operation, backwards=True, state=state_at(AUTH))
    get_user_model().objects.update(username="cid")
    assert len(published()) == 2


@only_postgresql
def test_the_bridge_of_another_apps_model_can_be_removed_and_restored():
    options = {"created": "user.created", "fields": ["username"]}
    migrate(BridgeTrigger("auth.User", **options), state=state_at(AUTH))
    removal = RemoveBridgeTrigger("auth.User", **options)
    migrate(removal, state=state_at(AUTH))
    get_user_model().objects.create_user("ann")
    assert types() == []
    migrate(removal, backwards=True, state=state_at(AUTH))
    get_user_model().objects.create_user("bob")
    assert types() == ["user.created"]


@only_postgresql
def test_the_router_is_asked_about_the_other_app(settings):
    settings.DATABASE_ROUTERS = [RouterThatKeepsAuthAway()]
    migrate(BridgeTrigger("auth.User", created="x", fields=[]), state=state_at(AUTH))
    get_user_model().objects.create_user("ann")
    assert types() == []


class RouterThatKeepsAuthAway:
    def allow_migrate(self, db, app_label, **hints):
        return app_label != "auth"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("auth.User", "no model of the app 'auth' is known .* add a migration of 'auth' to the"),
        ("Parcle", "no model shop.Parcle at this point of the migrations"),
        ("contenttypes.ContentTyp", "no model contenttypes.ContentTyp .* mean 'ContentType'"),
    ],
)
def test_a_model_that_the_migration_does_not_know_is_named(name, wrong):
    known = state_at(("contenttypes", "0002_remove_content_type_name"))
    operation = BridgeTrigger(name, created="x", fields=[])
    with pytest.raises(BridgeError, match=wrong):
        operation._model("shop", known)


def test_a_model_without_its_own_table_is_refused(settings):
    operation = BridgeTrigger("OrderProxy", created="x", fields=[])
    with pytest.raises(BridgeError, match=r"shop\.OrderProxy is a proxy .* bridge shop\.Order"):
        operation._model("shop", ProjectState.from_apps(apps))
    state = state_at(AUTH)
    settings.AUTH_USER_MODEL = "shop.Customer"
    with pytest.raises(BridgeError, match=r"auth\.User is replaced by shop\.Customer"):
        BridgeTrigger("auth.User", created="x", fields=[])._model("shop", state)


def test_another_apps_model_is_described_with_its_label():
    operation = BridgeTrigger("auth.User", created="x", fields=[])
    assert operation.describe() == "Create the event trigger of auth.User"
    assert operation.migration_name_fragment == "bridge_auth_user"


@only_postgresql
def test_every_write_publishes_an_event(orders):
    order = Order.objects.create(total=Decimal("9.90"))
    assert assert_published("order.created").payload == {
        "pk": order.pk,
        "status": "new",
        "total": "9.90",
    }
    Order.objects.update(status="paid")
    assert assert_published("order.updated").payload == {
        "pk": order.pk,
        "status": "paid",
        "total": "9.90",
        "changed": {"status": {"old": "new", "new": "paid"}},
    }
    execute("DELETE FROM shop_order")
    assert assert_published("order.deleted").payload == {
        "pk": order.pk,
        "status": "paid",
        "total": "9.90",
    }


@only_postgresql
def test_raw_sql_and_bulk_writes_publish_events(orders):
    Order.objects.bulk_create(Order(status=f"s{n}") for n in range(3))
    execute("UPDATE shop_order SET total = total + 1, status = status WHERE status <> 's0'")
    execute(
        "INSERT INTO shop_order (id, status, total, note, details, receipt)"
        " SELECT id, status, 7, note, details, receipt FROM shop_order"
        " ON CONFLICT (id) DO UPDATE SET total = excluded.total"
    )
    assert types() == ["order.created"] * 3 + ["order.updated"] * 5


@only_postgresql
def test_an_unchanged_row_publishes_no_event(orders):
    Order.objects.create()
    execute("UPDATE shop_order SET status = status, note = 'not bridged', total = 0.0")
    assert types() == ["order.created"]


@only_postgresql
def test_the_trigger_publishes_a_normal_event(orders):
    order = Order.objects.create()
    event = assert_published("order.created")
    assert event.event_id.version == 7
    assert event.event_id.variant == uuid.RFC_4122
    made_at = datetime.fromtimestamp((event.event_id.int >> 80) / 1000, UTC)
    assert abs(made_at - datetime.now(UTC)) < timedelta(hours=1)
    assert (event.namespace, event.queue, event.version) == ("default", "default", 1)
    assert (event.key, event.producer) == (f"shop.order:{order.pk}", "trigger:shop_order")
    assert (event.priority, event.attempts, event.status) == (0, 0, "PENDING")
    assert event.created_at is not None


@only_postgresql
def test_the_events_of_a_trigger_are_handled_in_order(orders):
    seen = []
    handler("order.*", name="h")(lambda event: seen.append((event.type, event.payload["status"])))
    order = Order.objects.create()
    Order.objects.update(status="paid")
    order.delete()
    assert drain().handled == 3
    assert seen == [("order.created", "new"), ("order.updated", "paid"), ("order.deleted", "paid")]


@only_postgresql
def test_the_event_is_part_of_the_transaction_of_the_writer(orders):
    with transaction.atomic():
        Order.objects.create()
        transaction.set_rollback(True)
    assert types() == []


@only_postgresql
def test_every_kind_of_value_is_published():
    class OrderMade(Event, type="triggers.order_made", version=3):
        pk: int
        total: Decimal
        placed_at: datetime
        took: timedelta
        customer: int
        details: dict

    got = []
    handler(OrderMade, name="h")(lambda event: got.append((event.version, event.data)))
    fields = ["total", "placed_at", "took", "customer", "details"]
    migrate(BridgeTrigger("Order", created="triggers.order_made", fields=fields))
    customer = Customer.objects.create()
    moment = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
    execute("SET LOCAL timezone = 'Asia/Tokyo'")
    order = Order.objects.create(
        total=Decimal("0.10"),
        placed_at=moment,
        took=timedelta(hours=1),
        customer=customer,
        details={"a": "it's \\ quoted"},
    )
    execute("SET LOCAL timezone = 'UTC'")
    drain()
    expected = OrderMade(
        pk=order.pk,
        total=Decimal("0.10"),
        placed_at=moment,
        took=timedelta(hours=1),
        customer=customer.pk,
        details={"a": "it's \\ quoted"},
    )
    assert got == [(3, expected)]


@only_postgresql
def test_names_with_quotes_are_escaped(settings):
    settings.EVENTBUS = {"NAMESPACE": "it's", "QUEUES": ["default", "a'b"]}
    options = {"fields": ["status"], "key": "it's {status} 100%", "queue": "a'b"}
    migrate(BridgeTrigger("Order", created="o'rder $$ %s", **options))
    Order.objects.create(status="x'y")
    event = assert_published("o'rder $$ %s", status="x'y")
    assert (event.namespace, event.queue, event.key) == ("it's", "a'b", "it's x'y 100%")


@only_postgresql
@pytest.mark.parametrize(
    ("key", "stored"), [(None, None), ("{customer}", None), ("customer:{customer}", "customer:")]
)
def test_keys_may_be_empty_or_none(key, stored):
    migrate(BridgeTrigger("Order", created="x", fields=["customer"], key=key))
    Order.objects.create()
    assert assert_published("x").key == stored


@only_postgresql
def test_a_key_is_cut_to_the_length_of_its_column():
    migrate(BridgeTrigger("Order", created="x", fields=["note"], key="n:{note}"))
    Order.objects.create(note="é" * 300)
    assert len(assert_published("x").key) == 200


@only_postgresql
def test_a_row_with_a_changed_key_publishes_under_its_new_key(orders):
    order = Order.objects.create()
    execute(f"UPDATE shop_order SET id = {order.pk} + 1, status = 'moved'")
    assert_published("order.updated", pk=order.pk + 1, status="moved")


@only_postgresql
def test_the_trigger_works_with_another_search_path(orders):
    execute("CREATE SCHEMA elsewhere")
    execute("SET LOCAL search_path = elsewhere")
    execute(
        "INSERT INTO public.shop_order (status, total, note, details, receipt)"
        " VALUES ('new', 0, '', '{}', '')"
    )
    execute("SET LOCAL search_path = public")
    assert types() == ["order.created"]


@only_postgresql
def test_a_trigger_migration_can_be_changed_and_reversed(orders):
    changed = BridgeTrigger("Order", updated="order.noted", fields=["note"], key=None)
    migrate(changed)
    Order.objects.create()
    Order.objects.update(status="paid")
    Order.objects.update(note="hello")
    assert types() == ["order.noted"]
    migrate(changed, backwards=True)
    Order.objects.update(note="bye")
    assert types() == ["order.noted"]
    migrate(changed, backwards=True)


@only_postgresql
def test_a_trigger_can_be_removed_and_restored(orders):
    removal = RemoveBridgeTrigger("Order", **NAMES, fields=["status"])
    migrate(removal)
    Order.objects.create()
    assert types() == []
    migrate(removal, backwards=True)
    Order.objects.create()
    assert types() == ["order.created"]


@only_postgresql
def test_the_sql_can_be_printed_for_review():
    state = ProjectState.from_apps(apps)
    with connection.schema_editor(collect_sql=True, atomic=False) as editor:
        BridgeTrigger("Order", **NAMES, fields=["status"]).database_forwards(
            "shop", editor, state, state
        )
    assert "CREATE TRIGGER eventbus_update AFTER UPDATE" in "\n".join(editor.collected_sql)
