"""Run single checks of event_doctor, and create the faults that they find."""

from contextlib import closing, contextmanager

import psycopg
from django.db import connection

from django_eventbus.diagnosis.catalogue import selected
from django_eventbus.diagnosis.examination import Bus, Verdict, examine
from django_eventbus.store import store_for
from tests.workers import eventually

#: The beginnings of the ids of the checks of PostgreSQL.
POSTGRESQL = ("EB05", "EB06", "EB07")


def diagnose(check_id):
    """Run one check and return its diagnosis."""
    (diagnosis,) = examine(Bus(store_for()), selected([check_id]))
    return diagnosis


def finding(check_id, verdict, *texts):
    """The one result of the check with this verdict, whose summary contains the texts."""
    results = diagnose(check_id).results
    (found,) = [
        each
        for each in results
        if each.verdict == verdict and all(text in each.summary for text in texts)
    ] or [None]
    assert found, results
    return found


def assert_ok(check_id):
    diagnosis = diagnose(check_id)
    assert {each.verdict for each in diagnosis.results} == {Verdict.OK}, diagnosis.results


def eventually_ok(check_id):
    eventually(lambda: diagnose(check_id).verdict is Verdict.OK, lambda: str(diagnose(check_id)))


def run(*statements):
    """Run statements on the connection of the test, each in a transaction of its own."""
    with connection.cursor() as cursor:
        for each in statements:
            cursor.execute(each)
        return cursor.fetchall() if cursor.description else None


def apply(fix):
    """Run the statements of a fix, as an operator does in psql."""
    for statement in filter(str.strip, fix.split(";")):
        run(statement)


@contextmanager
def session(*statements, user=None):
    """Another session of the same database in which these statements have been executed."""
    known = connection.settings_dict
    options = {"dbname": known["NAME"], "user": user or known["USER"], "host": known["HOST"]}
    connected = psycopg.connect(**options, application_name="a report", autocommit=True)
    # The session may be terminated by now, so it is closed without a COMMIT.
    with closing(connected) as other:
        for each in statements:
            other.execute(each)
        yield other


def process_id(other):
    return other.info.backend_pid
