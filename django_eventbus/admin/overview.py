"""The overview: problems, status, the statistics of the last hour and the handlers on one page.

A static script fetches this content again every few seconds while the page is visible. Without
JavaScript the page works, but does not refresh itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Model
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, reverse
from django.utils.decorators import method_decorator
from django.utils.formats import number_format
from django.utils.http import urlencode
from django.utils.timezone import get_current_timezone_name, localtime
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from django_eventbus import status
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.paging import grouped
from django_eventbus.admin.permissions import page_for
from django_eventbus.conf import settings
from django_eventbus.diagnosis import watching
from django_eventbus.diagnosis.examination import Bus
from django_eventbus.models import (
    DeadEvent,
    EventLane,
    EventSchedule,
    EventWorker,
    FlowControl,
    MinuteStatistics,
    QueuedEvent,
    QueuedStatus,
)
from django_eventbus.statistics import problems
from django_eventbus.status import Status, in_words, shown_count
from django_eventbus.store import store_for

REFRESH_SECONDS = 5
SPARK_HEIGHT = 40
SPARK_STEP = 4
NOTHING = "\N{EN DASH}"

#: The list to which a problem or a tile links, and the filter of this list.
PAGES: dict[str, tuple[type[Model], dict[str, str]]] = {
    "workers": (EventWorker, {}),
    "dead": (DeadEvent, {}),
    "lanes": (EventLane, {"state": "blocked"}),
    "schedules": (EventSchedule, {}),
    "queue": (QueuedEvent, {}),
    "executors": (FlowControl, {"state": "unavailable"}),
    "breakers": (FlowControl, {"state": "open"}),
    "pauses": (FlowControl, {"state": "paused"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    label: str
    value: str
    note: str = ""
    url: str | None = None
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """A sparkline of sixty bars. The sizes are strings, because templates localize numbers."""

    label: str
    summary: str
    path: str
    is_bad: bool = False
    width: str = str(status.SHOWN_MINUTES * SPARK_STEP)
    height: str = str(SPARK_HEIGHT)


class OverviewMixin(EventBusAdminMixin):
    """The overview page, at the URL and with the view permission of MinuteStatistics."""

    class Media:
        css = {"all": ("django_eventbus/eventbus.css", "django_eventbus/overview.css")}
        js = ("django_eventbus/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        return [
            self.route("", self.changelist_view, "changelist"),
            self.route("statistics/", self.statistics_view, "statistics"),
            self.route("checks/", self.checks_view, "checks"),
        ]

    @method_decorator(require_safe)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> TemplateResponse:
        return self.page(
            request,
            "overview",
            title=_("Overview"),
            refresh_seconds=str(REFRESH_SECONDS),
            statistics_url=self.url_of("statistics"),
            **self._statistics(request, may_examine=False),
        )

    @method_decorator(require_safe)
    def statistics_view(self, request: HttpRequest) -> TemplateResponse:
        """Return the part of the page that the script refreshes."""
        template = "admin/django_eventbus/overview_statistics.html"
        return TemplateResponse(request, template, self._statistics(request, may_examine=True))

    @method_decorator(require_safe)
    def checks_view(self, request: HttpRequest) -> TemplateResponse:
        """Show the results of all checks, with their explanations."""
        self.demand_view(request)
        found = watching.examined(Bus(store_for()))
        return self.page(
            request,
            "checks",
            title=_("Checks"),
            as_of=as_of(found.at) if found else "",
            # The failing checks come first; the order is stable otherwise.
            diagnoses=sorted(found.diagnoses if found else (), key=lambda each: not each.is_wrong),
        )

    def _statistics(self, request: HttpRequest, *, may_examine: bool) -> dict[str, Any]:
        self.demand_view(request)
        seen = status.look()
        bus = Bus(store_for(), seen)
        return {
            "checks_url": self.url_of("checks"),
            "failing_checks": watching.failing(bus, may_examine=may_examine),
            "as_of": as_of(seen.at),
            "tiles": [*self._queue_tiles(request, seen), *self._rate_tiles(request, seen)],
            "sparks": sparks(seen),
            "problems": [
                (each, self._page(request, each.about, **_group_of(each)))
                for each in problems.find_problems(seen)
            ],
            "handlers": handler_rows(seen),
            "has_hand_offs": any(each.executor or each.runs.handed_off for each in seen.handlers),
            "ignored_messages": _ignored_messages(seen),
            "minutes": minute_rows(seen),
        }

    def _queue_tiles(self, request: HttpRequest, seen: Status) -> list[Tile]:
        found: dict[str, Any] = seen.metrics
        pending = self._page(request, "queue", status=QueuedStatus.PENDING)
        running = self._page(request, "queue", status=QueuedStatus.PROCESSING)
        dead = self._page(request, "dead")
        return [
            Tile(label=_("Pending"), value=shown_count(found["pending"]), url=pending),
            Tile(
                label=_("Running"),
                value=shown_count(found["running"]),
                note=_handed_off_note(seen),
                url=running,
            ),
            Tile(label=_("Retrying"), value=shown_count(found["retrying"]), url=pending),
            Tile(
                label=_("Scheduled"),
                value=shown_count(found["scheduled"]),
                note=_("held by flow control: %(held)s") % {"held": shown_count(found["held"])},
                url=pending,
            ),
            Tile(
                label=_("Dead letters"),
                value=shown_count(found["dead"]),
                url=dead,
                is_bad=found["dead"] > 0,
            ),
            Tile(
                label=_("Oldest pending"),
                value=in_words(found["lag"]) if found["pending"] else NOTHING,
                is_bad=found["lag"] > problems.LATE,
            ),
        ]

    def _rate_tiles(self, request: HttpRequest, seen: Status) -> list[Tile]:
        found: dict[str, Any] = seen.metrics
        recently = _("last %(minutes)d min") % {"minutes": status.RECENT_MINUTES}
        return [
            Tile(
                label=_("Events per minute"),
                value=number_format(round(found["events_per_minute"], 1)),
                note=recently,
            ),
            Tile(label=_("Failure rate"), value=per_cent(found["failure_rate"]), note=recently),
            Tile(
                label=_("Latency, median"),
                value=duration(found["p50"]),
                note=_("95th percentile: %(time)s") % {"time": duration(found["p95"])},
            ),
            Tile(
                label=_("Workers"),
                value=shown_count(found["workers"]),
                url=self._page(request, "workers"),
                is_bad=not found["workers"],
            ),
        ]

    def _page(self, request: HttpRequest, about: str, **filters: str) -> str | None:
        """Return the URL of a list, or None if the list is missing or the user may not view it."""
        model, chosen = PAGES[about]
        if page_for(request, self.admin_site, model) is None:
            return None
        name = f"{model._meta.app_label}_{model._meta.model_name}_changelist"
        url = reverse(f"admin:{name}", current_app=self.admin_site.name)
        query = urlencode({**chosen, **filters})
        return f"{url}?{query}" if query else url


@admin.register(MinuteStatistics)
class OverviewAdmin(OverviewMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


def as_of(moment: datetime) -> str:
    facts = {"time": f"{localtime(moment):%H:%M:%S}", "zone": get_current_timezone_name()}
    return _("As of %(time)s, %(zone)s") % facts


def _handed_off_note(seen: Status) -> str:
    count: Any = seen.metrics["handed_off"]
    if not count and not seen.executors:
        return ""
    return _("handed off: %(count)s") % {"count": shown_count(count)}


def _ignored_messages(seen: Status) -> str:
    """Return the number of ignored messages as text; an empty text if there are none."""
    count: Any = seen.metrics["ignored_messages"]
    return shown_count(count) if count else ""


def _group_of(problem: problems.Problem) -> dict[str, str]:
    return {"group": problem.fingerprint} if problem.fingerprint else {}


def sparks(seen: Status) -> list[Spark]:
    ended = [each.ended for each in seen.last_hour]
    failed = [each.failed for each in seen.last_hour]
    slow = [each.p95 or 0.0 for each in seen.last_hour]
    summary = _("last minute %(last)s, maximum %(most)s")

    def summarize(values: Sequence[float], show: Any) -> str:
        return summary % {"last": show(values[-2]), "most": show(max(values))}

    return [
        Spark(label=_("Events per minute"), summary=summarize(ended, grouped), path=bars(ended)),
        Spark(
            label=_("Failures per minute"),
            summary=summarize(failed, grouped),
            path=bars(failed),
            is_bad=True,
        ),
        Spark(
            label=_("Latency, 95th percentile"),
            summary=summarize(slow, lambda seconds: duration(seconds or None)),
            path=bars(slow),
        ),
    ]


def bars(values: Sequence[float]) -> str:
    """Return an SVG path with a bar for each value above 0; a bar has a height of at least 1."""
    most = max(values) or 1
    heights = (max(1, round(SPARK_HEIGHT * each / most)) if each else 0 for each in values)
    return " ".join(
        f"M{place * SPARK_STEP} {SPARK_HEIGHT}v-{height}h{SPARK_STEP - 1}v{height}z"
        for place, height in enumerate(heights)
        if height
    )


def handler_rows(seen: Status) -> list[dict[str, Any]]:
    """Return the handlers, busiest first."""
    return [
        {
            "name": each.name,
            "runs": grouped(each.runs.total),
            "failed": grouped(each.runs.failed),
            "rate": per_cent(each.runs.failure_rate),
            # A discarded event is a dead letter too, so it is counted here.
            "dead": grouped(each.runs.dead + each.runs.discarded),
            "p50": duration(each.runs.p50),
            "p95": duration(each.runs.p95),
            "hand_offs": grouped(each.runs.handed_off),
            "state": _handler_state(each),
            "is_bad": each.breaker_open or each.executor_unavailable,
        }
        for each in sorted(seen.handlers, key=lambda each: -each.runs.total)
    ]


def _handler_state(handler: status.HandlerCounts) -> str:
    if handler.breaker_open:
        return _("circuit breaker open")
    if handler.paused:
        return _("paused")
    if handler.executor_unavailable:
        return _("broker unavailable")
    if handler.executor:
        text = _("active, %(count)s of at most %(window)s events handed off")
        window = grouped(settings.HANDOFF_WINDOW)
        return text % {"count": shown_count(handler.handed_off), "window": window}
    return _("active") if handler.is_registered else _("not registered here")


def minute_rows(seen: Status) -> list[dict[str, Any]]:
    """Return the data of the sparklines as a table, latest minute first."""
    last = seen.at.replace(second=0, microsecond=0)
    return [
        {
            "minute": last - timedelta(minutes=ago),
            "ended": grouped(each.ended),
            "failed": grouped(each.failed),
            "dead": grouped(each.dead),
            "p95": duration(each.p95),
        }
        for ago, each in enumerate(reversed(seen.last_hour))
        if each.total
    ]


def per_cent(share: float | None) -> str:
    return NOTHING if share is None else f"{number_format(share, 1)} %"


def duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else in_words(seconds)
