"""An executor without a broker: a test takes the messages and delivers them itself."""

import pytest

from django_eventbus.delivery import handing_off
from django_eventbus.exceptions import BrokerUnavailableError
from django_eventbus.worker.handed_off import deliver_message


class Outbox:
    """The messages that event workers have sent. With ``is_down``, they cannot be sent."""

    def __init__(self):
        self.messages = []
        self.is_down = False

    def send(self, executor, message, expires):
        if self.is_down:
            raise BrokerUnavailableError("no broker", retry_in=1.0)
        self.messages.append(message)

    def deliver(self):
        """Deliver all messages, as the workers of the executor would."""
        taken, self.messages = self.messages, []
        for message in taken:
            deliver_message(message, executor="celery")


@pytest.fixture
def outbox(monkeypatch):
    outbox = Outbox()
    monkeypatch.setattr(handing_off, "_sender", lambda path: outbox.send)
    return outbox
