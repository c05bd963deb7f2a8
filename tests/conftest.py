# SPDX-License-Identifier: Apache-2.0
"""What all Python tests share: eight virtual CPU devices, and how a test says what it needs."""

import gc
import importlib.util
import os
from collections.abc import Callable

import pytest

# Before JAX is imported anywhere. A GPU run sets the platforms itself.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")


@pytest.fixture
def needs() -> Callable[[str], None]:
    """Skips the test, with the name, where a package is not installed."""

    def check(name: str) -> None:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which is not installed (make frameworks)")

    return check


@pytest.fixture(autouse=True)
def _collections_search_what_a_test_made() -> None:
    """What is there before is left alone: half a million objects of JAX and others, a second each time."""
    gc.collect()
    gc.freeze()
