# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run and write what they say. How fast anything is, no test looks at."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A script that needs no other file of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_quickly(name: str, output: Path) -> dict:
    command = [sys.executable, ROOT / f"benchmarks/{name}.py", "--quick", "--output", output]
    done = subprocess.run(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    plot = output / f"{name}_cpu.png"
    if importlib.util.find_spec("matplotlib"):
        assert plot.read_bytes().startswith(b"\x89PNG")
    else:
        assert "pip install matplotlib" in done.stdout
        assert not plot.exists()
    return json.loads((output / f"{name}_cpu.json").read_text())


def test_call_cost(tmp_path: Path) -> None:
    report = run_quickly("call_cost", tmp_path)
    assert {"date", "device", "versions", "rows", "targets"} <= set(report)
    ours = report["rows"]["jaxbridge, empty Python"]
    assert set(ours) == {"loop", "unrolled", "one", "dispatch"}
    assert all(us > 0 for us in ours.values())
    assert {t["status"] for t in report["targets"]} <= {"not built", "not measured", "needs cuda"}


def test_growth(tmp_path: Path) -> None:
    report = run_quickly("growth", tmp_path)
    for panel in report["panels"]:
        assert len(panel["lines"]) >= 2
        assert all(len(line) == 2 for line in panel["lines"].values())


def test_tables_of_the_page_are_those_of_the_results() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    assert script("tables").filled(page) == page, "run python benchmarks/tables.py"


# ---- counts of instructions ----------------------------------------------------------------------

PROFILE = """\
events: Ir
fl=(1) a.cpp
fn=(1) jaxbridge::run(int)
10 7
+1 3
cfn=(2) jaxbridge::find(int)
calls=2 20
11 100
-1 5

fn=(2)
20 60
* 40
"""


def test_own_costs_leave_out_what_is_called() -> None:
    costs = script("instructions").own_costs(PROFILE)
    assert costs == {"jaxbridge::run(int)": 15, "jaxbridge::find(int)": 100}


def test_what_stands_for_xla_is_not_counted() -> None:
    is_ours = script("instructions").is_ours
    assert is_ours("jaxbridge::v1::dispatch::decode(int)")
    assert not is_ours("jaxbridge::v1::testing::detail::stream_get(int)")
    assert not is_ours("fake_xla::run(jaxbridge::v1::status)")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (100, 102, None),
        (100, 103, "jaxbridge::find: 103 instructions, 100 before (+3.0%)"),
        (100, 50, None),
        (None, 5, "jaxbridge::find: 5 instructions, not there before"),
    ],
)
def test_what_grew_is_named(before: int | None, now: int, expected: str | None) -> None:
    baseline = {} if before is None else {"jaxbridge::find(int)": before}
    found = script("instructions").grown(baseline, {"jaxbridge::find(int)": now})
    assert found == ([] if expected is None else [expected])
