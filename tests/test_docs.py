"""The reference pages say what the code says."""

import ast
import dataclasses
import inspect
import pkgutil
import re
from argparse import _SubParsersAction
from pathlib import Path

import pytest
from django.core.management import load_command_class
from django.core.management.base import BaseCommand

import django_eventbus
from django_eventbus import RetryPolicy, checks, conf
from django_eventbus.management import commands

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
COMMANDS = [module.name for module in pkgutil.iter_modules(commands.__path__)]


def page(name):
    return (REFERENCE / f"{name}.md").read_text()


def rows(text):
    """The tables of a page or section: name in the first column, the rest of the row."""
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, flags=re.MULTILINE)


def documented_defaults():
    cells = ((name, re.match("`(.+?)` \\|", rest)) for name, rest in rows(page("settings")))
    return {name: ast.literal_eval(found[1]) for name, found in cells if found}


def section(text, heading):
    """From a heading to the next of any rank."""
    found = re.search(rf"^#+ {heading}$(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {heading!r}"
    return found[1]


def options_in(text):
    return {name for name, _ in rows(text) if name.startswith("--")}


def test_the_settings_page_has_every_setting_once_with_its_default():
    settings = {name: default for name, default in documented_defaults().items() if name.isupper()}
    assert settings == {name: vars(conf.Settings)[name] for name in conf.names()}
    names = [name for name, _ in rows(page("settings"))]
    assert len(names) == len(set(names))


def test_the_settings_page_has_every_argument_of_a_retry_policy():
    arguments = {name: value for name, value in documented_defaults().items() if name.islower()}
    assert arguments == dataclasses.asdict(RetryPolicy())


def test_the_example_on_the_settings_page_passes_the_checks(settings):
    example = re.search(r"```python\nEVENTBUS = (.+?)```", page("settings"), flags=re.DOTALL)
    settings.EVENTBUS = ast.literal_eval(example[1])
    assert settings.EVENTBUS
    assert checks.check_settings() == []


def test_the_checks_page_has_every_id():
    used = set(re.findall(r'"([EW]\d{3})"', inspect.getsource(checks)))
    documented = [name.removeprefix("django_eventbus.") for name, _ in rows(page("checks"))]
    assert sorted(documented) == sorted(used)


def test_the_checks_page_names_the_setting_of_each_id():
    documented = dict(rows(page("checks")))
    for setting, (number, _) in checks.RULES.items():
        assert documented[f"django_eventbus.{number}"] == f"`{setting}`"


def test_the_checks_page_has_the_sqlite_options_of_the_hint():
    example = re.search(r'"OPTIONS": (\{.+?\})', page("checks"), flags=re.DOTALL)
    assert ast.literal_eval(example[1]) == checks.SQLITE_OPTIONS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_page_has_every_option_of_every_command(command):
    parser = load_command_class("django_eventbus", command).create_parser("manage.py", command)
    text = page("commands")
    shared = options_in(section(text, command))
    assert shared | everything_django_has() >= own_options(parser)
    if not sub_commands(parser):
        assert shared == own_options(parser) - everything_django_has()
    for action, sub_parser in sub_commands(parser).items():
        documented = options_in(section(text, f"{command} {action}"))
        assert shared | documented == own_options(sub_parser)
        assert not shared & documented


def own_options(parser):
    return {
        option
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def sub_commands(parser):
    found = [action.choices for action in parser._actions if isinstance(action, _SubParsersAction)]
    return found[0] if found else {}


def everything_django_has():
    return own_options(BaseCommand().create_parser("manage.py", "any"))


def test_every_public_name_is_in_the_reference():
    text = page("api")
    assert [name for name in django_eventbus.__all__ if name not in text] == []
