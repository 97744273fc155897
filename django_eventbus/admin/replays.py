"""The list and the page of replays, with the action "cancel"."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.sites import AdminSite
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.formats import localize
from django.utils.html import format_html
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_eventbus import replay
from django_eventbus.admin.filters import ChoiceFilter
from django_eventbus.admin.paging import MOST_COUNTED, Capped, Grouped, IndexedChangeList, grouped
from django_eventbus.admin.permissions import page_for
from django_eventbus.admin.row_actions import MOST_AT_ONCE, RowActionsMixin
from django_eventbus.errors.text import one_line
from django_eventbus.models import DeadEvent, EventReplay, QueuedEvent, ReplayState
from django_eventbus.replay import ReplayStatus
from django_eventbus.store import default_alias, store_for

SHOWN_ON_CONFIRMATION = 20
SHOWN_IDS = 20
#: The seconds during which a request deletes copies of cancelled replays.
SECONDS = 3.0


class ReplayStateFilter(ChoiceFilter):
    title = gettext_lazy("state")
    parameter_name = column = "state"

    def known(self) -> Sequence[tuple[str, Any]]:
        return ReplayState.choices


class ReplayChangeList(IndexedChangeList):
    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        _add_progress(list(self.result_list), request, self.model_admin.admin_site)


class ReplayMixin(RowActionsMixin):
    list_display = (
        "shown_id",
        "shown_by",
        "selection",
        "shown_handler",
        "shown_state",
        "progress",
        "dead_copies",
        "shown_rate",
        "created_at",
        "finished_at",
    )
    list_filter = (ReplayStateFilter,)
    list_per_page = 20
    ordering = ("-id",)
    actions = ("cancel",)
    fields = readonly_fields = (
        "shown_by",
        "selection",
        "shown_ids",
        "shown_handler",
        "shown_queue",
        "shown_state",
        "progress",
        "waiting_copies",
        "dead_copies",
        "shown_rate",
        "created_at",
        "finished_at",
    )
    change_form_template = "admin/django_eventbus/replay_page.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ReplayChangeList]:
        return ReplayChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the replays without the ids of single events, which may be 1,000 per replay."""
        has_ids = ExpressionWrapper(Q(event_ids__isnull=False), output_field=BooleanField())
        rows: QuerySet[Any] = super().get_queryset(request).annotate(has_ids=has_ids)
        return rows.defer("event_ids", "waits_for")

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            _add_progress([row], request, self.admin_site)
        return row

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        context = {"may_cancel": self.has_replay_permission(request), **(extra_context or {})}
        return super().change_view(request, object_id, form_url, context)

    # -- the columns

    @admin.display(description=gettext_lazy("id"))
    def shown_id(self, row: EventReplay) -> str:
        return str(row.pk)

    @admin.display(description=gettext_lazy("started by"))
    def shown_by(self, row: EventReplay) -> str:
        return one_line(row.created_by)

    @admin.display(description=gettext_lazy("events"))
    def selection(self, row: EventReplay) -> str:
        """Return the filter of the replay in words."""
        return one_line("; ".join(_selection_in_words(row)))

    @admin.display(description=gettext_lazy("event ids"))
    def shown_ids(self, row: EventReplay) -> str:
        ids = row.event_ids or []
        text = ", ".join(ids[:SHOWN_IDS])
        more = len(ids) - SHOWN_IDS
        if more > 0:
            rest = ngettext("and %(count)s more", "and %(count)s more", more)
            text += f" {rest % {'count': more}}"
        return text

    @admin.display(description=gettext_lazy("handler"))
    def shown_handler(self, row: EventReplay) -> str:
        return one_line(row.handler) or _("All handlers")

    @admin.display(description=gettext_lazy("queue"))
    def shown_queue(self, row: EventReplay) -> str:
        return one_line(row.queue) or _("the queue of each event")

    @admin.display(description=gettext_lazy("state"))
    def shown_state(self, row: EventReplay) -> str:
        done = progress_of(row)
        if done.state == ReplayState.COPIED and done.is_over:
            return _("finished")
        return str(done.state.label)

    @admin.display(description=gettext_lazy("progress"))
    def progress(self, row: EventReplay) -> str:
        done = progress_of(row)
        total = max(done.total, done.copied)
        return format_html(
            '<progress class="eventbus-bar" max="{}" value="{}" aria-label="{}"></progress> {}',
            max(total, 1),
            done.handled,
            _("Progress"),
            _("%(count)s of %(total)s") % {"count": grouped(done.handled), "total": grouped(total)},
        )

    @admin.display(description=gettext_lazy("waiting copies"))
    def waiting_copies(self, row: EventReplay) -> str:
        return _linked(Capped(progress_of(row).waiting), row, "waiting_url")

    @admin.display(description=gettext_lazy("dead copies"))
    def dead_copies(self, row: EventReplay) -> str:
        return _linked(Capped(progress_of(row).dead), row, "dead_url")

    @admin.display(description=gettext_lazy("rate"))
    def shown_rate(self, row: EventReplay) -> str:
        if row.rate is None:
            return _("not limited")
        return _("%(rate)s per second") % {"rate": localize(row.rate)}

    # -- the action

    @admin.action(description=gettext_lazy("Cancel replays"), permissions=["replay"])
    def cancel(
        self, request: HttpRequest, queryset: QuerySet[EventReplay]
    ) -> TemplateResponse | None:
        chosen = list(queryset[:MOST_AT_ONCE])
        if "confirmed" not in request.POST:
            return self._confirm_cancel(request, chosen)
        cancellation = Cancellation()
        done = self.act(request, chosen, cancellation.cancel, _("cancelled"))
        self._report_cancel(request, done, cancellation)
        return None

    def _confirm_cancel(self, request: HttpRequest, chosen: list[EventReplay]) -> TemplateResponse:
        title = ngettext("Cancel %(count)s replay?", "Cancel %(count)s replays?", len(chosen))
        return self.page(
            request,
            "cancel_replays",
            title=title % {"count": len(chosen)},
            replays=[one_line(str(row)) for row in chosen[:SHOWN_ON_CONFIRMATION]],
            more=max(0, len(chosen) - SHOWN_ON_CONFIRMATION),
            ids=[str(row.pk) for row in chosen],
        )

    def _report_cancel(self, request: HttpRequest, done: int, cancellation: Cancellation) -> None:
        text = ngettext("Cancelled %(count)s replay.", "Cancelled %(count)s replays.", done)
        level = messages.SUCCESS if done else messages.WARNING
        self.message_user(request, text % {"count": done}, level)
        if cancellation.deleted:
            text = ngettext(
                "Deleted %(count)s waiting copy.",
                "Deleted %(count)s waiting copies.",
                cancellation.deleted,
            )
            self.message_user(request, text % {"count": Grouped(cancellation.deleted)})
        if cancellation.is_incomplete:
            text = _("Copies are still in the queue. Cancel the replays again to delete them.")
            self.message_user(request, text, messages.WARNING)


class OutOfTime(Exception):
    """The request has deleted copies for SECONDS."""


class Cancellation:
    """The cancellation of several replays in one request, which takes a limited time."""

    def __init__(self) -> None:
        self.deleted = 0
        self.is_incomplete = False
        self._deadline = time.monotonic() + SECONDS

    def cancel(self, row: EventReplay) -> bool:
        """Cancel a replay and delete its copies until the deadline; False if it has ended."""
        before = self.deleted

        def report(deleted: int) -> None:
            self.deleted = before + deleted
            if time.monotonic() >= self._deadline:
                raise OutOfTime

        try:
            return replay.cancel(row, using=default_alias(), report=report)
        except OutOfTime:
            self.is_incomplete = True
            return True


def progress_of(row: EventReplay) -> ReplayStatus:
    found: ReplayStatus = row.progress_shown  # type: ignore[attr-defined]
    return found


def _add_progress(rows: Sequence[Any], request: HttpRequest, site: AdminSite) -> None:
    """Set the progress of each replay, and the URLs of the lists of its copies.

    All counts together need two queries.
    """
    ids = [row.pk for row in rows]
    store = store_for(default_alias())
    with store.reading_by_index():
        waiting = store.waiting_copies_by_replay(ids, at_most=replay.COUNTED_UP_TO)
        dead = store.dead_copies_by_replay(ids, at_most=MOST_COUNTED + 1)
    urls = {name: _list_url(model, request, site) for name, model in LISTS.items()}
    for row in rows:
        row.progress_shown = ReplayStatus(
            state=ReplayState(row.state),
            total=row.total,
            copied=row.copied,
            waiting=waiting.get(str(row.pk), 0),
            dead=dead.get(str(row.pk), 0),
        )
        for name, url in urls.items():
            setattr(row, name, f"{url}?replay={row.pk}" if url else "")


#: The attributes for the URLs of the lists of copies.
LISTS = {"waiting_url": QueuedEvent, "dead_url": DeadEvent}


def _list_url(model: type[Any], request: HttpRequest, site: AdminSite) -> str:
    if page_for(request, site, model) is None:
        return ""
    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
    return reverse(name, current_app=site.name)


def _linked(count: Capped, row: EventReplay, name: str) -> str:
    url: str = getattr(row, name)
    return format_html('<a href="{}">{}</a>', url, count) if count and url else str(count)


def _selection_in_words(row: EventReplay) -> Iterator[str]:
    if row.has_ids:  # type: ignore[attr-defined]
        text = ngettext("%(count)s selected event", "%(count)s selected events", row.total)
        yield text % {"count": Grouped(row.total)}
        return
    yield _("type: %(type)s") % {"type": row.type or "*"}
    if row.key:
        yield _("key: %(key)s") % {"key": row.key}
    if row.status:
        yield _("status: %(status)s") % {"status": row.status}
    if row.since is not None:
        yield _("ended since %(time)s") % {"time": localize(localtime(row.since))}
    yield _("ended before %(time)s") % {"time": localize(localtime(row.until))}


@admin.register(EventReplay)
class ReplayAdmin(ReplayMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
