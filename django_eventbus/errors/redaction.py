"""Remove credentials and the values of rows from the text of an error."""

from __future__ import annotations

import re

from django.utils.module_loading import import_string

from django_eventbus.conf import settings
from django_eventbus.errors.introspection import chain, exact, is_database_error, message, type_name
from django_eventbus.exceptions import HandlerTimeout

#: The maximum number of characters of a message that are stored.
MAX_MESSAGE = 1000
#: The maximum number of characters of a text that are searched for the values of a row.
MAX_SEARCHED = 1_000_000


def redacted(error: BaseException, text: str, limit: int = MAX_MESSAGE) -> str:
    """Return the beginning of a message or traceback, without credentials and values of rows.

    Only the first ``2 * limit`` characters are searched for credentials and passed to the project's
    function (REDACT_ERRORS). So the time of these steps does not grow with the length of the text.
    """
    try:
        text = _beginning(_without_values(error, text), 2 * limit)
        text = _without_credentials(text)
        hook = settings.REDACT_ERRORS
        return exact(import_string(hook)(text)) if hook else text
    except HandlerTimeout:
        raise
    except BaseException as broken:
        # The text may still contain values or credentials, so it is not stored.
        return f"<withheld: redacting the text raised {type_name(broken)}>"


def _beginning(text: str, limit: int) -> str:
    """Cut a long text. If the cut is inside a URL, also drop what follows "://".

    Without the "@" of the URL, the beginning of a password would not be recognized.
    """
    if len(text) <= limit:
        return text
    head = text[:limit]
    last_word = head[-1:].strip() and head.rsplit(None, 1)[-1]
    if "://" in last_word:
        head = head[: len(head) - len(last_word) + last_word.index("://") + 3]
    return f"{head}…"


def _without_credentials(text: str) -> str:
    """Hide passwords of URLs, connection strings and keyword arguments, in linear time."""
    if "://" in text:
        text = _WORD.sub(_without_url_password, text)
    return _PASSWORD.sub(r"\1…", text)


_WORD = re.compile(r"\S+")
_USER_OF_URL = re.compile(r"://[^:/@]*:")
#: A quoted password ends at the closing quote, or at the end of the text. No part of the pattern
#: can match the same text in two ways, so a search takes linear time.
_PASSWORD = re.compile(
    r"((?:password|passwd|pwd)['\"]?\s*[=:]\s*)"
    r"(?:'[^'\\]*(?:\\.[^'\\]*)*(?:'|\\?\Z)|\"[^\"\\]*(?:\\.[^\"\\]*)*(?:\"|\\?\Z)|[^\s,;&)]+)",
    re.IGNORECASE | re.DOTALL,
)


def _without_url_password(word: re.Match[str]) -> str:
    """Hide the password of a URL. The password ends at the last "@", because it may contain "@"."""
    text = word[0]
    end = text.rfind("@")
    user = _USER_OF_URL.search(text, 0, max(end, 0))
    return f"{text[: user.end()]}…{text[end:]}" if user else text


#: The places where the first line of a database error quotes a value and not a name.
_QUOTED_VALUE = re.compile(
    r"(?P<before>Duplicate entry |near |value:? |: )"
    r"(?P<quote>['\"]).*?(?:(?P=quote)(?= for | at | is out of | of type )|(?P=quote)?\)?$)"
)


def _without_values(error: BaseException, text: str) -> str:
    """Remove the values of rows from a text that contains database errors.

    The first line of each database error is kept, without the values that it quotes. The next lines
    (DETAIL, CONTEXT, the statement) are removed, because they may repeat the values of the row.
    """
    found = [message(each) for each in chain(error) if is_database_error(each)]
    if not found:
        return text
    if len(text) > MAX_SEARCHED:
        # The last line may be incomplete and would not be found in ``hidden``, so it is dropped.
        text = "".join(text[:MAX_SEARCHED].splitlines(keepends=True)[:-1]) + "…"
    hidden: set[str] = set()
    for each in found:
        first, *rest = each.splitlines() or [""]
        hidden.update(line.strip() for line in rest)
        text = text.replace(first, _QUOTED_VALUE.sub(r"\g<before>…", first))
    hidden.discard("")
    if not hidden:
        return text
    # In the traceback of an exception group, lines begin with spaces and "|".
    lines = (line for line in text.splitlines() if line.strip(" |\t") not in hidden)
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")
