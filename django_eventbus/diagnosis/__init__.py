"""The checks of ``event_doctor``, which find faults of the running bus and name their fixes."""
