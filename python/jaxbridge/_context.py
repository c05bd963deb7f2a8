# SPDX-License-Identifier: Apache-2.0
"""Where a callee runs: `current`."""

import dataclasses

from . import _core


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Where a callee runs.

    Attributes:
        platform: "cpu" or "cuda".
        device: the device's ordinal within its platform.
        stream: XLA's CUstream for this call as an integer; 0 on the CPU.
        capturing: whether the stream is being captured into a CUDA graph.
    """

    platform: str
    device: int
    stream: int
    capturing: bool


def current() -> Context:
    """The context of the call that this thread is in.

    Raises:
        RuntimeError: not inside a function that JAX called through jaxbridge.
    """
    found = _core.current_call()
    if found is None:
        raise RuntimeError(
            "jaxbridge.current() is there inside a function that is being called through jaxbridge, "
            "and only on the thread of that call"
        )
    return Context(*found)
