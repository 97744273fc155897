"""Write docs/howto/troubleshooting.md from the checks of event_doctor: ``make troubleshooting``.

The texts of a check are only in its code. A test fails if the page is out of date.
"""

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).parent / "howto" / "troubleshooting.md"
WIDTH = 119

INTRODUCTION = """\
# Troubleshooting

Find the cause of a symptom, and what fixes it. Run all checks first:

```console
$ python manage.py event_doctor
```

The [command](#event_doctor) runs the checks of this page on your bus. It only reads. For each
fault it prints the statement, setting or command that fixes it. A section of this page is also
printed by `python manage.py event_doctor explain EB014`.
"""

#: Commands, settings, options and calls are shown as code.
CODE = re.compile(
    r"""manage\.py\ \w+(?:\ (?:list|retry|purge|enable|disable|run|explain))?
        (?:\ --[\w-]+(?:\ \d+[dhm])?)*
    |EVENTBUS\["\w+"\](?:\ =\ \{.+?\})?
    |OPTIONS\["\w+"\]
    |@?\w[\w.]*\([^()]*\)
    |(?<![\w-])--[a-z-]+(?:=\w+)?
    |\b[A-Za-z]+(?:_[A-Za-z]+)+\b
    |\bPRAGMA\ \w+=\w+;
    """,
    re.VERBOSE,
)


def page(checks) -> str:
    rows = [f"| {code(each.symptom)} | [{each.id}](#{each.id}) |" for each in checks]
    table = "\n".join(["| Symptom | Check |", "|---|---|", *rows])
    return "\n".join([INTRODUCTION, table, "", *map(section, checks)])


def section(check) -> str:
    parts = [("Symptom", check.symptom), ("Cause", check.cause), ("Fix", check.fix)]
    if len(check.databases) == 1:
        parts.append(("Database", f"only {check.databases[0]}."))
    paragraphs = [wrapped(f"**{name}:** {code(text)}") for name, text in parts]
    return "\n\n".join([f"({check.id})=\n## {check.id}: {check.title}", *paragraphs]) + "\n"


def code(text: str) -> str:
    return CODE.sub(lambda found: f"`{found[0]}`", text)


def wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    import django

    django.setup()
    from django_eventbus.diagnosis.catalogue import CHECKS

    PAGE.write_text(page(CHECKS))
