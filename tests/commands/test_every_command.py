"""All commands: Django's options, missing actions, missing tables."""

import io
import pkgutil

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.core.management.base import BaseCommand
from django.db import connection

from django_eventbus.management import commands
from django_eventbus.models import MinuteStatistics, QueuedEvent
from tests.test_docs import own_options, sub_commands

#: The shortest complete form of each command.
SHORTEST = {
    "dead_events": ("list",),
    "erase_events": ("--key", "order:7"),
    "event_breakers": (),
    "event_doctor": (),
    "event_pause": (),
    "event_schedules": ("list",),
    "event_status": (),
    "publish_event": ("order.placed",),
    "purge_events": ("--older-than", "30d"),
    "replay_events": ("--list",),
    "run_event_worker": ("--drain", "--processes", "0"),
}
ACTIONS = [
    (name, action)
    for name in SHORTEST
    for action in sub_commands(
        load_command_class("django_eventbus", name).create_parser("manage.py", name)
    )
]


def test_every_command_is_tested_here():
    assert sorted(SHORTEST) == [module.name for module in pkgutil.iter_modules(commands.__path__)]


def parsed(name, *arguments):
    parser = load_command_class("django_eventbus", name).create_parser("manage.py", name)
    return parser.parse_args(arguments)


def needed(name, action):
    """The required arguments of an action."""
    return ("report",) if name == "event_schedules" and action != "list" else ()


@pytest.mark.parametrize(("name", "action"), ACTIONS)
def test_djangos_options_may_follow_the_action(name, action):
    given = parsed(
        name,
        action,
        *needed(name, action),
        *("--settings", "shop.settings", "--pythonpath", "/srv/shop", "-v", "3"),
        *("--traceback", "--no-color"),
    )
    assert (given.settings, given.pythonpath, given.verbosity) == ("shop.settings", "/srv/shop", 3)
    assert (given.traceback, given.no_color) == (True, True)


@pytest.mark.parametrize(("name", "action"), ACTIONS)
def test_djangos_options_before_the_action_keep_their_values(name, action):
    given = parsed(name, "--traceback", "-v", "0", action, *needed(name, action))
    assert (given.traceback, given.verbosity) == (True, 0)


@pytest.mark.parametrize(("name", "action"), ACTIONS)
def test_an_action_takes_every_option_that_django_has(name, action):
    parser = load_command_class("django_eventbus", name).create_parser("manage.py", name)
    django_has = own_options(BaseCommand().create_parser("manage.py", "any"))
    assert django_has <= own_options(sub_commands(parser)[action])


@pytest.mark.parametrize("name", sorted({name for name, _ in ACTIONS}))
def test_a_command_without_its_action_names_the_actions(name):
    with pytest.raises(CommandError, match=f"Name an action: list, .*Example: {name} list"):
        call_command(name)


@pytest.fixture(params=[QueuedEvent, MinuteStatistics], ids=lambda model: model.__name__)
def missing_table(request, transactional_db):
    """A missing table of the first or of a later migration."""
    model, name = request.param, request.param._meta.db_table
    with connection.schema_editor() as editor:
        editor.alter_db_table(model, name, "not_migrated")
    yield name
    with connection.schema_editor() as editor:
        editor.alter_db_table(model, "not_migrated", name)


@pytest.mark.parametrize("name", SHORTEST)
def test_without_tables_a_command_names_the_migrate_command(missing_table, name):
    with pytest.raises(CommandError, match=rf"\({missing_table} is missing\): run manage.py migra"):
        call_command(name, *SHORTEST[name], stdout=io.StringIO())
