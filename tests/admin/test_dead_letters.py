"""The list of dead letters, their groups, and actions on one or many of them: M32."""

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
from django_eventbus.admin.dead_letters import BULK_ACTIONS
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from django_eventbus.store import store_for
from django_eventbus.store.base import Store
from tests.admin.conftest import url
from tests.bus import drain
from tests.test_dead_letters import NOON, dead_letter, many_dead_letters

pytestmark = pytest.mark.django_db

LIST = "deadevent_changelist"


def text_of(response):
    """The text of a page without its elements."""
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


def message_in(client, response):
    """The message at the end."""
    assert response.status_code == 302
    page = client.get(response.url)
    return " ".join(str(message) for message in page.context["messages"])


# -- the list


def test_the_list_shows_handler_and_error(chief):
    dead_letter("order.placed", key="order:7", error=KeyError("stock"))
    page = text_of(chief.get(url(LIST)))
    for word in ("order.placed", "order:7", "shop.ship", "KeyError", "failed"):
        assert word in page


def test_a_long_list_costs_few_queries_and_reads_no_payload(chief):
    many_dead_letters(60)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = chief.get(url(LIST))
    assert len(page.context["cl"].result_list) == 50
    assert len(queries) < 15
    sql = "\n".join(query["sql"] for query in queries)
    assert "error_type" in sql
    for column in ("payload", "headers", "deliveries", "edits"):
        assert column not in sql
    assert "DISTINCT" not in sql


def test_counting_stops_at_a_bound(chief, monkeypatch, settings):
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
    """Django accepts any column number from the address, and would sort a million rows."""
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
    """A query string of the filter by time of failure."""
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
    range_of(end="2026-03-01 12:00:00"): "time of failure: up to March 1, 2026, noon",
    range_of("2026-03-01 11:00:00", "2026-03-01 13:00:00"): (
        "time of failure: from March 1, 2026, 11 a.m. to March 1, 2026, 1 p.m."
    ),
    "?attempts__range__gte=&attempts__range__lte=2": "attempts: up to 2",
    "?queue=mail&status=FAILED": "queue: mail",
}


@pytest.mark.parametrize(("query", "words"), FILTERS.items())
def test_every_filter_selects_rows_and_is_described(chief, two, query, words):
    chosen, _ = two
    assert listed(chief.get(url(LIST, query=query))) == [chosen.pk]
    page = ask_for_all(chief, "retry", query)
    assert "Retry 1 dead letter?" in text_of(page)
    assert words in text_of(page)
    response = confirm(chief, page, "retry", query)
    assert message_in(chief, response) == "Retried 1 event."
    assert QueuedEvent.objects.get().event_id == chosen.event_id
    assert words in LogEntry.objects.get().change_message


def test_an_event_is_found_by_its_id(chief, two):
    _, other = two
    assert listed(chief.get(url(LIST, query=f"?q={other.event_id}"))) == [other.pk]


def test_a_search_has_no_wildcards(chief, two):
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
def test_an_invalid_filter_shows_no_rows_and_a_message(chief, two, query, zone, settings):
    """By default an invalid range or search shows all rows, and an action would include them."""
    settings.TIME_ZONE = zone
    page = chief.get(url(LIST, query=query))
    assert listed(page) == []
    assert "invalid" in text_of(page)
    assert "so no rows are shown" in text_of(page)
    page = ask_for_all(chief, "purge", query)
    assert "so no rows are shown" in text_of(page)
    assert "No events match" in text_of(page)
    confirm(chief, page, "purge", query)
    assert DeadEvent.objects.count() == 2


@pytest.mark.parametrize("name", ["status", "queue", "handler", "group"])
@pytest.mark.parametrize("value", ["%00", "x%00y", "%FF", "'", "%25", "x" * 1000])
def test_a_filter_accepts_any_text(chief, two, name, value):
    assert listed(chief.get(url(LIST, query=f"?{name}={value}"))) == []


@pytest.mark.parametrize("number", ["1e300", "-1", "1.5"])
def test_a_range_accepts_any_number(chief, two, number):
    query = f"?attempts__range__gte={number}&attempts__range__lte="
    assert chief.get(url(LIST, query=query)).status_code == 200


def test_a_range_includes_its_last_second(chief, settings):
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
        "flowcontrol",
        "eventworker",
        "eventreplay",
    ],
)
def test_the_url_cannot_select_a_column(chief, query, name):
    """A user could guess a hidden payload letter by letter."""
    dead_letter(payload={"password": "hunter2"})
    assert chief.get(url(f"{name}_changelist", query=query)).status_code == 400


@pytest.mark.parametrize("act", ["retry", "retry_later", "purge"])
def test_an_unknown_filter_is_refused(chief, two, act):
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


def test_dead_letters_of_other_namespaces_cannot_be_changed(chief, settings):
    letter = dead_letter()
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    assert listed(chief.get(url(LIST))) == []
    assert chief.post(url("deadevent_retry", letter.pk)).status_code == 404
    assert "Retry 0 dead letters?" in text_of(ask_for_all(chief, "retry"))


# -- bulk actions


def test_selected_dead_letters_are_retried_after_a_confirmation(chief):
    first, second, third = (dead_letter() for _ in range(3))
    page = ask(chief, "retry", first, third)
    assert "Retry 2 dead letters?" in text_of(page)
    assert DeadEvent.objects.count() == 3
    assert message_in(chief, confirm(chief, page, "retry")) == "Retried 2 events."
    assert DeadEvent.objects.get() == second


@pytest.mark.parametrize(
    ("language", "question"),
    [("en", "Retry 1,234,567 dead letters?"), ("de", "1.234.567 tote Ereignisse wiederholen?")],
)
def test_a_confirmation_groups_the_digits_of_its_count(language, question):
    with translation.override(language):
        assert BULK_ACTIONS[0].question % {"count": paging.Grouped(1_234_567)} == question


def test_a_final_action_is_marked(chief, two):
    purge = re.compile(r'class="button[^"]* ?eventbus-final[^"]*"[^>]*>Purge')
    for page in (
        chief.get(url(LIST, query="?queue=mail")),
        ask_for_all(chief, "purge"),
        chief.get(url("deadevent_change", two[0].pk)),
    ):
        assert purge.search(page.content.decode())
    assert "eventbus-final" not in ask_for_all(chief, "retry").content.decode()


def test_actions_on_all_events_are_less_prominent_without_a_filter(chief, two):
    assert "eventbus-quiet" in chief.get(url(LIST)).content.decode()
    assert "eventbus-quiet" not in chief.get(url(LIST, query="?queue=mail")).content.decode()


def test_the_link_of_the_list_selects_all_matching_events(chief, two):
    chosen, _ = two
    data = {"action": "purge", "_selected_action": [chosen.pk], "select_across": "1"}
    page = chief.post(url(LIST, query="?queue=mail"), data)
    assert "Purge 1 dead letter?" in text_of(page)
    assert "queue: mail" in text_of(page)


def test_purged_dead_letters_are_deleted(chief, two):
    _, other = two
    page = ask_for_all(chief, "purge", "?queue=mail")
    assert "deleted permanently" in text_of(page)
    assert message_in(chief, confirm(chief, page, "purge", "?queue=mail")) == "Purged 1 event."
    assert EventLog.objects.get().pk == other.pk
    assert not QueuedEvent.objects.exists()


def test_dead_letters_are_retried_at_a_pace(chief):
    many_dead_letters(4)
    page = ask_for_all(chief, "retry_later")
    confirm(chief, page, "retry_later", per_minute=30)
    times = list(QueuedEvent.objects.order_by("id").values_list("available_at", flat=True))
    gaps = [round((after - before).total_seconds()) for before, after in pairwise(times)]
    assert gaps == [2, 2, 2]
    assert "per_minute: 30" in LogEntry.objects.get().change_message


def test_a_pace_continues_across_the_requests_of_a_long_run(chief, monkeypatch):
    monkeypatch.setattr(bulk, "BATCH", 2)
    many_dead_letters(4)
    confirm(chief, ask_for_all(chief, "retry_later"), "retry_later", per_minute=6)
    times = list(QueuedEvent.objects.order_by("id").values_list("available_at", flat=True))
    assert round((times[3] - times[0]).total_seconds()) == 30


def test_a_pace_starts_at_the_confirmation(chief, monkeypatch):
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
def test_an_invalid_pace_shows_the_form_again(chief, pace):
    letter = dead_letter()
    page = confirm(chief, ask(chief, "retry_later", letter), "retry_later", per_minute=pace)
    assert page.status_code == 200
    assert page.context["form"].errors
    response = confirm(chief, page, "retry_later", per_minute=60)
    assert "1 event" in message_in(chief, response)


def test_a_newer_dead_letter_is_not_included(chief):
    many_dead_letters(2)
    page = ask_for_all(chief, "purge")
    late = dead_letter(died_at=store_for().read_clock() + timedelta(minutes=1))
    assert message_in(chief, confirm(chief, page, "purge")) == "Purged 2 events."
    assert DeadEvent.objects.get() == late


def test_missing_events_are_reported(chief):
    many_dead_letters(3)
    page = ask_for_all(chief, "retry")
    dead_letters.purge(event_id=dead_letters.list(1)[0].event_id)
    assert (
        message_in(chief, confirm(chief, page, "retry"))
        == "Retried 2 events, 1 no longer in the list."
    )


def test_locked_events_are_skipped_and_reported(chief, monkeypatch):
    many_dead_letters(3)
    held = dead_letters.list(1)[0].pk
    unlocked = Store.locked
    monkeypatch.setattr(Store, "locked", lambda self, rows: unlocked(self, rows.exclude(pk=held)))
    message = message_in(chief, confirm(chief, ask_for_all(chief, "retry"), "retry"))
    assert message == "Retried 2 events, 1 skipped: locked by another operator, or no longer dead."


def test_a_long_run_takes_several_requests(chief, monkeypatch):
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
    assert message_in(chief, page) == "Retried 5 events."
    counts = [int(entry.change_message.split()[1]) for entry in LogEntry.objects.order_by("pk")]
    assert counts == [2, 2, 1]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic_requests", [False, True])
@pytest.mark.parametrize("act", ["retry", "purge"])
def test_an_interrupted_request_can_be_sent_again(chief, monkeypatch, act, atomic_requests):
    """S06: the history has exactly the committed rows; the same form processes the rest."""
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", atomic_requests)
    monkeypatch.setattr(bulk, "BATCH", 2)
    many_dead_letters(5)
    page = ask_for_all(chief, act)
    record_batch, died = bulk.BulkMixin._record_batch, []

    def die_once(self, *args):
        record_batch(self, *args)
        if len(died) == 1:
            died.append("now")
            raise KeyboardInterrupt
        died.append("not yet")

    monkeypatch.setattr(bulk.BulkMixin, "_record_batch", die_once)
    with pytest.raises(KeyboardInterrupt):
        confirm(chief, page, act)
    assert DeadEvent.objects.count() == 3
    assert LogEntry.objects.count() == 1
    assert "3 events" in message_in(chief, confirm(chief, page, act))
    assert not DeadEvent.objects.exists()
    assert sum(int(entry.change_message.split()[1]) for entry in LogEntry.objects.all()) == 5


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite knows no deadlocks")
def test_a_batch_that_lost_a_deadlock_is_repeated(chief, monkeypatch):
    many_dead_letters(2)
    page = ask_for_all(chief, "retry")
    record_batch, lost = bulk.BulkMixin._record_batch, []

    def lose_once(self, *args):
        record_batch(self, *args)
        if not lost:
            lost.append("once")
            raise OperationalError(next(iter(store_for().conflicts)))

    monkeypatch.setattr(bulk.BulkMixin, "_record_batch", lose_once)
    assert message_in(chief, confirm(chief, page, "retry")) == "Retried 2 events."
    assert lost
    assert LogEntry.objects.count() == 1


def test_a_missing_or_forged_confirmation_is_refused(chief, two):
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


def test_a_confirmation_is_valid_only_for_its_user(chief, client_of):
    letter = dead_letter()
    page = ask(chief, "retry", letter)
    response = confirm(client_of("retrier"), page, "retry")
    assert response.status_code == 400
    assert DeadEvent.objects.exists()


def test_the_history_has_user_action_and_count(chief, two):
    confirm(chief, ask_for_all(chief, "retry", "?queue=mail"), "retry", "?queue=mail")
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.content_type.model) == ("chief", "deadevent")
    assert entry.change_message == "Retried 1 event; queue: mail"


def test_a_change_without_its_history_entry_is_rolled_back(chief, monkeypatch):
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


def test_an_action_on_a_group_includes_all_its_events(chief):
    many_dead_letters(3)
    other = dead_letter(error=KeyError("stock"))
    group = next(
        group
        for group in chief.get(url("deadevent_groups")).context["groups"]
        if group["handler"] == "bulk"
    )
    assert len(listed(chief.get(group["list_url"]))) == 3
    retry = next(act for act in group["actions"] if str(act["label"]) == "Retry")
    page = chief.get(retry["url"])
    assert "Retry 3 dead letters?" in text_of(page)
    assert "error: ValueError in bulk" in text_of(page)
    response = chief.post(retry["url"], {"run": token_in(page)})
    assert message_in(chief, response) == "Retried 3 events."
    assert DeadEvent.objects.get() == other


def test_groups_are_paginated(chief, monkeypatch):
    monkeypatch.setattr("django_eventbus.admin.dead_letters.GROUPS_SHOWN", 1)
    dead_letter(handler_name="a", died_at=NOON)
    dead_letter(handler_name="b", died_at=NOON + timedelta(hours=1))
    first = chief.get(url("deadevent_groups"))
    assert [group["handler"] for group in first.context["groups"]] == ["b"]
    second = chief.get(url("deadevent_groups", query=f"?p={first.context['next']}"))
    assert [group["handler"] for group in second.context["groups"]] == ["a"]
    assert not second.context["next"]
    for odd in ("x", "-1", "0", "9" * 30):
        assert chief.get(url("deadevent_groups", query=f"?p={odd}")).status_code == 200


def test_the_page_says_that_there_are_more_groups(chief, monkeypatch):
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
    assert "edited and retried" in LogEntry.objects.get().change_message
    timeline = text_of(chief.get(response.url, follow=True))
    assert "Retried by chief with an edited payload" in timeline
    assert '"order": 7' in timeline
    assert '"order": 8' in timeline


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
def test_an_edit_is_validated_like_publish(chief, payload):
    letter = dead_letter(payload={"order": 7})
    page = edit(chief, letter, payload)
    assert page.status_code == 200
    assert page.context["form"].errors["payload"]
    assert DeadEvent.objects.get().payload == {"order": 7}
    assert not LogEntry.objects.exists()


def test_an_edit_neither_shows_nor_loses_secrets(chief):
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


def test_dots_without_a_hidden_value_are_refused(chief):
    letter = dead_letter(payload={"password": "hunter2"})
    for number in ("2", "0", "9" * 5000):
        assert edit(chief, letter, f'{{"password": "•••••• ({number})"}}').status_code == 200
    assert DeadEvent.objects.exists()


@pytest.mark.parametrize("payload", ['{"note": "•••••• (1)"}', '"•••••• (1)"', '["•••••• (1)"]'])
def test_a_secret_cannot_be_moved_to_a_visible_field(chief, payload):
    letter = dead_letter(payload={"password": "hunter2"})
    page = edit(chief, letter, payload)
    assert "only valid in a hidden field" in text_of(page)
    assert DeadEvent.objects.get().payload == {"password": "hunter2"}


def test_a_secret_may_move_into_another_hidden_field(chief):
    letter = dead_letter(payload={"password": "hunter2"})
    assert edit(chief, letter, '{"secrets": [{"mine": "•••••• (1)"}]}').status_code == 302
    assert QueuedEvent.objects.get().payload == {"secrets": [{"mine": "hunter2"}]}


def test_a_concurrently_changed_payload_is_not_overwritten(chief):
    letter = dead_letter(payload=1)
    old = chief.get(url("deadevent_edit", letter.pk)).context["form"].initial["before"]
    EventLog.objects.update(payload=2)
    page = chief.post(url("deadevent_edit", letter.pk), {"payload": "3", "before": old})
    assert "before" in page.context["form"].errors
    assert DeadEvent.objects.get().payload == 2


def test_the_list_edits_one_at_a_time(chief):
    first, second = dead_letter(), dead_letter()
    assert ask(chief, "edit", first).url == url("deadevent_edit", first.pk)
    assert "Select exactly one" in message_in(chief, ask(chief, "edit", first, second))


# -- queued events


def test_queued_events_are_run_now_and_cancelled(chief):
    handler("x", name="h")(lambda event: None)
    first, second = publish("x", 1, delay=3600), publish("x", 2, delay=3600)
    chosen = {"action": "run", "_selected_action": [first.pk]}
    page = chief.post(url("queuedevent_changelist"), chosen)
    assert "Run 1 event now?" in text_of(page)
    data = {"run": token_in(page)}
    response = chief.post(url("queuedevent_bulk", "run"), data)
    assert message_in(chief, response) == "Made 1 event ready to run."
    drain()
    assert EventLog.objects.get().event_id == first.event_id
    page = chief.get(url("queuedevent_bulk", "cancel"))
    response = chief.post(url("queuedevent_bulk", "cancel"), {"run": token_in(page)})
    assert message_in(chief, response) == "Cancelled 1 event."
    assert DeadEvent.objects.get().event_id == second.event_id


@pytest.mark.parametrize("name", ["queuedevent", "eventlog"])
def test_the_other_lists_read_no_payload(chief, name):
    publish("x", 1, delay=60)
    queued.cancel([publish("x", 2, delay=60).event_id])
    with CaptureQueriesContext(connection) as queries:
        page = chief.get(url(f"{name}_changelist"))
    assert len(listed(page)) == 1
    assert len(queries) < 15
    assert "payload" not in "\n".join(query["sql"] for query in queries)
