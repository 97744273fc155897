"""The counters of this process, and when they are written to the database."""
