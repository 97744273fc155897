"""Imported by a worker whose supervisor is to wait only 4 seconds for a lost answer."""

from django_eventbus.delivery import deadlines

deadlines.NO_ANSWER_AFTER = 4.0

ENVIRONMENT = {"EVENTBUS_TEST_IMPORT": __name__}
