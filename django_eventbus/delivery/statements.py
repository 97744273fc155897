"""Determine what a handler's SQL statement does to its transaction and its session.

This check finds a harmful statement before it is sent. If the check misses a COMMIT, PostgreSQL and
SQLite refuse the COMMIT, because the settlement is missing. On MariaDB and MySQL, the worker
detects the COMMIT afterwards (see ``GroupGuard``). The check ignores comments, and the contents of
literals, quoted names and dollar-quoted bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

#: SQL texts with more characters are not cached. The texts of Django's ORM are short and repeat,
#: because their parameters are passed separately.
LONGEST_REMEMBERED = 2000


class Effects(NamedTuple):
    """The effects of the statements of one text, apart from reading and writing rows."""

    #: Whether a statement is COMMIT, ROLLBACK, BEGIN or similar, or commits implicitly.
    ends_transaction: bool = False
    #: Whether a setting, session lock or temporary table remains after the end of the transaction.
    changes_session: bool = False
    #: Whether a setting is changed, for the session or for the transaction.
    sets: bool = False
    #: Whether the deferred constraints of the whole transaction are checked.
    checks_constraints: bool = False


def effects_of(sql: Any, connection: Any) -> Effects:
    """Return the effects of the text that the driver will send for ``sql``."""
    text = text_of(sql, connection)
    commits_implicitly = not connection.features.can_rollback_ddl
    if len(text) > LONGEST_REMEMBERED:
        return _effects(text, commits_implicitly)
    return _remembered(text, commits_implicitly)


def text_of(sql: Any, connection: Any) -> str:
    """Return a statement as a string. ``sql`` is a str, bytes, or a composed object of psycopg."""
    if isinstance(sql, str):
        return sql
    if isinstance(sql, bytes | bytearray):
        return sql.decode(errors="replace")
    if hasattr(sql, "as_string"):
        return str(sql.as_string(connection.connection))
    return str(sql)


def _effects(text: str, commits_implicitly: bool) -> Effects:
    lowered = text.lower()
    statements = list(_statements(lowered, mysql_syntax=commits_implicitly))
    ends = _ENDS_OR_COMMITS if commits_implicitly else _ENDS
    return Effects(
        ends_transaction=any(map(ends.match, statements)),
        changes_session=any(name in lowered for name in _BY_FUNCTION)
        or any(map(_CHANGES_SESSION.match, statements)),
        sets=any(map(_SETS.match, statements)),
        checks_constraints=any(map(_CHECKS_CONSTRAINTS.match, statements)),
    )


_remembered = lru_cache(maxsize=500)(_effects)


def _statements(text: str, *, mysql_syntax: bool) -> Iterator[str]:
    """Yield the statements of a text, without comments and the contents of quotes.

    The text must be in lower case already.
    """
    parts = (part.strip() for part in _without_quotes(text, mysql_syntax).split(";"))
    for part in parts:
        if _HAS_BODY.match(part):
            # Skip the statements in the body of a function or trigger: CREATE does not run them.
            for inner in parts:
                if inner.startswith("end"):
                    break
        yield part


def _without_quotes(text: str, mysql_syntax: bool) -> str:
    tokens = _MYSQL_TOKENS if mysql_syntax else _TOKENS
    if not tokens.search(text):
        return text
    code: list[str] = []
    position = 0
    while found := tokens.search(text, position):
        code.append(text[position : found.start()])
        position = found.end()
        if found[0] == "/*":
            position = _end_of_comment(text, position, nested=not mysql_syntax)
        code.append(" " if found[0][0] in "-#/*" else "''")
    code.append(text[position:])
    return "".join(code)


def _end_of_comment(text: str, position: int, *, nested: bool) -> int:
    depth = 1
    for found in _COMMENT_EDGES.finditer(text, position):
        if found[0] == "*/":
            depth -= 1
        elif nested:
            depth += 1
        if not depth:
            return found.end()
    return len(text)


_COMMENT_EDGES = re.compile(r"/\*|\*/")

# A quote without an end extends to the end of the text. A literal with a doubled quote ('it''s')
# matches as two adjacent literals.
_TOKENS = re.compile(
    r"""(?<!\w)e'(?:[^'\\]|\\.)*+(?:'|\Z) | '[^']*(?:'|\Z) | "[^"]*(?:"|\Z) | `[^`]*(?:`|\Z)
    | (?<![\w$])(\$(?:[^\W\d]\w*)?\$).*?(?:\1|\Z) | --[^\n]* | /\*""",
    re.VERBOSE | re.DOTALL,
)
# MariaDB and MySQL execute the text inside of /*! … */ and /*M! … */, so only the comment marks are
# removed.
_MYSQL_TOKENS = re.compile(
    r"""'(?:[^'\\]|\\.)*+(?:'|\Z) | "(?:[^"\\]|\\.)*+(?:"|\Z) | `[^`]*(?:`|\Z)
    | --(?=\s|\Z)[^\n]* | \#[^\n]* | /\*m?!\d* | /\* | \*/""",
    re.VERBOSE | re.DOTALL,
)

_HAS_BODY = re.compile(r"create\b.*\bbegin\b", re.DOTALL)

_END_WORDS = (
    r"commit|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b)|end|abort|begin|start\s+transaction"
    r"|prepare\s+transaction"
)
_ENDS = re.compile(rf"(?:{_END_WORDS})\b")
# This pattern adds the statements for which the manuals of MariaDB and MySQL document an implicit
# commit. Such a statement commits the transaction even if the statement itself fails. CALL and
# EXECUTE are omitted on purpose, because their text does not show whether they commit. If they do,
# the savepoint of the handler does not exist afterwards, and the group counts as lost.
_ENDS_OR_COMMITS = re.compile(
    rf"""(?:{_END_WORDS}|xa|alter|create(?!\s+(?:or\s+replace\s+)?temporary\b)
    |drop(?!\s+temporary\b)|truncate|rename|lock\s+tables?|unlock|grant|revoke
    |analyze(?!\s+(?:format|select|insert|update|delete|replace|with)\b)|optimize|check|repair
    |flush|reset|cache\s+index|load\s+index|install|uninstall|change\s+(?:master|replication)
    |(?:start|stop)\s+(?:all\s+)?(?:slaves?|replicas?|group_replication)|shutdown|import\s+table
    |set\s+(?:password|default\s+role)|set\b[^;]*\bautocommit)\b""",
    re.VERBOSE | re.DOTALL,
)
_SETS = re.compile(r"set\b")
_CHECKS_CONSTRAINTS = re.compile(r"set\s+constraints\b|pragma\s+foreign_key_check\b")
_CHANGES_SESSION = re.compile(
    r"(?:set(?!\s+(?:local|constraints|transaction)\b)|reset|discard|listen|unlisten|prepare|load"
    r"|use|attach|detach|create\s+(?:(?:or\s+replace|local|global)\s+)?temp(?:orary)?)\b"
    r"|pragma\s+[\w.]+\s*="
)
_BY_FUNCTION = ("set_config", "pg_advisory_lock", "pg_try_advisory_lock", "get_lock(")
