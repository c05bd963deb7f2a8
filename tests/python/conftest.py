# SPDX-License-Identifier: Apache-2.0
"""The CPU tests: they run without a GPU, and on the CPU where there is one."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit types are enabled."""
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def collected() -> Callable[[], None]:
    """Clears JAX's caches and collects, so that what nobody holds is gone."""

    def collect() -> None:
        jax.clear_caches()
        gc.collect()
        gc.collect()

    return collect
