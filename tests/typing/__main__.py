"""Check the samples with mypy --strict and pyright: ``python -m tests.typing``.

``accepted.py`` must be free of errors. In ``refused.py`` both must report an error in every line
that is marked with ``# refused``, and in no other.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ACCEPTED, REFUSED = HERE / "accepted.py", HERE / "refused.py"

#: (name of the file, line) and the message there.
Errors = dict[tuple[str, int], str]


def main() -> int:
    wrong = [
        f"{checker.__name__}: {complaint}"
        for checker in (mypy, pyright)
        for complaint in complaints(checker())
    ]
    print("\n".join(wrong) or "mypy and pyright agree with the samples")
    return 1 if wrong else 0


def complaints(found: Errors) -> list[str]:
    expected = marked(REFUSED)
    return [
        *(f"{name}:{line}: {found[name, line]}" for name, line in sorted(found.keys() - expected)),
        *(f"{name}:{line}: no error is reported" for name, line in sorted(expected - found.keys())),
    ]


def marked(path: Path) -> set[tuple[str, int]]:
    lines = enumerate(path.read_text().splitlines(), start=1)
    return {(path.name, number) for number, text in lines if text.endswith("# refused")}


def mypy() -> Errors:
    """The project's own configuration is strict."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(ACCEPTED), str(REFUSED)]
    output = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.findall(r"^(.+?):(\d+)(?::\d+)?: error: (.+)$", output, flags=re.MULTILINE)
    return {(Path(name).name, int(line)): message for name, line, message in found}


def pyright() -> Errors:
    options = ["--outputjson", "--pythonpath", sys.executable]
    command = [sys.executable, "-m", "pyright", *options, str(ACCEPTED), str(REFUSED)]
    answer = subprocess.run(command, capture_output=True, text=True)
    try:
        reports = json.loads(answer.stdout)["generalDiagnostics"]
    except (ValueError, KeyError):
        sys.exit(f"pyright did not run: {answer.stdout}{answer.stderr}")
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1): each["message"]
        for each in reports
        if each["severity"] == "error"
    }


if __name__ == "__main__":
    sys.exit(main())
