# SPDX-License-Identifier: Apache-2.0
"""Instructions of our functions in one call, held to a committed baseline within 2 %.

    cmake --preset bench && cmake --build --preset bench
    python benchmarks/instructions.py [--renew]

Counts are exact where times are not. They are the compiler's as much as ours, so the baseline holds for the
compiler that it names, and with another this is skipped. --renew writes the baseline; say in the commit why
it changed.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "benchmarks/instructions.json"
DRIVER = ROOT / "build/bench/benchmarks/instructions"
SCENARIOS = ("call 1", "call 4", "call 16", "cache 2", "cache 16")
FEW, MANY = 500, 1500
ALLOWED = 1.02

Counts = dict[str, float]  # function -> instructions per call


def own_costs(profile: str) -> dict[str, int]:
    """Instructions of each function itself, from callgrind's file."""
    names: dict[str, str] = {}
    costs: dict[str, int] = {}
    current, inclusive = "", False
    for line in profile.splitlines():
        if found := re.match(r"c?fn=\((\d+)\)(?: (.*))?", line):
            number, name = found.groups()
            if name:
                names[number] = name
            if not line.startswith("c"):
                current = number
        elif line.startswith("calls="):
            inclusive = True  # the next line is the callee's cost
        elif re.match(r"[+\-*\d]\S* \d+$", line):
            if not inclusive:
                costs[current] = costs.get(current, 0) + int(line.split()[1])
            inclusive = False
    by_name: dict[str, int] = {}
    for number, cost in costs.items():
        by_name[names[number]] = by_name.get(names[number], 0) + cost
    return by_name


def is_ours(name: str) -> bool:
    # `jaxbridge::testing` is XLA's side of the call.
    other = ("fake_xla::", "bench::", "jaxbridge::testing::", "jaxbridge::v1::testing::")
    return "jaxbridge::" in name and not name.startswith(other)


def count(scenario: str) -> Counts:
    """Of one time; what comes before and after is in both runs alike."""
    profiles = []
    for times in (FEW, MANY):
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "profile"
            command = [
                "valgrind",
                "--tool=callgrind",
                "-q",
                f"--callgrind-out-file={out}",
                str(DRIVER),
            ]
            subprocess.run([*command, *scenario.split(), str(times)], check=True)
            profiles.append(own_costs(out.read_text()))
    few, many = profiles
    once = {
        n: round((cost - few.get(n, 0)) / (MANY - FEW), 1) for n, cost in many.items() if is_ours(n)
    }
    return {name: cost for name, cost in sorted(once.items()) if cost > 0}


def compiler() -> str:
    version = subprocess.run(
        ["g++", "--version"], capture_output=True, text=True, check=True
    ).stdout
    return f"{version.splitlines()[0]}, {platform.machine()}"


def short(name: str) -> str:
    """Without its arguments."""
    name = name.replace("(anonymous namespace)::", "").replace("jaxbridge::v1::", "jaxbridge::")
    return re.sub(r"\(.*", "", name)


def grown(before: Counts, now: Counts) -> list[str]:
    """The functions that take more than they may, in words."""
    return [
        f"{short(name)}: {cost:g} instructions, {before[name]:g} before ({cost / before[name] - 1:+.1%})"
        if name in before
        else f"{short(name)}: {cost:g} instructions, not there before"
        for name, cost in now.items()
        if cost > before.get(name, 0) * ALLOWED
    ]


def compare(baseline: dict[str, Counts], now: dict[str, Counts]) -> list[str]:
    """What grew, a line each. Prints the sums."""
    found = []
    for scenario, counts in now.items():
        before = baseline.get(scenario, {})
        total, total_before = sum(counts.values()), sum(before.values())
        print(f"{scenario:10s}{total:9.1f} instructions, baseline {total_before:9.1f}")
        found += [f"{scenario}: {text}" for text in grown(before, counts)]
        if total * ALLOWED < total_before:
            print(f"{'':10s}fewer than before: --renew, so that it stays")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--renew", action="store_true", help="write the baseline")
    options = parser.parse_args()
    for program, package in (("valgrind", "valgrind"), ("g++", "g++")):
        if shutil.which(program) is None:
            print(f"instruction counts: skipped, {program} is missing: apt-get install {package}")
            return 0
    if not DRIVER.exists():
        print(
            f"{DRIVER} is missing: cmake --preset bench && cmake --build --preset bench",
            file=sys.stderr,
        )
        return 1
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"compiler": None}
    if not options.renew and baseline["compiler"] != compiler():
        print("instruction counts: skipped, the baseline is of another compiler")
        print(f"  baseline: {baseline['compiler']}\n  here:     {compiler()}")
        return 0
    now = {scenario: count(scenario) for scenario in SCENARIOS}
    if options.renew:
        BASELINE.write_text(json.dumps({"compiler": compiler(), "counts": now}, indent=1) + "\n")
        print(f"written: {BASELINE.relative_to(ROOT)}")
        return 0
    if found := compare(baseline["counts"], now):
        print("\ngrew by more than 2 %:", *found, sep="\n  ")
        print(
            "\nWhere that is meant: python benchmarks/instructions.py --renew, and why in the commit."
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
