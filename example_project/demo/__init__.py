"""What ``run.py`` is made of. The shop itself knows nothing of it."""
