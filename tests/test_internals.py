"""The undocumented behaviour of Django and django-admin-rangefilter that ``internals`` relies on.

One test per internal. A new version that changes one of them fails here, by name; elsewhere the
same change would cause lost or repeated work.
"""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, suppress

import pytest
from django.contrib.admin import ModelAdmin, site
from django.contrib.messages import get_messages
from django.contrib.messages.storage.cookie import CookieStorage
from django.db import Error, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Manager, QuerySet
from django.test import RequestFactory, TestCase

from django_eventbus.integrations.django_querysets import BridgedQuerySet
from django_eventbus.internals import django as internals
from django_eventbus.internals import rangefilter
from django_eventbus.models import EventLog
from tests.shop.models import Customer, Order

ALIAS = "default"
commits = pytest.mark.django_db(transaction=True)


def names():
    return sorted(Customer.objects.values_list("name", flat=True))


def insert(name):
    Customer.objects.create(name=name)


def in_another_thread(action):
    """Run the action in a thread with its own connections and return its result."""
    results = []

    def run():
        try:
            results.append(action())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


# -- attributes


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("atomic_blocks", list),
        ("savepoint_ids", list),
        ("run_on_commit", list),
        ("execute_wrappers", list),
        ("settings_dict", dict),
        ("in_atomic_block", bool),
        ("needs_rollback", bool),
        ("closed_in_transaction", bool),
    ],
)
def test_a_connection_has_the_attribute(name, type_):
    value = getattr(connection, name, "missing")
    assert isinstance(value, type_), f"connection.{name} is {value!r}, expected a {type_.__name__}"


@pytest.mark.parametrize(
    "name", ["_savepoint", "cursor", "get_connection_params", "get_new_connection"]
)
def test_a_connection_has_the_method(name):
    assert callable(getattr(BaseDatabaseWrapper, name, None)), f"connection.{name}() is missing"


# -- BEGIN


def test_only_sqlite_begins_explicitly():
    assert internals.begins_explicitly(connection) is (connection.vendor == "sqlite")


@commits
def test_begin_can_be_deferred():
    if not internals.begins_explicitly(connection):
        pytest.skip("this database begins with the first statement")
    with ExitStack() as stack:
        with internals.begin_deferred(connection):
            stack.enter_context(transaction.atomic())
        assert connection.in_atomic_block
        assert internals.driver_in_transaction(connection) is False
        internals.begin(connection)
        assert internals.driver_in_transaction(connection) is True
        insert("a")
    assert internals.driver_in_transaction(connection) is False
    assert names() == ["a"]


@commits
def test_a_transaction_after_a_deferred_one_begins_as_usual():
    if not internals.begins_explicitly(connection):
        pytest.skip("this database begins with the first statement")
    with internals.begin_deferred(connection), transaction.atomic():
        pass
    with transaction.atomic():
        assert internals.driver_in_transaction(connection) is True


# -- atomic() blocks and savepoints


@commits
def test_the_depth_counts_blocks_and_savepoints():
    assert internals.depth(connection) == (0, 0)
    with transaction.atomic():
        assert internals.depth(connection) == (1, 0)
        with transaction.atomic():
            assert internals.depth(connection) == (2, 1)
            with transaction.atomic(savepoint=False):
                assert internals.depth(connection) == (3, 2)
        assert internals.depth(connection) == (1, 0)
    assert internals.depth(connection) == (0, 0)


@commits
def test_forgotten_blocks_do_not_keep_the_outer_block_from_committing():
    with transaction.atomic():
        insert("a")
        outer = internals.depth(connection)
        transaction.atomic().__enter__()
        transaction.atomic(savepoint=False).__enter__()
        internals.forget_deeper_than(connection, outer)
        assert internals.depth(connection) == outer
    assert not connection.in_atomic_block
    assert names() == ["a"]


@commits
def test_an_abandoned_transaction_is_rolled_back_by_closing():
    transaction.atomic().__enter__()
    insert("a")
    internals.abandon_transaction(connection)
    connection.close()
    assert connection.connection is None, "close() kept the driver's connection"
    assert not internals.is_marked_for_rollback(connection)
    assert names() == []


@commits
def test_a_transaction_is_lost_when_the_connection_is_closed_in_it():
    assert internals.transaction_is_lost(connection)
    with suppress(Error), transaction.atomic():
        assert not internals.transaction_is_lost(connection)
        connection.close()
        assert internals.transaction_is_lost(connection)


@commits
def test_a_broken_block_is_marked_for_rollback_until_it_is_unmarked():
    with transaction.atomic():
        sid = connection.savepoint()
        with suppress(ValueError), transaction.atomic(savepoint=False):
            insert("a")
            raise ValueError
        assert internals.is_marked_for_rollback(connection)
        internals.unmark_for_rollback(connection)
        connection.savepoint_rollback(sid)
        insert("b")
    assert names() == ["b"]


@commits
def test_a_savepoint_can_have_a_given_name():
    with transaction.atomic():
        internals.create_savepoint(connection, "ours")
        insert("a")
        connection.savepoint_rollback("ours")
        insert("b")
        connection.savepoint_commit("ours")
    assert names() == ["b"]


@commits
def test_releasing_a_savepoint_that_does_not_exist_is_an_error():
    with pytest.raises(Error), transaction.atomic():
        connection.savepoint_commit("missing")


@commits
def test_callbacks_belong_to_the_current_savepoint_id():
    ran = []
    with transaction.atomic():
        internals.push_savepoint_id(connection, "ours")
        internals.create_savepoint(connection, "ours")
        transaction.on_commit(lambda: ran.append("rolled back"))
        connection.savepoint_rollback("ours")
        internals.pop_savepoint_id(connection)
        transaction.on_commit(lambda: ran.append("kept"))
    assert ran == ["kept"]


@commits
def test_a_transaction_of_production_is_not_of_a_test_case():
    with transaction.atomic():
        assert not internals.is_in_test_case(connection)
        assert not internals.has_only_test_case_blocks(connection)


class BlocksOfATestCase(TestCase):
    def test_the_blocks_of_a_test_case_are_recognised(self):
        assert internals.is_in_test_case(connection)
        assert internals.has_only_test_case_blocks(connection)
        with transaction.atomic():
            assert internals.is_in_test_case(connection)
            assert not internals.has_only_test_case_blocks(connection)


# -- on_commit() callbacks


@commits
def test_each_transaction_has_its_own_list_of_callbacks():
    with transaction.atomic():
        first = internals.commit_hooks(connection)
        transaction.on_commit(lambda: None)
        with transaction.atomic():
            assert internals.commit_hooks(connection) is first
    with transaction.atomic():
        assert internals.commit_hooks(connection) is not first


@commits
def test_rolling_back_a_savepoint_replaces_the_list_of_callbacks():
    with transaction.atomic():
        before = internals.commit_hooks(connection)
        with suppress(ValueError), transaction.atomic():
            raise ValueError
        assert internals.commit_hooks(connection) is not before


@commits
def test_the_last_callback_is_the_one_that_was_registered_last():
    def first(): ...
    def last(): ...

    with transaction.atomic():
        assert internals.last_commit_hook(connection) is None
        transaction.on_commit(first)
        transaction.on_commit(last)
        assert internals.last_commit_hook(connection) is last


@commits
def test_callbacks_of_the_same_savepoints_are_dropped_together():
    is_of_same = internals.last_commit_hook_is_of_same_savepoints
    with transaction.atomic():
        assert not is_of_same(connection)
        transaction.on_commit(lambda: None)
        assert is_of_same(connection)
        with transaction.atomic():
            assert not is_of_same(connection)
            transaction.on_commit(lambda: None)
            assert is_of_same(connection)
        assert not is_of_same(connection)


@commits
def test_the_callbacks_of_a_savepoint_can_be_dropped():
    ran = []
    with transaction.atomic():
        transaction.on_commit(lambda: ran.append("outer"))
        internals.push_savepoint_id(connection, "ours")
        transaction.on_commit(lambda: ran.append("dropped"))
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append("dropped too"))
        internals.pop_savepoint_id(connection)
        internals.drop_commit_hooks(connection, "ours")
    assert ran == ["outer"]


@commits
def test_wrapped_callbacks_run_in_order_and_continue_after_an_error():
    ran = []

    def wrap(hook):
        def run():
            ran.append("wrapped")
            hook()

        return run

    with transaction.atomic():
        transaction.on_commit(lambda: 1 / 0)
        transaction.on_commit(lambda: ran.append("second"))
        internals.wrap_commit_hooks(connection, wrap)
    assert ran == ["wrapped", "wrapped", "second"]


# -- cursors and statements


@commits
def test_cursors_and_statements_are_watched():
    seen = []
    wrapper = connections[ALIAS]

    def cursor(*args, **kwargs):
        seen.append("cursor")
        return internals.open_cursor(wrapper, *args, **kwargs)

    def on_execute(execute, sql, params, many, context):
        seen.append("execute")
        return execute(sql, params, many, context)

    wrapper.ensure_connection()
    internals.watch_cursors(wrapper, cursor, on_execute)
    try:
        names()
    finally:
        internals.unwatch_cursors(wrapper, on_execute)
    assert seen == ["cursor", "execute"]
    names()
    assert seen == ["cursor", "execute"]


@commits
def test_the_driver_knows_whether_a_transaction_is_open():
    names()
    assert internals.driver_in_transaction(connection) is False
    with transaction.atomic():
        names()
        # MySQLdb only knows that autocommit is off.
        expected = None if connection.vendor == "mysql" else True
        assert internals.driver_in_transaction(connection) is expected
    assert internals.driver_in_transaction(connection) is False


@commits
def test_the_driver_of_postgresql_knows_that_its_session_ended():
    names()
    assert not internals.driver_is_closed(connection)
    if connection.vendor == "postgresql":
        connection.connection.close()
        assert internals.driver_is_closed(connection)
        connection.close()


@commits
def test_a_separate_session_is_not_the_one_of_the_thread():
    names()
    with closing(internals.open_separate_session(connection)) as session:
        assert type(session) is type(connection.connection)
        assert session is not connection.connection


# -- options of connections that are opened later


def option(name):
    return connections[ALIAS].settings_dict["OPTIONS"].get(name)


def test_an_option_of_all_threads_is_seen_by_new_connections(monkeypatch):
    options = dict(connections.settings[ALIAS]["OPTIONS"])
    monkeypatch.setitem(connections.settings[ALIAS], "OPTIONS", options)
    internals.set_option_of_all_threads(ALIAS, "eventbus", 1)
    assert in_another_thread(lambda: option("eventbus")) == 1


def test_an_option_of_this_thread_is_not_seen_by_others(monkeypatch):
    wrapper = connections[ALIAS]
    monkeypatch.setattr(wrapper, "settings_dict", wrapper.settings_dict)
    internals.set_option_of_this_thread(ALIAS, "eventbus", 1)
    assert option("eventbus") == 1
    assert in_another_thread(lambda: option("eventbus")) is None


def test_a_pool_that_is_turned_off_is_not_used_by_new_connections(monkeypatch):
    options = {**connections.settings[ALIAS]["OPTIONS"], "pool": True}
    monkeypatch.setitem(connections.settings[ALIAS], "OPTIONS", options)
    assert in_another_thread(lambda: option("pool")) is True
    internals.turn_off_pool(ALIAS)
    assert in_another_thread(lambda: option("pool")) is None
    if connection.vendor == "postgresql":
        assert in_another_thread(lambda: connections[ALIAS].pool) is None


# -- models and the admin


def test_the_queryset_class_of_a_manager_is_known():
    assert internals.queryset_class_of(Order.objects) is BridgedQuerySet
    assert internals.queryset_class_of(Manager()) is QuerySet


def test_the_admin_redirects_from_a_missing_object_with_a_message():
    request = RequestFactory().get("/")
    request._messages = CookieStorage(request)
    answer = internals.redirect_for_missing_object(ModelAdmin(EventLog, site), request, "17")
    assert answer.status_code == 302
    (message,) = get_messages(request)
    assert "17" in str(message)


# -- django-admin-rangefilter


@pytest.mark.parametrize(
    ("base", "field", "values", "is_time"),
    [
        (
            rangefilter.TimeRange,
            "finished_at",
            {"gte_0": "2026-01-01", "gte_1": "0:00", "lte_0": "2026-01-02", "lte_1": "0:00"},
            True,
        ),
        (rangefilter.NumberRange, "attempts", {"gte": "3", "lte": "5"}, False),
    ],
)
def test_a_range_filter_calls_the_hooks(base, field, values, is_time):
    adapted = []

    class Range(base):
        def adapt_fields(self, fields):
            adapted.append(len(fields))

        def adapt_bounds(self, bounds):
            adapted.append(sorted(bounds))
            return bounds

    request = RequestFactory().get("/")
    params = {f"{field}__range__{name}": [value] for name, value in values.items()}
    titled = rangefilter.titled(Range, "a title")
    chosen = titled(
        EventLog._meta.get_field(field),
        request,
        params,
        EventLog,
        ModelAdmin(EventLog, site),
        field,
    )
    chosen.queryset(request, EventLog.objects.all())
    assert chosen.title == "a title"
    assert adapted == [2, [f"{field}__gte", f"{field}__lte"]]
    lower, upper = chosen.form.cleaned_data.values()
    assert lower < upper


# -- the reloader


@pytest.mark.processes
def test_the_reloader_starts_a_process_with_its_variable(tmp_path):
    """The first process only waits for the second one, which runs the code."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from django.utils import autoreload\n"
        "from django_eventbus.internals.django import runs_under_reloader\n"
        "print('reloaded' if runs_under_reloader() else 'first', flush=True)\n"
        "if not runs_under_reloader():\n"
        "    sys.exit(autoreload.restart_with_reloader())\n"
    )
    result = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stdout.split() == ["first", "reloaded"], result.stderr
