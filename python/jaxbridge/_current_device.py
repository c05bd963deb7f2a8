# SPDX-License-Identifier: Apache-2.0
"""The CUDA device that is current for the calling thread, which is the caller's to choose."""

import functools
from collections.abc import Callable

from . import _compat, _core


def keeps_current_device[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, after which the device is current that was so before it.

    Whatever JAX does on a device makes that one current for the thread, and leaves it so.
    """

    @functools.wraps(function)
    def keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        if "cuda" not in _compat.local_platforms():
            return function(*args, **kwargs)
        context = _core.current_context()
        try:
            return function(*args, **kwargs)
        finally:
            _core.make_current(context)

    return keeping
