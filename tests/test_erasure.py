"""Personal data is erased from events; the events stay."""

import json

import pytest
from django.db import connection, transaction

from django_eventbus import dead_letters, erasure, handler, poll, publish
from django_eventbus.erasure import TOMBSTONE, Erased, erase
from django_eventbus.models import DeadEvent, EventLog, QueuedEvent
from tests.bus import drain
from tests.test_dead_letters import dead_letter
from tests.threads import in_thread

pytestmark = pytest.mark.django_db

EMAIL = "ann@example.com"
ANN = {"customer": {"email": EMAIL, "name": "Ann", "id": 7}, "total": 12}
BOB = {"customer": {"email": "bob@example.com", "name": "Bob", "id": 8}, "total": 7}
WHERE = {"customer.email": EMAIL}


def completed(payload=ANN, **options):
    handler("fine", name="fine")(print)
    event = publish("fine", payload, **options)
    drain()
    return EventLog.objects.get(event_id=event.event_id)


def stored(row):
    """All stored values of an event, as one text."""
    row.refresh_from_db()
    return json.dumps({f.attname: getattr(row, f.attname) for f in row._meta.fields}, default=str)


def test_an_event_is_found_in_the_queue_the_log_and_the_dead_letters():
    rows = [completed(), dead_letter(payload=ANN), publish("later", ANN, delay=60)]
    others = [completed(BOB), dead_letter(payload=BOB), publish("later", BOB, delay=60)]
    before = [stored(row) for row in others]
    assert erase(where=WHERE) == Erased(queued=1, completed=1, dead=1)
    for row in rows:
        assert EMAIL not in stored(row)
        assert row.payload == TOMBSTONE
    assert [stored(row) for row in others] == before
    assert erase(where=WHERE).total == 0, "there is nothing left to erase"


def test_a_dry_run_counts_and_changes_nothing():
    row, queued = completed(), publish("later", ANN, delay=60)
    before = stored(row), stored(queued)
    assert erase(where=WHERE, dry_run=True) == Erased(queued=1, completed=1)
    assert (stored(row), stored(queued)) == before


def test_events_are_found_by_key():
    row, other = completed(key="customer:7"), completed(key="customer:77")
    assert erase(key="customer:7") == Erased(completed=1)
    assert "customer:7" not in stored(row)
    assert (row.key, row.payload) == (TOMBSTONE, TOMBSTONE)
    other.refresh_from_db()
    assert (other.key, other.payload) == ("customer:77", ANN)


def test_error_texts_and_headers_are_erased_too():
    row = dead_letter(payload=ANN, headers={"user": EMAIL}, error=ValueError(f"no {EMAIL}"))
    assert EMAIL in row.errors[0]["message"]
    assert EMAIL in row.errors[0]["traceback"]
    erase(where=WHERE)
    assert EMAIL not in stored(row)
    assert row.headers == {"user": TOMBSTONE}
    assert (row.errors[0]["message"], row.errors[0]["traceback"]) == (TOMBSTONE, TOMBSTONE)
    assert (row.errors[0]["type"], row.error_type) == ("ValueError", "ValueError")
    assert (row.dead_handler, row.status) == ("shop.ship", "FAILED")


def test_a_payload_that_an_operator_replaced_is_found_and_erased():
    letter = dead_letter(payload=ANN)
    assert dead_letters.edit(letter, BOB, by="eve")
    queued = QueuedEvent.objects.get()
    assert erase(where=WHERE) == Erased(queued=1)
    assert EMAIL not in stored(queued)
    assert queued.edits[0]["by"] == "eve"


@pytest.mark.parametrize("spelled", [7, "7"])
@pytest.mark.parametrize("kept_as", [7, "7"])
def test_a_number_is_found_as_number_and_as_text(kept_as, spelled):
    row, other = completed({"customer": {"id": kept_as}}), completed({"customer": {"id": 77}})
    assert erase(where={"customer.id": spelled}).total == 1
    assert stored(row)
    assert row.payload == TOMBSTONE
    other.refresh_from_db()
    assert other.payload == {"customer": {"id": 77}}


@pytest.mark.parametrize("name", ["contains", "isnull", "a__b", "it's", '"', "\\", "ä", "%s", "0"])
def test_a_field_may_have_any_name(name):
    row = completed({name: EMAIL})
    assert erase(where={name: EMAIL}).total == 1
    assert EMAIL not in stored(row)


def test_a_path_may_lead_through_a_list():
    row = completed({"guests": [{"email": "bob@example.com"}, {"email": EMAIL}]})
    assert erase(where={"guests.1.email": EMAIL}, only=["guests.1"]).total == 1
    assert stored(row)
    assert row.payload == {"guests": [{"email": "bob@example.com"}, TOMBSTONE]}


def test_several_fields_must_all_match():
    row, other = completed(), completed({**ANN, "total": 13})
    assert erase(where={**WHERE, "total": 12}).total == 1
    assert stored(row)
    assert row.payload == TOMBSTONE
    other.refresh_from_db()
    assert other.payload == {**ANN, "total": 13}


def test_only_some_fields_can_be_erased_with_their_values_wherever_they_are():
    error = ValueError(f"no mail to {EMAIL} about 7")
    row = dead_letter(payload={**ANN, "note": f"call {EMAIL}"}, error=error, key=f"mail:{EMAIL}")
    assert erase(where=WHERE, only=["customer.email", "customer.id", "no.such"]) == Erased(dead=1)
    assert EMAIL not in stored(row)
    customer = {"email": TOMBSTONE, "name": "Ann", "id": TOMBSTONE}
    assert row.payload == {"customer": customer, "total": 12, "note": f"call {TOMBSTONE}"}
    assert row.errors[0]["message"] == f"no mail to {TOMBSTONE} about 7", "7 may be any number"
    assert row.key == f"mail:{TOMBSTONE}"


def test_a_deduplication_key_that_holds_the_value_is_erased_and_stays_unique():
    rows = [publish("later", ANN, delay=60, dedup_key=f"{n}:{EMAIL}") for n in range(2)]
    kept = publish("later", ANN, delay=60, dedup_key="order:1")
    assert erase(where=WHERE).queued == 3
    assert [EMAIL in stored(row) for row in rows] == [False, False]
    assert len({row.dedup_key for row in rows}) == 2
    kept.refresh_from_db()
    assert kept.dedup_key == "order:1"


def test_a_queued_event_keeps_its_key_until_it_has_ended():
    event = publish("fine", ANN, key="customer:7")
    assert erase(key="customer:7") == Erased(queued=1)
    event.refresh_from_db()
    assert (event.key, event.payload) == ("customer:7", TOMBSTONE)
    assert erase(key="customer:7").total == 0
    handler("fine", name="fine")(print)
    drain()
    assert erase(key="customer:7") == Erased(completed=1)
    assert EventLog.objects.get().key == TOMBSTONE


def test_an_event_that_is_being_processed_is_skipped():
    publish("fine", ANN)
    event = poll()
    assert erase(where=WHERE, dry_run=True) == erase(where=WHERE) == Erased(skipped=1)
    assert QueuedEvent.objects.get().payload == ANN
    assert event.payload == ANN


@pytest.mark.django_db(transaction=True)
def test_an_event_that_another_transaction_has_locked_is_skipped():
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has no row locks")
    letter = dead_letter(payload=ANN)
    with transaction.atomic():
        DeadEvent.objects.select_for_update().get()
        with in_thread(erase, where=WHERE) as erasing:
            assert erasing.result() == Erased(skipped=1)
    assert erase(where=WHERE) == Erased(dead=1)
    assert EMAIL not in stored(letter)


def test_batches_and_progress_cover_all_events():
    for _ in range(5):
        publish("later", ANN, delay=60)
        publish("later", BOB, delay=60)
    reported = []
    assert erase(where=WHERE, batch_size=2, progress=reported.append).queued == 5
    assert reported == [2, 4, 5]


def test_other_namespaces_are_not_changed(settings):
    row = completed()
    settings.EVENTBUS = {"NAMESPACE": "other"}
    assert erase(where=WHERE).total == 0
    row.refresh_from_db()
    assert row.payload == ANN


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({}, "by either key= or where="),
        ({"key": "k", "where": WHERE}, "by either key= or where="),
        ({"where": {"customer": None}}, "a string, a number or a bool"),
        ({"where": {"customer..email": 1}}, "is not a path"),
        ({"key": "k", "only": "customer"}, "a list of paths"),
    ],
)
def test_an_invalid_selection_is_refused(options, right):
    with pytest.raises(ValueError, match=right):
        erase(**options)


def test_every_json_column_of_an_event_is_covered():
    assert {"deliveries", "errors", "edits"} <= set(erasure.RECORDS)
