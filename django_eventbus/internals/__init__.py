"""The undocumented parts of Django and of django-admin-rangefilter that the event bus relies on.

No code of the event bus outside of this package uses these parts. If a new version of Django or of
django-admin-rangefilter changes one of them, ``tests/test_internals.py`` fails.
"""
