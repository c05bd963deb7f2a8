# SPDX-License-Identifier: Apache-2.0
"""Tests of calls on CUDA without a GPU, on the fake driver of tests/cpp.

The driver is chosen once for a process, so they have a process of their own:
`JAXBRIDGE_FAKES=build/.../tests/cpp pytest tests/fake_gpu`, as `make test` does.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))  # fake_cuda

_fakes = os.environ.get("JAXBRIDGE_FAKES")
_missing = None
if not _fakes:
    _missing = "JAXBRIDGE_FAKES names no build of tests/cpp"
elif not Path(_fakes, "libfake_xla.so").exists():
    _missing = f"{_fakes} has no libfake_xla.so"
else:
    os.environ["JAXBRIDGE_CUDA_DRIVER"] = str(Path(_fakes, "libfake_cuda.so").resolve())

collect_ignore_glob = ["test_*.py"] if _missing else []


def pytest_configure(config: pytest.Config) -> None:
    if _missing:
        raise pytest.UsageError(f"tests/fake_gpu: {_missing}")
