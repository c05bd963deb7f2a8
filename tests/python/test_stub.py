# SPDX-License-Identifier: Apache-2.0
"""The stub of the extension module is what nanobind makes of the module that was built."""

import pathlib
import subprocess
import sys

import pytest

import jaxbridge

pytest.importorskip("nanobind", reason="needs nanobind, which make setup installs")


def test_stub_is_up_to_date(tmp_path):
    made = tmp_path / "_core.pyi"
    root = pathlib.Path(jaxbridge.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-i", str(root), "-m", "jaxbridge._core"]
        + ["-o", str(made)],
        check=True,
    )
    committed = pathlib.Path(__file__).parents[2] / "python" / "jaxbridge" / "_core.pyi"
    assert made.read_text() == committed.read_text(), (
        "run: python -m nanobind.stubgen -m jaxbridge._core -o python/jaxbridge/_core.pyi"
    )
