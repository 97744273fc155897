"""Payloads as text: shortened, and with sensitive fields replaced by placeholders."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_eventbus.conf import settings

MOST_SHOWN = 20_000

_PLACEHOLDER = re.compile(r"•••••• \((\d+)\)")


@dataclass(frozen=True, slots=True)
class Shown:
    """A text for a page, and the number of characters that were cut off its end."""

    text: str
    left_out: int = 0


def shown(value: Any) -> Shown:
    text = _json(Redaction(value).public)
    # Shorten the text before printable(), which would take seconds for a huge text.
    return Shown(printable(text[:MOST_SHOWN]), max(0, len(text) - MOST_SHOWN))


def as_text(value: Any) -> str:
    return printable(_json(value))


def _json(value: Any) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False, indent=2)


def printable(text: str) -> str:
    """Return the text with an escape in place of each character that is not printable.

    Such characters are, for example, control characters and characters that change the direction of
    text. The escapes do not change the value of a JSON text, because JSON contains such characters
    only inside of strings.
    """
    return "".join(c if c.isprintable() or c in "\n " else _spelt_out(c) for c in text)


def _spelt_out(character: str) -> str:
    return json.dumps(character)[1:-1]


class MisplacedSecret(ValueError):
    """A placeholder was moved to a field that is not sensitive, or its number is unknown."""


class Redaction:
    """A value whose sensitive fields are replaced by numbered placeholders.

    The number identifies the hidden value, so an editor may move a placeholder to another
    sensitive field.
    """

    def __init__(self, value: Any) -> None:
        self._hidden: list[Any] = []
        self._words = [_normal(word) for word in settings.REDACT_FIELDS]
        self.public = self._without_secrets(value)

    def _without_secrets(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                name: self._hide(item) if self._is_sensitive(name) else self._without_secrets(item)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._without_secrets(item) for item in value]
        return value

    def _is_sensitive(self, name: str) -> bool:
        return any(word in _normal(name) for word in self._words)

    def _hide(self, value: Any) -> str:
        self._hidden.append(value)
        return f"•••••• ({len(self._hidden)})"

    def restored(self, edited: Any, *, is_hidden: bool = False) -> Any:
        """Return an edited public value with the hidden values in place of their placeholders.

        Raise MisplacedSecret for an unknown placeholder, and for a placeholder in a field that is
        not sensitive, because the page would then show the hidden value.
        """
        if isinstance(edited, dict):
            return {
                name: self.restored(item, is_hidden=is_hidden or self._is_sensitive(name))
                for name, item in edited.items()
            }
        if isinstance(edited, list):
            return [self.restored(item, is_hidden=is_hidden) for item in edited]
        found = _PLACEHOLDER.fullmatch(edited) if isinstance(edited, str) else None
        if found is None:
            return edited
        if not is_hidden:
            raise MisplacedSecret(edited)
        return self._secret(found[1], edited)

    def _secret(self, number: str, placeholder: str) -> Any:
        # int() refuses thousands of digits. No placeholder has a number of ten digits, so a number
        # of ten or more digits is replaced by 0, which is not the number of a placeholder.
        place = int(number) if len(number) < 10 else 0
        if not 1 <= place <= len(self._hidden):
            raise MisplacedSecret(placeholder)
        return self._hidden[place - 1]


def _normal(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
