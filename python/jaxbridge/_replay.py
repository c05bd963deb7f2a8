# SPDX-License-Identifier: Apache-2.0
"""What becomes of calls with graph="replay" and "verify", as far as Python has to know of it."""

import math
import warnings
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from ._errors import ReplayError

if TYPE_CHECKING:
    from ._call_site import CallSite


def not_captured(site: "CallSite", reason: str) -> None:
    """Asked once, when a call could not be captured and is to be made by a normal run."""
    site.callee.counts.not_captured(reason)
    warnings.warn(
        f'{site.name}: graph="{site.options.graph}": the function could not be captured into a CUDA graph, '
        f"and runs at each call from now on: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


def compare(site: "CallSite", results: list[tuple[Any, bytes, bytes]]) -> None:
    """Whether a run and a replay gave the same.

    Floating-point numbers may differ by 256 units in the last place, and by 8 of the largest number:
    kernels that add atomically are not the same twice.

    Args:
        site: the call.
        results: of each result the dtype, what the run gave, and what the replay gave.

    Raises:
        ReplayError: they differ.
    """
    for position, (dtype, run, replay) in enumerate(results):
        if run == replay:
            continue
        # Of one byte, or packed into less: as bytes.
        as_type = np.dtype(dtype) if np.dtype(dtype).itemsize > 1 else np.dtype(np.uint8)
        different = _difference(np.frombuffer(run, as_type), np.frombuffer(replay, as_type))
        if different is not None:
            index, expected, got = different
            raise ReplayError(
                f"{site.name}: a replay of the function's CUDA graph gave other values than the function "
                f"itself: element {index} of result {position}, counted in memory, is {got} there and "
                f"{expected} here. A graph repeats the work that was captured: what Python computes, "
                f"reads or counts is frozen in it. Pass such a value as an array or a static argument, or "
                f"drop graph="
            )


def _difference(run: Any, replay: Any) -> tuple[int, Any, Any] | None:
    """The first element that differs, and its values."""
    if jnp.issubdtype(run.dtype, np.inexact):
        wide = np.complex128 if run.dtype.kind == "c" else np.float64
        a, b = run.astype(wide), replay.astype(wide)
        size = np.where(np.isfinite(a), np.abs(a), 0)
        eps = float(jnp.finfo(run.dtype).eps)
        # Of a type with few digits not more than half of them.
        tolerance = min(256 * eps, math.sqrt(eps)) * size + 8 * eps * size.max(initial=0)
        with np.errstate(invalid="ignore"):  # infinities
            differs = ~((a == b) | (np.abs(a - b) <= tolerance) | (np.isnan(a) & np.isnan(b)))
    else:
        differs = run != replay
    if not differs.any():
        return None
    index = int(differs.argmax())
    return index, run[index], replay[index]
