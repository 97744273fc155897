"""The tool finds every kind of mutation and makes no other change."""

from pathlib import Path

import pytest

import django_eventbus
from tests.mutants.equivalents import EQUIVALENT
from tests.mutants.mutations import mutations_of

SOURCE = '''"""A docstring about SELECT 1 FOR UPDATE."""
LOCK = f"""
    SELECT id FROM {queue} WHERE a = 1 AND b = 2
    ORDER BY id LIMIT 3 FOR UPDATE SKIP LOCKED"""


def work(self, event, chances):
    """Ä docstring."""
    if event.key is not None:
        self.ran = True
    logger.info("done", extra=event)
    local = chances - 1
    send(event, status="ä" + "b")
    return zip(event, chances, strict=True)
'''


def changed_lines(what):
    before = SOURCE.splitlines()
    for each in mutations_of("x.py", SOURCE):
        after = each.applied_to(SOURCE).splitlines()
        if each.what == what:
            yield from (new.strip() for old, new in zip(before, after, strict=True) if old != new)


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        ("flipped comparison", ["if (event.key is None):"]),
        ("condition to True", ["if True:"]),
        ("True to False", ["self.ran = False"]),
        ("+ and - exchanged", ["local = (chances + 1)"]),
        ("statement dropped", ["pass", "pass"]),
        ("status= dropped", ["send(event)"]),
        ("row lock dropped", ['ORDER BY id LIMIT 3 """']),
        ("SKIP LOCKED dropped", ['ORDER BY id LIMIT 3 FOR UPDATE """']),
        ("ORDER BY dropped", ['LIMIT 3 FOR UPDATE SKIP LOCKED"""']),
        ("condition dropped", ["SELECT id FROM {queue} WHERE a = 1"]),
    ],
)
def test_a_mutation_changes_one_place(what, lines):
    assert list(changed_lines(what)) == lines


def test_logging_docstrings_and_assertions_have_no_mutations():
    kinds = {each.what for each in mutations_of("x.py", SOURCE)}
    assert not kinds & {"extra= dropped", "strict= dropped"}
    assert len(kinds) == 10


def test_every_mutation_listed_as_equivalent_exists():
    package = Path(django_eventbus.__file__).parent
    found = {
        (path, each.line, each.what)
        for path in {path for path, _, _ in EQUIVALENT}
        for each in mutations_of(path, (package / path).read_text())
    }
    assert EQUIVALENT.keys() <= found
