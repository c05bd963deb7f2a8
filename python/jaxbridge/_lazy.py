# SPDX-License-Identifier: Apache-2.0
"""`lazy_apply` and `from_ufunc`: array-API functions and ufuncs as JAX functions."""

import functools
import importlib
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _identity
from ._errors import PlatformError, ResultError
from ._function import Function, _ById, _default_name, call

# ---- lazy_apply ----------------------------------------------------------------------------------

Shape = tuple[int | None, ...]

# The keyword under which `_apply` gets what it is to do: no function has one that is written so, and
# the arguments keep their positions, which errors name.
_how = "<lazy_apply>"

# An entry lives as long as the programs that call its Function.
_functions: weakref.WeakValueDictionary[Any, Function[..., Any]] = weakref.WeakValueDictionary()
_by_reference: weakref.WeakValueDictionary[str, types.FunctionType] = weakref.WeakValueDictionary()


def lazy_apply(
    func: Callable[..., Any],
    *args: Any,
    shape: Shape | Sequence[Shape] | None = None,
    dtype: Any = None,
    as_numpy: bool = False,
    xp: types.ModuleType | None = None,
    framework: str | Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls `func`, which works on arrays of another framework, on JAX arrays: eagerly or in a program.

    The signature is array-api-extra's. With arguments that are not JAX's, `func` is called directly.

    Args:
        func: gets arrays of `framework`, never JAX's. It returns an array, or a sequence of them where
            `shape` is a sequence.
        *args: arrays, or trees of them. What is not an array (a Python number, None) is passed as it is.
        shape: the result's shape, or a sequence of shapes, one for each result. None: the shapes of
            `args`, broadcast. None in place of a length: not known before the call, which can't be traced.
        dtype: the result's dtype, or one for each result. None: the result type of `args`.
        as_numpy: `func` gets NumPy arrays, also on CUDA.
        xp: the namespace of the arguments. None: theirs.
        framework: "numpy", "cupy", "torch", ..., or one for each platform. None: NumPy on the CPU,
            CuPy on CUDA.
        **kwargs: passed as `args` are, but do not count for the defaults of `shape` and `dtype`.

    Returns:
        The result, or a tuple where `shape` is a sequence.

    Raises:
        ValueError: there is no array, `shape` and `dtype` don't fit together, or a length is not known
            in a traced call.
        ResultError: `func` returned something else than was declared.
        BaseException: what `func` raised, where the call is eager.
    """
    shown = f"lazy_apply({_default_name(func)})"
    leaves = jax.tree.leaves((args, kwargs))
    if xp is None and not any(map(_is_array, leaves)):
        raise ValueError(f"{shown}: no argument is an array; pass one, or say xp=")
    shapes = _shapes(shape)
    count = len(shapes) if isinstance(shapes, list) else None
    dtypes_count = len(dtype) if isinstance(dtype, (list, tuple)) else None
    if dtype is not None and count != dtypes_count:
        raise ValueError(
            f"{shown}: shape is {shape} and dtype is {dtype}; give one of each, or sequences of one "
            f"length"
        )
    if not any(map(_is_jax, leaves)) and getattr(xp, "__name__", None) != "jax.numpy":
        return _call_directly(func, args, kwargs, count is not None, as_numpy, xp)

    inputs = jax.tree.leaves(args)
    if shapes is None:
        shapes = np.broadcast_shapes(*(x.shape for x in inputs if _is_array(x)))
    if dtype is None:
        # Numbers count as weak types do; strings and other objects don't.
        counted = [x for x in inputs if _is_array(x) or isinstance(x, (int, float, complex))]
        dtype = jnp.result_type(*(counted or [float]))
        dtype = dtype if count is None else [dtype] * count
    declared = [(shapes, dtype)] if count is None else list(zip(shapes, dtype, strict=True))
    results = tuple((s, np.dtype(d)) for s, d in declared)
    if framework is None and as_numpy:
        framework = "numpy"
    how = func, count, jax.dtypes.canonicalize_dtype(np.float64) != np.float64
    if not any(None in s for s, _ in results):
        found, extra = _function_for(_apply, how, results, count is None, framework)
        return found(*args, **kwargs, **extra)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise ValueError(
            f"{shown}: shape is {shape}; inside jit, and whatever else traces, every length must be known"
        )
    return _call_for_unknown(how, results, framework, args, kwargs)


def _is_jax(x: Any) -> bool:
    return isinstance(x, jax.Array) or _compat.is_ref(x) or hasattr(type(x), "__jax_array__")


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _shapes(shape: Any) -> Any:
    """None, a shape as a tuple, or a list of them."""
    if shape is None:
        return None
    if all(n is None or hasattr(n, "__index__") for n in shape):
        return tuple(None if n is None else operator.index(n) for n in shape)
    return [_shapes(s) for s in shape]


def _call_directly(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    several: bool,
    as_numpy: bool,
    xp: types.ModuleType | None,
) -> Any:
    array: Any = next((x for x in jax.tree.leaves((args, kwargs)) if _is_array(x)), None)
    if as_numpy:
        args, kwargs = jax.tree.map(lambda x: np.asarray(x) if _is_array(x) else x, (args, kwargs))
    result = func(*args, **kwargs)
    namespace: Any = xp
    if namespace is None and hasattr(array, "__array_namespace__"):
        namespace = array.__array_namespace__()
    if namespace is None:  # torch has no such method
        namespace = sys.modules.get(type(array).__module__.partition(".")[0])
    convert = getattr(namespace, "asarray", lambda x: x)
    return tuple(map(convert, result)) if several else convert(result)


def _function_for(
    apply: Callable[..., Any],
    how: tuple[Callable[..., Any], int | None, bool],
    results: tuple[tuple[Any, Any], ...],
    single: bool,
    framework: str | Mapping[str, str] | None,
) -> tuple[Function[..., Any], dict[str, Any]]:
    """The Function that calls `apply`, and what it takes beside the user's arguments.

    Calls with one `func` find one Function while a program has it. Else an eager call of a function
    whose content can't be told would be compiled each time.
    """
    func = how[0]
    same = (
        (_ById(func.__self__), _ById(func.__func__))
        if isinstance(func, types.MethodType)
        else _ById(func)
    )
    frameworks = tuple(framework.items()) if isinstance(framework, Mapping) else framework
    key = apply, same, how[1:], results, frameworks
    extra: dict[str, Any] = {_how: how}
    found = _functions.get(key)
    if found is None:
        specs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in results)
        found = call(
            # What has a reference is a static argument, which an exported program can carry.
            apply if _is_portable(func) else functools.partial(apply, **extra),
            specs[0] if single else specs,
            framework=framework,
            # Nothing is known about `func`: one call for each element is right always.
            vmap_method="sequential",
        )
        found.name = _default_name(func)
        found = _functions.setdefault(key, found)
    return found, extra if found.callee("cpu") is apply else {}


def _is_portable(func: Callable[..., Any]) -> bool:
    """Whether `module:name` tells `func` in every process."""
    ref = _identity.reference(func)
    try:
        if ref is None or _identity.resolve(ref) is not func:
            return False
    except LookupError:
        return False
    # The same code in another module object of that name reads other globals.
    is_def = isinstance(func, types.FunctionType)
    if is_def and _by_reference.setdefault(ref, func).__globals__ is not func.__globals__:
        return False
    return _identity.is_told(_identity.fingerprint(func))


def _apply(*args: Any, **kwargs: Any) -> Any:
    """What runs in place of a function of `lazy_apply`."""
    func, count, narrow = kwargs.pop(_how)
    result = func(*args, **kwargs)
    if count is None:
        return _as_result(result, narrow)
    if not isinstance(result, (tuple, list)) or len(result) != count:
        got = len(result) if isinstance(result, (tuple, list)) else type(result).__name__
        raise ResultError(
            f"{_default_name(func)}: expected a sequence of {count} results, got {got}"
        )
    return tuple(_as_result(r, narrow) for r in result)


_narrowed = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


def _as_result(x: Any, narrow: bool) -> Any:
    """`x` as jax.numpy.asarray would have it: an array, of 32 bits where JAX has no more."""
    if isinstance(x, (list, tuple, bool, int, float, complex)):
        x = np.asarray(x)
    if narrow and hasattr(x, "astype") and (smaller := _narrowed.get(str(x.dtype))):
        return x.astype(smaller)
    return x


# By a number of the call: results of lengths that nobody knew.
_kept: dict[int, Any] = {}
_calls = itertools.count()


def _call_for_unknown(
    how: tuple[Callable[..., Any], int | None, bool],
    results: tuple[tuple[Any, Any], ...],
    framework: str | Mapping[str, str] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """An eager call whose callee keeps the results: XLA has no memory of a size that is not known."""
    number = next(_calls) & 0x7FFFFFFF
    found, extra = _function_for(_keep, how, (((), np.dtype("int32")),), True, framework)
    try:
        done = found(jnp.int32(number), *args, **kwargs, **extra).block_until_ready()
        values = _kept[number]
    finally:
        _kept.pop(number, None)
    outs = []
    for value, (shape, dtype) in zip(values, results, strict=True):
        if isinstance(value, np.ndarray):
            out = jax.device_put(value, done.device if done.committed else None)
        else:
            out = jax.dlpack.from_dlpack(value)
        lengths_fit = all(n in (None, m) for n, m in zip(shape, out.shape, strict=False))
        if out.ndim != len(shape) or not lengths_fit or out.dtype != dtype:
            raise ResultError(
                f"{_default_name(how[0])}: expected a result of {dtype.name}{list(shape)}, "
                f"got {out.dtype.name}{list(out.shape)}; change shape= and dtype="
            )
        outs.append(out)
    return outs[0] if how[1] is None else tuple(outs)


def _keep(number: Any, *args: Any, **kwargs: Any) -> Any:
    single = kwargs[_how][1] is None
    result = _apply(*args, **kwargs)
    _kept[int(number)] = [_copy(x) for x in ([result] if single else result)]
    return number


def _copy(x: Any) -> Any:
    # The views that the function got end with the call, and a result may be one of them.
    if hasattr(x, "__array_interface__"):
        return np.array(x)
    return x.clone() if hasattr(x, "clone") else x.copy()


# ---- from_ufunc ----------------------------------------------------------------------------------

# By kind: the library on each platform. A ufunc has the same name in both.
_libraries = {
    "numpy": {"cpu": "numpy", "cuda": "cupy"},
    "special": {"cpu": "scipy.special", "cuda": "cupyx.scipy.special"},
}
# What they return depends on the precision of the dtype itself: no wider one can stand in for it.
_of_precision = frozenset(["nextafter", "spacing"])


class _Named:
    """A ufunc of a platform's library, which is imported at the first call.

    Any process finds it by its reference, for example `jaxbridge._lazy:on_cuda.special.gamma`.
    """

    def __init__(self, platform: str, kind: str, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = f"on_{platform}.{kind}.{name}"
        self.__module__ = __name__
        self._library = _libraries[kind][platform]

    @functools.cached_property
    def _ufunc(self) -> Any:
        found = getattr(importlib.import_module(self._library), self.__name__, None)
        if found is None:
            raise PlatformError(
                f"{self._library} has no {self.__name__!r}; use jaxbridge.call(..., elementwise=True) "
                f'with another function for that platform, or with framework="numpy"'
            )
        return _unwrapped(found) or found

    def __call__(self, *operands: Any, out: Any) -> None:
        # JAX and CuPy say nothing of a division by zero, whose result a program may discard.
        with np.errstate(all="ignore"):
            self._ufunc(*operands, *(out if isinstance(out, tuple) else (out,)))


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
        self.function.name = self.name

    def __call__(self, *operands: Any) -> Any:
        """Calls the ufunc, with NumPy's broadcasting and NumPy's types of the results.

        Args:
            *operands: arrays and numbers. A Python number has a weak type, as in NumPy, and is not
                static: another value is no new trace.

        Returns:
            The result, or a tuple where the ufunc has several.

        Raises:
            TypeError: the ufunc has no loop for these types, or another number of arguments.
            OverflowError: a Python integer does not fit the type of the other operands.
        """
        if len(operands) != self.ufunc.nin:
            raise TypeError(
                f"{self.name} takes {self.ufunc.nin} arguments, all of them operands; "
                f"{len(operands)} were given"
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
        if hasattr(kind, "__jax_array__"):
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
        raise TypeError(
            f"{name} is a generalized ufunc, of signature {of_cpu.signature}; use "
            f'jaxbridge.call({name}, ..., out="out", vmap_method="broadcast_all")'
        )
    return _made(kind, name, of_cpu)


# One for each ufunc, so that its loops are found once.
_made = functools.cache(Ufunc)


def _find(ufunc: Any) -> tuple[str, str, np.ufunc]:
    """Kind and name of a ufunc, and what has this name on the CPU."""
    of_numpy = _unwrapped(ufunc)
    if of_numpy is None and type(ufunc).__name__ != "ufunc":  # CuPy's class is called so too
        raise TypeError(f"{ufunc!r} is no ufunc; use jaxbridge.call(..., elementwise=True)")
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
        f"{ufunc!r} is not in {', '.join(m for ms in _libraries.values() for m in ms.values())}; use "
        f"jaxbridge.call(..., elementwise=True)"
    )


def _unwrapped(x: Any) -> np.ufunc | None:
    """The NumPy ufunc that `x` is, or that SciPy's array API dispatch has wrapped."""
    x = getattr(x, "__wrapped__", x)
    return x if isinstance(x, np.ufunc) else None
