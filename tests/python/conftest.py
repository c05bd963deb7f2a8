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


@pytest.fixture
def plain_tracebacks() -> Iterator[None]:
    """JAX's filtering of tracebacks costs milliseconds each time."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.fixture
def two_devices(x: jax.Array) -> tuple[Callable[..., jax.Array], jax.Array]:
    """A program that fails on two devices at once, and an operand for it."""
    import jaxbridge
    from failing import Stubborn

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    spec = jax.sharding.PartitionSpec("i")

    def fail(v: jax.Array) -> jax.Array:
        raise Stubborn(7, reason="on a device")

    f = jaxbridge.call(fail, lambda v: v)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)), x
