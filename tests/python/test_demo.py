# SPDX-License-Identifier: Apache-2.0
"""examples/deblur.py, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

demo = Path(__file__).parents[2] / "examples" / "deblur.py"


@pytest.fixture(autouse=True)
def _packages() -> None:
    for name in ("skimage", "PIL", "scipy"):
        pytest.importorskip(name, reason=f"the demo needs {name}, which is not installed")


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, demo, *arguments],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_error_falls_and_the_picture_is_written(tmp_path: Path) -> None:
    done = run(tmp_path, "--size", "128", "--iterations", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(
        float, re.findall(r"error: ([\d.]+) before, ([\d.]+) after", done.stdout)[0]
    )
    assert 0 < after < 0.75 * before
    assert len(re.findall(r"^ +\d+ of 30 iterations, error", done.stdout, re.MULTILINE)) == 3
    # The filter was called with XLA's own memory: once to blur, twice an iteration.
    assert re.search(
        r"the filter: scipy.ndimage \S+ on cpu:0, on numpy.ndarray .*; 61 calls", done.stdout
    )
    assert re.search(r"time per iteration: [\d.]+ ms", done.stdout)

    from PIL import Image

    picture = Image.open(tmp_path / "deblur.png")
    assert picture.width == 3 * 128
    assert picture.height > 128
    # Blurred, restored, original: the edges grow.
    ends = [
        picture.crop((128 * i, picture.height - 128, 128 * (i + 1), picture.height))
        for i in range(3)
    ]
    import numpy as np

    edges = [float(np.abs(np.diff(np.asarray(p, float), axis=1)).mean()) for p in ends]
    assert edges[0] < edges[1] < edges[2]


def test_no_improvement_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, "--size", "64", "--iterations", "0")
    assert done.returncode == 1, done.stdout + done.stderr


def test_iterations_need_not_be_a_multiple_of_ten(tmp_path: Path) -> None:
    done = run(tmp_path, "--size", "64", "--iterations", "13", "--output", "other.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 of 13 iterations" in done.stdout
    assert (tmp_path / "other.png").exists()


def test_without_a_photograph_it_says_what_to_install(tmp_path: Path) -> None:
    program = f"""
import runpy, sys
sys.argv = ["deblur.py"]
module = runpy.run_path({str(demo)!r})
module["photograph"].__globals__["find_spec"] = lambda name: None
module["main"]()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install scikit-image" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_platform_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--platform", "cuda")
    assert done.returncode != 0
    assert "cuda" in done.stderr
