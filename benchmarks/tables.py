# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md from the committed results: python benchmarks/tables.py.

A table stands between `<!-- table: KIND FILE -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results"


def lines(rows: list[list[str]]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rest])


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def caption(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"{report['device']}, {report['date']}; {versions}.\n\n"


def calls(report: dict[str, Any]) -> str:
    ways = ("loop", "unrolled", "one", "dispatch", "eager")
    rows = [[name, *(number(row.get(way)) for way in ways)] for name, row in report["rows"].items()]
    return caption(report) + lines([["us per call", *ways], *(r for r in rows if any(r[1:]))])


def targets(report: dict[str, Any]) -> str:
    rows = [["case", "called", "at most", "us", "allowed", "ratio", ""]]
    for t in report["targets"]:
        if t["ours_us"] is not None:
            figures = (number(t[key]) for key in ("ours_us", "allowed_us", "ratio"))
            rows.append([t["case"], t["way"], t["limit"], *figures, t["status"]])
    return lines(rows)


def growth(report: dict[str, Any]) -> str:
    parts = []
    for panel in report["panels"]:
        sizes = list(next(iter(panel["lines"].values())))
        rows = [[f"{panel['y']}; {panel['x']}:", *sizes]]
        rows += [[name, *map(number, line.values())] for name, line in panel["lines"].items()]
        parts.append(lines(rows))
    return caption(report) + "\n\n".join(parts)


KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "calls": calls,
    "targets": targets,
    "growth": growth,
}


def filled(page: str) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        report = json.loads((RESULTS / found[3]).read_text())
        return f"{found[1]}\n{KINDS[found[2]](report)}\n<!-- end -->"

    return re.sub(r"(<!-- table: (\w+) (\S+) -->)\n.*?<!-- end -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
