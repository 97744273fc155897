"""``manage.py event_doctor``: actions, selection, formats, exit codes."""

import io
import json
from contextlib import suppress

import pytest
from django.core.management import CommandError, ManagementUtility, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_eventbus import handler
from django_eventbus.diagnosis.catalogue import CHECKS
from django_eventbus.flow.fleet import digest_of, known_here
from tests.diagnosis.test_schedules import OF_THE_SUITE

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _own_checks_only(settings):
    settings.SILENCED_SYSTEM_CHECKS = [OF_THE_SUITE]


def doctor(*arguments, **options):
    out = io.StringIO()
    call_command("event_doctor", *arguments, stdout=out, **options)
    return out.getvalue()


def failed(*arguments):
    out = io.StringIO()
    with pytest.raises(CommandError) as raised:
        call_command("event_doctor", *arguments, stdout=out)
    return raised.value, out.getvalue()


def doctor_of_any_server(*arguments):
    """The text, whatever the exit code: the server of the tests may have faults of its own."""
    out = io.StringIO()
    with suppress(CommandError):
        call_command("event_doctor", *arguments, stdout=out)
    return out.getvalue()


@pytest.fixture
def worker(store, worker_id):
    handlers = known_here()
    store.note_handlers(worker_id, handlers, digest_of(handlers))


def test_a_healthy_bus_exits_with_0(worker):
    """The tests run on a SQLite without full synchronization, and on servers of any setup."""
    text = doctor("--only", "EB00,EB01,EB02")
    assert "fail " not in text
    assert text.splitlines()[-1].startswith("23 ok, 0 warn, 0 fail, 0 skipped")


def test_a_failed_check_exits_with_2():
    error, text = failed("--only", "EB001")
    assert (error.returncode, str(error)) == (2, "EB001 failed")
    assert "EB001  fail     No worker is running: " in text
    assert "                Fix: manage.py run_event_worker" in text


def test_a_warning_exits_with_1_unless_only_failures_count(store, worker):
    handler("a", name="a")(lambda event: None)
    error, _ = failed("--only", "EB003")
    assert (error.returncode, str(error)) == (1, "EB003 warned")
    assert "EB003  warn " in doctor("--only", "EB003", "--fail-on", "fail")


def test_ignored_checks_do_not_run():
    assert "EB001" not in failed("--only", "EB00", "--ignore", "EB001")[1]


@pytest.mark.parametrize(
    "arguments", [("--only", "EB14"), ("explain", "EB14"), ("list", "--ignore", "EB14")]
)
def test_an_unknown_id_is_refused_with_a_suggestion(arguments):
    error, _ = failed(*arguments)
    assert str(error) == "there is no check 'EB14'; did you mean 'EB014'?"
    assert error.returncode == 3


def test_run_takes_no_ids():
    error, _ = failed("run", "EB014")
    assert str(error) == "run takes no ids: pass --only EB014"


def test_list_names_every_check():
    assert [line.split("  ")[0] for line in doctor("list").splitlines()] == [e.id for e in CHECKS]
    listed = json.loads(doctor("list", "--format", "json"))["checks"]
    assert listed[0] == {
        "id": "EB001",
        "title": "No worker is running",
        "databases": ["PostgreSQL", "SQLite", "MariaDB"],
    }


def test_explain_has_the_symptom_the_cause_and_the_fix():
    text = doctor("explain", "EB014")
    assert text.startswith("EB014  Lanes blocked for long\n  Symptom: ")
    assert "\n  Cause: " in text
    assert "\n  Fix: " in text


@pytest.mark.parametrize(
    "action", [("explain",), ("list",), ("run", "--fail-on", "fail", "--ignore", "EB001,EB002")]
)
def test_the_text_fits_80_columns(action):
    lines = doctor_of_any_server(*action).splitlines()
    assert lines
    # A command of a fix is not broken, so that it can be copied.
    assert [line for line in lines if len(line) > 80 and " Fix: " not in line] == []


def test_json(store):
    _, text = failed("--only", "EB001,EB006", "--format", "json")
    assert json.loads(text) == {
        "database": {"alias": "default", "name": store.database_name},
        "totals": {"ok": 1, "warn": 0, "fail": 1, "skipped": 0},
        "checks": [
            {
                "id": "EB001",
                "title": "No worker is running",
                "verdict": "fail",
                "results": [
                    {
                        "verdict": "fail",
                        "summary": "no worker has renewed its registration",
                        "fix": "manage.py run_event_worker",
                    }
                ],
            },
            {
                "id": "EB006",
                "title": "Clock skew",
                "verdict": "ok",
                "results": [{"verdict": "ok", "summary": "the clocks agree", "fix": ""}],
            },
        ],
    }


def test_the_annotations_of_github():
    _, text = failed("--only", "EB001,EB006", "--format", "github")
    assert text == (
        "::error title=EB001 No worker is running::no worker has renewed its registration%0A"
        "Fix: manage.py run_event_worker\n"
    )


def test_colours_only_on_a_terminal():
    assert "\x1b[" not in doctor("--only", "EB006")
    assert "\x1b[" in doctor("--only", "EB006", force_color=True)


def test_a_wrong_setting_does_not_keep_the_command_from_running(settings, capsys):
    """Other commands end before they start, with the errors of the system checks."""
    settings.EVENTBUS = {"BATCHSIZE": 7}
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "event_doctor", "--only", "EB026"]).execute()
    assert ended.value.code == 2
    assert "EB026  fail     System checks report faults: django_eventbus.E002" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("arguments", [["--nope"], ["--only", "EB14"], ["--database", "nope"]])
def test_a_mistake_exits_with_3(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "event_doctor", *arguments]).execute()
    assert ended.value.code == 3


def test_a_found_fault_exits_with_its_code(capsys):
    with pytest.raises(SystemExit) as ended:
        ManagementUtility(["manage.py", "event_doctor", "--only", "EB001"]).execute()
    assert ended.value.code == 2


def test_the_command_changes_nothing(worker):
    """All statements but those that open and limit the transaction are reads."""
    with CaptureQueriesContext(connection) as queries:
        assert doctor_of_any_server("--ignore", "EB03,EB04")
    writes = ("INSERT", "UPDATE", "DELETE", "ALTER", "CREATE", "DROP", "LOCK")
    assert [q["sql"] for q in queries if q["sql"].lstrip().upper().startswith(writes)] == []
    assert len(queries) > 10
