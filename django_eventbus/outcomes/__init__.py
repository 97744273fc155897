"""The run of one event: its due handlers, their outcomes, and the settlement."""
