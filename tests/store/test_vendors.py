"""Each supported kind of database has a store of its own; others are refused."""

import pytest
from django.db import connections

from django_eventbus import publish
from django_eventbus.exceptions import UnsupportedDatabaseError
from django_eventbus.store import Store, store_for

pytestmark = pytest.mark.django_db


def test_the_database_of_the_tests_has_its_own_store():
    assert type(store_for()) is not Store


@pytest.mark.parametrize("use", [store_for, lambda: publish("order.placed")])
def test_an_unsupported_vendor_is_refused_with_the_supported_ones(monkeypatch, use):
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    with pytest.raises(UnsupportedDatabaseError) as refused:
        use()
    assert str(refused.value) == (
        "The database 'default' is of the vendor 'oracle', which is not supported. "
        "Supported vendors: mysql, postgresql, sqlite."
    )
