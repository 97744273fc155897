"""The checks of ``event_doctor``: what is wrong with the running bus, and what fixes it."""
