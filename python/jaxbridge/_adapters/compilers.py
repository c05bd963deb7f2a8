# SPDX-License-Identifier: Apache-2.0
"""Compilers of device code that frameworks have."""

import collections
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxbridge._signature import Signature


def cupy_version() -> str:
    """CuPy's version; ImportError where it is not installed."""
    import cupy

    return str(cupy.__version__)


def cupy_cubin(source: str, name: str, options: tuple[str, ...], architecture: str) -> bytes:
    """A cubin of CUDA C++ source, by CuPy's NVRTC; for options as NVRTC takes them."""
    from cupy.cuda import compiler

    chosen = options if any("-std=" in o for o in options) else ("--std=c++17", *options)
    image, _ = compiler.compile_using_nvrtc(
        source, chosen, architecture.removeprefix("sm_"), f"{name}.cu"
    )
    return bytes(image)


def numba_ptx(
    function: Any, signature: "Signature", capability: tuple[int, int]
) -> tuple[str, str]:
    """PTX of a Python function that numba.cuda compiles for the types of `signature`, and its name there.

    The same function gives the same text, in any process.
    """
    import numba
    import numba.cuda

    cuda: Any = numba.cuda
    types = [_numba_type(numba, p) for p in signature.parameters]
    ptx, _ = cuda.compile(
        function,
        tuple(types),
        device=False,
        abi="numba",
        cc=capability,
        output="ptx",
    )
    text = _without_counters(ptx if isinstance(ptx, str) else ptx.decode())
    entries = re.findall(r"\.entry\s+([\w$]+)", text)
    if len(entries) != 1:
        raise TypeError(f"cuda_kernel: Numba made {len(entries)} kernels of {function!r}")
    return text, entries[0]


# Numba counts the functions that it compiles in a process, and shared arrays, and puts the number into
# their names: as the tag "v<number>" of a mangled one, behind the tag's length, or at the end.
_counted = re.compile(r"B(?P<length>\d+)v(?P<function>\d+)|_cudapy_(?P<kind>[a-z]+)_(?P<array>\d+)")


def _without_counters(ptx: str) -> str:
    """The text with these numbers counted from 1, in the order in which they stand there."""
    seen: dict[str, dict[str, int]] = collections.defaultdict(dict)

    def counted(kind: str, number: str) -> int:
        return seen[kind].setdefault(number, len(seen[kind]) + 1)

    def renamed(found: re.Match[str]) -> str:
        if kind := found["kind"]:
            return f"_cudapy_{kind}_{counted(kind, found['array'])}"
        # What follows the tag can begin with a digit.
        digits, size = found["function"], int(found["length"]) - 1
        if not 0 < size <= len(digits):
            return found[0]
        tag = f"v{counted('', digits[:size])}"
        return f"B{len(tag)}{tag}{digits[size:]}"

    return _counted.sub(renamed, ptx)


def _numba_type(numba: Any, p: Any) -> Any:
    scalar = numba.from_dtype(np.dtype(p.dtype))
    if not p.is_array:
        return scalar
    return numba.types.Array(scalar, len(p.shape or ()), "C", readonly=p.role == "operand")
