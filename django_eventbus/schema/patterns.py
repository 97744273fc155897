"""Patterns of names: ``order.*`` matches ``order.placed``."""

from __future__ import annotations


def matches(pattern: str, type_name: str) -> bool:
    """Return whether a name matches a pattern.

    ``*`` matches one or more characters, including dots; no other character is special. The
    literal pieces are searched from left to right, so the time is linear in the length of the name.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == type_name
    if not type_name.startswith(first):
        return False
    position = len(first)
    *middle, last = rest
    for piece in middle:
        if not piece:
            continue  # Several stars in a row mean the same as one star.
        position = type_name.find(piece, position + 1)
        if position < 0:
            return False
        position += len(piece)
    return len(type_name) - len(last) > position and type_name.endswith(last)


def by_specificity(pattern: str) -> tuple[bool, int]:
    """Return a sort key: exact names before patterns, long patterns before short patterns."""
    return "*" in pattern, -len(pattern.replace("*", ""))
