"""The first migration says what the models say, on every database."""

import io

import pytest
from django.core.management import call_command
from django.db import connection


@pytest.mark.django_db
@pytest.mark.parametrize("auto_field", ["BigAutoField", "AutoField"])
def test_no_migration_is_missing(settings, auto_field):
    settings.DEFAULT_AUTO_FIELD = f"django.db.models.{auto_field}"
    output = io.StringIO()
    call_command("makemigrations", "django_eventbus", check=True, dry_run=True, stdout=output)
    assert "No changes detected" in output.getvalue()


@pytest.mark.django_db
def test_every_index_exists_on_every_database():
    """Partial where the database can, full where it cannot, never missing."""
    with connection.cursor() as cursor:
        found = {
            name
            for table in ("queuedevent", "eventlog", "eventlane")
            for name in connection.introspection.get_constraints(cursor, f"django_eventbus_{table}")
        }
    assert {
        "eventbus_ready",
        "eventbus_delayed",
        "eventbus_unrouted",
        "eventbus_lane",
        "eventbus_dedup",
        "eventbus_lane_key",
        "eventbus_lane_ready",
        "eventbus_log_finished",
        "eventbus_log_dead",
    } <= found


@pytest.mark.django_db(transaction=True)
def test_the_migration_can_be_printed_for_review():
    output = io.StringIO()
    call_command("sqlmigrate", "django_eventbus", "0001", stdout=output)
    assert "django_eventbus_queuedevent" in output.getvalue()
