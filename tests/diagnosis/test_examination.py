"""The framework of the checks: verdicts, errors, read-only reads, selection."""

import pytest
from django.db import DatabaseError, ProgrammingError, connection, connections

from django_eventbus.diagnosis.catalogue import CHECKS, UnknownCheckError, selected
from django_eventbus.diagnosis.examination import Bus, Diagnosis, Verdict, check, examine, ok, warn
from django_eventbus.models import EventLog, EventWorker


def a_check(examine, **options):
    texts = dict.fromkeys(("title", "symptom", "cause", "fix"), "text")
    return check("EB999", **texts, **options)(examine)


def run(store, *checks):
    return list(examine(Bus(store), checks))


def test_ids_are_unique_and_sorted():
    ids = [each.id for each in CHECKS]
    assert ids == sorted(set(ids))


@pytest.mark.django_db(transaction=True)
def test_a_check_cannot_write(store):
    def writes(bus):
        bus.store.workers.update(host="other")
        yield ok("written")

    (found,) = run(store, a_check(writes))
    assert found.verdict is Verdict.FAIL
    assert "raised" in found.results[0].summary


def test_a_check_that_raises_fails_and_the_next_check_runs(store):
    def raises(bus):
        raise ProgrammingError("no such thing")

    first, second = run(store, a_check(raises), a_check(lambda bus: [ok("fine")]))
    assert (first.verdict, second.verdict) == (Verdict.FAIL, Verdict.OK)
    assert "ProgrammingError: no such thing" in first.results[0].summary


def test_a_check_of_another_database_is_skipped(store):
    (found,) = run(store, a_check(lambda bus: [ok("fine")], databases=("Oracle",)))
    assert found.verdict is Verdict.SKIPPED
    assert found.results[0].summary.startswith("only for Oracle, not for ")


def test_a_check_without_a_result_fails(store):
    (found,) = run(store, a_check(lambda bus: []))
    assert found.verdict is Verdict.FAIL


def test_the_session_is_writable_after_the_examination(store, worker_id):
    run(store, a_check(lambda bus: [ok("fine")]))
    assert EventWorker.objects.update(host="other") == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def test_the_worst_result_is_the_verdict():
    results = (ok("fine"), warn("late", fix="wait"))
    assert Diagnosis(CHECKS[0], results).verdict is Verdict.WARN


def test_an_unknown_id_is_refused_with_a_suggestion():
    with pytest.raises(
        UnknownCheckError, match=r"there is no check 'EB14'; did you mean 'EB014'\?"
    ):
        selected(["EB14"])


def test_the_beginning_of_an_id_selects_its_checks():
    assert {each.id for each in selected(["eb00"])} == {
        each.id for each in CHECKS if each.id.startswith("EB00")
    }
    assert "EB001" not in {each.id for each in selected([], ["EB001"])}


def test_a_missing_privilege_and_a_timeout_are_skipped(store):
    for code in (*store._privilege_errors, *store._timeout_errors):

        def refused(bus, code=code):
            raise DatabaseError(code, "refused")

        (found,) = run(store, a_check(refused))
        assert found.verdict is Verdict.SKIPPED


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(
    connection.vendor == "sqlite", reason="readers of SQLite in WAL mode never wait"
)
def test_a_check_does_not_wait_for_a_locked_table(diagnose):
    table = EventLog._meta.db_table
    is_mariadb = connection.vendor == "mysql"
    other = connections["default"].copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {table} WRITE" if is_mariadb else f"LOCK TABLE {table}")
        found = diagnose("EB020")
    finally:
        other.close()
    assert found.verdict is Verdict.SKIPPED
    assert found.results[0].summary.startswith("timeout: ")
    assert diagnose("EB020").verdict is Verdict.OK


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif(connection.vendor != "postgresql", reason="needs pg_sleep")
def test_a_statement_that_takes_too_long_is_cancelled(store):
    def sleeps(bus):
        yield ok(str(bus.store.read_rows("SELECT pg_sleep(60)")))

    (found,) = examine(Bus(store), [a_check(sleeps)], seconds=0.05)
    assert found.verdict is Verdict.SKIPPED
    assert "statement timeout" in found.results[0].summary
