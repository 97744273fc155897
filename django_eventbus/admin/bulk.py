"""Doing one thing to many events: ask, do it in pieces, tell.

A page states how many are meant and by which filter. Confirmed, they are worked off in batches,
each a transaction with its entry in the history; a request does as many as it has time for and
hands the rest to the next by a form. Where a request dies, what it committed stands, and sending
the same form again does the rest.
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
from django.utils.translation import ngettext

from django_eventbus.admin import audit
from django_eventbus.admin.lists import EventChangeList, EventListMixin
from django_eventbus.admin.paging import Grouped, grouped
from django_eventbus.store import store_for

BATCH = 500
#: How long a request goes on beginning batches.
SECONDS = 3.0
A_DAY = timedelta(days=1)
MOST_SELECTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was confirmed, and how far it has come. Travels signed from page to page."""

    act: str
    #: The filter, as the list's query string; with ``ids``, only the way back to the list.
    query: str
    ids: list[int] | None = None
    #: What is younger came after the question, and is not meant.
    asked_at: str
    #: When it was confirmed; empty as long as it is only a question.
    started_at: str = ""
    expected: int = 0
    #: The filter in words, as it was confirmed.
    conditions: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    last_id: int = 0
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
    def gone(self) -> int:
        return max(0, self.expected - self.done - self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Something to do with many events. Texts are lazy; those with a number take ``count``."""

    name: str
    #: Of the admin's ``has_…_permission()``.
    permission: str
    label: Any
    label_all: Any
    question: Any
    told: Any
    do: Callable[[Sequence[uuid.UUID], Run], int]
    warning: Any = ""
    #: It cannot be undone.
    is_final: bool = False
    form: type[forms.Form] = forms.Form
    flag: int = CHANGE


class BulkMixin(EventListMixin):
    """A list whose rows, or all that match its filter, can be acted on."""

    acts: Sequence[Act] = ()
    change_list_template = "admin/django_eventbus/event_list.html"

    # -- offering it

    def __init__(self, model: type[Any], admin_site: Any) -> None:
        super().__init__(model, admin_site)
        self.actions = [*(self.actions or ()), *map(self._action_for, self.acts)]

    def offered(self, request: HttpRequest) -> list[Act]:
        return [act for act in self.acts if self._may(request, act)]

    def _may(self, request: HttpRequest, act: Act) -> bool:
        allowed: bool = getattr(self, f"has_{act.permission}_permission")(request)
        return allowed

    def _action_for(self, act: Act) -> Callable[..., HttpResponse]:
        @admin.action(permissions=[act.permission], description=act.label)
        def ask(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> HttpResponse:
            if request.POST.get("select_across") == "1":
                return self._ask_about_all(request, act)
            chosen = list(rows.values_list("pk", flat=True)[:MOST_SELECTED])
            return self._ask(request, self._counted(rows, self._run(request, act, ids=chosen)))

        ask.__name__ = act.name
        return ask

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        self._refuse_what_is_not_offered(request)
        acts = [
            {
                "label": act.label_all,
                "url": self.url_of("bulk", act.name),
                "is_final": act.is_final,
            }
            for act in self.offered(request)
        ]
        return super().changelist_view(request, {"acts": acts, **(extra_context or {})})

    def _refuse_what_is_not_offered(self, request: HttpRequest) -> None:
        """Django would only say that no action was chosen."""
        asked = request.POST.get("action")
        for action in self.actions or ():
            needed = getattr(action, "allowed_permissions", ())
            if getattr(action, "__name__", "") == asked and not any(
                getattr(self, f"has_{name}_permission")(request) for name in needed
            ):
                raise PermissionDenied

    # -- the pages

    def get_urls(self) -> list[Any]:
        # With ATOMIC_REQUESTS all batches of a request would be one transaction.
        view = partial(self.bulk_view)
        transaction.non_atomic_requests(view)
        return [self.route("bulk/<str:name>/", view, "bulk"), *super().get_urls()]

    def bulk_view(self, request: HttpRequest, name: str) -> HttpResponse:
        """GET asks about all that match the query string; POST does what was asked."""
        act = next((act for act in self.acts if act.name == name), None)
        if act is None:
            raise Http404
        self.demand_view(request)
        if not self._may(request, act):
            raise PermissionDenied
        if request.method == "POST":
            return self._go_on(request, act)
        return self._ask_about_all(request, act)

    def _ask_about_all(self, request: HttpRequest, act: Act) -> HttpResponse:
        matching = self._matching(request)
        run = self._run(request, act, conditions=matching.in_words)
        run = self._counted(matching.queryset, run)
        return self._ask(request, run, complaints=matching.complaints)

    def _matching(self, request: HttpRequest) -> EventChangeList:
        try:
            found = self.get_changelist_instance(request)
        except IncorrectLookupParameters:
            raise BadRequest("the filter cannot be read") from None
        assert isinstance(found, EventChangeList)
        return found

    @staticmethod
    def _run(request: HttpRequest, act: Act, **facts: Any) -> Run:
        now = store_for().read_clock().isoformat()
        return Run(act=act.name, query=request.GET.urlencode(), asked_at=now, **facts)

    def _counted(self, rows: QuerySet[Any], run: Run) -> Run:
        """Exactly: it is said to somebody who has to decide."""
        return replace(run, expected=self._meant(rows, run).count())

    def _meant(self, rows: QuerySet[Any], run: Run) -> QuerySet[Any]:
        asked_at = datetime.fromisoformat(run.asked_at)
        rows = rows.order_by().filter(**{f"{self.moment}__lte": asked_at}, pk__gt=run.last_id)
        return rows if run.ids is None else rows.filter(pk__in=run.ids)

    def _ask(
        self,
        request: HttpRequest,
        run: Run,
        *,
        form: forms.Form | None = None,
        complaints: Sequence[str] = (),
    ) -> TemplateResponse:
        act = self._act_of(run)
        question = act.question % {"count": Grouped(run.expected)}
        form = form or act.form()
        facts = {"title": question, "act": act, "form": form, "complaints": complaints}
        return self._page(request, "confirm", run, **facts)

    def _go_on(self, request: HttpRequest, act: Act) -> HttpResponse:
        run = self._signed(request, act)
        if run.last_id == 0:
            form = act.form(request.POST)
            if not form.is_valid():
                return self._ask(request, run, form=form)
            now = store_for().read_clock().isoformat()
            run = replace(run, options=form.cleaned_data, started_at=now)
        by_filter = run.ids is None
        rows = self._matching(request).queryset if by_filter else self.get_queryset(request)
        enough = time.monotonic() + SECONDS
        while before := self._next_batch(rows, run):
            run = self._do(request, act, run, before)
            if time.monotonic() >= enough:
                return self._show_progress(request, act, run)
        self._tell_end(request, act, run)
        return HttpResponseRedirect(self.url_of("changelist") + run.query_string)

    def _show_progress(self, request: HttpRequest, act: Act, run: Run) -> TemplateResponse:
        counts = {
            "done": grouped(run.done),
            "expected": grouped(run.expected),
            "skipped": grouped(run.skipped),
        }
        return self._page(request, "progress", run, title=act.label, act=act, **counts)

    # -- the work

    def _next_batch(self, rows: QuerySet[Any], run: Run) -> list[tuple[int, uuid.UUID]]:
        meant = self._meant(rows, run).order_by("pk")
        return list(meant.values_list("pk", "event_id")[:BATCH])

    def _do(
        self, request: HttpRequest, act: Act, run: Run, batch: list[tuple[int, uuid.UUID]]
    ) -> Run:
        def work() -> int:
            done = act.do([event_id for _, event_id in batch], run)
            if done:
                self._write_down(request, act, run, done, batch)
            return done

        done = store_for().in_transaction(work)
        return replace(
            run,
            last_id=batch[-1][0],
            done=run.done + done,
            skipped=run.skipped + len(batch) - done,
        )

    def _write_down(
        self,
        request: HttpRequest,
        act: Act,
        run: Run,
        done: int,
        batch: list[tuple[int, uuid.UUID]],
    ) -> None:
        what = [act.told % {"count": done}]
        if run.ids is None:
            what += run.conditions or [_("no filter")]
        what += [f"{name}: {value}" for name, value in run.options.items()]
        single = batch[0] if len(batch) == 1 else None
        audit.record(
            request,
            self.model,
            "; ".join(map(str, what)),
            subject=str(single[1]) if single else self._many(done),
            object_id=single and single[0],
            flag=act.flag,
        )

    def _many(self, count: int) -> str:
        return f"{count} {self.opts.verbose_name_plural}"

    def _tell_end(self, request: HttpRequest, act: Act, run: Run) -> None:
        parts = [act.told % {"count": Grouped(run.done)}]
        if run.skipped:
            skipped = ngettext("%(count)s was skipped", "%(count)s were skipped", run.skipped)
            parts.append(skipped % {"count": Grouped(run.skipped)})
        if run.gone:
            gone = ngettext("%(count)s was gone before", "%(count)s were gone before", run.gone)
            parts.append(gone % {"count": Grouped(run.gone)})
        level = messages.SUCCESS if run.done else messages.WARNING
        self.message_user(request, f"{'; '.join(map(str, parts))}.", level)

    # -- what travels

    def _signed(self, request: HttpRequest, act: Act) -> Run:
        try:
            found = signing.loads(
                request.POST.get("run", ""), salt=self._salt(request), max_age=A_DAY
            )
        except signing.BadSignature:
            raise BadRequest("this question was never asked, or too long ago") from None
        run = Run(**found)
        if run.act != act.name or run.query != request.GET.urlencode():
            raise BadRequest("this is not what was asked")
        return run

    def _salt(self, request: HttpRequest) -> str:
        """A confirmation is good for whom it was shown to."""
        return f"django_eventbus.bulk.{self.opts.model_name}.{request.user.pk}"

    def _act_of(self, run: Run) -> Act:
        return next(act for act in self.acts if act.name == run.act)

    def _page(
        self, request: HttpRequest, template: str, run: Run, **context: Any
    ) -> TemplateResponse:
        return self.page(
            request,
            template,
            run=run,
            token=signing.dumps(asdict(run), salt=self._salt(request)),
            form_url=self.url_of("bulk", run.act) + run.query_string,
            back_url=self.url_of("changelist") + run.query_string,
            **context,
        )
