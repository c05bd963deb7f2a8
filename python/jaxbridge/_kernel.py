# SPDX-License-Identifier: Apache-2.0
"""`cuda_kernel`: CUDA kernels, launched from C++ on XLA's stream."""

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _config, _device_code, _identity, _lengths, _options
from ._bind import Argument, ShapedCallee, check_parameters, function_of, signature_of
from ._call_site import CallSite
from ._errors import add_note
from ._native_function import NativeFunction
from ._signature import Signature
from .errors import SignatureError

Extent = int | str
Shape = Extent | Sequence[Extent] | Callable[..., Any]


class _KernelCallee(ShapedCallee):
    how_named = 'cuda_kernel(..., export_name="...")'

    def __init__(
        self,
        code: _device_code.DeviceCode,
        signature: Signature,
        name: str,
        claim: bool,
        grid: Shape,
        block: Shape,
        shared: int | str,
        options: Mapping[str, Any],
    ) -> None:
        self.signatures = (signature,)
        self.code = code
        self.grid, self.block, self.shared = grid, block, shared
        told = [code.identity, code.name, str(signature), repr(shared)]
        for shape in (grid, block):
            told.append(_identity.fingerprint(shape)[0] if callable(shape) else repr(shape))
        if not any(t.startswith("only:") for t in told):
            identity = "content:" + hashlib.sha256("\0".join(told).encode()).hexdigest()
        elif claim:
            identity = f"name:{name}:{signature}"
        else:
            identity = _identity.unique()
        super().__init__(name, {"cuda": code}, identity, options, claim)

    def made_of(self) -> str:
        how = f"code {self.code.identity[:16]}, grid {self.grid!r}, block {self.block!r}"
        return f"the kernel {self.code.name} ({how})"

    def is_capturable(self, site: CallSite) -> bool:
        # XLA takes no graph without a node, and a grid without blocks is no launch.
        return self.options.graph == "xla" and 0 not in self._shape_of("grid", self.grid, site)

    def make_target(self, site: CallSite, states: dict[Any, Any]) -> Any:
        arguments, _ = self.arguments(site)
        grid = self._shape_of("grid", self.grid, site)
        # Where nothing is launched a block of no threads is none that is wrong.
        block = (1, 1, 1) if 0 in grid else self._shape_of("block", self.block, site)
        shared = _bytes(self.name, self._number("shared", self.shared, self._lengths(site)[2]))
        if self.code.convention == "numba":
            arguments = self._numba_arguments(site, arguments)
        return self.code.kernel(shared).target(
            name=self.name,
            arguments=arguments,
            grid=grid,
            block=block,
            shared=shared,
            operand_names=self.operand_names(site),
            in_place=list(site.in_place),
            external=list(site.external),
            inspects=_config.debug,
            limit=_config.cache_limit,
        )

    def _number(self, what: str, extent: Any, lengths: Mapping[str, Any]) -> Any:
        if not isinstance(extent, str):
            return extent
        try:
            return _lengths.evaluate(extent, lengths)
        except SignatureError as error:
            raise SignatureError(f"{self.name}: {what}: {error}") from None

    def _shape_of(self, what: str, shape: Shape, site: CallSite) -> tuple[int, int, int]:
        operands, attributes, lengths = self._lengths(site)
        given: Any = shape
        if callable(shape):
            try:
                given = shape(*operands, **attributes)
            except Exception as error:
                add_note(
                    error,
                    f"raised by the function {what}= of {self.name}, which gets the arrays by position "
                    f"as jax.ShapeDtypeStruct, and static values by keyword",
                )
                raise
        extents = [self._number(what, e, lengths) for e in _extents(self.name, what, given)]
        return _shape(self.name, what, extents)

    def _numba_arguments(self, site: CallSite, plain: Sequence[Argument]) -> list[Argument]:
        # An array of Numba's is seven words and more: no owner, elements, bytes of one, the address,
        # lengths, strides.
        assert site.types is not None
        of_operand = dict(enumerate(site.types[0]))
        of_result = dict(enumerate(site.types[1]))
        out: list[Argument] = []
        for argument in plain:
            source, _, index, _ = argument
            if source not in ("operand", "result"):
                out.append(argument)
                continue
            dtype, shape = (of_operand if source == "operand" else of_result)[index]
            item = np.dtype(dtype).itemsize
            strides = [
                item * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))
            ]
            words = [0, 0, int(np.prod(shape, dtype=np.int64)), item]
            out += [("value", False, 0, w) for w in words]
            out.append(argument)
            out += [("value", False, 0, w) for w in (*shape, *strides)]
        return out


def _extents(name: str, what: str, given: Any) -> list[Any]:
    """The one to three numbers or expressions of a grid or block."""
    try:
        many = [given] if np.ndim(given) == 0 else list(given)
        out = [e if isinstance(e, str) else operator.index(e) for e in many]
    except (TypeError, ValueError):  # of a ragged list
        raise TypeError(
            f"{name}: {what} is {given!r}; expected one to three integers, or expressions of lengths"
        ) from None
    if not 1 <= len(out) <= 3:
        raise ValueError(f"{name}: {what} is {given!r}; expected one to three numbers")
    return out


def _shape(name: str, what: str, extents: Sequence[int]) -> tuple[int, int, int]:
    """A grid or block, as the driver takes it."""
    lowest, *highest = (0, 2**31 - 1, 65535, 65535) if what == "grid" else (1, 1024, 1024, 64)
    if not all(lowest <= n <= most for n, most in zip(extents, highest, strict=False)):
        raise ValueError(
            f"{name}: {what} is {tuple(extents)}; expected one to three numbers from {lowest} to "
            f"{highest[0]}, {highest[1]} and {highest[2]}"
        )
    if what == "block" and math.prod(extents) > 1024:
        raise ValueError(f"{name}: block is {tuple(extents)}, of more than 1024 threads")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def _bytes(name: str, shared: Any) -> int:
    """The dynamic shared memory of a block."""
    try:
        out = operator.index(shared)
    except TypeError:
        raise TypeError(f"{name}: shared is {shared!r}; expected bytes") from None
    if not 0 <= out < 2**31:
        raise ValueError(f"{name}: shared is {out} bytes; expected 0 up to 2 GiB")
    return out


def _check_launch(grid: Shape, block: Shape, shared: int | str, lengths: Any) -> None:
    """What can be told of them before there are arrays."""
    for what, given in (("grid", grid), ("block", block)):
        if callable(given):
            continue
        extents = _extents("cuda_kernel", what, given)
        if not any(isinstance(e, str) for e in extents):
            _shape("cuda_kernel", what, extents)
        for e in extents:
            if isinstance(e, str):
                _lengths.check_named(f"cuda_kernel: {what}", e, lengths)
    if isinstance(shared, str):
        _lengths.check_named("cuda_kernel: shared", shared, lengths)
    else:
        _bytes("cuda_kernel", shared)


def cuda_kernel(
    code: Any,
    name: str | None = None,
    *,
    signature: str | Signature,
    grid: Shape,
    block: Shape,
    shared: int | str = 0,
    options: Sequence[str] = (),
    capturable: bool = True,
    elementwise: bool = False,
    vmap_method: str | None = None,
    has_side_effect: bool | None = None,
    export_name: str | None = None,
) -> NativeFunction:
    """A Function of a CUDA kernel, which is launched from C++ on XLA's stream: no Python, no GIL.

    Args:
        code: PTX (text), a cubin (bytes), CUDA C++ source (text; compiled by cuda.core, or by CuPy, for
            the device that is there, and kept on disk by its content), the `pathlib.Path` of a file with
            one of these, a `numba.cuda` kernel, or a `cupy.RawKernel`.
        name: of the kernel in the code; a kernel object has one.
        signature: the kernel's parameters in order, as `bind` takes them, without strings and stream.
        grid: blocks: one to three numbers, or expressions of the signature's lengths such as
            "(n + 255) // 256", or a function of the arguments (arrays by position, as
            `jax.ShapeDtypeStruct`; static values by keyword) that returns them.
        block: threads of a block: the same.
        shared: bytes of dynamic shared memory of a block; a number, or an expression.
        options: of the compiler, for source.
        capturable: whether XLA may capture the launch into its command buffers.
        elementwise: as `call` takes it.
        vmap_method: as `call` takes it.
        has_side_effect: as `call` takes it.
        export_name: what tells the Function in other processes; without one it can't be exported.

    Raises:
        SignatureError: the signature is none, a kernel has no such parameter, or an expression is none
            of the signature's lengths.
        TypeError: `code` is no code, or an option is of another type.
        ValueError: a grid, a block or shared memory that no GPU has, or another option's wrong value.
    """
    _options.check_name(export_name)
    parsed = signature_of("cuda_kernel", signature)
    check_parameters("cuda_kernel", parsed)
    if parsed.of("stream") or any(p.form == "string" for p in parsed.attributes):
        raise SignatureError("cuda_kernel: a kernel gets no stream, and no strings")
    if parsed.returns != "void":
        raise SignatureError("cuda_kernel: a kernel returns nothing")
    _check_launch(grid, block, shared, parsed.length_names)
    if isinstance(options, str) or not all(isinstance(o, str) for o in options):
        raise TypeError(f"cuda_kernel: options is {options!r}; expected a list of texts")
    if name is not None and (not isinstance(name, str) or "\0" in name):
        raise TypeError(
            f"cuda_kernel: the kernel's name is {name!r}; expected a text without zeros"
        )
    if not isinstance(capturable, (bool, np.bool_)):
        raise TypeError(f"cuda_kernel: capturable is {capturable!r}; expected True or False")
    found = _device_code.of(code, name, parsed, tuple(options))
    chosen = {
        "inout": parsed.in_place or None,
        "elementwise": elementwise,
        "vmap_method": vmap_method,
        "has_side_effect": has_side_effect,
        "graph": "xla" if capturable else "off",
    }
    callee = _KernelCallee(
        found,
        parsed,
        export_name or found.shown or found.name,
        export_name is not None,
        grid,
        block,
        shared,
        chosen,
    )
    return function_of(callee, "")
