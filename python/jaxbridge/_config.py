# SPDX-License-Identifier: Apache-2.0
"""The environment variables, read in this one place.

JAXBRIDGE_DEBUG: 0 (default) or 1: checks every call, slowly (docs/errors.md).
JAXBRIDGE_CACHE_LIMIT: how many lists of addresses are kept for each call and its shapes, and how many
    graphs for each call and device (default 256).
JAXBRIDGE_CACHE_DIR: where compiled CUDA source is kept (default ~/.cache/jaxbridge).
JAXBRIDGE_CUDA_DRIVER: path of the driver library instead of libcuda.so.1; read by the core.
"""

import os


def _flag(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("0", "1"):
        raise ValueError(f"environment variable {name} is {text!r}; allowed values are 0 and 1")
    return text == "1"


debug: bool = _flag("JAXBRIDGE_DEBUG")


_largest = 2**31 - 1  # of the core's type


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    # By its length first: Python refuses to read thousands of digits.
    if not text.isdecimal() or len(text) > 10 or int(text) > _largest:
        raise ValueError(
            f"environment variable {name} is {text!r}; expected a whole number from 0 to {_largest}"
        )
    return int(text)


cache_limit: int = _count("JAXBRIDGE_CACHE_LIMIT", 256)

cache_directory: str = os.environ.get("JAXBRIDGE_CACHE_DIR") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "jaxbridge"
)
