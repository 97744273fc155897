"""Tests of the proxy itself."""

import threading

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from tests.faults.proxy import AFTER, BEFORE, LATE, commits, says, through
from tests.shop.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

NEW = {"event_id": "0198b7e4-0000-7000-8000-000000000000", "handler": "x"}


def connect(proxy, **options):
    known = connection.settings_dict
    return psycopg.connect(
        host=proxy.host,
        port=proxy.port,
        dbname=known["NAME"],
        user=known["USER"],
        password=known["PASSWORD"],
        autocommit=True,
        **options,
    )


def test_the_proxy_passes_everything_by_default(proxy):
    with through(proxy):
        Effect.objects.create(**NEW)
        assert Effect.objects.count() == 1
        assert len(proxy.links) == 1


@pytest.mark.parametrize(("when", "committed"), [(BEFORE, 0), (AFTER, 1)])
def test_a_connection_can_be_cut_before_or_after_a_commit(proxy, when, committed):
    cut = proxy.cut(commits, when)
    with through(proxy), pytest.raises(OperationalError), transaction.atomic():
        Effect.objects.create(**NEW)
    assert cut.happened.is_set()
    assert Effect.objects.count() == committed


def test_a_commit_in_the_extended_protocol_is_recognised(proxy):
    cut = proxy.cut(commits)
    with connect(proxy) as raw:
        raw.execute("BEGIN")
        raw.execute("SELECT pg_notify('x', %s)", ["y"])
        with pytest.raises(psycopg.OperationalError):
            raw.execute("COMMIT", prepare=True)
    assert cut.happened.is_set()


def test_a_late_message_is_executed_after_its_client_has_disconnected(proxy):
    cut = proxy.cut(says("INSERT"), LATE)
    with through(proxy), pytest.raises(OperationalError):
        Effect.objects.create(**NEW)
    assert not Effect.objects.exists()
    proxy.let_arrive(cut)
    assert Effect.objects.count() == 1


def test_a_blackhole_swallows_until_it_is_healed(proxy):
    answers = []
    with connect(proxy) as raw:
        proxy.blackhole()
        asking = threading.Thread(target=lambda: answers.append(raw.execute("SELECT 1").fetchone()))
        asking.start()
        asking.join(0.3)
        assert answers == []
        with pytest.raises(psycopg.OperationalError, match="timeout"):
            connect(proxy, connect_timeout=2)
        proxy.heal()
        asking.join()
        assert answers == [(1,)]


def test_forgotten_connections_stay_dead_and_new_ones_work(proxy):
    ends = []

    def ask(raw):
        try:
            ends.append(raw.execute("SELECT 1").fetchone())
        except psycopg.OperationalError as error:
            ends.append(error)

    raw = connect(proxy)
    proxy.blackhole()
    asking = threading.Thread(target=ask, args=(raw,))
    asking.start()
    proxy.heal(forget=True)
    with connect(proxy) as other:
        assert other.execute("SELECT 2").fetchone() == (2,)
    assert ends == []
    proxy.reset()
    asking.join()
    assert isinstance(ends[0], psycopg.OperationalError)
    raw.close()


def test_a_delay_applies_once_per_request_and_once_per_answer(proxy):
    with connect(proxy) as raw:
        taken = []
        proxy.delay = lambda: taken.append(1) or 0.001
        assert len(raw.execute("SELECT generate_series(1, 100)").fetchall()) == 100
        proxy.delay = None
    assert len(taken) == 2


def test_the_pooler_gives_each_transaction_another_session(pooler):
    with connect(pooler) as one, connect(pooler) as other:
        pids = {raw.execute("SELECT pg_backend_pid()").fetchone() for raw in (one, one, one, other)}
        assert len(pids) == 2
        one.execute("BEGIN")
        inside = {one.execute("SELECT pg_backend_pid()").fetchone() for _ in range(3)}
        assert len(inside) == 1
        one.execute("COMMIT")
    assert pooler.swaps > 0
