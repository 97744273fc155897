"""The tables of the bus. Only the package ``store`` locks and writes rows of these tables."""

from django_eventbus.models.counters import (
    EVENTS,
    FOLDED,
    PUBLISHING,
    RUNS,
    STARTS,
    EventCounter,
)
from django_eventbus.models.events import (
    DEAD_STATUSES,
    DeadEvent,
    DeadEventManager,
    EventFields,
    EventLog,
    LogStatus,
    QueuedEvent,
    QueuedStatus,
)
from django_eventbus.models.flow_controls import FlowControl, FlowControlKind
from django_eventbus.models.guards import GroupGuard
from django_eventbus.models.idempotency_keys import IdempotencyKey
from django_eventbus.models.lanes import EventLane
from django_eventbus.models.replays import ACTIVE_STATES, EventReplay, ReplayState
from django_eventbus.models.schedules import EventSchedule, ScheduleOrigin, this_namespace
from django_eventbus.models.workers import EventWorker, MinuteStatistics

__all__ = [
    "ACTIVE_STATES",
    "DEAD_STATUSES",
    "EVENTS",
    "FOLDED",
    "PUBLISHING",
    "RUNS",
    "STARTS",
    "DeadEvent",
    "DeadEventManager",
    "EventCounter",
    "EventFields",
    "EventLane",
    "EventLog",
    "EventReplay",
    "EventSchedule",
    "EventWorker",
    "FlowControl",
    "FlowControlKind",
    "GroupGuard",
    "IdempotencyKey",
    "LogStatus",
    "MinuteStatistics",
    "QueuedEvent",
    "QueuedStatus",
    "ReplayState",
    "ScheduleOrigin",
    "this_namespace",
]
