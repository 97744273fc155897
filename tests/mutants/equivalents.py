"""Mutations that do not change the behaviour, each with the reason.

An entry names the module, the stripped text of the line and the kind of the mutation, as the table
prints them. A survivor is listed here only if no input, interleaving or crash shows a difference in
a guarantee or in a documented number; otherwise it needs a test.
"""

from __future__ import annotations

from tests.mutants.mutations import Mutation

_HEARTBEAT = (
    'self._thread = threading.Thread(target=self._run, name="eventbus-heartbeat", daemon=True)'
)
_WATCHDOG = (
    'self._thread = threading.Thread(target=self._run, name="eventbus-watchdog", daemon=True)'
)

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (path, line, what): "The thread is always joined before the process ends."
    for path, line in (("worker/registration.py", _HEARTBEAT), ("delivery/deadlines.py", _WATCHDOG))
    for what in ("True to False", "daemon= dropped")
}


def is_equivalent(mutation: Mutation) -> bool:
    return (mutation.path, mutation.line, mutation.what) in EQUIVALENT
