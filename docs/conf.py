"""How Sphinx builds this documentation: make docs."""

from importlib import metadata

project = "django-durable-events"
author = "django-durable-events contributors"
copyright = f"2026, {author}"
release = metadata.version(project)

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output

exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"{project} {release}"
