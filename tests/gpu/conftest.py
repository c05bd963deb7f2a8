# SPDX-License-Identifier: Apache-2.0
"""The tests that need a GPU. Without one they are skipped, with the reason."""

import importlib.util
import os

import pytest

# Other libraries allocate beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import jaxbridge
from device_arrays import spin
from jaxbridge import _from_external, _imports


def _no_cuda() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def pytest_configure(config: pytest.Config) -> None:
    # Numba warns of every small grid, and small ones are quick.
    config.addinivalue_line("filterwarnings", "ignore:.*Grid size")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_cuda()
    if reason is None:
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device: {reason}")
    for item in items:
        if os.path.dirname(__file__) in str(item.path):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _the_first_device_is_current() -> None:
    """JAX leaves that of its last program current, or of its start the last one."""
    if importlib.util.find_spec("cupy"):
        import cupy

        cupy.cuda.Device(0).use()


@pytest.fixture
def cp(needs):
    needs("cupy")
    import cupy

    return cupy


@pytest.fixture
def torch(needs):
    needs("torch")
    import torch

    return torch


@pytest.fixture
def gpu():
    return jax.devices("cuda")[0]


@pytest.fixture
def two_gpus():
    found = jax.devices("cuda")
    if len(found) < 2:
        pytest.skip("needs 2 GPUs")
    return found[:2]


@pytest.fixture
def exchange(cp, gpu, monkeypatch):
    """What happens once in a process is done, so that nobody waits for it behind a slow kernel."""
    monkeypatch.setattr(_from_external, "_placement_is_known", True)
    _imports.compute_stream(gpu)
    spin()
    cp.cuda.Device().synchronize()
    return jaxbridge.from_external
