"""Mutants of the engine: single-point changes of the code that a test has to notice.

``python -m tests.mutants --help``, or ``make mutants``. Not part of CI.
"""
