"""The supervisor, the worker process with its dispatcher, and ``poll()`` for your own loop."""
