# SPDX-License-Identifier: Apache-2.0
"""Letter D of the acceptance cases on a GPU: mutation, aliasing and donation."""

import numpy as np
import pytest

import jaxbridge

pytestmark = pytest.mark.gpu


def test_D04_memory_with_a_wrong_label():
    host = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="the driver knows no such memory"):
        jaxbridge.buffer(host.ctypes.data, (4,), "f4", "cuda")

    class Source:
        @property
        def __cuda_array_interface__(self):
            return dict(host.__array_interface__, version=3)

    with pytest.raises(ValueError, match="the driver knows no such memory"):
        jaxbridge.from_external(Source())
