"""The parts of ``run.py``. The shop itself does not import them."""
