"""For a worker process whose supervisor shall not wait a minute for an answer that never comes."""

from django_eventbus import deadlines

deadlines.NO_ANSWER_AFTER = 4.0

ENVIRONMENT = {"EVENTBUS_TEST_IMPORT": __name__}
