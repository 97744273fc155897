"""Typed events, envelopes, and the validation of payloads and names."""

import dataclasses
import json
import time
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from datetime import time as day_time
from decimal import Decimal
from enum import Enum, IntEnum

import pytest
from django.test import override_settings
from django.utils.functional import lazystr
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus import (
    DuplicateEventError,
    Envelope,
    Event,
    EventBusError,
    InvalidPayloadError,
    UnknownEventError,
)
from django_eventbus.events import (
    class_for,
    current_envelope,
    current_event_id,
    set_current_envelope,
    to_payload,
    uuid7,
)
from django_eventbus.schema.claims import Claim, ClaimedEvent
from django_eventbus.schema.names import check_name
from django_eventbus.schema.payloads import check_payload, encode
from django_eventbus.schema.typed_payloads import from_payload

# No deadline, because the machine may be busy.
unhurried = given_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# -- typed events


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Floor(IntEnum):
    GROUND = 0
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Money:
    amount: Decimal
    currency: str = "EUR"


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    price: Money
    size: Size = Size.SMALL


class Parcel(Event):
    """Abstract: it has no type name."""

    parcel_id: int


class ParcelSent(Parcel, type="test-events.parcel.sent", version=3):
    weight: Decimal
    note: str | None = None


class EverythingHappened(Event, type="test-events.everything"):
    total: Decimal
    at: datetime
    day: date
    hour: day_time
    lasting: timedelta
    token: uuid.UUID
    size: Size
    floor: Floor
    lines: list[Line]
    prices: dict[str, Decimal]
    points: tuple[int, ...]
    gift: Money | None = None
    maybe: uuid.UUID | None = None


EVERYTHING = EverythingHappened(
    total=Decimal("12.30"),
    at=datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC),
    day=date(2026, 3, 1),
    hour=day_time(12, 30),
    lasting=timedelta(days=-1, seconds=5),
    token=uuid.UUID("01a1e236-f1dc-7fe5-a078-051ef9380342"),
    size=Size.LARGE,
    floor=Floor.FIRST,
    lines=[Line("a", Money(Decimal("1.10"))), Line("b", Money(Decimal(2), "USD"), Size.LARGE)],
    prices={"net": Decimal("10.00")},
    points=(1, 2, 3),
    gift=Money(Decimal(5)),
)


def through_json(event):
    payload = to_payload(event)
    check_payload(payload)
    return json.loads(encode(payload))


def test_a_typed_event_cannot_be_changed():
    event = ParcelSent(parcel_id=1, weight=Decimal(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.weight = Decimal(3)


def test_a_typed_event_takes_its_fields_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        ParcelSent(1, Decimal(2))


def test_typed_events_of_equal_fields_are_equal():
    assert ParcelSent(parcel_id=1, weight=Decimal(2)) == ParcelSent(parcel_id=1, weight=Decimal(2))
    assert ParcelSent(parcel_id=1, weight=Decimal(2)) != ParcelSent(parcel_id=2, weight=Decimal(2))


def test_an_event_class_is_found_by_its_type_name():
    assert ParcelSent.event_type == "test-events.parcel.sent"
    assert ParcelSent.event_version == 3
    assert class_for("test-events.parcel.sent") is ParcelSent
    assert class_for("test-events.parcel.lost") is None


def test_the_first_version_of_an_event_is_1():
    assert EverythingHappened.event_version == 1


def test_an_event_without_type_name_is_abstract_and_cannot_be_published():
    with pytest.raises(UnknownEventError, match="Parcel is abstract"):
        to_payload(Parcel(parcel_id=1))


def test_a_subclass_of_a_named_event_does_not_inherit_the_name():
    class Express(ParcelSent):
        pass

    assert Express.event_type is None
    assert class_for("test-events.parcel.sent") is ParcelSent


def test_two_classes_cannot_have_the_same_type_name():
    with pytest.raises(DuplicateEventError, match=r"Rival and .*ParcelSent both declare"):

        class Rival(Event, type="test-events.parcel.sent"):
            pass

    assert class_for("test-events.parcel.sent") is ParcelSent


def test_a_class_that_is_declared_again_replaces_itself():
    def declare():
        class Reloaded(Event, type="test-events.reloaded"):
            pass

        return Reloaded

    declare()
    again = declare()
    assert class_for("test-events.reloaded") is again


def test_a_type_name_that_cannot_be_stored_is_refused_at_class_creation():
    with pytest.raises(InvalidPayloadError, match="the event type"):

        class Bad(Event, type="two\nlines"):
            pass


def test_the_fields_of_every_kind_survive_the_way_through_json():
    """M19."""
    back = from_payload(EverythingHappened, through_json(EVERYTHING))
    assert back == EVERYTHING
    for field in dataclasses.fields(back):
        assert type(getattr(back, field.name)) is type(getattr(EVERYTHING, field.name)), field.name


class Chosen(Event, type="test-events.chosen"):
    sizes: list[Size]
    by_name: dict[str, Size]


def test_enums_inside_lists_and_dicts_survive_the_way_through_json():
    chosen = Chosen(sizes=[Size.SMALL, Size.LARGE], by_name={"his": Size.LARGE})
    assert from_payload(Chosen, through_json(chosen)) == chosen


class Tagged(Event, type="test-events.tagged"):
    tags: frozenset[str]


def test_a_set_survives_the_way_through_json():
    tagged = Tagged(tags=frozenset({"new", "red"}))
    assert from_payload(Tagged, through_json(tagged)) == tagged


class Paired(Event, type="test-events.paired"):
    pair: tuple[uuid.UUID, str]


def test_a_tuple_of_different_kinds_survives_the_way_through_json():
    paired = Paired(pair=(uuid.UUID(int=1), "one"))
    assert from_payload(Paired, through_json(paired)) == paired


class Moment(Event, type="test-events.moment"):
    at: datetime
    hour: day_time


@unhurried
@given(at=st.datetimes(timezones=st.just(UTC)), hour=st.times())
def test_a_moment_survives_to_the_microsecond(at, hour):
    moment = Moment(at=at, hour=hour)
    assert from_payload(Moment, through_json(moment)) == moment


def test_a_time_with_a_time_zone_is_refused():
    """M25: it is ambiguous without a date, and its zone would be lost."""
    moment = Moment(at=EVERYTHING.at, hour=day_time(12, tzinfo=UTC))
    with pytest.raises(InvalidPayloadError, match=r"payload\.hour"):
        check_payload(to_payload(moment))


class Measured(Event, type="test-events.measured"):
    value: Decimal
    token: uuid.UUID
    lasting: timedelta
    day: date


@unhurried
@given(
    value=st.decimals(allow_nan=False),
    token=st.uuids(),
    lasting=st.timedeltas(),
    day=st.dates(),
)
def test_any_value_of_a_field_survives_the_way_through_json(value, token, lasting, day):
    measured = Measured(value=value, token=token, lasting=lasting, day=day)
    assert from_payload(Measured, through_json(measured)) == measured


def test_the_payload_of_a_typed_event_is_plain():
    assert to_payload(ParcelSent(parcel_id=7, weight=Decimal("1.5"))) == {
        "parcel_id": 7,
        "weight": Decimal("1.5"),
        "note": None,
    }


def test_fields_that_are_missing_take_their_default():
    event = from_payload(ParcelSent, {"parcel_id": 7, "weight": "1.5"})
    assert event == ParcelSent(parcel_id=7, weight=Decimal("1.5"), note=None)


def test_a_missing_field_without_default_is_named():
    with pytest.raises(UnknownEventError, match=r"does not fit ParcelSent.*weight"):
        from_payload(ParcelSent, {"parcel_id": 7})


def test_unknown_fields_are_named():
    with pytest.raises(UnknownEventError, match="ParcelSent has no field colour, shape"):
        from_payload(ParcelSent, {"parcel_id": 7, "weight": "1", "shape": "", "colour": ""})


def test_an_unknown_field_of_a_nested_dataclass_is_named():
    payload = through_json(EVERYTHING)
    payload["gift"]["weight"] = 3
    with pytest.raises(UnknownEventError, match="Money has no field weight"):
        from_payload(EverythingHappened, payload)


@pytest.mark.parametrize("payload", [None, 7, "text", [1]])
def test_a_payload_that_is_not_an_object_matches_no_class(payload):
    with pytest.raises(UnknownEventError, match="needs a JSON object"):
        from_payload(ParcelSent, payload)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("total", "a lot"),
        ("at", "yesterday"),
        ("at", "2026-13-45T00:00:00Z"),
        ("day", "yesterday"),
        ("hour", "noon"),
        ("lasting", "long"),
        ("token", "not-a-uuid"),
        ("size", "xxl"),
        ("floor", 99),
        ("prices", {"net": "a lot"}),
        ("lines", ["not an object"]),
    ],
)
def test_a_stored_value_of_the_wrong_type_is_refused(field, value):
    """A payload of another version must not become an incomplete event."""
    with pytest.raises(UnknownEventError):
        from_payload(EverythingHappened, through_json(EVERYTHING) | {field: value})


# -- envelopes


def claimed(**changes):
    facts = {
        "claim": Claim(
            uuid.uuid4(), uuid.uuid4(), namespace="shop", queue="orders", using="default"
        ),
        "row_id": 1,
        "event_id": uuid.UUID("01a1e236-f1dc-7fe5-a078-051ef9380342"),
        "type": "test-events.parcel.sent",
        "version": 3,
        "payload_json": '{"parcel_id": 7, "weight": "1.5"}',
        "headers_json": '{"trace": "abc"}',
        "key": "parcel:7",
        "lane_id": None,
        "priority": 5,
        "attempts": 4,
        "crashes": 0,
        "interruptions": 0,
        "producer": "web-1:42",
        "caused_by": uuid.UUID(int=9),
        "created_epoch": datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp(),
        "due_epoch": None,
        "started_epoch": datetime(2026, 3, 1, 13, tzinfo=UTC).timestamp(),
        "deliveries_json": None,
        "errors_json": None,
    }
    return ClaimedEvent(**facts | changes)


def envelope(event, handler_name="stock", attempt=1):
    return Envelope(event, handler_name=handler_name, attempt=attempt)


def test_the_envelope_has_all_attributes_of_the_event():
    """M8: namespace, type, payload, emitted-at, producer, event id, delivery count."""
    event = envelope(claimed(), attempt=2)
    assert event.namespace == "shop"
    assert event.queue == "orders"
    assert event.type == "test-events.parcel.sent"
    assert event.version == 3
    assert event.payload == {"parcel_id": 7, "weight": "1.5"}
    assert event.headers == {"trace": "abc"}
    assert event.created_at == datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert event.producer == "web-1:42"
    assert event.id == uuid.UUID("01a1e236-f1dc-7fe5-a078-051ef9380342")
    assert event.caused_by == uuid.UUID(int=9)
    assert event.delivery_count == 4
    assert event.attempt == 2
    assert event.key == "parcel:7"
    assert event.priority == 5


def test_the_idempotency_key_is_the_same_for_every_attempt_of_a_handler():
    first = envelope(claimed(attempts=1), attempt=1)
    later = envelope(claimed(attempts=3), attempt=3)
    assert first.idempotency_key == later.idempotency_key


def test_the_idempotency_key_differs_between_handlers_and_between_events():
    event, other = claimed(), claimed(event_id=uuid7())
    keys = {
        envelope(event, "stock").idempotency_key,
        envelope(event, "mail").idempotency_key,
        envelope(other, "stock").idempotency_key,
    }
    assert len(keys) == 3


def test_each_handler_has_its_own_copy_of_the_payload():
    event = claimed()
    first, second = envelope(event, "first"), envelope(event, "second")
    first.payload["weight"] = "changed"
    assert first.payload["weight"] == "changed"
    assert second.payload["weight"] == "1.5"


def test_a_json_null_payload_is_read_as_none():
    assert envelope(claimed(payload_json="null")).payload is None


def test_an_event_without_headers_has_empty_ones():
    assert envelope(claimed(headers_json=None)).headers == {}


def test_the_data_of_an_event_is_an_instance_of_its_class():
    """M19."""
    assert envelope(claimed()).data == ParcelSent(parcel_id=7, weight=Decimal("1.5"))


def test_the_data_of_an_event_without_class_raises_an_error():
    with pytest.raises(UnknownEventError, match=r"no event class .*'nobody\.knows'"):
        _ = envelope(claimed(type="nobody.knows")).data


def test_the_repr_of_an_envelope_names_the_event():
    shown = repr(envelope(claimed(), attempt=2))
    assert shown == (
        "<Envelope test-events.parcel.sent 01a1e236-f1dc-7fe5-a078-051ef9380342 attempt 2 of stock>"
    )


def test_the_database_clock_continues_from_the_moment_of_the_claim():
    event = claimed()
    started = event.processing_started_at
    assert started == datetime(2026, 3, 1, 13, tzinfo=UTC)
    event.claim = dataclasses.replace(event.claim, answered_at=time.monotonic() - 90)
    passed = event.database_now() - started
    assert timedelta(seconds=90) <= passed < timedelta(seconds=120)


def test_the_current_event_is_known_while_it_is_handled():
    assert current_envelope() is current_event_id() is None
    shown = envelope(claimed())
    set_current_envelope(shown)
    try:
        assert current_envelope() is shown
        assert current_event_id() == shown.id
    finally:
        set_current_envelope(None)
    assert current_envelope() is current_event_id() is None


# -- identities and names


def test_an_event_id_is_a_uuid_of_version_7():
    made = uuid7()
    assert made.version == 7
    assert made.variant == uuid.RFC_4122


def test_event_ids_begin_with_the_time_and_so_sort_by_it():
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    assert before <= made.int >> 80 <= after


def test_event_ids_of_one_moment_differ():
    assert len({uuid7() for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize("name", ["a", "order.placed", "order:7/é", "鍵", "🔑", "a b", "x" * 200])
def test_a_name_may_be_any_printable_text_up_to_200_characters(name):
    check_name(name, "the key")


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        7,
        b"bytes",
        "x" * 201,
        " a",
        "a ",
        "a\nb",
        "a\tb",
        "a\x00b",
        "a\x1b[31m",
        "\ud800",
        "a\u2028b",
        "a\u202eb",
    ],
)
def test_a_name_that_a_column_would_change_is_refused(name):
    with pytest.raises(InvalidPayloadError, match=r"^the key "):
        check_name(name, "the key")


def test_the_error_about_a_very_long_name_is_short():
    with pytest.raises(InvalidPayloadError, match="has 1000000 characters, 200 are") as caught:
        check_name("x" * 1_000_000, "the key")
    assert len(str(caught.value)) < 200


# -- validation of payloads

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=1 - 2**1024, max_value=2**1024 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@unhurried
@given(JSON)
def test_any_json_value_can_be_published_and_read_back(value):
    """M25: no valid value is refused."""
    check_payload(value)
    assert json.loads(encode(value)) == value


@unhurried
@given(JSON, st.integers(0, 60))
def test_a_payload_is_refused_exactly_when_it_is_larger_than_allowed(value, limit):
    """The quick estimate and the exact count agree."""
    fits = len(encode(value).encode()) <= limit
    with override_settings(EVENTBUS={"MAX_PAYLOAD_BYTES": limit}):
        if fits:
            check_payload(value)
        else:
            with pytest.raises(InvalidPayloadError, match="bytes as JSON"):
                check_payload(value)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 3, 1, 12, tzinfo=UTC),
        datetime(2026, 3, 1, 12),
        date(2026, 3, 1),
        day_time(12, 30),
        timedelta(minutes=5),
        Decimal("1.50"),
        uuid.UUID(int=1),
        lazystr("translated later"),
        Floor.FIRST,
        (1, 2),
    ],
)
def test_values_that_django_encodes_as_json_can_be_published(value):
    check_payload({"value": value})
    json.loads(encode({"value": value}))


class Stranger:
    pass


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("a\x00b", "contains a NUL character"),
        ("a\ud800b", "contains a lone surrogate"),
        (float("nan"), "is nan, which JSON cannot represent"),
        (float("inf"), "is inf, which JSON cannot represent"),
        (float("-inf"), "is -inf, which JSON cannot represent"),
        (1e400, "is inf, which JSON cannot represent"),
        (2**1024, "has more than 1024 bits"),
        (-(10**10_000), "has more than 1024 bits"),
        (b"bytes", "has the type bytes, which JSON cannot represent"),
        ({1, 2}, "has the type set, which JSON cannot represent"),
        (1j, "has the type complex, which JSON cannot represent"),
        (Stranger(), "has the type tests.test_events.Stranger, which JSON cannot represent"),
        (Size.SMALL, "has the type tests.test_events.Size, which JSON cannot represent"),
        ({7: "seven"}, "has the key 7, but JSON keys are strings"),
        ({None: 1}, "has the key None, but JSON keys are strings"),
        (day_time(12, tzinfo=timezone(timedelta(hours=1))), "timezone-aware times"),
        (lazystr("a\x00b"), "contains a NUL character"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_values_that_json_cannot_represent_are_refused_with_their_path(value, complaint):
    """M25, F43."""
    payload = {"items": [{"sku": 1}, {"sku": 2}, {"sku": 3}, {"sku": value}]}
    with pytest.raises(InvalidPayloadError) as caught:
        check_payload(payload)
    assert str(caught.value).startswith("payload.items[3].sku ")
    assert complaint in str(caught.value)


@pytest.mark.parametrize("key", ["a\x00", "a\ud800"])
def test_a_key_that_json_cannot_represent_is_refused(key):
    """M25, F43."""
    with pytest.raises(InvalidPayloadError) as caught:
        check_payload({"items": {key: 1}})
    str(caught.value).encode()  # The message itself can be logged.


def test_the_path_of_an_invalid_top_level_value_is_payload():
    with pytest.raises(InvalidPayloadError, match=r"^payload has the type set"):
        check_payload({1})


def test_the_error_names_the_checked_argument():
    with pytest.raises(InvalidPayloadError, match=r"^headers\.trace has the type bytes"):
        check_payload({"trace": b"1"}, "headers")


def nested(depth, innermost=1):
    value = innermost
    for _ in range(depth):
        value = [value]
    return value


def test_a_payload_may_be_nested_64_deep_and_no_deeper():
    """M25."""
    check_payload(nested(64))
    with pytest.raises(InvalidPayloadError, match="is nested more than 64 levels deep"):
        check_payload(nested(65))


def test_a_database_may_allow_less_depth_but_not_more():
    """M25."""
    check_payload(nested(31), depth=31)
    with pytest.raises(InvalidPayloadError, match="is nested more than 31 levels deep"):
        check_payload(nested(32), depth=31)
    with pytest.raises(InvalidPayloadError, match="is nested more than 64 levels deep"):
        check_payload(nested(65), depth=1000)


@pytest.mark.parametrize("step", [lambda inner: [inner], lambda inner: {"a": inner}])
def test_a_payload_10_000_deep_is_refused_with_a_short_message(step):
    """M25, F43."""
    value = 1
    for _ in range(10_000):
        value = step(value)
    with pytest.raises(InvalidPayloadError, match="is nested more than 64 levels deep") as caught:
        check_payload(value)
    assert len(str(caught.value)) < 300


def test_a_payload_that_contains_itself_is_refused():
    """M25."""
    payload = {"items": []}
    payload["items"].append(payload)
    with pytest.raises(InvalidPayloadError, match=r"^payload\.items\[0\]\.items\[0\].*deep"):
        check_payload(payload)


def test_the_same_object_twice_is_not_a_cycle():
    shared = {"a": 1}
    check_payload([shared, shared])


QUOTES = 2
LIMIT = 256 * 1024


def test_a_payload_may_be_as_large_as_allowed_to_the_byte():
    """M25."""
    check_payload("x" * (LIMIT - QUOTES - 1))
    check_payload("x" * (LIMIT - QUOTES))
    with pytest.raises(InvalidPayloadError, match="262,145 bytes as JSON, 262,144 are allowed"):
        check_payload("x" * (LIMIT - QUOTES + 1))


def test_bytes_are_counted_not_characters():
    """M25."""
    check_payload("é" * (LIMIT // 2 - QUOTES // 2))
    with pytest.raises(InvalidPayloadError, match="262,146 bytes"):
        check_payload("é" * (LIMIT // 2 - QUOTES // 2 + 1))


def test_a_payload_of_10_megabytes_is_refused():
    """M25."""
    with pytest.raises(InvalidPayloadError, match="bytes as JSON, 262,144 are allowed"):
        check_payload({"blob": "x" * 10_000_000})


def test_the_limits_are_settings(settings):
    settings.EVENTBUS = {"MAX_PAYLOAD_BYTES": 10, "MAX_PAYLOAD_DEPTH": 2}
    check_payload("x" * 8)
    check_payload([[1]])
    with pytest.raises(InvalidPayloadError, match="11 bytes as JSON, 10 are allowed"):
        check_payload("x" * 9)
    with pytest.raises(InvalidPayloadError, match="is nested more than 2 levels deep"):
        check_payload([[[1]]])


def test_a_refused_payload_is_a_value_error_and_an_error_of_the_bus():
    assert issubclass(InvalidPayloadError, ValueError)
    assert issubclass(InvalidPayloadError, EventBusError)


HOSTILE = st.recursive(
    SCALARS | st.floats() | st.binary(max_size=3) | st.text(max_size=5) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.sets(st.integers(), max_size=2)
    ),
    max_leaves=10,
)


@unhurried
@given(HOSTILE)
def test_a_value_is_either_refused_by_name_or_can_be_encoded(value):
    """M25: a value that passes the check cannot fail later, inside the caller's transaction."""
    try:
        check_payload(value)
    except InvalidPayloadError as refused:
        str(refused).encode()
    else:
        text = encode(value)
        text.encode()
        assert "\\u0000" not in text
        json.loads(text)


@pytest.mark.parametrize("version", [0, -1, 32_768, "2"])
def test_a_version_that_the_column_cannot_store_is_refused(version):
    with pytest.raises(InvalidPayloadError, match="version"):

        class Versioned(Event, type="test-events.versioned", version=version):
            """Never declared."""
