"""The list of worker processes and their last heartbeats. It has no actions."""

from __future__ import annotations

from django.contrib import admin
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_eventbus.admin.row_actions import RowActionsMixin, read_at, time_between
from django_eventbus.models import EventWorker


class WorkerMixin(RowActionsMixin):
    list_display = ("process", "serves", "uptime", "last_heartbeat", "state")
    ordering = ("started_at", "id")
    fields = readonly_fields = (
        "process",
        "serves",
        "started_at",
        "renewed_at",
        "expires_at",
        "last_heartbeat",
        "state",
    )

    @admin.display(description=gettext_lazy("worker"))
    def process(self, worker: EventWorker) -> str:
        return str(worker)

    @admin.display(description=gettext_lazy("queues"))
    def serves(self, worker: EventWorker) -> str:
        return ", ".join(map(str, worker.queues))

    @admin.display(description=gettext_lazy("uptime"))
    def uptime(self, worker: EventWorker) -> str:
        return time_between(worker.started_at, read_at(worker))

    @admin.display(description=gettext_lazy("last heartbeat"))
    def last_heartbeat(self, worker: EventWorker) -> str:
        return _("%(time)s ago") % {"time": time_between(worker.renewed_at, read_at(worker))}

    @admin.display(description=gettext_lazy("state"))
    def state(self, worker: EventWorker) -> str:
        if worker.expires_at > read_at(worker):
            return _("alive")
        return _("not responding: other workers take over its events")


@admin.register(EventWorker)
class WorkerAdmin(WorkerMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
