"""manage.py dead_events, in a terminal and in a script."""

import io
import json
import os
import re
import subprocess
import sys
import uuid
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from django_eventbus import dead_letters, handler, publish
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from django_eventbus.store import store_for
from tests.bus import drain_with_retries
from tests.test_dead_letters import dead_letter, ids_of, many_dead_letters

pytestmark = pytest.mark.django_db


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*arguments, stdout=None):
    stdout = io.StringIO() if stdout is None else stdout
    call_command("dead_events", *map(str, arguments), stdout=stdout)
    return stdout.getvalue()


def listed(*arguments):
    """The event ids in the JSON output of a list."""
    return [uuid.UUID(each["event_id"]) for each in json.loads(run("list", *arguments, *JSON))]


JSON = ("--format", "json")


def ago(**period):
    return store_for().read_clock() - timedelta(**period)


@pytest.fixture
def answer(monkeypatch):
    """Simulate a terminal with this answer, and return the prompts."""
    questions = []

    def give(word, meanwhile=lambda: None):
        def read(prompt=""):
            questions.append(prompt)
            meanwhile()
            if word is None:
                raise EOFError
            return word

        monkeypatch.setattr("sys.stdin", Terminal())
        monkeypatch.setattr("builtins.input", read)
        return questions

    return give


def test_the_table_shows_age_handler_error_and_id():
    letter = dead_letter(error=KeyError("stock"), died_at=ago(hours=3, minutes=5))
    header, row = run("list").splitlines()
    assert header.split() == ["died", "type", "handler", "error", "attempts", "event", "id"]
    assert row.split() == [
        "3h",
        "order.placed",
        "shop.ship",
        "KeyError:",
        "'stock'",
        "1",
        str(letter.event_id),
    ]


@pytest.mark.parametrize(
    ("period", "age"),
    [
        ({"minutes": 59}, "59m"),
        ({"hours": 23}, "23h"),
        ({"days": 40}, "40d"),
    ],
)
def test_the_age_has_the_units_that_purge_takes(period, age):
    dead_letter(died_at=ago(**period))
    assert run("list").splitlines()[1].split()[0] == age


def test_an_age_below_a_minute_is_in_seconds():
    dead_letter(died_at=ago(seconds=1))
    assert re.fullmatch(r"[1-9]\d?s", run("list").splitlines()[1].split()[0])


def test_the_table_shows_the_error_of_the_handler_that_died():
    @handler("order.placed", name="shop.ship", retry={"max_retries": 0})
    def die(event):
        raise KeyError("stock")

    @handler("order.placed", name="shop.bill", priority=-1)
    def succeed_in_the_end(event):
        if event.attempt < 3:
            raise ValueError("the bank is closed")

    publish("order.placed", {})
    drain_with_retries()
    row = run("list").splitlines()[1]
    assert "shop.ship" in row
    assert "KeyError: 'stock'" in row


def test_the_newest_hundred_dead_letters_are_listed_first():
    """M26."""
    many_dead_letters(101)
    EventLog.objects.filter(payload=50).update(finished_at=ago(days=-1))
    *lines, more = run("list").splitlines()
    assert len(lines) == 1 + 100
    assert str(DeadEvent.objects.get(payload=50).event_id) in lines[1]
    assert more == "More dead letters exist: pass --offset 100."


def test_a_page_is_chosen_by_limit_and_offset():
    """M26."""
    many_dead_letters(5)
    EventLog.objects.update(finished_at=ago(hours=1))
    newest_first = ids_of(dead_letters.list())
    assert listed("--limit", 2, "--offset", 1) == newest_first[1:3]
    output = run("list", "--limit", 2, "--offset", 1)
    assert output.endswith("More dead letters exist: pass --offset 3.\n")
    assert "More" not in run("list", "--limit", 2, "--offset", 3)


def test_an_empty_list_names_the_filter():
    assert run("list") == "Found no dead letters.\n"
    assert run("list", "--type", "order.*", "--key", "order:7") == (
        "Found no dead letters of type 'order.*' with the key 'order:7'.\n"
    )


def test_json_output_has_every_field():
    """M13, M28."""
    handler("order.placed", name="fine")(lambda event: None)
    letter = dead_letter(payload={"order": 7}, key="order:7", headers={"h": 1})
    (record,) = json.loads(run("list", *JSON))
    assert record["event_id"] == str(letter.event_id)
    assert (record["payload"], record["headers"]) == ({"order": 7}, {"h": 1})
    assert (record["key"], record["status"]) == ("order:7", "COMPLETED_WITH_ERRORS")
    assert (record["dead_handler"], record["error_type"]) == ("shop.ship", "ValueError")
    assert record["errors"] == letter.errors
    assert record["deliveries"] == letter.deliveries
    assert record["finished_at"][:19] == letter.finished_at.isoformat()[:19]


def test_json_output_of_an_empty_list_is_an_array():
    assert json.loads(run("list", *JSON)) == []


def test_json_output_respects_the_limit():
    many_dead_letters(3)
    assert len(listed("--limit", 2)) == 2


@pytest.mark.parametrize("form", [(), JSON])
def test_an_error_message_cannot_write_to_the_terminal(form):
    dead_letter(error=ValueError("red \x1b[31m\nforged line \x9b2K \u202e reversed"))
    output = run("list", *form)
    assert "forged line" in output
    assert all(character.isprintable() for character in output.replace("\n", ""))
    if not form:
        assert len(output.splitlines()) == 2


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_the_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    letter = dead_letter(
        "order.placed.from.a.far.away.place",
        error=ValueError("a long story " * 20),
        handler_name="warehouse.handlers.reserve_stock_for_order",
    )
    lines = run("list", stdout=Terminal()).splitlines()
    assert max(map(len, lines)) == width
    assert lines[1].endswith(str(letter.event_id))
    assert lines[1].count("…") == 3


def test_a_table_that_fits_is_not_stretched_or_cut(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    dead_letter()
    on_terminal = run("list", stdout=Terminal())
    assert "…" not in on_terminal
    assert on_terminal == run("list")


def test_a_pipe_gets_the_table_uncut():
    """A pipe gets complete lines, so that grep finds a text."""
    name = "warehouse.handlers.reserve_stock_for_orders_from_a_far_away_place"
    dead_letter(error=ValueError("a long story " * 10), handler_name=name)
    output = run("list")
    assert name in output
    assert "a long story " * 9 in output


@pytest.fixture
def two_letters(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    chosen = dead_letter(key="order:7", queue="mail", error=KeyError(7))
    other = dead_letter("stock.empty", key="stock:1", handler_name="stock.buy")
    return chosen, other


FILTERS = [
    ("--type", "order.placed"),
    ("--type", "order.*"),
    ("--handler", "shop.ship"),
    ("--queue", "mail"),
    ("--key", "order:7"),
    ("--error-type", "KeyError"),
    ("--type=order.*", "--key=order:7", "--database=default"),
]


@pytest.mark.parametrize("filters", FILTERS, ids=" ".join)
def test_every_filter_applies_to_the_list(two_letters, filters):
    assert listed(*filters) == [two_letters[0].event_id]


@pytest.mark.parametrize("filters", FILTERS, ids=" ".join)
def test_every_filter_applies_to_retry(two_letters, filters):
    assert run("retry", *filters).startswith("Retried 1 dead letter ")
    assert ids_of(QueuedEvent.objects.all()) == [two_letters[0].event_id]


@pytest.mark.parametrize("filters", FILTERS, ids=" ".join)
def test_every_filter_applies_to_purge(two_letters, filters):
    assert run("purge", *filters, "--yes").startswith("Purged 1 dead letter ")
    assert listed() == [two_letters[1].event_id]


@pytest.mark.parametrize("action", ["list", "retry", "purge"])
def test_the_event_id_is_a_filter_of_every_action(two_letters, action):
    chosen, other = two_letters
    yes = ["--yes"] if action == "purge" else []
    output = run(action, "--event-id", chosen.event_id, *yes)
    assert str(chosen.event_id) in output
    assert str(other.event_id) not in output
    assert (chosen.event_id in listed()) == (action == "list")


def test_retry_queues_the_named_events_and_reports_their_number():
    """M26: as if new. M15: with their key."""
    first, second, left = (dead_letter(key=f"order:{n}") for n in range(3))
    output = run("retry", first.event_id, second.event_id)
    assert output == "Retried 2 dead letters with the given ids.\n"
    rows = QueuedEvent.objects.order_by("id")
    assert [(row.key, row.status, row.attempts, row.errors) for row in rows] == [
        ("order:0", "PENDING", 0, None),
        ("order:1", "PENDING", 0, None),
    ]
    assert listed() == [left.event_id]


def test_retry_reports_skipped_ids():
    letter = dead_letter()
    output = run("retry", letter.event_id, letter.event_id, uuid.uuid4())
    assert output == (
        "Retried 1 dead letter with the given ids, "
        "1 skipped: unknown id, no longer dead, or not matched by a filter.\n"
    )


def test_retry_takes_all_only_with_the_option():
    many_dead_letters(3)
    with pytest.raises(
        CommandError, match=r"Select the dead letters to retry: event ids, .* or --all"
    ):
        run("retry")
    assert not QueuedEvent.objects.exists()
    assert run("retry", "--all") == "Retried 3 dead letters.\n"
    assert QueuedEvent.objects.count() == 3


@pytest.mark.parametrize("action", ["retry", "purge"])
def test_all_and_a_filter_contradict_each_other(action):
    with pytest.raises(CommandError, match="--all cannot be combined with ids or filters"):
        run(action, "--all", "--type", "order.*")


def test_a_dry_run_of_retry_only_counts():
    many_dead_letters(3)
    assert run("retry", "--type", "b*", "--dry-run") == (
        "Would retry 3 dead letters of type 'b*'.\n"
    )
    assert not QueuedEvent.objects.exists()


def test_retrying_no_events_is_not_an_error():
    assert run("retry", "--all") == "Retried no dead letters.\n"


@pytest.mark.parametrize("period", ["30d", "720h", "43200m", "30"])
def test_purge_deletes_dead_letters_of_that_age(period):
    """M26: by time of death."""
    dead_letter(died_at=ago(days=30, minutes=1))
    younger = dead_letter(died_at=ago(days=29, hours=23))
    output = run("purge", "--older-than", period, "--yes")
    assert output.startswith("Purged 1 dead letter that died before 20")
    assert output.endswith(" UTC.\n")
    assert listed() == [younger.event_id]


@pytest.mark.parametrize("period", ["30x", "-1d", "1.5d", "d", "", "1d12h", "9999999d", "\u0661d"])
def test_a_time_that_purge_cannot_read_names_the_right_form(period):
    dead_letter()
    with pytest.raises(CommandError, match="give days, hours or minutes: 30d, 12h, 90m"):
        run("purge", f"--older-than={period}", "--yes")
    assert len(listed()) == 1


def test_purge_asks_with_the_count_and_the_filter_in_words(answer):
    questions = answer("y")
    for _ in range(2):
        dead_letter(key="order:7", died_at=ago(days=40))
    dead_letter(key="order:8", died_at=ago(days=40))
    output = run("purge", "--older-than", "30d", "--type", "order.*", "--key", "order:7")
    (question,) = questions
    expected = "2 dead letters of type 'order.*' with the key 'order:7' that died before 20"
    assert question.startswith(f"Delete {expected}")
    assert question.endswith(" UTC permanently? [y/N] ")
    assert output.startswith(f"Purged {expected}")
    assert [each.key for each in dead_letters.list()] == ["order:8"]


@pytest.mark.parametrize("word", ["", "n", "no", "maybe", None])
def test_purge_does_nothing_without_a_yes(answer, word):
    answer(word)
    dead_letter()
    assert run("purge", "--all") == "Not confirmed: purged no dead letters.\n"
    assert len(listed()) == 1


@pytest.mark.parametrize("word", ["y", "Y", "yes", " Yes "])
def test_purge_accepts_a_yes(answer, word):
    answer(word)
    dead_letter(died_at=ago(hours=1))
    assert run("purge", "--all").startswith("Purged 1 dead letter ")
    assert listed() == []


def test_purge_refuses_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    dead_letter(died_at=ago(hours=1))
    with pytest.raises(CommandError, match=r"1 dead letter .* so there is no prompt: pass --yes"):
        run("purge", "--all")
    assert len(listed()) == 1


def test_purge_does_not_ask_when_there_is_nothing_to_purge(answer):
    questions = answer("y")
    assert run("purge", "--type", "order.*").startswith("Purged no dead letters of type 'order.*'")
    assert questions == []


@pytest.mark.django_db(transaction=True)
def test_a_dead_letter_that_is_added_during_the_prompt_is_not_purged(answer):
    dead_letter(died_at=ago(hours=1))
    late = []
    answer("y", meanwhile=lambda: late.append(dead_letter()))
    assert run("purge", "--all").startswith("Purged 1 dead letter ")
    assert listed() == ids_of(late)


def test_a_dry_run_of_purge_counts_and_does_not_ask(answer):
    questions = answer("y")
    many_dead_letters(3)
    EventLog.objects.update(finished_at=ago(hours=1))
    output = run("purge", "--type", "bulk", "--dry-run")
    assert output.startswith("Would purge 3 dead letters of type 'bulk' that died before ")
    assert output.endswith(" UTC.\n")
    assert questions == []
    assert len(listed()) == 3


def test_purge_takes_all_only_with_the_option():
    dead_letter(died_at=ago(hours=1))
    with pytest.raises(CommandError, match=r"to purge: --older-than 30d, .* or --all"):
        run("purge", "--yes")
    assert len(listed()) == 1
    assert run("purge", "--all", "--yes").startswith("Purged 1 dead letter ")
    assert listed() == []


@pytest.mark.parametrize(
    ("arguments", "done"),
    [(["retry", "--all"], "retried"), (["purge", "--all", "--yes"], "purged")],
)
def test_a_terminal_shows_the_progress_of_a_long_run(monkeypatch, arguments, done):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    EventLog.objects.update(finished_at=ago(hours=1))
    *steps, last = run(*arguments, stdout=Terminal()).split("\r\x1b[2K")
    assert steps == ["", *(f"{count} of 5 {done} …" for count in (2, 4, 5))]
    assert last.startswith(f"{done.capitalize()} 5 dead letters")


def test_a_pipe_gets_the_result_and_no_progress(monkeypatch):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    assert run("retry", "--all") == "Retried 5 dead letters.\n"


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["retry", "7"], "an event id, which looks like 0"),
        (["list", "--event-id", "x"], "an event id, which looks like 0"),
        (["purge", "--event-id", "x"], "an event id, which looks like 0"),
        (["list", "--limit", "0"], "a number from 1 to"),
        (["list", "--limit", "many"], "a number from 1 to"),
        (["list", "--offset", "-1"], "a number from 0 to"),
        (["list", "--offset", "99999999999999999999"], "a number from 0 to 1000000"),
        (["list", "--format", "xml"], "choose from '?table'?, '?json"),
        (["list", "--type", "order.*.placed"], r"pass a type, or a prefix: 'order\.\*'"),
        (["retry", "--type", "*.placed"], r"pass a type, or a prefix: 'order\.\*'"),
        (["list", "--database", "defautl"], "no database 'defautl'; did you mean 'default'"),
        (["bury"], "choose from '?list'?, '?retry'?, '?purge"),
        ([], "Name an action: list, retry or purge"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_input_is_refused_with_the_valid_form(arguments, right):
    with pytest.raises(CommandError, match=right):
        run(*arguments)


@pytest.mark.django_db(transaction=True)
@pytest.mark.processes
def test_a_shell_sees_the_same_dead_letters_and_exit_codes():
    letter = dead_letter()

    def shell(*arguments):
        command = [sys.executable, "-m", "django", "dead_events", *arguments]
        return subprocess.run(
            command,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    refused = shell("purge", "--all")
    assert refused.returncode != 0
    assert "pass --yes" in refused.stderr
    done = shell("retry", str(letter.event_id))
    assert (done.returncode, done.stderr) == (0, "")
    assert QueuedEvent.objects.get().event_id == letter.event_id
