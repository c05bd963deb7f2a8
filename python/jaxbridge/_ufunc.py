# SPDX-License-Identifier: Apache-2.0
"""`from_ufunc`: NumPy's, SciPy's and CuPy's ufuncs as JAX functions."""

import functools
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _ufunc_derivatives
from ._function import Function, call

# By kind: the library on each platform. A ufunc has the same name in both.
_libraries = {
    "numpy": {"cpu": "numpy", "cuda": "cupy"},
    "special": {"cpu": "scipy.special", "cuda": "cupyx.scipy.special"},
}
_names = "numpy, scipy.special, cupy or cupyx.scipy.special"
# What they return depends on the precision of the dtype itself: no wider one can stand in for it.
_of_precision = frozenset(["nextafter", "spacing"])


class _Named:
    """A ufunc of a platform's library, which is imported at the first call.

    Any process finds it by its reference, for example `jaxbridge._ufunc:on_cuda.special.gamma`.
    """

    def __init__(self, platform: str, kind: str, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = f"on_{platform}.{kind}.{name}"
        self.__module__ = __name__
        self._kind, self._platform = kind, platform

    def _in(self, platform: str) -> Any:
        """What the library of a platform has of this name, or None."""
        found = getattr(
            importlib.import_module(_libraries[self._kind][platform]), self.__name__, None
        )
        return _unwrapped(found) or found

    @functools.cached_property
    def _of_numpy(self) -> Any:
        return self._in("cpu")

    @functools.cached_property
    def _of_cupy(self) -> Any:
        return self._in("cuda")

    def __call__(self, *operands: Any, out: Any) -> None:
        # JAX and CuPy say nothing of a division by zero, whose result a program may discard.
        with np.errstate(all="ignore"):
            if self._platform == "cpu":  # NumPy deprecates a positional out of maximum and minimum
                self._of_numpy(*operands, out=out)
            else:
                outs = out if isinstance(out, tuple) else (out,)
                if not self._on_device(operands, outs):
                    self._on_host(operands, outs)

    def _on_device(self, operands: tuple[Any, ...], outs: tuple[Any, ...]) -> bool:
        """Whether CuPy has the ufunc, and a loop for these types; if so, it is enqueued."""
        if self._of_cupy is None:
            return False
        try:
            self._of_cupy(*operands, *outs)
        except TypeError:  # it has no loop for these types, and has enqueued nothing
            return False
        return True

    def _on_host(self, operands: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
        """What CuPy lacks, on copies; it waits for the stream, which CuPy's current one is."""
        results = tuple(np.empty(o.shape, o.dtype) for o in outs)
        self._of_numpy(*(x.get() for x in operands), out=results)
        for out, result in zip(outs, results, strict=True):
            out.set(result)


class _Library:
    """The ufuncs of one kind on one platform, as attributes."""

    def __init__(self, platform: str, kind: str) -> None:
        self._platform, self._kind = platform, kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, _Named(self._platform, self._kind, name))


on_cpu = types.SimpleNamespace(**{kind: _Library("cpu", kind) for kind in _libraries})
on_cuda = types.SimpleNamespace(**{kind: _Library("cuda", kind) for kind in _libraries})


class _Loop(NamedTuple):
    """The types of one call: of the operands, of what the ufunc writes, of what the user gets."""

    operands: tuple[np.dtype[Any], ...]
    written: tuple[np.dtype[Any], ...]
    results: tuple[np.dtype[Any], ...]


class Ufunc:
    """A ufunc of NumPy or SciPy, with its counterpart in CuPy, as a JAX function. See `from_ufunc`."""

    def __init__(self, kind: str, name: str, ufunc: np.ufunc) -> None:
        self.ufunc = ufunc
        self._kind = kind
        self.name = f"{_libraries[kind]['cpu']}.{name}"
        self.__name__ = self.__qualname__ = name
        self.__doc__ = ufunc.__doc__
        self._loops: dict[Any, _Loop] = {}
        self.function: Function[..., Any] = call(
            {p: getattr(getattr(on, kind), name) for p, on in (("cpu", on_cpu), ("cuda", on_cuda))},
            self._declare,
            out="out",
            elementwise=True,
        )
        self.function.callee.name = self.name
        self.function.defjvp(self._jvp, symbolic_zeros=True)

    def __call__(self, *operands: Any, **keywords: Any) -> Any:
        """Calls the ufunc, with NumPy's broadcasting and NumPy's types of the results.

        Args:
            *operands: arrays and numbers. A Python number has a weak type, as in NumPy, and is not
                static: another value is no new trace.
            **keywords: none is taken.

        Returns:
            The result, or a tuple where the ufunc has several.

        Raises:
            TypeError: the ufunc has no loop for these types, or another number of arguments; a keyword.
            OverflowError: a Python integer does not fit the type of the other operands.
        """
        if keywords:
            raise TypeError(
                f"{self.name}: the keyword {min(keywords)!r} is not taken; use jaxbridge.call of a "
                f"function that calls it with keywords"
            )
        if len(operands) != self.ufunc.nin:
            raise TypeError(
                f"{self.name}: expected {self.ufunc.nin} operands by position, got {len(operands)}"
            )
        taken = [self._take(x, i) for i, x in enumerate(operands)]
        key = tuple(t for _, t in taken), jax.dtypes.canonicalize_dtype(np.float64)
        loop = self._loops.get(key)
        if loop is None:
            loop = self._loops[key] = self._find_loop(key[0])
        values = [self._cast(x, d) for (x, _), d in zip(taken, loop.operands, strict=True)]
        out = self.function(*values)
        outs = out if self.ufunc.nout > 1 else (out,)
        outs = tuple(
            o if o.dtype == d else o.astype(d) for o, d in zip(outs, loop.results, strict=True)
        )
        return outs if self.ufunc.nout > 1 else outs[0]

    def __repr__(self) -> str:
        return f"<jaxbridge ufunc {self.name}>"

    def _take(self, x: Any, position: int) -> tuple[Any, Any]:
        """An operand, and its dtype: `int`, `float` or `complex` where that is weak."""
        kind = type(x)
        if kind in (int, float, complex):
            return x, kind
        if hasattr(kind, "__jax_array__") or _compat.is_typed_literal(x):
            x = jnp.asarray(x)
        elif kind is bool:
            x = np.bool_(x)
        if _compat.is_ref(x) or not isinstance(x, (jax.Array, np.ndarray, np.generic)):
            raise TypeError(
                f"{self.name}: argument {position} is of {kind.__qualname__}; expected an array (of a "
                f"jax.Ref its value, ref[...]) or a number"
            )
        if _compat.is_key_array(x) or np.dtype(x.dtype).kind not in "biufcV":
            raise TypeError(
                f"{self.name}: argument {position} is an array of {x.dtype}, which no loop takes; "
                f"{self._shown_loops()}"
            )
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(x.dtype))
        if isinstance(x, jax.Array) and jax.typeof(x).weak_type:
            return x, {"i": int, "f": float, "c": complex}.get(dtype.kind, dtype)
        return x, dtype

    def _cast(self, x: Any, dtype: np.dtype[Any]) -> Any:
        if isinstance(x, jax.Array):
            return x if x.dtype == dtype else x.astype(dtype)
        if isinstance(x, int) and dtype.kind in "iu":
            info = np.iinfo(dtype)
            if not info.min <= x <= info.max:
                raise OverflowError(
                    f"{self.name}: Python integer {x} is out of bounds for {dtype.name}"
                )
        x = np.asarray(x)
        cast = x.astype(dtype)
        if dtype.kind in "iu" and dtype.itemsize < x.dtype.itemsize and not np.array_equal(cast, x):
            raise TypeError(
                f"{self.name}: an array of {x.dtype.name} has values that do not fit {dtype.name}, and "
                f"JAX has {x.dtype.name} only with 64-bit types enabled: set jax_enable_x64"
            )
        return cast

    def _declare(self, *operands: Any) -> Any:
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        written = self._written([x.dtype for x in operands])
        specs = tuple(jax.ShapeDtypeStruct(shape, d) for d in written)
        return specs if self.ufunc.nout > 1 else specs[0]

    def _jvp(self, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out = self.function(*primals)
        if self._kind == "special" and (partials := _derivatives_of_special().get(self.__name__)):
            found = _ufunc_derivatives.jvp(self.name, partials, primals, out, tangents)
        elif self._kind == "numpy" and self.__name__ in _ufunc_derivatives.of_jax:
            found = _ufunc_derivatives.jvp_of_jax(self.__name__, primals, tangents)
        else:
            raise _ufunc_derivatives.unknown(self.name, "any argument")
        return out, jax.tree.map(_as_tangent, found, out)

    # ---- types -------------------------------------------------------------------------------

    def _resolve(self, types: Sequence[Any]) -> tuple[np.dtype[Any], ...]:
        return self.ufunc.resolve_dtypes((*types, *[None] * self.ufunc.nout))

    def _written(self, operands: Sequence[Any]) -> tuple[np.dtype[Any], ...]:
        """What the ufunc takes and gives for operands of exactly these types.

        That can be wider than what JAX has; the ufunc then converts as it writes.
        """
        found = self._resolve(operands)[self.ufunc.nin :]
        return tuple(np.dtype(jax.dtypes.canonicalize_dtype(d)) for d in found)

    def _find_loop(self, types: Sequence[Any]) -> _Loop:
        small = {t for t in types if isinstance(t, np.dtype) and _is_small_float(t)}
        native = self.ufunc.__name__ in _of_precision
        foreign = set() if native else small - {np.dtype(np.float16)}
        try:
            resolved = self._resolve([np.dtype(np.float32) if t in foreign else t for t in types])
        except TypeError:
            resolved = ()
        if not resolved or any(d.kind not in "biufcV" for d in resolved):
            given = ", ".join(
                f"weak {t.__name__}" if isinstance(t, type) else t.name for t in types
            )
            raise TypeError(f"{self.name} has no loop for ({given}); {self._shown_loops()}")
        inputs = resolved[: self.ufunc.nin]
        operands = tuple(np.dtype(jax.dtypes.canonicalize_dtype(d)) for d in inputs)
        written = results = self._written(operands)
        if len(small) == 1 and not native:
            (half,) = small
            back = self._comes_back(types, half)
            results = tuple(half if b else d for b, d in zip(back, written, strict=True))
        return _Loop(operands, written, results)

    def _comes_back(self, types: Sequence[Any], half: np.dtype[Any]) -> list[bool]:
        """Which results have the small type of the operands, though they are computed in float32.

        Those that would be float16 for a float16; and where there is no loop for that either, those of a
        call whose operands have that type in common.
        """
        as_half = [np.dtype(np.float16) if t == half else t for t in types]
        common = np.result_type(*(t(0) if isinstance(t, type) else t for t in as_half))
        return [
            d == np.float16 or (d == np.float32 and common == np.float16)
            for d in self._resolve(as_half)[self.ufunc.nin :]
        ]

    def _shown_loops(self) -> str:
        shown = {
            " -> ".join(
                ", ".join(np.dtype(c).name for c in side) for side in loop.split("->")
            ): None
            for loop in self.ufunc.types
            if not set(loop) & set("gGOMmSUV")
        }
        return f"its loops are {'; '.join(shown) or 'not for types that JAX has'}"


class _Special:
    """The ufuncs of scipy.special as JAX functions, as attributes."""

    def __getattr__(self, name: str) -> Ufunc:
        return from_ufunc(getattr(importlib.import_module("scipy.special"), name))


@functools.cache
def _derivatives_of_special() -> dict[str, _ufunc_derivatives.Partials]:
    return _ufunc_derivatives.special(_Special())


def _as_tangent(x: Any, out: Any) -> Any:
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return None
    return jnp.broadcast_to(x, out.shape).astype(out.dtype)


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """Whether it is float16, bfloat16, or smaller."""
    return dtype.itemsize <= 2 and jnp.issubdtype(dtype, jnp.floating)


def from_ufunc(ufunc: Any) -> Ufunc:
    """Makes a JAX function of a ufunc of NumPy, scipy.special, CuPy or cupyx.scipy.special.

    Whichever of them it is from: on the CPU that of NumPy or SciPy runs, on CUDA that of CuPy, by one
    name. CuPy is imported on CUDA alone.

    Args:
        ufunc: works element by element; generalized ufuncs do not.

    Raises:
        TypeError: it is no such ufunc.
    """
    if isinstance(ufunc, (Ufunc, Function)):
        raise TypeError(f"{ufunc!r} is a JAX function already; call it directly")
    kind, name, of_cpu = _find(ufunc)
    if of_cpu.signature is not None:
        shown = f"{_libraries[kind]['cpu']}.{name}"
        raise TypeError(
            f"{shown} is a generalized ufunc, of signature {of_cpu.signature}; use "
            f'jaxbridge.call({shown}, ..., out="out", vmap_method="broadcast_all")'
        )
    return _made(kind, name, of_cpu)


# One for each ufunc, so that its loops are found once.
_made = functools.cache(Ufunc)


def _find(ufunc: Any) -> tuple[str, str, np.ufunc]:
    """Kind and name of a ufunc, and what has this name on the CPU."""
    of_numpy = _unwrapped(ufunc)
    if of_numpy is None and type(ufunc).__name__ != "ufunc":  # CuPy's class is called so too
        raise TypeError(
            f"{ufunc!r} is no ufunc of {_names}. Use jaxbridge.call, which takes any "
            f"function with a description of its results; one of JAX's needs no bridge"
        )
    for kind, library in _libraries.items():
        module = sys.modules.get(library["cuda" if of_numpy is None else "cpu"])
        for name in (getattr(ufunc, "__name__", ""), *vars(module or object)):
            there = getattr(module, name, None)
            if there is None or (
                there is not ufunc and _unwrapped(there) is not (of_numpy or ufunc)
            ):
                continue
            of_cpu = _unwrapped(getattr(importlib.import_module(library["cpu"]), name, None))
            if of_cpu is None:
                raise TypeError(
                    f"{library['cpu']} has no ufunc {name!r}, which would tell the types of {ufunc!r}; "
                    f"use jaxbridge.call(..., elementwise=True)"
                )
            return kind, name, of_cpu
    raise TypeError(
        f"{ufunc!r} is no ufunc of {_names}. Use jaxbridge.call(..., elementwise=True); one of JAX's "
        f"needs no bridge"
    )


def _unwrapped(x: Any) -> np.ufunc | None:
    """The NumPy ufunc that `x` is, or that SciPy's array API dispatch has wrapped."""
    x = getattr(x, "__wrapped__", x)
    return x if isinstance(x, np.ufunc) else None
