"""Find the places of a module that can be mutated, and return the mutated source.

A mutation replaces one range of characters, so the rest of the file stays as it is written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: The replacement of each comparison.
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
#: Statements whose effect can be left out.
DROPPABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)
#: Calls without a guaranteed effect: logging, and the failpoints of the tests.
IDLE_CALLS = re.compile(r"logger\.|reached\(")
SQL = re.compile(r"\b(SELECT|UPDATE|DELETE|INSERT|LOCK)\b")
#: Parts of a statement that can be left out. A quote ends a part: it ends the Python literal.
CLAUSES = {
    "row lock": re.compile(r"\s+FOR (NO KEY )?(UPDATE|SHARE)( OF \w+)?( SKIP LOCKED| NOWAIT)?"),
    "SKIP LOCKED": re.compile(r"\s+SKIP LOCKED"),
    "ORDER BY": re.compile(r"""\s+ORDER BY [^\n"')]+?(?=\s+LIMIT\b|\s+FOR\b|\n|"|'|\))"""),
    "condition": re.compile(
        r"""(?<!PRECEDING)\s+AND [^\n"'()]+?(?=\s+AND\b|\s+ORDER\b|\n|"|'|\))"""
    ),
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one module. ``line`` is the stripped text of the first line it changes."""

    path: str
    lineno: int
    line: str
    what: str
    start: int
    end: int
    text: str

    def applied_to(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutations_of(path: str, source: str) -> list[Mutation]:
    """All mutations of a module that still compile, in the order of the source."""
    found = {each for each in _Finder(path, source).find() if _compiles(each, source)}
    return sorted(found, key=lambda each: (each.start, each.end, each.what))


def _compiles(mutation: Mutation, source: str) -> bool:
    try:
        ast.parse(mutation.applied_to(source))
    except SyntaxError:
        return False
    return True


class _Finder:
    """Finds mutations in the functions of a module, and in all its SQL."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.tree = ast.parse(source)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))

    def find(self) -> Iterator[Mutation]:
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assertions = self._assertions()
        nested: set[ast.AST] = set()
        for function in ast.walk(self.tree):
            if isinstance(function, functions) and function not in nested:
                nested.update(ast.walk(function))
                for statement in function.body:
                    for node in ast.walk(statement):
                        if node not in assertions:
                            yield from self.of_node(node)
        docstrings = self._docstrings()
        for node in ast.walk(self.tree):
            if node not in docstrings:
                yield from self.of_sql(node)

    def _docstrings(self) -> set[ast.AST]:
        statements = (each for each in ast.walk(self.tree) if isinstance(each, ast.Expr))
        return {each.value for each in statements if isinstance(each.value, ast.Constant)}

    def _assertions(self) -> set[ast.AST]:
        calls = (each for each in ast.walk(self.tree) if isinstance(each, ast.Call))
        return {key.value for call in calls for key in call.keywords if _is_assertion(call, key)}

    def of_node(self, node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            flipped = FLIPPED[type(node.ops[0])]()
            changed = ast.Compare(node.left, [flipped], node.comparators)
            yield self.replaced(node, "flipped comparison", f"({ast.unparse(changed)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield self.replaced(node, f"{node.value} to {not node.value}", str(not node.value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            yield from self.of_sum(node)
        elif isinstance(node, ast.If | ast.IfExp):
            yield self.replaced(node.test, "condition to True", "True")
        elif isinstance(node, DROPPABLE):
            yield from self.of_statement(node)
        if isinstance(node, ast.Call) and not IDLE_CALLS.match(ast.unparse(node)):
            yield from self.of_call(node)

    def of_sum(self, node: ast.BinOp) -> Iterator[Mutation]:
        if any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in ast.walk(node)):
            return
        other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        changed = ast.BinOp(node.left, other, node.right)
        yield self.replaced(node, "+ and - exchanged", f"({ast.unparse(changed)})")

    def of_statement(self, node: ast.Expr | ast.stmt) -> Iterator[Mutation]:
        text = ast.unparse(node)
        if IDLE_CALLS.match(text) or isinstance(getattr(node, "value", None), ast.Yield):
            return
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
            return
        if isinstance(node, ast.Assign) and not any(map(_is_state, node.targets)):
            return  # A missing local name always fails a test.
        yield self.replaced(node, "statement dropped", "pass")

    def of_call(self, node: ast.Call) -> Iterator[Mutation]:
        for keyword in node.keywords:
            if keyword.arg is not None and not _is_assertion(node, keyword):
                others = [each for each in node.keywords if each is not keyword]
                changed = ast.Call(node.func, node.args, others)
                yield self.replaced(node, f"{keyword.arg}= dropped", ast.unparse(changed))

    def of_sql(self, node: ast.AST) -> Iterator[Mutation]:
        if not (isinstance(node, ast.JoinedStr) or _is_text(node)):
            return
        start, end = self.range_of(node)
        literal = self.source[start:end]
        if not SQL.search(literal):
            return
        for name, pattern in CLAUSES.items():
            for match in pattern.finditer(literal):
                first = start + match.start() + len(match[0]) - len(match[0].lstrip())
                yield self.mutation(f"{name} dropped", first, start + match.end(), "")

    def replaced(self, node: ast.AST, what: str, text: str) -> Mutation:
        return self.mutation(what, *self.range_of(node), text)

    def mutation(self, what: str, start: int, end: int, text: str) -> Mutation:
        lineno = self.source.count("\n", 0, start) + 1
        line = self.lines[lineno - 1].strip()
        return Mutation(self.path, lineno, line, what, start, end, text)

    def range_of(self, node: ast.AST) -> tuple[int, int]:
        """Columns of the syntax tree count bytes of UTF-8, strings count characters."""
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, lineno: int, column: int) -> int:
        before = self.lines[lineno - 1].encode()[:column]
        return self.begins[lineno - 1] + len(before.decode())


def _is_assertion(call: ast.Call, keyword: ast.keyword) -> bool:
    """``zip(strict=)`` only asserts that its arguments are of equal length."""
    return keyword.arg == "strict" and isinstance(call.func, ast.Name) and call.func.id == "zip"


def _is_state(target: ast.expr) -> bool:
    return any(isinstance(each, ast.Attribute | ast.Subscript) for each in ast.walk(target))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
