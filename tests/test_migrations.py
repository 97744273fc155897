"""The first migration matches the models on every database."""

import io

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader


@pytest.mark.django_db
@pytest.mark.parametrize("auto_field", ["BigAutoField", "AutoField"])
def test_no_migration_is_missing(settings, auto_field):
    settings.DEFAULT_AUTO_FIELD = f"django.db.models.{auto_field}"
    output = io.StringIO()
    call_command("makemigrations", "django_eventbus", check=True, dry_run=True, stdout=output)
    assert "No changes detected" in output.getvalue()


@pytest.mark.django_db
def test_every_index_exists_on_every_database():
    """Indexes are partial if the database supports it, otherwise full."""
    with connection.cursor() as cursor:
        found = {
            name
            for table in ("queuedevent", "eventlog", "eventlane", "flowcontrol", "idempotencykey")
            for name in connection.introspection.get_constraints(cursor, f"django_eventbus_{table}")
        }
    assert {
        "eventbus_ready",
        "eventbus_delayed",
        "eventbus_held",
        "eventbus_unrouted",
        "eventbus_lane",
        "eventbus_dedup",
        "eventbus_counted",
        "eventbus_idempotency_key",
        "eventbus_key_expiry",
        "eventbus_lane_key",
        "eventbus_lane_ready",
        "eventbus_log_finished",
        "eventbus_log_dead",
        "eventbus_log_handler",
        "eventbus_log_group",
        "eventbus_log_caused",
        "eventbus_caused",
        "eventbus_flow_control_name",
    } <= found


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("table", ["queuedevent", "flowcontrol"])
def test_a_migration_can_be_printed_for_review(table):
    assert f"django_eventbus_{table}" in sql_of("0001")


@pytest.mark.django_db(transaction=True)
@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="only SQLite recreates tables")
def test_no_later_migration_recreates_the_queue():
    """The ids of a new table would start below the ids in the log, and events keep their id there.

    This checks all migrations after the first one.
    """
    loader = MigrationLoader(connection)
    ours = sorted(name for app, name in loader.disk_migrations if app == "django_eventbus")
    assert ours[0] == "0001_initial"
    for name in ours[1:]:
        assert 'CREATE TABLE "new__django_eventbus_queuedevent"' not in sql_of(name), name


def sql_of(migration):
    output = io.StringIO()
    call_command("sqlmigrate", "django_eventbus", migration, stdout=output)
    return output.getvalue()
