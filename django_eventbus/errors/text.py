"""Make text safe for a column and for a log line."""

from __future__ import annotations


def clean(text: str, limit: int) -> str:
    """Return at most ``limit`` bytes of text that every database can store.

    NUL characters and lone surrogates are escaped.
    """
    data = text[:limit].replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(data) <= limit and len(text) <= limit:
        return data.decode()
    return data[: max(0, limit - 3)].decode("utf-8", "ignore") + "…"


def one_line(text: str, limit: int = 300) -> str:
    """Return text as one printable line, which cannot forge log records or control a terminal."""
    printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return printable if len(text) <= limit else f"{printable[:limit]}…"
