# SPDX-License-Identifier: Apache-2.0
"""The environment variables, read in this one place.

JAXBRIDGE_DEBUG: 0 (default) or 1: checks every call, slowly (docs/errors.md).
JAXBRIDGE_CACHE_LIMIT: how many lists of addresses are kept for each call and its shapes (default 256).
JAXBRIDGE_CUDA_DRIVER: path of the driver library instead of libcuda.so.1; read by the core.
"""

import os


def _flag(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("0", "1"):
        raise ValueError(f"environment variable {name} is {text!r}; allowed values are 0 and 1")
    return text == "1"


debug: bool = _flag("JAXBRIDGE_DEBUG")


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(
            f"environment variable {name} is {text!r}; expected a whole number, 0 or more"
        )
    return int(text)


cache_limit: int = _count("JAXBRIDGE_CACHE_LIMIT", 256)
