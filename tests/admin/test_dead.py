"""The list of dead letters, their groups, and what is done with one or with many of them: M32."""

import re
from datetime import timedelta
from html import unescape
from itertools import pairwise

import pytest
from django.contrib.admin.models import LogEntry
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from django.utils import translation

from django_eventbus import dead_letters, handler, publish, queued
from django_eventbus.admin import bulk, paging
from django_eventbus.admin.dead import ACTS
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.store.base import Store
from tests.admin.conftest import url
from tests.bus import drain
from tests.test_dead_letters import NOON, dead_letter, many_dead_letters

pytestmark = pytest.mark.django_db

LIST = "deadevent_changelist"


def text_of(response):
    """What somebody reads, without elements."""
    return " ".join(unescape(re.sub("<[^>]+>", " ", response.content.decode())).split())


def listed(response):
    return [row.pk for row in response.context["cl"].result_list]


def token_in(response):
    return response.context["token"]


def ask(client, act, *letters, query=""):
    chosen = {"action": act, "_selected_action": [letter.pk for letter in letters]}
    return client.post(url(LIST, query=query), chosen)


def ask_for_all(client, act, query=""):
    return client.get(url("deadevent_bulk", act, query=query))


def confirm(client, page, act, query="", **options):
    data = {"run": token_in(page), **options}
    return client.post(url("deadevent_bulk", act, query=query), data)


def told(client, response):
    """The message at the end."""
    assert response.status_code == 302
    page = client.get(response.url)
    return " ".join(str(message) for message in page.context["messages"])


# -- the list


def test_the_list_tells_what_died_of_what(chief):
    dead_letter("order.placed", key="order:7", error=KeyError("stock"))
    page = text_of(chief.get(url(LIST)))
    for word in ("order.placed", "order:7", "shop.ship", "KeyError", "failed"):
        assert word in page


def test_a_list_of_many_costs_few_queries_and_reads_no_payload(chief):
    many_dead_letters(60)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = chief.get(url(LIST))
    assert len(page.context["cl"].result_list) == 50
    assert len(queries) < 15
    said = "\n".join(query["sql"] for query in queries)
    assert "error_type" in said
    for column in ("payload", "headers", "deliveries", "edits"):
        assert column not in said
    assert "DISTINCT" not in said


def test_counting_stops_early(chief, monkeypatch, settings):
    monkeypatch.setattr(paging, "MOST_COUNTED", 3)
    many_dead_letters(5)
    settings.USE_THOUSAND_SEPARATOR = True
    with CaptureQueriesContext(connection) as queries:
        page = chief.get(url(LIST))
    assert "3+ dead letters" in text_of(page)
    (counting,) = [query["sql"] for query in queries if "COUNT(" in query["sql"]]
    assert "LIMIT 4" in counting


@pytest.mark.parametrize("number", range(1, 7))
def test_only_the_age_can_be_sorted_by(chief, number):
    """Django would take any column's number from the address, and sort a million rows."""
    many_dead_letters(2)
    with CaptureQueriesContext(connection) as queries:
        assert chief.get(url(LIST, query=f"?o={number}")).status_code == 200
        assert chief.get(url("queuedevent_changelist", query=f"?o={number}")).status_code == 200
    orders = {part for q in queries for part in re.findall("ORDER BY (.+?) (?:ASC|DESC)", q["sql"])}
    assert not any("attempts" in order or "type" in order for order in orders)


@pytest.fixture
def two(settings):
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    settings.TIME_ZONE = "UTC"
    chosen = dead_letter("order.placed", key="order:7", queue="mail", died_at=NOON)
    other = dead_letter(
        "stock.empty", key="stock:1", handler_name="stock.buy", died_at=NOON + timedelta(days=1)
    )
    EventLog.objects.filter(pk=other.pk).update(attempts=5, status="COMPLETED_WITH_ERRORS")
    return chosen, other


def range_of(start="", end=""):
    """A query string of the filter by time of death."""
    fields = {"gte": start, "lte": end}
    return "?" + "&".join(
        f"finished_at__range__{name}_{part}={value}"
        for name, moment in fields.items()
        for part, value in enumerate(moment.split(" ") if moment else ["", ""])
    )


FILTERS = {
    "?status=FAILED": "status: failed",
    "?queue=mail": "queue: mail",
    "?handler=shop.ship": "handler: shop.ship",
    "?q=order:7": "search: “order:7”",
    "?q=order.pl": "search: “order.pl”",
    range_of(end="2026-03-01 12:00:00"): "time of death: up to March 1, 2026, noon",
    range_of("2026-03-01 11:00:00", "2026-03-01 13:00:00"): (
        "time of death: from March 1, 2026, 11 a.m. to March 1, 2026, 1 p.m."
    ),
    "?attempts__range__gte=&attempts__range__lte=2": "attempts: up to 2",
    "?queue=mail&status=FAILED": "queue: mail",
}


@pytest.mark.parametrize(("query", "words"), FILTERS.items())
def test_every_filter_chooses_the_rows_and_says_so(chief, two, query, words):
    chosen, _ = two
    assert listed(chief.get(url(LIST, query=query))) == [chosen.pk]
    page = ask_for_all(chief, "retry", query)
    assert "Retry 1 dead letter?" in text_of(page)
    assert words in text_of(page)
    response = confirm(chief, page, "retry", query)
    assert told(chief, response) == "1 event retried."
    assert QueuedEvent.objects.get().event_id == chosen.event_id
    assert words in LogEntry.objects.get().change_message


def test_an_event_is_found_by_its_id(chief, two):
    _, other = two
    assert listed(chief.get(url(LIST, query=f"?q={other.event_id}"))) == [other.pk]


def test_a_search_knows_no_wildcards(chief, two):
    for term in ("%", "_", "order_placed", "ORDER", "order:"):
        assert listed(chief.get(url(LIST, query=f"?q={term}"))) == []


@pytest.mark.parametrize(
    "query",
    [
        range_of("yesterday 12:00:00"),
        range_of(end="2026-03-01 "),
        range_of("2026-02-30 12:00:00"),
        range_of("0001-01-01 00:00:00"),
        range_of(end="9999-12-31 23:59:59"),
        "?attempts__range__gte=many&attempts__range__lte=",
        "?attempts__range__gte=nan&attempts__range__lte=",
        "?q=%00",
    ],
)
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_what_cannot_be_read_shows_nothing_and_says_so(chief, two, query, zone, settings):
    """Left alone, ranges and searches would show everything, and an action would take it."""
    settings.TIME_ZONE = zone
    page = chief.get(url(LIST, query=query))
    assert listed(page) == []
    assert "cannot be read, so nothing is shown" in text_of(page)
    page = ask_for_all(chief, "purge", query)
    assert "cannot be read" in text_of(page)
    assert "There is nothing to do" in text_of(page)
    confirm(chief, page, "purge", query)
    assert DeadEvent.objects.count() == 2


@pytest.mark.parametrize("name", ["status", "queue", "handler", "group"])
@pytest.mark.parametrize("value", ["%00", "x%00y", "%FF", "'", "%25", "x" * 1000])
def test_any_text_may_be_filtered_by(chief, two, name, value):
    assert listed(chief.get(url(LIST, query=f"?{name}={value}"))) == []


@pytest.mark.parametrize("number", ["1e300", "-1", "1.5"])
def test_any_number_may_bound_a_range(chief, two, number):
    query = f"?attempts__range__gte={number}&attempts__range__lte="
    assert chief.get(url(LIST, query=query)).status_code == 200


def test_the_last_second_of_a_range_counts_to_its_end(chief, settings):
    settings.TIME_ZONE = "UTC"
    letter = dead_letter(died_at=NOON + timedelta(microseconds=900_000))
    assert listed(chief.get(url(LIST, query=range_of(end="2026-03-01 12:00:00")))) == [letter.pk]


@pytest.mark.parametrize(
    "query",
    [
        "?payload__password__startswith=h",
        "?namespace__startswith=d",
        "?id=1",
        "?errors__icontains=x",
        "?type=order.placed",
        "?namespace=theirs",
        "?finished_at__gte=2026-01-01",
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "deadevent",
        "eventlog",
        "queuedevent",
        "eventschedule",
        "eventlane",
        "eventgate",
        "eventworker",
    ],
)
def test_no_column_can_be_asked_for_by_the_address(chief, query, name):
    """One could spell out a payload that one may not see."""
    dead_letter(payload={"password": "hunter2"})
    assert chief.get(url(f"{name}_changelist", query=query)).status_code == 400


@pytest.mark.parametrize("act", ["retry", "retry_later", "purge"])
def test_a_filter_nobody_understands_is_not_taken_for_none(chief, two, act):
    assert ask_for_all(chief, act, "?type=order.placed").status_code == 400


def test_the_nonce_of_django_reaches_the_range_filters(chief, settings):
    csp = pytest.importorskip("django.utils.csp").CSP
    middleware = "django.middleware.csp.ContentSecurityPolicyMiddleware"
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, middleware]
    settings.SECURE_CSP = {"default-src": [csp.SELF, csp.NONCE]}
    response = chief.get(url(LIST))
    nonces = set(re.findall('nonce="(.*?)"', response.content.decode()))
    assert len(nonces) == 1
    assert f"nonce-{nonces.pop()}" in response["Content-Security-Policy"]


def test_the_letters_of_other_projects_are_out_of_reach(chief, settings):
    letter = dead_letter()
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    assert listed(chief.get(url(LIST))) == []
    assert chief.post(url("deadevent_retry", letter.pk)).status_code == 404
    assert "Retry 0 dead letters?" in text_of(ask_for_all(chief, "retry"))


# -- many at once


def test_chosen_letters_are_retried_after_a_question(chief):
    first, second, third = (dead_letter() for _ in range(3))
    page = ask(chief, "retry", first, third)
    assert "Retry 2 dead letters?" in text_of(page)
    assert DeadEvent.objects.count() == 3
    assert told(chief, confirm(chief, page, "retry")) == "2 events retried."
    assert DeadEvent.objects.get() == second


@pytest.mark.parametrize(
    ("language", "question"),
    [("en", "Retry 1,234,567 dead letters?"), ("de", "1.234.567 tote Ereignisse wiederholen?")],
)
def test_a_question_groups_the_digits_of_its_count(language, question):
    with translation.override(language):
        assert ACTS[0].question % {"count": paging.Grouped(1_234_567)} == question


def test_what_cannot_be_undone_looks_like_it(chief, two):
    purge = re.compile(r'class="button[^"]* ?eventbus-final[^"]*"[^>]*>Purge')
    for page in (
        chief.get(url(LIST, query="?queue=mail")),
        ask_for_all(chief, "purge"),
        chief.get(url("deadevent_change", two[0].pk)),
    ):
        assert purge.search(page.content.decode())
    assert "eventbus-final" not in ask_for_all(chief, "retry").content.decode()


def test_all_there_are_is_offered_more_quietly_than_what_a_filter_chose(chief, two):
    assert "eventbus-quiet" in chief.get(url(LIST)).content.decode()
    assert "eventbus-quiet" not in chief.get(url(LIST, query="?queue=mail")).content.decode()


def test_all_that_match_are_meant_by_the_link_of_the_list_too(chief, two):
    chosen, _ = two
    data = {"action": "purge", "_selected_action": [chosen.pk], "select_across": "1"}
    page = chief.post(url(LIST, query="?queue=mail"), data)
    assert "Purge 1 dead letter?" in text_of(page)
    assert "queue: mail" in text_of(page)


def test_purged_letters_are_gone_for_good(chief, two):
    _, other = two
    page = ask_for_all(chief, "purge", "?queue=mail")
    assert "deleted for good" in text_of(page)
    assert told(chief, confirm(chief, page, "purge", "?queue=mail")) == "1 event purged."
    assert EventLog.objects.get().pk == other.pk
    assert not QueuedEvent.objects.exists()


def test_letters_are_retried_at_a_pace(chief):
    many_dead_letters(4)
    page = ask_for_all(chief, "retry_later")
    confirm(chief, page, "retry_later", per_minute=30)
    times = list(QueuedEvent.objects.order_by("id").values_list("available_at", flat=True))
    gaps = [round((after - before).total_seconds()) for before, after in pairwise(times)]
    assert gaps == [2, 2, 2]
    assert "per_minute: 30" in LogEntry.objects.get().change_message


def test_a_pace_goes_on_over_the_pages_of_a_long_run(chief, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 2)
    many_dead_letters(4)
    confirm(chief, ask_for_all(chief, "retry_later"), "retry_later", per_minute=6)
    times = list(QueuedEvent.objects.order_by("id").values_list("available_at", flat=True))
    assert round((times[3] - times[0]).total_seconds()) == 30


def test_a_pace_counts_from_the_answer_however_long_the_question_was_read(chief, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 2)
    many_dead_letters(4)
    EventLog.objects.update(finished_at=NOON)
    an_hour_ago, stores = store_for().read_clock() - timedelta(hours=1), type(store_for())
    with monkeypatch.context() as then:
        then.setattr(stores, "read_clock", lambda self: an_hour_ago)
        page = ask_for_all(chief, "retry_later")
    confirm(chief, page, "retry_later", per_minute=6)
    times = list(QueuedEvent.objects.order_by("id").values_list("available_at", flat=True))
    assert round((times[3] - times[0]).total_seconds()) == 30


@pytest.mark.parametrize("pace", ["", "0", "-1", "x", "1000000"])
def test_a_pace_that_is_none_is_asked_for_again(chief, pace):
    letter = dead_letter()
    page = confirm(chief, ask(chief, "retry_later", letter), "retry_later", per_minute=pace)
    assert page.status_code == 200
    assert page.context["form"].errors
    response = confirm(chief, page, "retry_later", per_minute=60)
    assert "1 event" in told(chief, response)


def test_what_died_after_the_question_is_not_meant(chief):
    many_dead_letters(2)
    page = ask_for_all(chief, "purge")
    late = dead_letter(died_at=store_for().read_clock() + timedelta(minutes=1))
    assert told(chief, confirm(chief, page, "purge")) == "2 events purged."
    assert DeadEvent.objects.get() == late


def test_what_was_gone_in_between_is_told(chief):
    many_dead_letters(3)
    page = ask_for_all(chief, "retry")
    dead_letters.purge(event_id=dead_letters.list(1)[0].event_id)
    assert told(chief, confirm(chief, page, "retry")) == "2 events retried; 1 was gone before."


def test_what_somebody_else_holds_is_skipped_and_told(chief, monkeypatch):
    many_dead_letters(3)
    held = dead_letters.list(1)[0].pk
    unlocked = Store.locked
    monkeypatch.setattr(Store, "locked", lambda self, rows: unlocked(self, rows.exclude(pk=held)))
    message = told(chief, confirm(chief, ask_for_all(chief, "retry"), "retry"))
    assert message == "2 events retried; 1 was skipped."


def test_a_long_run_goes_on_from_page_to_page(chief, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 2)
    monkeypatch.setattr(bulk, "SECONDS", -1)
    many_dead_letters(5)
    page = confirm(chief, ask_for_all(chief, "retry"), "retry")
    done = []
    while page.status_code == 200:
        done.append(page.context["run"].done)
        assert f"{done[-1]} of 5 done" in text_of(page)
        page = chief.post(url("deadevent_bulk", "retry"), {"run": token_in(page)})
    assert done == [2, 4, 5]
    assert told(chief, page) == "5 events retried."
    counts = [int(entry.change_message.split()[0]) for entry in LogEntry.objects.order_by("pk")]
    assert counts == [2, 2, 1]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic_requests", [False, True])
@pytest.mark.parametrize("act", ["retry", "purge"])
def test_a_request_that_dies_half_way_loses_nothing(chief, monkeypatch, act, atomic_requests):
    """S06: what is done is in the history, to the row; the same form does the rest."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", atomic_requests)
    monkeypatch.setattr(bulk, "BATCH", 2)
    many_dead_letters(5)
    page = ask_for_all(chief, act)
    write_down, died = bulk.BulkMixin._write_down, []

    def die_once(self, *args):
        write_down(self, *args)
        if len(died) == 1:
            died.append("now")
            raise KeyboardInterrupt
        died.append("not yet")

    monkeypatch.setattr(bulk.BulkMixin, "_write_down", die_once)
    with pytest.raises(KeyboardInterrupt):
        confirm(chief, page, act)
    assert DeadEvent.objects.count() == 3
    assert LogEntry.objects.count() == 1
    assert "3 events" in told(chief, confirm(chief, page, act))
    assert not DeadEvent.objects.exists()
    assert sum(int(entry.change_message.split()[0]) for entry in LogEntry.objects.all()) == 5


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite knows no deadlocks")
def test_a_batch_that_lost_a_deadlock_is_done_again(chief, monkeypatch):
    many_dead_letters(2)
    page = ask_for_all(chief, "retry")
    write_down, lost = bulk.BulkMixin._write_down, []

    def lose_once(self, *args):
        write_down(self, *args)
        if not lost:
            lost.append("once")
            raise OperationalError(next(iter(store_for().conflicts)))

    monkeypatch.setattr(bulk.BulkMixin, "_write_down", lose_once)
    assert told(chief, confirm(chief, page, "retry")) == "2 events retried."
    assert lost
    assert LogEntry.objects.count() == 1


def test_nothing_is_done_that_was_not_asked(chief, two):
    page = ask_for_all(chief, "retry", "?queue=mail")
    for data in (
        {},
        {"run": "forged"},
        {"run": token_in(page) + "x"},
    ):
        assert (
            chief.post(url("deadevent_bulk", "retry", query="?queue=mail"), data).status_code == 400
        )
    token = {"run": token_in(page)}
    assert chief.post(url("deadevent_bulk", "retry"), token).status_code == 400
    assert chief.post(url("deadevent_bulk", "purge", query="?queue=mail"), token).status_code == 400
    assert DeadEvent.objects.count() == 2


def test_a_confirmation_is_good_only_for_whom_it_was_shown_to(chief, client_of):
    letter = dead_letter()
    page = ask(chief, "retry", letter)
    response = confirm(client_of("retrier"), page, "retry")
    assert response.status_code == 400
    assert DeadEvent.objects.exists()


def test_the_history_tells_who_did_what_to_how_many(chief, two):
    confirm(chief, ask_for_all(chief, "retry", "?queue=mail"), "retry", "?queue=mail")
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.content_type.model) == ("chief", "deadevent")
    assert entry.change_message == "1 event retried; queue: mail"


def test_a_change_that_is_not_written_down_does_not_happen(chief, monkeypatch):
    letter = dead_letter()
    page = ask(chief, "purge", letter)

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(LogEntry.objects.__class__, "create", fail)
    with pytest.raises(ZeroDivisionError):
        confirm(chief, page, "purge")
    with pytest.raises(ZeroDivisionError):
        chief.post(url("deadevent_retry", letter.pk))
    assert DeadEvent.objects.get() == letter


# -- groups


def test_groups_are_shown_with_their_counts_and_actions(chief, monkeypatch):
    monkeypatch.setattr(paging, "MOST_COUNTED", 3)
    many_dead_letters(5)
    dead_letter(error=KeyError("stock"))
    with CaptureQueriesContext(connection) as queries:
        page = chief.get(url("deadevent_groups"))
    assert len(queries) < 15
    assert not [q for q in queries if '"payload"' in q["sql"] or "`payload`" in q["sql"]]
    bulk_group, order_group = sorted(page.context["groups"], key=lambda group: group["handler"])
    assert (bulk_group["handler"], str(bulk_group["count"])) == ("bulk", "3+")
    assert (order_group["error"], str(order_group["count"])) == ("KeyError", "1")
    assert "no stock" in text_of(page)
    assert "3+" in text_of(page)


def test_a_group_is_acted_on_as_a_whole(chief):
    many_dead_letters(3)
    other = dead_letter(error=KeyError("stock"))
    group = next(
        group
        for group in chief.get(url("deadevent_groups")).context["groups"]
        if group["handler"] == "bulk"
    )
    assert len(listed(chief.get(group["list_url"]))) == 3
    retry = next(act for act in group["acts"] if str(act["label"]) == "Retry")
    page = chief.get(retry["url"])
    assert "Retry 3 dead letters?" in text_of(page)
    assert "error: ValueError in bulk" in text_of(page)
    response = chief.post(retry["url"], {"run": token_in(page)})
    assert told(chief, response) == "3 events retried."
    assert DeadEvent.objects.get() == other


def test_groups_come_in_pages(chief, monkeypatch):
    monkeypatch.setattr("django_eventbus.admin.dead.GROUPS_SHOWN", 1)
    dead_letter(handler_name="a", died_at=NOON)
    dead_letter(handler_name="b", died_at=NOON + timedelta(hours=1))
    first = chief.get(url("deadevent_groups"))
    assert [group["handler"] for group in first.context["groups"]] == ["b"]
    second = chief.get(url("deadevent_groups", query=f"?p={first.context['next']}"))
    assert [group["handler"] for group in second.context["groups"]] == ["a"]
    assert not second.context["next"]
    for odd in ("x", "-1", "0", "9" * 30):
        assert chief.get(url("deadevent_groups", query=f"?p={odd}")).status_code == 200


def test_groups_that_are_not_looked_at_are_owned_up_to(chief, monkeypatch):
    monkeypatch.setattr(dead_letters, "MOST_GROUPS", 2)
    for name in ("a", "b"):
        dead_letter(handler_name=name)
    assert "There are more than" not in text_of(chief.get(url("deadevent_groups")))
    dead_letter(handler_name="c")
    page = chief.get(url("deadevent_groups"))
    assert "There are more than 2 groups" in text_of(page)
    assert len(page.context["groups"]) == 2


# -- editing


def edit(client, letter, payload):
    page = client.get(url("deadevent_edit", letter.pk))
    before = page.context["form"].initial["before"]
    data = {"payload": payload, "before": before}
    return client.post(url("deadevent_edit", letter.pk), data)


def test_a_payload_is_edited_and_retried(chief):
    letter = dead_letter(payload={"order": 7})
    response = edit(chief, letter, '{"order": 8}')
    assert response.status_code == 302
    event = QueuedEvent.objects.get()
    assert event.payload == {"order": 8}
    assert [(each["by"], each["payload"]) for each in event.edits] == [("chief", {"order": 7})]
    assert "payload edited" in LogEntry.objects.get().change_message
    story = text_of(chief.get(response.url, follow=True))
    assert "Retried by chief with another payload" in story
    assert '"order": 7' in story
    assert '"order": 8' in story


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "{",
        "{'order': 7}",
        "NaN",
        '{"a": Infinity}',
        r'"\u0000"',
        r'"\ud800"',
        "[" * 100_000,
        "9" * 10_000,
        '"' + "x" * 300_000 + '"',
        "[" * 70 + "]" * 70,
    ],
    ids=lambda text: text[:20],
)
def test_an_edit_is_checked_as_if_it_were_published(chief, payload):
    letter = dead_letter(payload={"order": 7})
    page = edit(chief, letter, payload)
    assert page.status_code == 200
    assert page.context["form"].errors["payload"]
    assert DeadEvent.objects.get().payload == {"order": 7}
    assert not LogEntry.objects.exists()


def test_secrets_are_neither_shown_nor_lost_by_an_edit(chief):
    secrets = {"users": [{"name": "a", "password": "hunter2"}, {"name": "b", "api-token": "xyzzy"}]}
    letter = dead_letter(payload=secrets)
    page = chief.get(url("deadevent_edit", letter.pk))
    assert "hunter2" not in page.content.decode()
    shown = page.context["form"].initial["payload"]
    swapped = shown.replace("(1)", "(?)").replace("(2)", "(1)").replace("(?)", "(2)")
    assert edit(chief, letter, swapped).status_code == 302
    assert QueuedEvent.objects.get().payload == {
        "users": [{"name": "a", "password": "xyzzy"}, {"name": "b", "api-token": "hunter2"}]
    }


def test_dots_that_hide_nothing_are_refused(chief):
    letter = dead_letter(payload={"password": "hunter2"})
    for number in ("2", "0", "9" * 5000):
        assert edit(chief, letter, f'{{"password": "•••••• ({number})"}}').status_code == 200
    assert DeadEvent.objects.exists()


@pytest.mark.parametrize("payload", ['{"note": "•••••• (1)"}', '"•••••• (1)"', '["•••••• (1)"]'])
def test_a_secret_cannot_be_moved_to_where_it_would_be_shown(chief, payload):
    letter = dead_letter(payload={"password": "hunter2"})
    page = edit(chief, letter, payload)
    assert "hidden values stay in fields that are hidden" in text_of(page)
    assert DeadEvent.objects.get().payload == {"password": "hunter2"}


def test_a_secret_may_move_into_another_hidden_field(chief):
    letter = dead_letter(payload={"password": "hunter2"})
    assert edit(chief, letter, '{"secrets": [{"mine": "•••••• (1)"}]}').status_code == 302
    assert QueuedEvent.objects.get().payload == {"secrets": [{"mine": "hunter2"}]}


def test_a_payload_that_has_changed_meanwhile_is_not_overwritten(chief):
    letter = dead_letter(payload=1)
    old = chief.get(url("deadevent_edit", letter.pk)).context["form"].initial["before"]
    EventLog.objects.update(payload=2)
    page = chief.post(url("deadevent_edit", letter.pk), {"payload": "3", "before": old})
    assert "before" in page.context["form"].errors
    assert DeadEvent.objects.get().payload == 2


def test_the_list_edits_one_at_a_time(chief):
    first, second = dead_letter(), dead_letter()
    assert ask(chief, "edit", first).url == url("deadevent_edit", first.pk)
    assert "Choose one" in told(chief, ask(chief, "edit", first, second))


# -- queued events


def test_queued_events_are_run_now_and_cancelled(chief):
    handler("x", name="h")(lambda event: None)
    first, second = publish("x", 1, delay=3600), publish("x", 2, delay=3600)
    chosen = {"action": "run", "_selected_action": [first.pk]}
    page = chief.post(url("queuedevent_changelist"), chosen)
    assert "Run 1 event now?" in text_of(page)
    data = {"run": token_in(page)}
    response = chief.post(url("queuedevent_bulk", "run"), data)
    assert told(chief, response) == "1 event made ready."
    drain()
    assert EventLog.objects.get().event_id == first.event_id
    page = chief.get(url("queuedevent_bulk", "cancel"))
    response = chief.post(url("queuedevent_bulk", "cancel"), {"run": token_in(page)})
    assert told(chief, response) == "1 event cancelled."
    assert DeadEvent.objects.get().event_id == second.event_id


@pytest.mark.parametrize("name", ["queuedevent", "eventlog"])
def test_the_other_lists_read_no_payload_either(chief, name):
    publish("x", 1, delay=60)
    queued.cancel([publish("x", 2, delay=60).event_id])
    with CaptureQueriesContext(connection) as queries:
        page = chief.get(url(f"{name}_changelist"))
    assert len(listed(page)) == 1
    assert len(queries) < 15
    assert "payload" not in "\n".join(query["sql"] for query in queries)
