"""The timeline of an event: publishing, attempts, actions of operators and the end, by time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_eventbus.admin import audit
from django_eventbus.admin.payloads import Shown, printable, shown
from django_eventbus.admin.statuses import handed_off_label, status_label
from django_eventbus.errors.failures import readable
from django_eventbus.errors.text import one_line
from django_eventbus.models import DeadEvent, EventLog, LogStatus, QueuedEvent
from django_eventbus.schema import deliveries
from django_eventbus.status import in_words

MOST_ATTEMPTS = 100
#: A retry is recorded twice: in the event with the time of the database, and in the admin's history
#: with the time of the web server. If the same user made both records, and their times differ by
#: less than this duration, they describe the same retry.
CLOCK_TOLERANCE = timedelta(seconds=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One entry of the timeline. ``waited`` and ``took`` are durations as texts."""

    at: datetime | None
    text: str
    message: str = ""
    traceback: str = ""
    waited: str = ""
    took: str = ""
    bad: bool = False
    payload: Shown | None = None


class Timeline:
    """The entries of one event, with the payload before each edit if ``with_payloads`` is true."""

    def __init__(self, event: Any, *, with_payloads: bool) -> None:
        self.event = event
        self.is_queued = isinstance(event, QueuedEvent)
        self.is_copy = event.replay_of is not None
        self._edits = (event.edits or []) if with_payloads else []

    def entries(self) -> list[TimelineEntry]:
        between = [
            *self._copied(),
            *self._hidden_attempts(),
            *self._due(),
            *self._admin_actions(),
            *self._payload_edits(),
            *self._earlier_lives(),
            *self._failed_attempts(self.event.errors, self._due_at),
            *self._hand_offs(),
            *self._successful_attempts(),
        ]
        between.sort(key=lambda each: each.at or self.event.created_at)
        return [self._published(), *between, *self._end()]

    def _published(self) -> TimelineEntry:
        by = {"producer": one_line(self.event.producer)}
        text = _("Published by %(producer)s")
        if self.is_copy:
            text = _("Original event published by %(producer)s")
        return TimelineEntry(at=self.event.created_at, text=text % by)

    def _copied(self) -> Iterator[TimelineEntry]:
        """Yield the replay that made this copy. A retry of the copy overwrites its time."""
        if self.is_copy:
            text = _("Copied into the queue by replay %(id)s") % {"id": self.event.replay_id}
            at = None if self.event.history else self._due_at
            yield TimelineEntry(at=at, text=text)

    @property
    def _due_at(self) -> datetime:
        published: datetime = self.event.created_at
        return max(published, self.event.due_at or published)

    def _due(self) -> Iterator[TimelineEntry]:
        """Yield the due time, unless the event ended earlier, for example by a cancellation."""
        if self.is_copy and not self.event.history:
            return  # The due time is the time of the copy.
        end = None if self.is_queued else self.event.finished_at
        if self._due_at > self.event.created_at and (end is None or self._due_at <= end):
            yield TimelineEntry(at=self._due_at, text=_("Due"))

    # -- operators

    def _admin_actions(self) -> Iterator[TimelineEntry]:
        """Yield the admin's history, except retries that ``history`` or ``edits`` also record."""
        dead_letter = audit.type_of(DeadEvent)
        for entry in audit.entries_of(self.event.pk, DeadEvent, QueuedEvent, EventLog):
            name = entry.user.get_username()
            if entry.content_type_id == dead_letter and self._is_recorded(name, entry.action_time):
                continue
            facts = {"name": one_line(name), "what": one_line(entry.change_message)}
            yield TimelineEntry(at=entry.action_time, text=_("%(name)s: %(what)s") % facts)

    def _is_recorded(self, name: str, at: datetime) -> bool:
        lives = [life for life in self.event.history or () if "omitted" not in life]
        retries = ((life["retried_by"], life["retried_at"]) for life in lives)
        return self._is_recorded_as_edit(name, at) or _contains(retries, name, at)

    def _is_recorded_as_edit(self, name: str, at: datetime) -> bool:
        return _contains(((edit["by"], edit["at"]) for edit in self._edits), name, at)

    def _payload_edits(self) -> Iterator[TimelineEntry]:
        for edit in self._edits:
            text = _("Retried by %(name)s with an edited payload. Payload before the edit:")
            by = {"name": _user(edit["by"])}
            payload = shown(edit["payload"])
            yield TimelineEntry(at=stored_time(edit["at"]), text=text % by, payload=payload)

    # -- attempts

    def _earlier_lives(self) -> Iterator[TimelineEntry]:
        """Yield the attempts and the end of each earlier life, and the retry that followed."""
        began = self.event.created_at
        for life in self.event.history or ():
            if "omitted" in life:
                yield _omitted_lives(life["omitted"], began)
                continue
            yield from self._failed_attempts(life["errors"], began)
            yield _end_of_life(life)
            retried_at = stored_time(life["retried_at"]) or began
            if not self._is_recorded_as_edit(life["retried_by"], retried_at):
                yield _retry(life, retried_at)
            began = retried_at

    def _hidden_attempts(self) -> Iterator[TimelineEntry]:
        count = len(self.event.errors or []) - MOST_ATTEMPTS
        if count > 0:
            text = ngettext(
                "%(count)s earlier attempt is not shown.",
                "%(count)s earlier attempts are not shown.",
                count,
            )
            yield TimelineEntry(at=None, text=text % {"count": count})

    def _failed_attempts(
        self, errors: list[dict[str, Any]] | None, began: datetime
    ) -> Iterator[TimelineEntry]:
        before: dict[str, datetime] = {}
        for error in readable(errors)[-MOST_ATTEMPTS:]:
            if "omitted" in error:
                yield _omitted_errors(error)
                continue
            at = stored_time(error["at"])
            since = before.get(error["handler"], began)
            if at is not None and at < since:  # The error was carried over from an earlier life.
                since = self.event.created_at
            if at is not None:
                before[error["handler"]] = at
            yield _failed_attempt(error, at, since)

    def _hand_offs(self) -> Iterator[TimelineEntry]:
        """Yield the last hand-off of each handler, and the process that picked it up."""
        for name, state in deliveries.readable(self.event.deliveries).items():
            is_waiting = state["state"] == deliveries.HANDED_OFF
            handed_off_at = stored_time(state.get("at" if is_waiting else "handed_off_at"))
            if handed_off_at is None:
                continue
            yield TimelineEntry(at=handed_off_at, text=capfirst(handed_off_label(name)))
            picked_up_at = stored_time(state.get("picked_up_at"))
            if picked_up_at is not None:
                facts = {"handler": one_line(name), "process": one_line(state.get("by") or "?")}
                yield TimelineEntry(
                    at=picked_up_at,
                    text=_("%(handler)s picked up by %(process)s") % facts,
                    waited=in_words((picked_up_at - handed_off_at).total_seconds()),
                )

    def _successful_attempts(self) -> Iterator[TimelineEntry]:
        for name, state in deliveries.readable(self.event.deliveries).items():
            if state["state"] == "done" and "at" in state:
                facts = {"handler": one_line(name), "attempt": state["failures"] + 1}
                yield TimelineEntry(
                    at=stored_time(state["at"]),
                    text=_("%(handler)s succeeded at attempt %(attempt)s") % facts,
                    took=in_words(state["seconds"]),
                )

    def _end(self) -> Iterator[TimelineEntry]:
        event, started_at = self.event, self.event.processing_started_at
        if not self.is_queued:
            took = in_words((event.finished_at - started_at).total_seconds()) if started_at else ""
            text = _("Ended: %(status)s") % {"status": status_label(event.status)}
            is_bad = event.status != LogStatus.COMPLETED
            yield TimelineEntry(at=event.finished_at, text=text, took=took, bad=is_bad)
        elif started_at is not None:
            yield TimelineEntry(at=started_at, text=_("Claimed by a worker"))


def _failed_attempt(error: dict[str, Any], at: datetime | None, since: datetime) -> TimelineEntry:
    seconds = error.get("seconds")
    text = _("%(handler)s failed at attempt %(attempt)s: %(error)s")
    facts = {
        "handler": one_line(error["handler"]),
        "attempt": error["attempt"],
        "error": one_line(error["type"]),
    }
    return TimelineEntry(
        at=at,
        text=text % facts if error["handler"] else str(facts["error"]),
        message=printable(error["message"]),
        traceback=printable(error.get("traceback", "")),
        waited=in_words((at - since).total_seconds() - (seconds or 0)) if at else "",
        took=in_words(seconds) if seconds is not None else "",
        bad=True,
    )


def _end_of_life(life: dict[str, Any]) -> TimelineEntry:
    text = _("Life %(life)s ended: %(status)s (attempts: %(attempts)s)")
    facts = {
        "life": life["life"],
        "status": status_label(life["status"]),
        "attempts": life["attempts"],
    }
    return TimelineEntry(at=stored_time(life["finished_at"]), text=text % facts, bad=True)


def _retry(life: dict[str, Any], at: datetime) -> TimelineEntry:
    facts = {
        "name": _user(life["retried_by"]),
        "handler": one_line(life["retried_handler"]),
        "life": life["life"] + 1,
    }
    text = _("Retried by %(name)s: life %(life)s begins")
    if life["edited"]:
        text = _("Payload edited and retried by %(name)s: life %(life)s begins")
    elif life["retried_handler"]:
        text = _("Retried for handler %(handler)s by %(name)s: life %(life)s begins")
    return TimelineEntry(at=at, text=text % facts)


def _omitted_lives(count: int, at: datetime) -> TimelineEntry:
    text = ngettext("%(count)s life is not stored.", "%(count)s lives are not stored.", count)
    return TimelineEntry(at=at, text=text % {"count": count})


def _omitted_errors(error: dict[str, Any]) -> TimelineEntry:
    count = error["omitted"]
    text = ngettext("%(count)s error is not stored.", "%(count)s errors are not stored.", count)
    return TimelineEntry(at=stored_time(error["at"]), text=text % {"count": count})


def _user(name: str) -> str:
    return one_line(name or _("an unknown user"))


def _contains(records: Iterable[tuple[str, str]], name: str, at: datetime) -> bool:
    times = (stored_time(recorded) for by, recorded in records if by == name)
    return any(each is not None and abs(each - at) < CLOCK_TOLERANCE for each in times)


def stored_time(text: str | None) -> datetime | None:
    """Parse a time of a JSON column. Returns None if the text is missing or not a time."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
