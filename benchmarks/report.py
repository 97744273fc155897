"""Print the results as a table."""

from __future__ import annotations

from typing import Any


def print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['database']}, Python {report['python']}, Django {report['django']}")
    for figure in report["figures"]:
        value = figure["value"]
        whole = figure["unit"] in ("/s", "statements")
        shown = f"{value:,.0f}" if whole else f"{value:,.2f}"
        print(f"  {figure['name']:<55} {shown:>10} {figure['unit']}", flush=True)
