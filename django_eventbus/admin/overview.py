"""The overview: how the bus is doing, on one page that keeps itself up to date.

Without JavaScript it is a plain page. With it, a small static script fetches the changing part
every few seconds, as long as somebody looks at it.
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

from django_eventbus import findings, status
from django_eventbus.admin.base import EventBusAdminMixin
from django_eventbus.admin.paging import grouped
from django_eventbus.models import (
    DeadEvent,
    EventGate,
    EventLane,
    EventMinute,
    EventSchedule,
    EventWorker,
    QueuedEvent,
    QueuedStatus,
)
from django_eventbus.status import Status, in_words, shown_count

REFRESH_SECONDS = 5
SPARK_HEIGHT = 40
SPARK_STEP = 4
NOTHING = "\N{EN DASH}"

#: The page that has more, by what a finding is about, and what to choose there.
PAGES: dict[str, tuple[type[Model], dict[str, str]]] = {
    "workers": (EventWorker, {}),
    "dead": (DeadEvent, {}),
    "lanes": (EventLane, {"state": "blocked"}),
    "schedules": (EventSchedule, {}),
    "queue": (QueuedEvent, {}),
    "breakers": (EventGate, {"state": "open"}),
    "pauses": (EventGate, {"state": "paused"}),
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
    """Sixty bars. All text: a number would be written as people write it, not as SVG does."""

    label: str
    summary: str
    path: str
    is_bad: bool = False
    width: str = str(status.SHOWN_MINUTES * SPARK_STEP)
    height: str = str(SPARK_HEIGHT)


class OverviewMixin(EventBusAdminMixin):
    """The page stands where the list of the minutes would: who may see those may see it."""

    class Media:
        css = {"all": ("django_eventbus/eventbus.css", "django_eventbus/overview.css")}
        js = ("django_eventbus/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        return [
            self.route("", self.changelist_view, "changelist"),
            self.route("figures/", self.figures_view, "figures"),
        ]

    @method_decorator(require_safe)
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> TemplateResponse:
        return self.page(
            request,
            "overview",
            title=_("Overview"),
            refresh_seconds=str(REFRESH_SECONDS),
            figures_url=self.url_of("figures"),
            **self._live(request),
        )

    @method_decorator(require_safe)
    def figures_view(self, request: HttpRequest) -> TemplateResponse:
        """The part that changes, for the script."""
        template = "admin/django_eventbus/overview_figures.html"
        return TemplateResponse(request, template, self._live(request))

    def _live(self, request: HttpRequest) -> dict[str, Any]:
        self.demand_view(request)
        seen = status.look()
        return {
            "as_of": as_of(seen.at),
            "tiles": self._tiles(request, seen),
            "sparks": sparks(seen),
            "findings": [
                (each, self._page(request, each.about, **_group_of(each)))
                for each in findings.of(seen)
            ],
            "handlers": handler_rows(seen),
            "minutes": minute_rows(seen),
        }

    def _tiles(self, request: HttpRequest, seen: Status) -> list[Tile]:
        found: dict[str, Any] = seen.figures
        pending = self._page(request, "queue", status=QueuedStatus.PENDING)
        running = self._page(request, "queue", status=QueuedStatus.PROCESSING)
        dead = self._page(request, "dead")
        workers = self._page(request, "workers")
        recently = _("last %(minutes)d min") % {"minutes": status.RECENT_MINUTES}
        return [
            Tile(label=_("Pending"), value=shown_count(found["pending"]), url=pending),
            Tile(label=_("Running"), value=shown_count(found["running"]), url=running),
            Tile(label=_("Retrying"), value=shown_count(found["retrying"]), url=pending),
            Tile(
                label=_("Scheduled"),
                value=shown_count(found["scheduled"]),
                note=_("held up: %(held)s") % {"held": shown_count(found["held"])},
                url=pending,
            ),
            Tile(
                label=_("Dead"),
                value=shown_count(found["dead"]),
                url=dead,
                is_bad=found["dead"] > 0,
            ),
            Tile(
                label=_("Oldest pending"),
                value=in_words(found["lag"]) if found["pending"] else NOTHING,
                is_bad=found["lag"] > findings.LATE,
            ),
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
                url=workers,
                is_bad=not found["workers"],
            ),
        ]

    def _page(self, request: HttpRequest, about: str, **filters: str) -> str | None:
        """Where to look for more, unless that page is not there or not for this user."""
        model, chosen = PAGES[about]
        page = self.admin_site._registry.get(model)
        if page is None or not page.has_view_permission(request):
            return None
        name = f"{model._meta.app_label}_{model._meta.model_name}_changelist"
        url = reverse(f"admin:{name}", current_app=self.admin_site.name)
        query = urlencode({**chosen, **filters})
        return f"{url}?{query}" if query else url


@admin.register(EventMinute)
class OverviewAdmin(OverviewMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass


def as_of(moment: datetime) -> str:
    facts = {"time": f"{localtime(moment):%H:%M:%S}", "zone": get_current_timezone_name()}
    return _("As of %(time)s, %(zone)s") % facts


def _group_of(finding: findings.Finding) -> dict[str, str]:
    return {"group": finding.fingerprint} if finding.fingerprint else {}


def sparks(seen: Status) -> list[Spark]:
    ended = [each.ended for each in seen.minutes]
    failed = [each.failed for each in seen.minutes]
    slow = [each.p95 or 0.0 for each in seen.minutes]
    summary = _("last minute %(last)s, most %(most)s")

    def said(values: Sequence[float], show: Any) -> str:
        return summary % {"last": show(values[-2]), "most": show(max(values))}

    return [
        Spark(label=_("Events per minute"), summary=said(ended, grouped), path=bars(ended)),
        Spark(
            label=_("Failures per minute"),
            summary=said(failed, grouped),
            path=bars(failed),
            is_bad=True,
        ),
        Spark(
            label=_("Latency, 95th percentile"),
            summary=said(slow, lambda seconds: duration(seconds or None)),
            path=bars(slow),
        ),
    ]


def bars(values: Sequence[float]) -> str:
    """A path of one bar for each value; what is not nothing can be seen."""
    most = max(values) or 1
    heights = (max(1, round(SPARK_HEIGHT * each / most)) if each else 0 for each in values)
    return " ".join(
        f"M{place * SPARK_STEP} {SPARK_HEIGHT}v-{height}h{SPARK_STEP - 1}v{height}z"
        for place, height in enumerate(heights)
        if height
    )


def handler_rows(seen: Status) -> list[dict[str, Any]]:
    """The busiest first."""
    return [
        {
            "name": each.name,
            "runs": grouped(each.runs.total),
            "failed": grouped(each.runs.failed),
            "rate": per_cent(each.runs.failure_rate),
            # Discarded ones are dead letters, too.
            "dead": grouped(each.runs.dead + each.runs.discarded),
            "p50": duration(each.runs.p50),
            "p95": duration(each.runs.p95),
            "state": _handler_state(each),
            "is_bad": each.breaker_open,
        }
        for each in sorted(seen.handlers, key=lambda each: -each.runs.total)
    ]


def _handler_state(handler: status.HandlerFigures) -> str:
    if handler.breaker_open:
        return _("breaker open")
    if handler.paused:
        return _("paused")
    return _("active") if handler.is_registered else _("not registered here")


def minute_rows(seen: Status) -> list[dict[str, Any]]:
    """What the sparklines show, to be read: the latest first."""
    last = seen.at.replace(second=0, microsecond=0)
    return [
        {
            "minute": last - timedelta(minutes=ago),
            "ended": grouped(each.ended),
            "failed": grouped(each.failed),
            "dead": grouped(each.dead),
            "p95": duration(each.p95),
        }
        for ago, each in enumerate(reversed(seen.minutes))
        if each.total
    ]


def per_cent(share: float | None) -> str:
    return NOTHING if share is None else f"{number_format(share, 1)} %"


def duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else in_words(seconds)
