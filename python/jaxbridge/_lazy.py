# SPDX-License-Identifier: Apache-2.0
"""`lazy_apply`: array-API functions on JAX arrays."""

import functools
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, _identity
from ._errors import ResultError
from ._function import Function, call
from ._identity import default_name
from ._spec import ById

Shape = tuple[int | None, ...]

# The keyword under which `_apply` gets what it is to do: no function has one that is written so, and
# the arguments keep their positions, which errors name.
_how = "<lazy_apply>"

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
    shown = f"lazy_apply({default_name(func)})"
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
    """The Function that calls `apply`, and what it takes beside the user's arguments."""
    func, *rest = how
    # A method is made anew each time that it is looked up.
    parts = (
        (ById(func.__self__), ById(func.__func__))
        if isinstance(func, types.MethodType)
        else (ById(func),)
    )
    frameworks = tuple(framework.items()) if isinstance(framework, Mapping) else framework
    found = _made(apply, parts, *rest, results, single, frameworks)
    return found, {_how: how} if found.callee.functions["cpu"] is apply else {}


# Bounded: an eager call of a function whose content can't be told is not compiled each time.
@_compat.bounded_cache(128)
def _made(
    apply: Callable[..., Any],
    parts: tuple[ById, ...],
    count: int | None,
    narrow: bool,
    results: tuple[tuple[Any, Any], ...],
    single: bool,
    framework: Any,
) -> Function[..., Any]:
    func = parts[0].x if len(parts) == 1 else types.MethodType(parts[1].x, parts[0].x)
    specs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in results)
    how = {_how: (func, count, narrow)}
    found = call(
        # What has a reference is a static argument, which an exported program can carry.
        apply if _is_portable(func) else functools.partial(apply, **how),
        specs[0] if single else specs,
        framework=dict(framework) if isinstance(framework, tuple) else framework,
        # Nothing is known about `func`: one call for each element is right always.
        vmap_method="sequential",
    )
    found.callee.name = default_name(func)
    return found


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
    return _identity.is_told(_identity.fingerprint(func)[0])


def _apply(*args: Any, **kwargs: Any) -> Any:
    """What runs in place of a function of `lazy_apply`."""
    func, count, narrow = kwargs.pop(_how)
    result = func(*args, **kwargs)
    if count is None:
        return _as_result(result, narrow)
    if not isinstance(result, (tuple, list)) or len(result) != count:
        got = len(result) if isinstance(result, (tuple, list)) else type(result).__name__
        raise ResultError(
            f"{default_name(func)}: expected a sequence of {count} results, got {got}"
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
                f"{default_name(how[0])}: expected a result of {dtype.name}{list(shape)}, "
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
