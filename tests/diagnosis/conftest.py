import pytest

from django_eventbus.diagnosis.catalogue import CHECKS
from django_eventbus.diagnosis.examination import Bus, examine


@pytest.fixture
def diagnose(store):
    """Run one check on the database of the test."""

    def run(check_id, *, of=None):
        (chosen,) = [each for each in CHECKS if each.id == check_id]
        (diagnosis,) = examine(Bus(of or store), [chosen])
        return diagnosis

    return run


@pytest.fixture
def now(store):
    return store.read_clock()
