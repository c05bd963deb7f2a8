# SPDX-License-Identifier: Apache-2.0
"""The environment variables, read in this one place.

JAXBRIDGE_DEBUG: 0 (default) or 1: checks every call, slowly (docs/errors.md).
JAXBRIDGE_CUDA_DRIVER: path of the driver library instead of libcuda.so.1; read by the core.
"""

import os


def _flag(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("0", "1"):
        raise ValueError(f"environment variable {name} is {text!r}; allowed values are 0 and 1")
    return text == "1"


debug: bool = _flag("JAXBRIDGE_DEBUG")
