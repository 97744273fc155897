"""What is shown of a payload: as much as fits a page, without what nobody should read there."""

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
    """A text for a page, and how many characters of it are left out."""

    text: str
    left_out: int = 0


def shown(value: Any) -> Shown:
    text = _json(Redaction(value).public)
    # Cut first: to look at every letter of a huge one takes seconds.
    return Shown(printable(text[:MOST_SHOWN]), max(0, len(text) - MOST_SHOWN))


def as_text(value: Any) -> str:
    return printable(_json(value))


def _json(value: Any) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False, indent=2)


def printable(text: str) -> str:
    """What would steer the reader's eye (or terminal) elsewhere is spelt out. In JSON this is
    still the same value: such characters only stand inside strings."""
    return "".join(c if c.isprintable() or c in "\n " else _spelt_out(c) for c in text)


def _spelt_out(character: str) -> str:
    return json.dumps(character)[1:-1]


class MisplacedSecret(ValueError):
    """A placeholder that cannot be replaced where it stands."""


class Redaction:
    """A value with its sensitive fields replaced by placeholders, each by one of its own: so they
    find back to what they stand for, to whichever sensitive field an editor has moved them."""

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
        """An edited public value with the secrets put back. Raises MisplacedSecret for a
        placeholder that stands for nothing, or where its secret would be shown (that is, not
        inside a field that ``is_hidden``)."""
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
        # None has as many digits as Python refuses to read.
        place = int(number) if len(number) < 10 else 0
        if not 1 <= place <= len(self._hidden):
            raise MisplacedSecret(placeholder)
        return self._hidden[place - 1]


def _normal(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
