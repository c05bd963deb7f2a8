# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that is not JAX's, for tests that have it updated in place."""

import numpy as np
import pytest

import jaxbridge
from jaxbridge import _compat

# JAX before 0.8.3 updates a copy of memory of the host: there all of this is an error.
updates_host_memory = _compat.jax_version >= (0, 8, 3)
needs_updates = pytest.mark.skipif(
    not updates_host_memory, reason="JAX before 0.8.3 updates a copy of memory of the host"
)


def owned(size: int = 8, dtype: str = "float32") -> np.ndarray:
    a = jaxbridge.empty((size,), dtype)
    a[...] = np.arange(size)
    return a


def readonly_view(a: np.ndarray) -> np.ndarray:
    a = a[:]
    a.flags.writeable = False
    return a


class Exchanged:
    """An array of a library that has DLPack alone; it cannot be referred to weakly."""

    __slots__ = ("array",)

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
