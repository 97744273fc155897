"""The rules of docs/explanation/architecture, held with ast.

Each rule is a function from a module's syntax tree to complaints. It is tried on code that breaks
it, so that a rule that sees nothing is not taken for code that is clean.
"""

import ast
import re
from pathlib import Path

import pytest

import django_eventbus
from django_eventbus.worker import WorkerLoop

PACKAGE = Path(django_eventbus.__file__).parent
NAME = PACKAGE.name

#: A module imports only what stands above it.
ORDER = (
    "exceptions",
    "failpoints",
    "conf",
    "clock",
    "events",
    "retries",
    "pacing",
    "registry",
    "cron",
    "failures",
    "signals",
    "indexes",
    "histograms",
    "models",
    "store",
    "transactions",
    "deadlines",
    "progress",
    "backpressure",
    "publishing",
    "schedules",
    "inbox",
    "minutes",
    "batch",
    "coroutines",
    "calling",
    "admission",
    "delivery",
    "polling",
    "retention",
    "dead_letters",
    "queued",
    "lanes",
    "gates",
    "breakers",
    "status",
    "findings",
    "worker",
    "child",
    "supervisor",
)
#: They import anything, and nobody imports them but apps.py.
EDGES = ("apps", "checks", "admin", "testing", "integrations", "management")
#: The door, which fetches what it names when it is first used.
DOOR = "__init__"
#: The fixtures are another door to the helpers for tests.
DOORS_TO_EDGES = {("integrations.pytest", "testing")}
UNRULED = ("migrations",)

OPTIONAL = {
    "celery",
    "cronsim",
    "factory",
    "kombu",
    "MySQLdb",
    "opentelemetry",
    "prometheus_client",
    "psycopg",
    "psycopg2",
    "pytest",
    "redis",
}
VENDORS = {"postgresql", "sqlite", "sqlite3", "mysql", "mariadb"}
WRITES = {
    "bulk_create",
    "bulk_update",
    "cursor",
    "delete",
    "get_or_create",
    "save",
    "select_for_update",
    "update",
    "update_or_create",
}
UNSAFE_MODULES = {"dill", "marshal", "pickle", "shelve", "yaml"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH|ALTER|CREATE|DROP|TRUNCATE|NOTIFY|LISTEN|SET)\s"
)


def modules():
    """Every file of the package as (its dotted name inside the package, its path)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        dotted = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield dotted.removesuffix(".__init__"), path


def part_of(dotted):
    """``store.base`` belongs to ``store``."""
    return dotted.split(".")[0]


RULED = [(name, path) for name, path in modules() if part_of(name) not in UNRULED]
CORE = [(name, path) for name, path in RULED if part_of(name) in ORDER]


def tree_of(path):
    return ast.parse(path.read_text(), filename=str(path))


def imported(tree, importer=""):
    """(dotted module, line) of every import, also of those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                home = [NAME, *importer.split(".")][: -node.level]
                source = ".".join([*home, source]).rstrip(".")
            if source in (NAME, "django.conf"):
                yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield source, node.lineno


def parts_imported(tree, importer):
    """(part of our package, line)."""
    for dotted, line in imported(tree, importer):
        root, _, rest = dotted.partition(".")
        if root == NAME:
            yield part_of(rest) or DOOR, line


def upward_imports(tree, importer):
    me = part_of(importer)
    above = ORDER[: ORDER.index(me)]
    return [
        f"line {line}: {importer} imports {part}, which does not stand above it"
        for part, line in parts_imported(tree, importer)
        if part != me and part not in above
    ]


def edges_imported(tree, importer):
    me = part_of(importer)
    return [
        f"line {line}: {importer} imports {part}, an edge"
        for part, line in parts_imported(tree, importer)
        if part in EDGES and part != me and me != "apps" and (importer, part) not in DOORS_TO_EDGES
    ]


def settings_read(tree, importer=""):
    return [
        f"line {line}: {dotted}"
        for dotted, line in imported(tree, importer)
        if dotted == "django.conf.settings"
    ]


def optional_imports(tree, importer=""):
    return [
        f"line {line}: {dotted}"
        for dotted, line in imported(tree, importer)
        if dotted.split(".")[0] in OPTIONAL
    ]


def unsafe(tree, importer=""):
    found = [
        f"line {line}: imports {dotted}"
        for dotted, line in imported(tree, importer)
        if dotted.split(".")[0] in UNSAFE_MODULES
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in UNSAFE_CALLS
        ):
            found.append(f"line {node.lineno}: calls {node.func.id}")
    return found


def vendors_named(tree, importer=""):
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in VENDORS
    ]


def rows_written(tree, importer=""):
    """Calls like ``rows.delete()``. ``mapping.update(other)``, of one positional, is none, nor is
    ``super().save()``, by which a model refuses what others save."""
    return [
        f"line {node.lineno}: .{node.func.attr}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WRITES
        and not (node.func.attr == "update" and node.args)
        and ast.unparse(node.func) != "super().save"
    ]


def sql_made_of_strings(tree, importer=""):
    """f-strings, %, + and format() that begin like SQL."""

    def text(node):
        if isinstance(node, ast.JoinedStr):
            return text(node.values[0]) if node.values else ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        return ""

    found = []
    for node in ast.walk(tree):
        made = ""
        if isinstance(node, ast.JoinedStr):
            made = text(node)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.Add):
            made = text(node.left)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "format"
        ):
            made = text(node.func.value)
        if SQL.match(made):
            found.append(f"line {node.lineno}: {made.strip()[:30]!r}")
    return found


def put_into_sql(tree, importer=""):
    """The expressions that f-strings and format() put into SQL."""

    def is_sql(text):
        return bool(SQL.match(text) or re.search(r"\b(SELECT|WHERE|FROM|VALUES|ORDER BY)\b", text))

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(each.value for each in node.values if isinstance(each, ast.Constant))
            if is_sql(text):
                found |= {
                    ast.unparse(each.value)
                    for each in node.values
                    if isinstance(each, ast.FormattedValue)
                }
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "format"
        ):
            found |= {ast.unparse(each.value) for each in node.keywords}
    return sorted(found)


# -- the rules see what breaks them


@pytest.mark.parametrize(
    ("rule", "importer", "code"),
    [
        (upward_imports, "events", "from django_eventbus.worker import Worker"),
        (upward_imports, "events", "from django_eventbus import worker"),
        (upward_imports, "events", "import django_eventbus.worker"),
        (upward_imports, "events", "def f():\n    from django_eventbus.registry import registry"),
        (upward_imports, "store.base", "from django_eventbus.publishing import publish"),
        (upward_imports, "store.base", "from ..publishing import publish"),
        (upward_imports, "events", "from .store import base"),
        (upward_imports, "events", "from . import store"),
        (upward_imports, "worker", "from django_eventbus import publish"),
        (upward_imports, "worker", "from django_eventbus.checks import x"),
        (upward_imports, "worker", "from django_eventbus.supervisor import x"),
        (edges_imported, "management.commands.x", "from django_eventbus.testing import drain"),
        (settings_read, "worker", "from django.conf import settings"),
        (settings_read, "worker", "from django.conf import settings as s"),
        (optional_imports, "worker", "import celery.app"),
        (optional_imports, "worker", "def f():\n    from prometheus_client import Counter"),
        (unsafe, "worker", "import pickle"),
        (unsafe, "worker", "from yaml import load"),
        (unsafe, "worker", "eval('1')"),
        (unsafe, "worker", "def f():\n    exec(code)"),
        (vendors_named, "worker", "if connection.vendor == 'postgresql': pass"),
        (vendors_named, "worker", "x = {'mysql': 1}"),
        (rows_written, "worker", "event.save()"),
        (rows_written, "worker", "QueuedEvent.objects.filter(id=1).update(status='x')"),
        (rows_written, "worker", "rows.update(**changes)"),
        (rows_written, "worker", "rows.delete()"),
        (rows_written, "worker", "QueuedEvent.objects.bulk_create(rows)"),
        (rows_written, "worker", "with connection.cursor() as cursor: pass"),
        (rows_written, "worker", "rows.select_for_update(skip_locked=True)"),
        (sql_made_of_strings, "worker", "f'SELECT {column} FROM t'"),
        (sql_made_of_strings, "worker", "'DELETE FROM %s' % table"),
        (sql_made_of_strings, "worker", "'INSERT INTO ' + table"),
        (sql_made_of_strings, "worker", "'UPDATE {} SET x = 1'.format(table)"),
        (put_into_sql, "store.x", "f'SELECT a FROM t WHERE type = {type_name}'"),
        (put_into_sql, "store.x", "SOME_SQL.format(bound=user_input)"),
    ],
)
def test_a_rule_sees_what_breaks_it(rule, importer, code):
    assert rule(ast.parse(code), importer)


@pytest.mark.parametrize(
    ("rule", "importer", "code"),
    [
        (upward_imports, "worker", "from django_eventbus.events import Event"),
        (upward_imports, "worker", "from django_eventbus import failures, publishing"),
        (upward_imports, "store.base", "from django_eventbus.store.other import x"),
        (upward_imports, "store.base", "from . import other"),
        (upward_imports, "worker", "from django.db import connection"),
        (edges_imported, "apps", "from django_eventbus import checks"),
        (edges_imported, "admin.views", "from django_eventbus.admin import site"),
        (settings_read, "worker", "from django_eventbus.conf import settings"),
        (vendors_named, "worker", "x = 'MySQL has no such thing as postgresql'"),
        (rows_written, "worker", "mapping.update(other)"),
        (rows_written, "models", "super().save(*args)"),
        (sql_made_of_strings, "worker", "f'{event} was deleted'"),
        (sql_made_of_strings, "worker", "f'select one of {names}'"),
    ],
)
def test_a_rule_lets_the_rest_be(rule, importer, code):
    assert rule(ast.parse(code), importer) == []


# -- the package keeps the rules


def complaints(rule, where, *, except_in=()):
    return [
        f"{name}: {complaint}"
        for name, path in where
        if part_of(name) not in except_in
        for complaint in rule(tree_of(path), name)
    ]


def test_the_package_is_found():
    assert {"store.base", "worker", "management.commands.run_event_worker"} <= {
        name for name, _ in modules()
    }


def test_every_module_has_its_place():
    """A new module is put where it belongs in ORDER, or is an edge."""
    known = {*ORDER, *EDGES, *UNRULED, DOOR}
    assert {part_of(name) for name, _ in modules()} <= known


def test_a_module_imports_only_what_stands_above_it():
    assert complaints(upward_imports, CORE) == []


def test_nobody_imports_an_edge_but_apps():
    assert complaints(edges_imported, RULED, except_in=[DOOR]) == []


def test_only_conf_reads_the_settings_of_the_project():
    """Checks and commands speak about the project as a whole."""
    exempt = ["conf", "checks", "management"]
    assert complaints(settings_read, RULED, except_in=exempt) == []


def test_only_integrations_import_optional_libraries():
    """Nothing else may need more than Django; cron.py is the one place that knows cronsim."""
    assert complaints(optional_imports, RULED, except_in=["integrations", "cron"]) == []
    in_cron = complaints(optional_imports, [each for each in CORE if each[0] == "cron"])
    assert [each for each in in_cron if not each.endswith(": cronsim")] == []


def test_only_the_store_names_vendors():
    assert complaints(vendors_named, RULED, except_in=["store"]) == []


def test_only_the_store_locks_or_writes_rows():
    """transactions.py wraps the connection's cursor to see who touches the database; the rows of
    a bridged queryset are the project's."""
    not_ours = [each for each in RULED if each[0] != "integrations.django_querysets"]
    assert complaints(rows_written, not_ours, except_in=["store", "transactions"]) == []
    cursors_only = [
        each
        for each in complaints(rows_written, CORE)
        if each.startswith("transactions:") and not each.endswith(".cursor()")
    ]
    assert cursors_only == []


def test_sql_is_made_of_strings_only_in_the_store():
    assert complaints(sql_made_of_strings, RULED, except_in=["store"]) == []


#: What may be put into SQL beside the constants of its module.
MAY_STAND_IN_SQL = {
    # pieces of constants, where they are put together
    *("bound", "name", "way", "sql", "_READY.format(queue=QUEUE, bound=bound)"),
    "_UPDATE.format(picked='SELECT id FROM picked')",
    "'SELECT id FROM picked'",
    # quoted by Django, from its own models
    *("quote(target._meta.db_table)", "into"),
    # compiled by Django, with its parameters beside it
    *("select", "due_at"),
    # hexadecimal digits: NOTIFY and LISTEN take no parameters
    *("self._known_channel()", "channel"),
    "''",
}
CONSTANT = re.compile("_?[A-Z_]+")


def test_what_the_store_puts_into_its_sql_is_known():
    """S07: a name that is new here has to be looked at by somebody. Triggers are statements of the
    schema, made of a model's names by quoting functions of their own."""
    store = [(name, path) for name, path in RULED if part_of(name) == "store"]
    put = {
        each
        for name, path in store
        if name != "store.triggers"
        for each in put_into_sql(tree_of(path))
    }
    assert {each for each in put if not CONSTANT.fullmatch(each)} - MAY_STAND_IN_SQL == set()
    assert {"QUEUE", "select"} <= put


def test_nothing_stored_is_ever_executed():
    """No pickle, no YAML, no eval: a row of the database is data."""
    assert complaints(unsafe, list(modules())) == []


def test_no_module_is_called_utils():
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name, _ in modules() if vague & set(name.split("."))] == []


def test_every_module_says_what_it_is_for():
    silent = [
        name
        for name, path in RULED
        if path.stat().st_size and ast.get_docstring(tree_of(path)) is None
    ]
    assert silent == []


def test_the_loop_of_a_worker_fits_on_one_screen():
    tree = tree_of(PACKAGE / "worker.py")
    (run,) = [
        method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == WorkerLoop.__name__
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "run"
    ]
    assert run.end_lineno - run.lineno + 1 <= 25


def test_everything_the_door_promises_is_behind_it():
    for name in django_eventbus.__all__:
        assert getattr(django_eventbus, name).__module__.startswith(f"{NAME}.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = django_eventbus.nothing
