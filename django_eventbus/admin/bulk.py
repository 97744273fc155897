"""Bulk actions: confirm, process in batches, report.

A confirmation page shows the number of events and the filter. After the confirmation the events are
processed in batches; each batch is a transaction that includes its entry in the admin's history. A
request starts batches for a few seconds. If events remain, its response contains a form that starts
the next request. If a request fails, its committed batches are kept, and the user can send the same
form again to process the remaining events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE
from django.contrib.admin.options import IncorrectLookupParameters
from django.core import signing
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_eventbus.admin import audit
from django_eventbus.admin.lists import EventChangeList, EventListMixin
from django_eventbus.admin.paging import Grouped, grouped
from django_eventbus.store import LOWEST_ID, store_for

BATCH = 500
#: The seconds during which a request starts new batches.
SECONDS = 3.0
A_DAY = timedelta(days=1)
MOST_SELECTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRun:
    """An action, its events and its progress.

    The confirmation page and the progress page contain this data in a signed form field.
    """

    action: str
    #: The filter as a query string. If ``ids`` is given, the ids select the events, and the filter
    #: is only needed to return to the same list.
    query: str
    ids: list[int] | None = None
    #: The time at which the confirmation page was shown. Newer events are not processed.
    asked_at: str
    #: The time at which the user confirmed the action; empty before the confirmation.
    started_at: str = ""
    expected: int = 0
    #: The filter in words, as the confirmation showed it.
    conditions: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    #: The name of the user who sent the request. It is set only for ``BulkAction.perform``.
    by: str = ""
    last_id: int = LOWEST_ID
    done: int = 0
    skipped: int = 0

    @property
    def seconds_since_start(self) -> float:
        started_at = datetime.fromisoformat(self.started_at)
        return (store_for().read_clock() - started_at).total_seconds()

    @property
    def query_string(self) -> str:
        return f"?{self.query}" if self.query else ""

    @property
    def missing(self) -> int:
        """The number of events that left the list between the confirmation page and their batch."""
        return max(0, self.expected - self.done - self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkAction:
    """An action on many events.

    The texts are lazy translations; ``question`` and ``result`` contain the placeholder ``count``.
    """

    name: str
    #: The name of the permission in the method ``has_…_permission()``.
    permission: str
    label: Any
    label_all: Any
    question: Any
    result: Any
    #: Why an event of a batch may be skipped.
    skip_reason: Any
    perform: Callable[[Sequence[uuid.UUID], BulkRun], int]
    warning: Any = ""
    #: Whether the action cannot be undone.
    is_final: bool = False
    form: type[forms.Form] = forms.Form
    flag: int = CHANGE


class BulkMixin(EventListMixin):
    """A list with actions on selected rows, or on all rows that match the filter."""

    bulk_actions: Sequence[BulkAction] = ()
    change_list_template = "admin/django_eventbus/event_list.html"

    # -- the offered actions

    def __init__(self, model: type[Any], admin_site: Any) -> None:
        super().__init__(model, admin_site)
        self.actions = [*(self.actions or ()), *map(self._action_for, self.bulk_actions)]

    def offered_actions(self, request: HttpRequest) -> list[BulkAction]:
        return [action for action in self.bulk_actions if self._may(request, action)]

    def action_links(self, request: HttpRequest, query: str = "") -> list[dict[str, Any]]:
        """Return the links that templates show for the actions."""
        return [
            {
                "label": action.label,
                "label_all": action.label_all,
                "url": self.url_of("bulk", action.name) + query,
                "is_final": action.is_final,
            }
            for action in self.offered_actions(request)
        ]

    def _may(self, request: HttpRequest, action: BulkAction) -> bool:
        allowed: bool = getattr(self, f"has_{action.permission}_permission")(request)
        return allowed

    def _action_for(self, action: BulkAction) -> Callable[..., HttpResponse]:
        @admin.action(permissions=[action.permission], description=action.label)
        def ask(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse:
            if request.POST.get("select_across") == "1":
                return self._confirm_all(request, action)
            ids = list(rows.values_list("pk", flat=True)[:MOST_SELECTED])
            run = self._new_run(request, action, ids=ids)
            return self._confirm(request, self._with_count(rows, run))

        ask.__name__ = action.name
        return ask

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        self._refuse_forbidden_action(request)
        context = {"bulk_actions": self.action_links(request), **(extra_context or {})}
        return super().changelist_view(request, context)

    def _refuse_forbidden_action(self, request: HttpRequest) -> None:
        """Raise PermissionDenied if the request asks for an action that the user may not run.

        Without this method, Django would only report that no action was selected.
        """
        asked = request.POST.get("action")
        for action in self.actions or ():
            needed = getattr(action, "allowed_permissions", ())
            if getattr(action, "__name__", "") == asked and not any(
                getattr(self, f"has_{name}_permission")(request) for name in needed
            ):
                raise PermissionDenied

    # -- the pages

    def get_urls(self) -> list[Any]:
        # With ATOMIC_REQUESTS all batches of a request would be one transaction, so this view is
        # excluded from that setting.
        view = partial(self.bulk_view)
        transaction.non_atomic_requests(view)
        return [self.route("bulk/<str:name>/", view, "bulk"), *super().get_urls()]

    def bulk_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """Show the confirmation page for all matching events (GET), or run an action (POST)."""
        action = next((each for each in self.bulk_actions if each.name == name), None)
        if action is None:
            raise Http404
        self.demand_view(request)
        if not self._may(request, action):
            raise PermissionDenied
        if request.method == "POST":
            return self._process(request, action)
        return self._confirm_all(request, action)

    def _confirm_all(self, request: HttpRequest, action: BulkAction) -> HttpResponse:
        matching = self._matching(request)
        run = self._new_run(request, action, conditions=matching.in_words)
        run = self._with_count(matching.queryset, run)
        return self._confirm(request, run, complaints=matching.complaints)

    def _matching(self, request: HttpRequest) -> EventChangeList:
        try:
            found = self.get_changelist_instance(request)
        except IncorrectLookupParameters:
            raise BadRequest("The filter in the address is invalid.") from None
        assert isinstance(found, EventChangeList)
        return found

    @staticmethod
    def _new_run(request: HttpRequest, action: BulkAction, **facts: Any) -> BulkRun:
        now = store_for().read_clock().isoformat()
        return BulkRun(action=action.name, query=request.GET.urlencode(), asked_at=now, **facts)

    def _with_count(self, rows: QuerySet[Any], run: BulkRun) -> BulkRun:
        """Add the exact number of events, because the operator's decision depends on it."""
        with store_for(rows.db).reading_by_index(may_sort=True):
            return replace(run, expected=self._remaining(rows, run).count())

    def _remaining(self, rows: QuerySet[Any], run: BulkRun) -> QuerySet[Any]:
        asked_at = datetime.fromisoformat(run.asked_at)
        rows = rows.order_by().filter(**{f"{self.moment}__lte": asked_at}, pk__gt=run.last_id)
        return rows if run.ids is None else rows.filter(pk__in=run.ids)

    def _confirm(
        self,
        request: HttpRequest,
        run: BulkRun,
        *,
        form: forms.Form | None = None,
        complaints: Sequence[str] = (),
    ) -> TemplateResponse:
        action = next(each for each in self.bulk_actions if each.name == run.action)
        question = action.question % {"count": Grouped(run.expected)}
        form = form or action.form()
        facts = {"title": question, "action": action, "form": form, "complaints": complaints}
        return self._page(request, "confirm", run, **facts)

    def _process(self, request: HttpRequest, action: BulkAction) -> HttpResponse:
        run = self._signed_run(request, action)
        if run.last_id == LOWEST_ID:
            form = action.form(request.POST)
            if not form.is_valid():
                return self._confirm(request, run, form=form)
            now = store_for().read_clock().isoformat()
            run = replace(run, options=form.cleaned_data, started_at=now)
        by_filter = run.ids is None
        rows = self._matching(request).queryset if by_filter else self.get_queryset(request)
        deadline = time.monotonic() + SECONDS
        while batch := self._next_batch(rows, run):
            run = self._process_batch(request, action, run, batch)
            if time.monotonic() >= deadline:
                return self._show_progress(request, action, run)
        self._report(request, action, run)
        return HttpResponseRedirect(self.url_of("changelist") + run.query_string)

    def _show_progress(
        self, request: HttpRequest, action: BulkAction, run: BulkRun
    ) -> TemplateResponse:
        counts = {
            "done": grouped(run.done),
            "expected": grouped(run.expected),
            "skipped": grouped(run.skipped),
        }
        return self._page(request, "progress", run, title=action.label, **counts)

    # -- batches

    def _next_batch(self, rows: QuerySet[Any], run: BulkRun) -> list[tuple[int, uuid.UUID]]:
        remaining = self._remaining(rows, run).order_by("pk")
        return list(remaining.values_list("pk", "event_id")[:BATCH])

    def _process_batch(
        self,
        request: HttpRequest,
        action: BulkAction,
        run: BulkRun,
        batch: list[tuple[int, uuid.UUID]],
    ) -> BulkRun:
        def work() -> int:
            by = request.user.get_username()
            done = action.perform([event_id for _, event_id in batch], replace(run, by=by))
            if done:
                self._record_batch(request, action, run, done, batch)
            return done

        done = store_for().in_transaction(work)
        return replace(
            run,
            last_id=batch[-1][0],
            done=run.done + done,
            skipped=run.skipped + len(batch) - done,
        )

    def _record_batch(
        self,
        request: HttpRequest,
        action: BulkAction,
        run: BulkRun,
        done: int,
        batch: list[tuple[int, uuid.UUID]],
    ) -> None:
        what = [action.result % {"count": done}]
        if run.ids is None:
            what += run.conditions or [_("no filter")]
        what += [f"{name}: {value}" for name, value in run.options.items()]
        single = batch[0] if len(batch) == 1 else None
        audit.record(
            request,
            self.model,
            "; ".join(map(str, what)),
            subject=str(single[1]) if single else f"{done} {self.opts.verbose_name_plural}",
            object_id=single and single[0],
            flag=action.flag,
        )

    def _report(self, request: HttpRequest, action: BulkAction, run: BulkRun) -> None:
        text = str(action.result % {"count": Grouped(run.done)})
        if run.missing:
            facts = {"result": text, "count": Grouped(run.missing)}
            text = _("%(result)s, %(count)s no longer in the list") % facts
        if run.skipped:
            facts = {"result": text, "count": Grouped(run.skipped), "why": action.skip_reason}
            text = _("%(result)s, %(count)s skipped: %(why)s") % facts
        level = messages.SUCCESS if run.done else messages.WARNING
        self.message_user(request, _("%(result)s.") % {"result": text}, level)

    # -- the signed run

    def _signed_run(self, request: HttpRequest, action: BulkAction) -> BulkRun:
        try:
            found = signing.loads(
                request.POST.get("run", ""), salt=self._salt(request), max_age=A_DAY
            )
        except signing.BadSignature:
            raise BadRequest("The confirmation is missing or has expired.") from None
        run = BulkRun(**found)
        if run.action != action.name or run.query != request.GET.urlencode():
            raise BadRequest("The confirmation is for another action or filter.")
        return run

    def _salt(self, request: HttpRequest) -> str:
        """Return a salt per user, so that a confirmation is valid only for the user who got it."""
        return f"django_eventbus.bulk.{self.opts.model_name}.{request.user.pk}"

    def _page(
        self, request: HttpRequest, template: str, run: BulkRun, **context: Any
    ) -> TemplateResponse:
        return self.page(
            request,
            template,
            run=run,
            token=signing.dumps(asdict(run), salt=self._salt(request)),
            form_url=self.url_of("bulk", run.action) + run.query_string,
            back_url=self.url_of("changelist") + run.query_string,
            **context,
        )
