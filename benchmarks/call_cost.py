# SPDX-License-Identifier: Apache-2.0
"""What one external call costs, beside JAX's own ways and other bridges, in one run.

    python benchmarks/call_cost.py [--quick] [--output DIRECTORY]

Every row is called in a fori_loop, unrolled 50 times, as one call that is waited for, and as dispatch
alone: medians in microseconds per call, float32[1024]. Values are checked. Then come the figures that are
to be reached. Writes call_cost_DEVICE.json and .png. What is not installed is named as missing.
"""

import argparse
from pathlib import Path
from typing import Any

from candidates import CANDIDATES, make
from measuring import WAYS, measure, medians
from plots import plot_calls
from results import RESULTS, where, write
from targets import TARGETS, Verdict, judge

QUICK = ["native add", "jaxbridge, empty Python"]


def report_of(names: list[str], quick: bool) -> dict[str, Any]:
    subjects, missing = make(names)
    samples = measure(subjects, quick)
    return {
        **where(),
        "unit": "microseconds per call, float32[1024], medians",
        "ways": {name: way.about for name, way in WAYS.items()},
        "rows": medians(samples),
        "missing": missing,
        "targets": [judge(target, samples)._asdict() for target in TARGETS],
    }


def show(report: dict[str, Any]) -> None:
    columns = ("loop", "unrolled", "one", "dispatch", "eager")
    print(f"{report['device']}, {report['date']}: {report['unit']}")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"\n{'':38s}" + "".join(f"{c:>10s}" for c in columns))
    for name, row in report["rows"].items():
        if set(row) & set(columns):
            cells = (f"{row[c]:10.2f}" if c in row else f"{'':10s}" for c in columns)
            print(f"{name:38s}" + "".join(cells).rstrip())
    for name, reason in report["missing"].items():
        print(f"{name:38s}  missing: {reason}")
    print(
        f"\n{'to be reached':44s}{'way':10s}{'at most':53s}{'us':>10s}{'allowed':>10s}{'ratio':>8s}"
    )
    for verdict in (Verdict(**v) for v in report["targets"]):
        columns = (
            (verdict.ours_us, ">10.2f"),
            (verdict.allowed_us, ">10.2f"),
            (verdict.ratio, ">8.3f"),
        )
        numbers = "".join(
            f"{'':{form[1:-3]}s}" if x is None else format(x, form) for x, form in columns
        )
        print(f"{verdict.case:44s}{verdict.way:10s}{verdict.limit:53s}{numbers}  {verdict.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two candidates, few repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    report = report_of(QUICK if options.quick else list(CANDIDATES), options.quick)
    show(report)
    plot_calls(report, write(report, options.output, "call_cost"))


if __name__ == "__main__":
    main()
