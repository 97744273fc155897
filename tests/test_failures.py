"""Stored error records, which every database accepts for any exception."""

import json
import types
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from django_eventbus.errors.failures import (
    FIRST_KEPT,
    LAST_KEPT,
    bounded,
    describe,
    fingerprint,
    in_a_line,
    recorded,
)
from django_eventbus.errors.introspection import type_name
from django_eventbus.errors.redaction import MAX_MESSAGE
from django_eventbus.errors.text import clean
from django_eventbus.schema.payloads import check_payload

# No deadline, because the machine may be busy.
unhurried = given_settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
MAX_TRACEBACK = 16 * 1024


def caught(error):
    """Raise and catch the error, so that it has a traceback."""
    try:
        raise error
    except BaseException as raised:
        return raised


def record(error, handler="stock", attempt=1):
    return describe(error, handler=handler, attempt=attempt, at=AT)


def assert_storable(found):
    """Check for no NUL, no half surrogate, valid UTF-8, and the length limits."""
    check_payload(found)
    json.dumps(found)
    assert len(found["message"].encode()) <= MAX_MESSAGE
    assert len(found["traceback"].encode()) <= MAX_TRACEBACK


def test_a_record_has_the_handler_the_time_and_the_error():
    """M13."""
    found = record(caught(ValueError("no stock")), handler="stock", attempt=3)
    assert found["handler"] == "stock"
    assert found["attempt"] == 3
    assert found["at"] == "2026-03-01T12:00:00+00:00"
    assert found["type"] == "ValueError"
    assert found["message"] == "no stock"
    assert found["traceback"].startswith("Traceback (most recent call last):\n")
    assert "in caught\n    raise error\n" in found["traceback"]
    assert found["traceback"].endswith("ValueError: no stock\n")


class OurError(Exception):
    pass


def test_the_type_is_named_with_its_module_unless_it_is_builtin():
    assert type_name(ValueError()) == "ValueError"
    assert type_name(OurError()) == "tests.test_failures.OurError"


def test_causes_and_notes_are_kept():
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise OurError("the effect") from cause
    except OurError as error:
        error.add_note("a note for the reader at night")
        found = record(error)
    assert "KeyError: 'the cause'" in found["traceback"]
    assert "direct cause" in found["traceback"]
    assert "a note for the reader at night" in found["traceback"]


def test_an_error_that_was_never_raised_can_be_recorded():
    found = record(ValueError("made, not raised"))
    assert found["traceback"] == "ValueError: made, not raised\n"


# -- hostile errors


class BrokenStr(Exception):
    def __str__(self):
        raise RuntimeError("not even this works")


class BrokenRepr(Exception):
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __repr__


class StrReturnsNumber(Exception):
    def __str__(self):
        return 7


class StrAsksToExit(Exception):
    def __str__(self):
        raise SystemExit(1)


class EndlessStr(Exception):
    def __str__(self):
        return str(self)


class StrReturnsNone(Exception):
    def __str__(self):
        return None


class OddText(str):
    """Objects that pretend to be a text."""

    def __getitem__(self, where):
        raise RuntimeError("no item")

    def __len__(self):
        raise RuntimeError("no length")

    def replace(self, *args):
        raise RuntimeError("no replacement")

    encode = splitlines = __contains__ = __format__ = replace


class StrReturnsOddText(Exception):
    def __str__(self):
        return OddText("odd text")


class RaisesItself(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


class OddAttributes(Exception):
    """An exception of which every descriptive attribute raises."""

    def refuse(self, *args):
        raise RuntimeError("not for you")

    __cause__ = __context__ = __traceback__ = __notes__ = args = property(refuse)
    __suppress_context__ = __class__ = property(refuse)
    __bool__ = __len__ = __eq__ = __hash__ = add_note = with_traceback = refuse


class OddNotes(Exception):
    __notes__ = 7


class OddMeta(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")

    __mro__ = __name__

    def __repr__(cls):
        raise RuntimeError("no repr")

    def __getattribute__(cls, name):
        raise RuntimeError("no attribute")


class OddClass(Exception, metaclass=OddMeta):
    pass


class OddModule(Exception):
    __module__ = 7


class OddGroup(ExceptionGroup):
    @property
    def exceptions(self):
        raise RuntimeError("no members")


class OddSyntax(SyntaxError):
    text = offset = end_lineno = lineno = ["odd"]


def with_a_cause(cause):
    error = ValueError("the effect")
    error.__cause__ = cause
    return error


#: By name, because pytest cannot display such parameters.
ODD_ERRORS = {
    "returns None": StrReturnsNone,
    "returns an odd text": StrReturnsOddText,
    "raises itself": RaisesItself,
    "odd attributes": OddAttributes,
    "odd notes": OddNotes,
    "odd class": OddClass,
    "odd module": OddModule,
    "odd group": lambda: OddGroup("many", [ValueError("a")]),
    "odd syntax": lambda: OddSyntax("odd"),
    "too many digits": lambda: ValueError(10**5000),
    "odd text": lambda: ValueError(OddText("odd")),
    "cause with odd attributes": lambda: with_a_cause(OddAttributes()),
    "cause of an odd class": lambda: with_a_cause(OddClass()),
    "cause that raises itself": lambda: with_a_cause(RaisesItself()),
}


@pytest.mark.parametrize("name", ODD_ERRORS)
def test_an_error_that_overrides_its_own_description_can_be_recorded(name):
    error = ODD_ERRORS[name]()
    found = record(caught(error))
    assert_storable(found)
    assert found["type"].isprintable()
    assert found["where"].partition(":")[0] == __file__
    assert in_a_line(error).isprintable()
    assert fingerprint(found)


def test_an_error_that_cannot_be_formatted_keeps_its_frames():
    found = record(caught(OddAttributes("text")))
    assert "in caught\n    raise error\n" in found["traceback"]
    assert found["type"] == "tests.test_failures.OddAttributes"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\x00b"),
        ValueError("a\ud800b"),
        ValueError("\udcff" * 5000),
        ValueError("\x00" * 100_000),
        ValueError("\U0001f511" * 100_000),
        ValueError(b"\x00\xff"),
        BrokenStr(),
        BrokenRepr(),
        StrReturnsNumber(),
        EndlessStr(),
        StrAsksToExit(),
        ExceptionGroup("many\x00", [ValueError("a\ud800"), BrokenStr()]),
        SystemExit(3),
        KeyboardInterrupt(),
        UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "bad\x00"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hostile_error_is_cleaned_and_cut(error):
    """F44: the text of a failure must not prevent storing it."""
    assert_storable(record(caught(error)))


@pytest.mark.costly
def test_an_error_of_50_megabytes_is_cut():
    """F44."""
    assert_storable(record(caught(ValueError("x" * 50_000_000))))


def test_a_nul_is_shown_and_not_dropped():
    assert record(ValueError("a\x00b"))["message"] == "a\\x00b"


def test_half_a_surrogate_is_shown_and_not_dropped():
    assert record(ValueError("a\ud800b"))["message"] == "a\\ud800b"


def test_an_unreadable_message_is_replaced_by_the_reason():
    message = record(caught(BrokenStr()))["message"]
    assert message == "<no message: its __str__ raised RuntimeError>"


def test_a_cut_text_ends_in_an_ellipsis_and_keeps_its_beginning():
    message = record(ValueError("x" * 2000))["message"]
    assert message == "x" * (MAX_MESSAGE - 3) + "…"


def test_the_largest_size_of_a_stored_traceback_is_a_setting(settings):
    settings.EVENTBUS = {"MAX_ERROR_BYTES": 100}
    assert len(record(caught(ValueError("x" * 1000)))["traceback"].encode()) <= 100


def test_a_class_with_a_hostile_name_is_cleaned_and_cut():
    """The type has its own column of 200 characters."""
    long = type("E" * 10_000, (Exception,), {})
    assert len(record(caught(long()))["type"]) <= 200
    odd = type("Odd", (Exception,), {"__module__": "mod\x00ule\ud800"})
    assert_storable(record(caught(odd())))


def test_a_circular_chain_of_causes_is_cut():
    """F44."""
    first, second = caught(ValueError("first")), caught(ValueError("second"))
    first.__cause__, second.__cause__ = second, first
    found = record(first)
    assert_storable(found)
    assert "ValueError: first" in found["traceback"]


def test_an_error_that_is_its_own_context_is_cut():
    error = caught(ValueError("lonely"))
    error.__cause__ = error
    assert_storable(record(error))


def test_a_long_chain_of_causes_is_cut():
    error = caught(ValueError(0))
    for number in range(1, 2000):
        effect = caught(ValueError(number))
        effect.__cause__ = error
        error = effect
    assert_storable(record(error))


def with_frames(count):
    """An error with a traceback of this depth, without recursion."""
    error = caught(ValueError("deep"))
    traceback = error.__traceback__
    # Two alternating frames, because equal consecutive frames are shown as one.
    both = [traceback, caught_elsewhere(ValueError("deep")).__traceback__]
    for number in range(count):
        seen = both[number % 2 - 1]
        traceback = types.TracebackType(traceback, seen.tb_frame, seen.tb_lasti, seen.tb_lineno)
    return error.with_traceback(traceback)


def caught_elsewhere(error):
    try:
        raise error
    except ValueError as raised:
        return raised


def test_the_innermost_of_ten_thousand_frames_are_kept():
    """F44."""
    found = record(with_frames(10_000))
    assert_storable(found)
    assert found["traceback"].count('  File "') == 30
    assert "in caught\n    raise error\n" in found["traceback"]
    assert found["traceback"].endswith("ValueError: deep\n")


def test_endless_recursion_is_recorded():
    def again():
        again()

    try:
        again()
    except RecursionError as error:
        found = record(error)
    assert found["type"] == "RecursionError"
    assert "in again" in found["traceback"]
    assert_storable(found)


def test_a_traceback_shows_no_values_of_variables():
    """They may be passwords."""

    def log_in(password):
        raise OurError("refused")

    try:
        log_in("hunter" + str(2))
    except OurError as error:
        found = record(error)
    assert "in log_in" in found["traceback"]
    assert "hunter2" not in json.dumps(found)


@unhurried
@given(st.text(st.characters(), max_size=200), st.integers(3, 100))
def test_any_cleaned_text_fits_and_can_be_stored(text, limit):
    cleaned = clean(text, limit)
    assert len(cleaned.encode()) <= limit
    assert "\x00" not in cleaned


@unhurried
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=50))
def test_a_text_that_fits_is_unchanged(text):
    assert clean(text, 200) == text


@pytest.mark.parametrize("letter", ["x", "é", "🔑"])
def test_a_text_is_cut_if_it_is_one_byte_too_long(letter):
    fits = letter * 12
    limit = len(fits.encode())
    assert clean(fits, limit) == fits
    cut = clean(fits, limit - 1)
    assert cut.endswith("…")
    assert fits.startswith(cut[:-1])


# -- fingerprints


def fail_here(number):
    raise OurError(f"order {number} failed")


def fail_there(number):
    raise OurError(f"order {number} failed")


def record_of(func, *args, handler="stock"):
    try:
        func(*args)
    except Exception as error:
        return record(error, handler=handler)


def test_errors_raised_on_the_same_line_have_the_same_fingerprint():
    first, second = record_of(fail_here, 1), record_of(fail_here, 2)
    assert first["message"] != second["message"]
    assert fingerprint(first) == fingerprint(second)


def test_a_text_that_looks_like_a_traceback_does_not_change_the_fingerprint():
    """Errors of remote calls carry the remote traceback in their text."""

    def forward(text):
        raise OurError(text)

    first = record_of(forward, 'remote:\n  File "/tmp/run-1/job.py", line 1, in run')
    second = record_of(forward, 'remote:\n  File "/tmp/run-2/job.py", line 1, in run')
    assert fingerprint(first) == fingerprint(second)


def test_errors_raised_on_different_lines_have_different_fingerprints():
    assert fingerprint(record_of(fail_here, 1)) != fingerprint(record_of(fail_there, 1))


def test_errors_of_different_handlers_have_different_fingerprints():
    stock, mail = (record_of(fail_here, 1, handler=name) for name in ("stock", "mail"))
    assert fingerprint(stock) != fingerprint(mail)


def test_errors_of_different_types_have_different_fingerprints():
    def fail_with(error):
        raise error

    first, second = record_of(fail_with, ValueError("x")), record_of(fail_with, KeyError("x"))
    assert fingerprint(first) != fingerprint(second)


def test_an_error_without_a_traceback_has_a_fingerprint_that_fits_its_column():
    assert len(fingerprint(record(ValueError("x")) | {"traceback": ""})) == 16


# -- many errors


def errors_of(*handlers):
    return [
        {"handler": name, "attempt": number, "at": f"at {number}", "type": "E", "message": "m"}
        for number, name in enumerate(handlers, 1)
    ]


def add_one_by_one(errors):
    kept = []
    for each in errors:
        kept = bounded([*kept, each])
    return kept


def test_all_errors_are_kept_up_to_a_number():
    errors = errors_of(*["h"] * (FIRST_KEPT + LAST_KEPT))
    assert add_one_by_one(errors) == errors


@pytest.mark.parametrize("bound", [bounded, add_one_by_one])
@pytest.mark.parametrize("count", [21, 22, 104, 1000])
def test_the_first_and_the_last_of_many_errors_are_kept_and_the_others_counted(bound, count):
    errors = errors_of(*["h"] * count)
    kept = bound(errors)
    omitted = count - FIRST_KEPT - LAST_KEPT
    assert kept[:FIRST_KEPT] == errors[:FIRST_KEPT]
    assert kept[FIRST_KEPT + 1 :] == errors[-LAST_KEPT:]
    marker = kept[FIRST_KEPT]
    assert marker["omitted"] == omitted
    assert marker["at"] == errors[-LAST_KEPT - 1]["at"]
    assert errors[0].keys() <= marker.keys()
    assert recorded(kept) == errors[:FIRST_KEPT] + errors[-LAST_KEPT:]


def test_the_last_error_of_each_handler_is_kept():
    errors = errors_of(*["a"] * 10, "b", "b", *["a"] * 50)
    kept = add_one_by_one(errors)
    assert [each["attempt"] for each in kept if each["handler"] == "b"] == [12]
    assert sum(each.get("omitted", 0) for each in kept) == len(errors) - len(recorded(kept))
