# SPDX-License-Identifier: Apache-2.0
"""The examples beside the demo, as a user runs them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxbridge import _compat

examples = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, examples / name, *arguments],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    _compat.jax_version < (0, 8, 3), reason="JAX before 0.8.3 updates a copy of memory of the host"
)
def test_pendulums_are_balanced_in_place(tmp_path: Path) -> None:
    out = run("pendulums.py", tmp_path, "--pendulums", "64", "--steps", "250")
    found = re.findall(r"^(in place|with copies) +cost ([\d.]+) -> ([\d.]+), .*", out, re.MULTILINE)
    assert [name for name, *_ in found] == ["in place", "with copies"]
    for _, before, after in found:
        assert float(after) < float(before) / 10
    beside = [int(n) for n in re.findall(r"(\d+) KiB beside the state", out)]
    assert beside[0] <= beside[1]
    assert (tmp_path / "pendulums.png").exists() or "no plot" in out


def test_images_are_restored_through_an_fft_of_numpys(tmp_path: Path) -> None:
    out = run("fourier.py", tmp_path, "--size", "32", "--steps", "60")
    (found,) = re.findall(r"error: ([\d.]+) before, ([\d.]+) after 60 steps", out)
    assert float(found[1]) < float(found[0]) / 2
    # In the batch one call does all images, and each step takes two.
    assert re.search(r"3 images of 32 x 32 on cpu:0, 240 FFTs", out)


def test_terrain_from_a_few_heights(tmp_path: Path, needs: Callable[[str], None]) -> None:
    needs("matplotlib")  # which has the data, too
    out = run("terrain.py", tmp_path, "--points", "60", "--nu", "0.6", "1.3")
    # What is found where the gradient is right.
    found = re.findall(r"^nu ([\d.]+): .* log-likelihood ([\d.]+)$", out, re.MULTILINE)
    assert {nu: float(value) for nu, value in found} == {"0.6": 104.3, "1.3": 102.4}
    error, spread, inside = map(int, re.findall(r"(\d+) (?:m|%)[,; ]", out.splitlines()[-2] + " "))
    assert error < 0.9 * spread and inside > 80
    assert (tmp_path / "terrain.png").stat().st_size > 10_000
