# SPDX-License-Identifier: Apache-2.0
"""The tests that need two GPUs in one machine. Without them they are skipped, with the reason."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

# Other libraries allocate beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
for folder in ("python", "gpu"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

import jax
import numpy as np


def _devices() -> list[Any]:
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


def pytest_configure(config: pytest.Config) -> None:
    # Numba warns of every small grid, and small ones are quick.
    config.addinivalue_line("filterwarnings", "ignore:.*Grid size")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (count := len(_devices())) >= 2:
        return
    skip = pytest.mark.skip(reason=f"needs two CUDA devices in one machine, there are {count}")
    for item in items:
        if os.path.dirname(__file__) in str(item.path):
            item.add_marker(skip)


@pytest.fixture
def devices() -> list[Any]:
    return _devices()[:2]


@pytest.fixture
def mesh(devices) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), ("d",))


@pytest.fixture
def cp(needs):
    needs("cupy")
    import cupy

    cupy.cuda.Device(0).use()  # JAX leaves that of its last program current
    return cupy
