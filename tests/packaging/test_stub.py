# SPDX-License-Identifier: Apache-2.0
"""The committed stub of the extension module is the one that the built module gives."""

import pathlib
import subprocess
import sys

from environments import ROOT, clean_environ


def test_stub_is_current(tmp_path: pathlib.Path) -> None:
    generated = tmp_path / "_core.pyi"
    subprocess.run(
        [
            *(sys.executable, "-m", "nanobind.stubgen", "--quiet"),
            *("--module", "jaxbridge._core", "--output-file", generated),
        ],
        check=True,
        env=clean_environ(),
        cwd=tmp_path,
    )
    committed = ROOT / "python" / "jaxbridge" / "_core.pyi"
    assert committed.exists(), "python/jaxbridge/_core.pyi is missing; run: make stubs"
    assert generated.read_text() == committed.read_text(), "out of date; run: make stubs"
