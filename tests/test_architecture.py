"""The rules of docs/explanation/architecture, checked with ast.

Each rule is a function from a module's syntax tree to complaints. It is also tested on code that
breaks it, because a rule that reports nothing may be broken itself.
"""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

import django_eventbus
from django_eventbus.store import Settlement
from django_eventbus.worker.dispatcher import Dispatcher

PACKAGE = Path(django_eventbus.__file__).parent
NAME = PACKAGE.name

#: The parts of the package. A part imports only parts above it in this list.
ORDER = (
    "internals",
    "exceptions",
    "conf",
    "schema",
    "errors",
    "tracing",
    "events",
    "logs",
    "retries",
    "policies",
    "executors",
    "registry",
    "signals",
    "scheduling",
    "models",
    "store",
    "counters",
    "publishing",
    "schedules",
    "outcomes",
    "status",
    "statistics",
    "flow",
    "delivery",
    "worker",
    "retention",
    "replay",
    "erasure",
    "dead_letters",
    "queued",
    "lanes",
    "pauses",
    "breakers",
    "diagnosis",
)
#: The public modules and Django's conventions. Everything else is a private package.
PUBLIC_MODULES = {
    *("apps", "conf", "exceptions", "handlers", "logs", "signals", "tasks", "testing"),
    *("events", "executors", "policies", "registry", "retries"),
    *("breakers", "dead_letters", "erasure", "lanes", "pauses", "queued", "replay", "retention"),
    *("schedules", "status"),
}
#: They may import anything, and only apps.py imports them.
EDGES = ("apps", "checks", "admin", "handlers", "tasks", "testing", "integrations", "management")
#: The public module, which imports each name when it is first used.
DOOR = "__init__"
#: The pytest plugin exports the helpers for tests as fixtures. The handlers of the bus itself are
#: in its integrations, and so is the code that reads the configuration of Celery.
DOORS_TO_EDGES = {
    ("checks.executors", "integrations"),
    ("integrations.pytest", "testing"),
    ("handlers", "integrations"),
    ("tasks", "integrations"),
}
UNRULED = ("migrations",)

MOST_LINES_OF_A_MODULE = 450
MOST_LINES_OF_A_FUNCTION = 45

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
#: Undocumented attributes of Django and of django-admin-rangefilter.
INTERNALS = {
    *("atomic_blocks", "closed_in_transaction", "execute_wrappers", "needs_rollback"),
    *("run_on_commit", "savepoint_ids", "_from_testcase"),
    *("_savepoint", "_savepoint_commit", "_savepoint_rollback"),
    "_start_transaction_under_autocommit",
    *("get_connection_params", "get_new_connection"),
    *("_get_obj_does_not_exist_redirect", "_queryset_class", "_registry"),
    *("_get_form_fields", "_make_query_filter", "__from_builder"),
}
#: Attributes that may be read, but whose assignment is undocumented.
READ_ONLY = {"cursor", "in_atomic_block", "settings_dict"}
#: Names with an underscore that Django or Python document.
DOCUMENTED = {"_default_manager", "_meta", "_state", "_asdict", "_exit", "_fields", "_replace"}
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


def names_of_ours(trees):
    """The functions, classes, variables and attributes that the package itself defines."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) in ("self", "cls")
            ):
                yield node.attr


OURS = set(names_of_ours(tree_of(path) for name, path in RULED if part_of(name) != "internals"))


def internals_touched(tree, importer=""):
    """Undocumented attributes: those of INTERNALS, also by getattr() and by overriding them;
    assignments to READ_ONLY; a pool in OPTIONS; names with an underscore that are not ours."""
    return [
        f"line {node.lineno}: {touched}"
        for node in ast.walk(tree)
        if (touched := _internal_in(node))
    ]


def _internal_in(node):
    if isinstance(node, ast.Constant):
        return node.value if node.value in {*INTERNALS, "pool"} else ""
    if isinstance(node, ast.FunctionDef):
        return node.name if node.name in INTERNALS else ""
    if not isinstance(node, ast.Attribute):
        return ""
    is_foreign = node.attr.startswith("_") and not node.attr.endswith("__")
    is_changed = node.attr in READ_ONLY and not isinstance(node.ctx, ast.Load)
    if (
        node.attr in INTERNALS
        or (is_foreign and node.attr not in OURS | DOCUMENTED)
        or (is_changed and ast.unparse(node.value) != "self")
        or ast.unparse(node) == "connections.settings"
    ):
        return ast.unparse(node)
    return ""


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
    """f-strings, %, + and format() that start like SQL."""

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


# -- the rules report code that breaks them


@pytest.mark.parametrize(
    ("rule", "importer", "code"),
    [
        (upward_imports, "events", "from django_eventbus.worker.worker import Worker"),
        (upward_imports, "events", "from django_eventbus import worker"),
        (upward_imports, "events", "import django_eventbus.worker.worker"),
        (upward_imports, "events", "def f():\n    from django_eventbus.registry import registry"),
        (upward_imports, "store.base", "from django_eventbus.publishing.publisher import publish"),
        (upward_imports, "store.base", "from ..publishing import publish"),
        (upward_imports, "events", "from .store import base"),
        (upward_imports, "events", "from . import store"),
        (upward_imports, "worker", "from django_eventbus import publish"),
        (upward_imports, "worker", "from django_eventbus.checks import x"),
        (upward_imports, "flow.admission", "from django_eventbus.worker import supervisor"),
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
        (internals_touched, "worker", "connection.savepoint_ids.append(sid)"),
        (internals_touched, "worker", "len(self.connection.atomic_blocks)"),
        (internals_touched, "worker", "self.store.connection.run_on_commit = []"),
        (internals_touched, "worker", "if connection.needs_rollback: pass"),
        (internals_touched, "worker", "if connection.closed_in_transaction: pass"),
        (internals_touched, "worker", "connection.execute_wrappers.append(watch)"),
        (internals_touched, "worker", "connection.cursor = watched"),
        (internals_touched, "worker", "del connection.cursor"),
        (internals_touched, "worker", "connection.in_atomic_block = False"),
        (internals_touched, "worker", "connection.settings_dict = {}"),
        (internals_touched, "worker", "self.connection._savepoint('a')"),
        (internals_touched, "worker", "block._from_testcase"),
        (internals_touched, "worker", "getattr(connection, 'run_on_commit', [])"),
        (internals_touched, "worker", "hasattr(c, '_start_transaction_under_autocommit')"),
        (internals_touched, "worker", "connections.settings[alias]['OPTIONS'] = {}"),
        (internals_touched, "worker", "options.pop('pool', None)"),
        (internals_touched, "worker", "connection.get_new_connection({})"),
        (internals_touched, "admin.x", "site._registry.get(model)"),
        (internals_touched, "admin.x", "class F(R):\n    def _get_form_fields(self): pass"),
        (internals_touched, "admin.x", "type('F', (R,), {'__from_builder': True})"),
        (internals_touched, "worker", "queryset._result_cache"),
        (internals_touched, "worker", "self._prefetch_done"),
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
def test_a_rule_reports_code_that_breaks_it(rule, importer, code):
    assert rule(ast.parse(code), importer)


@pytest.mark.parametrize(
    ("rule", "importer", "code"),
    [
        (upward_imports, "worker", "from django_eventbus.events import Event"),
        (upward_imports, "worker", "from django_eventbus import errors, publishing"),
        (upward_imports, "store.base", "from django_eventbus.store.other import x"),
        (upward_imports, "store.base", "from . import other"),
        (upward_imports, "worker", "from django.db import connection"),
        (edges_imported, "apps", "from django_eventbus import checks"),
        (edges_imported, "admin.views", "from django_eventbus.admin import site"),
        (settings_read, "worker", "from django_eventbus.conf import settings"),
        (vendors_named, "worker", "x = 'MySQL has no such thing as postgresql'"),
        (internals_touched, "worker", "with connection.cursor() as cursor: pass"),
        (internals_touched, "worker", "if connection.in_atomic_block: pass"),
        (internals_touched, "worker", "model._meta.db_table, instance._state.adding"),
        (internals_touched, "worker", "pair._replace(a=1), super().__init__()"),
        (internals_touched, "worker", "self._on_cursor"),
        (rows_written, "worker", "mapping.update(other)"),
        (rows_written, "models", "super().save(*args)"),
        (sql_made_of_strings, "worker", "f'{event} was deleted'"),
        (sql_made_of_strings, "worker", "f'select one of {names}'"),
    ],
)
def test_a_rule_accepts_code_that_keeps_it(rule, importer, code):
    assert rule(ast.parse(code), importer) == []


# -- the package keeps the rules


def complaints(rule, where, *, except_in=()):
    return [
        f"{name}: {complaint}"
        for name, path in where
        if part_of(name) not in except_in
        for complaint in rule(tree_of(path), name)
    ]


def test_the_modules_of_the_package_are_found():
    assert {"store.base", "worker.dispatcher", "management.commands.run_event_worker"} <= {
        name for name, _ in modules()
    }


def test_every_module_is_in_the_import_order():
    """A new module has a place in ORDER or is an edge module."""
    known = {*ORDER, *EDGES, *UNRULED, DOOR}
    assert {part_of(name) for name, _ in modules()} <= known


def test_a_top_level_module_is_public_and_a_package_is_private():
    """``ls django_eventbus`` shows users what they may import."""
    top = {name for name, path in RULED if path.parent == PACKAGE}
    assert top - {DOOR} == PUBLIC_MODULES
    packages = {path.parent.name for _, path in RULED if path.name == "__init__.py"} - {NAME}
    assert packages.isdisjoint(PUBLIC_MODULES)


def test_only_the_store_imports_parts_of_the_store():
    inside = re.compile(rf"{NAME}\.store\.").match
    found = [
        f"{name}: line {line}: {dotted}"
        for name, path in RULED
        if part_of(name) != "store"
        for dotted, line in imported(tree_of(path), name)
        if inside(dotted)
    ]
    assert found == []


def test_a_module_imports_only_modules_above_it():
    assert complaints(upward_imports, CORE) == []


def test_only_apps_imports_an_edge_module():
    assert complaints(edges_imported, RULED, except_in=[DOOR]) == []


def test_only_conf_reads_the_settings_of_the_project():
    """Checks and commands are about the project as a whole."""
    exempt = ["conf", "checks", "management"]
    assert complaints(settings_read, RULED, except_in=exempt) == []


def test_only_integrations_import_optional_libraries():
    """Nothing else may need more than Django, except cron arithmetic, which uses cronsim.

    Only Celery imports the module ``tasks``.
    """
    found = complaints(optional_imports, RULED, except_in=["integrations", "tasks"])
    assert [each.split(":")[0] for each in found if each.endswith(": cronsim")] == [
        "scheduling.cron"
    ]
    assert [each for each in found if not each.endswith(": cronsim")] == []


def test_only_the_store_names_vendors():
    assert complaints(vendors_named, RULED, except_in=["store"]) == []


def test_only_internals_uses_undocumented_parts_of_django():
    assert complaints(internals_touched, RULED, except_in=["internals"]) == []


def test_internals_are_small_functions_with_a_docstring():
    functions = [
        (name, node)
        for name, path in RULED
        if part_of(name) == "internals"
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{name}.{node.name}" for name, node in functions if not ast.get_docstring(node)] == []
    assert len(functions) > 20


def test_only_the_store_locks_or_writes_rows():
    """``internals`` opens the cursors of a watched connection; the rows of a bridged queryset
    belong to the project."""
    not_ours = [each for each in RULED if each[0] != "integrations.django_querysets"]
    found = complaints(rows_written, not_ours, except_in=["store"])
    is_watched_cursor = re.compile(r"internals\.django: .*\.cursor\(\)").fullmatch
    assert [each for each in found if not is_watched_cursor(each)] == []


def test_only_the_store_builds_sql_from_strings():
    assert complaints(sql_made_of_strings, RULED, except_in=["store"]) == []


#: Expressions that may be formatted into SQL in addition to the constants of its module.
MAY_STAND_IN_SQL = {
    # Parts of constants, where they are combined.
    *("bound", "name", "way", "sql", "statement", "READY.format(queue=QUEUE, bound=bound)"),
    "UPDATE.format(picked='SELECT id FROM picked')",
    *("'SELECT id FROM picked'", "UPDATE.format(picked=UNLOCKED_RUNS)"),
    # Taken from a statement of Django.
    "table",
    # Quoted by Django, from its own models.
    *("quote(target._meta.db_table)", "into"),
    # Compiled by Django, with separate parameters.
    *("select", "due_at"),
    # hexadecimal digits: NOTIFY and LISTEN take no parameters
    *("self._known_channel()", "channel"),
    "''",
}
CONSTANT = re.compile("_?[A-Z_]+")


def test_only_known_expressions_are_formatted_into_sql():
    """S07: a new expression needs a review. Triggers are schema statements, built from a model's
    names with their own quoting functions. Remedies are shown to an operator, never executed."""
    store = [(name, path) for name, path in RULED if part_of(name) == "store"]
    put = {
        each
        for name, path in store
        if name not in ("store.triggers", "store.postgresql_remedies")
        for each in put_into_sql(tree_of(path))
    }
    assert {each for each in put if not CONSTANT.fullmatch(each)} - MAY_STAND_IN_SQL == set()
    assert {"QUEUE", "select"} <= put


def test_stored_data_is_never_executed():
    """No pickle, no YAML, no eval: a row of the database is data."""
    assert complaints(unsafe, list(modules())) == []


def test_no_module_and_no_function_is_too_long():
    """A part that grows is split by domain."""
    modules_too_long = [
        f"{name}: {lines} lines"
        for name, path in RULED
        if (lines := len(path.read_text().splitlines())) > MOST_LINES_OF_A_MODULE
    ]
    functions_too_long = [
        f"{name}.{node.name}"
        for name, path in RULED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    assert modules_too_long + functions_too_long == []


def test_no_module_is_called_utils():
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert [name for name, _ in modules() if vague & set(name.split("."))] == []


def test_every_module_has_a_docstring():
    silent = [
        name
        for name, path in RULED
        if path.stat().st_size and ast.get_docstring(tree_of(path)) is None
    ]
    assert silent == []


def test_the_loop_of_a_worker_fits_on_one_screen():
    tree = tree_of(PACKAGE / "worker" / "dispatcher.py")
    (loop,) = [
        method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == Dispatcher.__name__
        for method in node.body
        if isinstance(method, ast.FunctionDef) and any(map(is_loop, method.body))
    ]
    assert loop.name == Dispatcher._work.__name__
    assert loop.end_lineno - loop.lineno + 1 <= 25


def is_loop(node):
    return isinstance(node, ast.While) and "stopping" in ast.unparse(node.test)


def test_every_public_name_can_be_imported():
    for name in django_eventbus.__all__:
        assert getattr(django_eventbus, name).__module__.startswith(f"{NAME}.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = django_eventbus.nothing


def test_the_public_names_are_listed():
    """A shell completes names from dir() before their first use."""
    assert set(django_eventbus.__all__) <= set(dir(django_eventbus))
    assert dir(django_eventbus) == sorted(dir(django_eventbus))


def test_the_pipeline_of_a_delivery_fits_on_one_screen():
    tree = tree_of(PACKAGE / "delivery" / "deliverer.py")
    (deliver,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "deliver"
    ]
    assert deliver.end_lineno - deliver.lineno + 1 <= 30


def test_only_the_store_distinguishes_kinds_of_settlements():
    """Other parts use the attributes of a settlement: ``ends``, ``goes_on``, ``holds_lane``."""
    kinds = {each.__name__ for each in get_args(Settlement)}
    assert len(kinds) == 5
    found = [
        f"{name}: line {node.lineno}"
        for name, path in RULED
        if part_of(name) != "store"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
        if kinds & set(re.findall(r"\w+", ast.unparse(node.args[1])))
    ]
    assert found == []
