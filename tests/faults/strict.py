"""Imported by a worker that is not live as soon as a thread reports one second late."""

from django_eventbus.delivery import deadlines

deadlines.LATE_AFTER = 1.0
