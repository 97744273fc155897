"""Make the Nth statement fail: before it is sent, or after execution with a lost answer.

The method is that of SQLite's own I/O tests: fail the first statement, then the second, and so on,
until a run completes without a fault.
"""

from contextlib import contextmanager

from django.db import OperationalError, connection


class NthStatement:
    """An execute wrapper that breaks the connection at one statement."""

    def __init__(self, nth, *, answer_lost=False):
        self.left = nth
        self.answer_lost = answer_lost
        self.hit = None

    def __call__(self, execute, sql, params, many, context):
        self.left -= 1
        if self.left != 0:
            return execute(sql, params, many, context)
        self.hit = str(sql)
        if self.answer_lost:
            execute(sql, params, many, context)
        context["connection"].connection.close()
        raise OperationalError(f"the connection is lost: {self.hit[:60]}")


@contextmanager
def failing(nth, *, answer_lost=False):
    """Fail a statement of this thread."""
    fault = NthStatement(nth, answer_lost=answer_lost)
    with connection.execute_wrapper(fault):
        yield fault


def sweep(prepare, run, check, *, answer_lost=False, at_most=300):
    """Call ``run`` with its first statement failing, then its second, until none fails.

    ``prepare`` runs before and ``check(what failed)`` after each call, without faults.
    """
    for nth in range(1, at_most):
        prepare()
        with failing(nth, answer_lost=answer_lost) as fault:
            run()
        connection.close()
        check(fault.hit)
        if fault.hit is None:
            return nth - 1
    raise AssertionError(f"after {at_most} statements there was still one to fail")
