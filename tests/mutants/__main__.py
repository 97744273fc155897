"""Run a seeded sample of mutants against the tests, and print which survived."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests import embedded_postgres
from tests.mutants.equivalents import is_equivalent
from tests.mutants.mutations import Mutation, mutations_of
from tests.mutants.selection import PACKAGE, PARTS, TESTS, databases_for

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "_build", "dist")
DATABASES = ["sqlite", "postgresql", "mariadb"]
#: Exit codes of pytest: some tests failed, or modules of tests could not be imported.
FAILED = (1, 2)


def main() -> int:
    options = parse(sys.argv[1:])
    sample = chosen(options)
    if "postgresql" in options.db and not os.environ.get("EVENTBUS_TEST_POSTGRES_URL"):
        os.environ["EVENTBUS_TEST_POSTGRES_URL"] = embedded_postgres.start()
    with tempfile.TemporaryDirectory(prefix="eventbus-mutants-") as directory:
        laboratory = Laboratory(Path(directory) / "tree", options)
        with contextlib.suppress(KeyboardInterrupt):  # Report the results so far.
            for number, (part, mutation) in enumerate(sample, 1):
                started = time.monotonic()
                result = laboratory.result_of(part, mutation)
                seconds = time.monotonic() - started
                place = f"{number:>4}/{len(sample)}"
                print(f"{place}  {result:<24} {seconds:>4.0f} s  {described(mutation)}", flush=True)
    return report(laboratory, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=50, help="size of the sample")
    parser.add_argument(
        "--db", type=names_in(DATABASES), default=DATABASES[:2], help="comma-separated, in order"
    )
    parser.add_argument(
        "--modules", type=names_in(list(PARTS)), default=list(PARTS), help="comma-separated"
    )
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds; a mutant that takes longer is killed"
    )
    return parser.parse_args(arguments)


def names_in(allowed: list[str]) -> object:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [each for each in found if each not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose from {', '.join(allowed)}")
        return found

    return names


def chosen(options: argparse.Namespace) -> list[tuple[str, Mutation]]:
    """The sample: the same for the same seed, count, modules, databases and source."""
    everything = [
        (part, mutation)
        for part in options.modules
        for path in modules_of(part)
        if databases_for(path, options.db)
        for mutation in mutations_of(path, (ROOT / PACKAGE / path).read_text())
        if not is_equivalent(mutation)
    ]
    count = min(options.count, len(everything))
    print(f"{count} of {len(everything)} mutants, SEED={options.seed} DB={','.join(options.db)}")
    return random.Random(options.seed).sample(everything, count)


def modules_of(part: str) -> Iterator[str]:
    for name in PARTS[part]:
        path = ROOT / PACKAGE / name
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        yield from (str(each.relative_to(ROOT / PACKAGE)) for each in files)


def described(mutation: Mutation) -> str:
    return f"{mutation.path}:{mutation.lineno}  {mutation.what}: {mutation.line[:70]}"


@dataclass
class Laboratory:
    """A copy of the tree in which one module at a time is changed."""

    tree: Path
    options: argparse.Namespace
    results: list[tuple[str, Mutation, str]] = field(default_factory=list)
    sound: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        shutil.copytree(ROOT, self.tree, ignore=LEFT_OUT)

    def result_of(self, part: str, mutation: Mutation) -> str:
        """``killed on …``, ``timed out on …`` or ``SURVIVED``."""
        result = "SURVIVED"
        for database in databases_for(mutation.path, self.options.db):
            self.require_sound(part, database)
            if (end := self.test_mutant(part, mutation, database)) is not None:
                result = f"{end} on {database}"
                break
        self.results.append((part, mutation, result))
        return result

    def require_sound(self, part: str, database: str) -> None:
        """Check that the tests pass without a mutation, or every mutant would look killed."""
        if (part, database) not in self.sound:
            if self.test(part, database) is not None:
                sys.exit(f"The tests of {part} fail on {database} without any mutation.")
            self.sound.add((part, database))

    def test_mutant(self, part: str, mutation: Mutation, database: str) -> str | None:
        path = self.tree / PACKAGE / mutation.path
        source = path.read_text()
        path.write_text(mutation.applied_to(source))
        try:
            return self.test(part, database)
        finally:
            path.write_text(source)

    def test(self, part: str, database: str) -> str | None:
        """``killed`` if a test failed, ``timed out``, or None if all of them passed."""
        quiet = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly")
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *quiet, "-n", str(self.options.jobs), *TESTS[part]],
            cwd=self.tree,
            env={
                **os.environ,
                "EVENTBUS_TEST_DB": database,
                "PYTHONPATH": str(self.tree),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(self.options.timeout)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            end_group(process)
        if code not in (0, *FAILED):
            return f"killed (exit code {code})"
        return "killed" if code else None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill processes that a test run left, such as the workers of a mutant that hangs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(laboratory: Laboratory, options: argparse.Namespace) -> int:
    """Print survivors and percentages. Returns the exit code: 0 if nine of ten were killed."""
    survivors = [each for _, each, result in laboratory.results if result == "SURVIVED"]
    total = Counter(part for part, _, _ in laboratory.results)
    alive = Counter(part for part, _, result in laboratory.results if result == "SURVIVED")
    print("\npart        mutants  killed")
    for part, count in total.items():
        print(f"{part:<10} {count:>8}  {100 * (count - alive[part]) / count:>5.0f}%")
    killed = 100 * (1 - len(survivors) / max(1, len(laboratory.results)))
    print(f"{'all':<10} {len(laboratory.results):>8}  {killed:>5.0f}%   SEED={options.seed}")
    for each in sorted(survivors, key=lambda each: (each.path, each.lineno)):
        print(f"survived: {described(each)}")
    return 0 if killed >= 90 else 1


if __name__ == "__main__":
    sys.exit(main())
