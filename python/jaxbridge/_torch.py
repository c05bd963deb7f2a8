# SPDX-License-Identifier: Apache-2.0
"""`torch_function`, `torch_module`: torch code with torch's own derivatives, as JAX functions."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import _adapters, _imports, _views
from ._errors import ResultError
from ._from_external import from_external
from ._function import Function, call
from ._spec import ById


def torch_function(
    fn: Callable[..., Any],
    *,
    result: Any = None,
    vmap_method: str | None = "sequential",
    graph: str = "off",
    name: str | None = None,
) -> Function[..., Any]:
    """Makes a JAX function of a function of torch tensors, with the derivatives that torch has.

    Forward and reverse mode are `torch.func.jvp` and `torch.func.vjp` of `fn`, each in a call of its own;
    derivatives of these are torch's of them, as far as torch has them. A backward pass runs `fn` again: no
    graph of torch's lives between calls.

    Args:
        fn: gets tensors, and returns tensors in tuples, lists and dicts. It does not write to its
            arguments, and is one that `torch.func` can differentiate.
        result: shapes and dtypes of the results, as `call` takes them. None: torch tells them, by running
            `fn` on tensors without memory when a call is traced.
        vmap_method: as in `call`, for the function and its derivatives. "elementwise" is not among them.
        graph: as in `call`; derivatives run each time.
        name: as in `call`.

    Raises:
        ImportError: torch is not installed.
        ResultError: a call's results have shapes or kinds that can't be told or taken.
        InputChangedError: `fn` writes to an argument.
    """
    _torch()
    if not callable(fn):
        raise TypeError(f"torch_function: fn is {fn!r}; expected a function")
    return _differentiable(fn, result, vmap_method, graph, name)


def torch_module(
    module: Any,
    *,
    mode: Literal["eval", "train"] = "eval",
    result: Any = None,
    vmap_method: str | None = "sequential",
    graph: str = "off",
    name: str | None = None,
) -> tuple[Function[..., Any], dict[str, dict[str, Any]]]:
    """Makes a JAX function of a `torch.nn.Module`, with the derivatives that torch has.

    The module itself is not changed, and changes of it are not seen afterwards.

    Args:
        module: its parameters and buffers become arguments.
        mode: "eval" or "train", as `module.eval()` and `module.train()`.
        result: as `torch_function` has it.
        vmap_method: as `torch_function` has it.
        graph: as `torch_function` has it.
        name: as `call` has it.

    Returns:
        f: `f(params, *args, **kwargs)` returns what the module does; with mode="train" a pair of that and
            the new buffers (running means, counts), a dict like `params["buffers"]`. A module that uses
            random numbers (dropout) takes `key=`: two uint32, as of `jax.random.key_data`.
        params: `{"parameters": {...}, "buffers": {...}}`, by the module's own names: copies, as JAX arrays.
            Derivatives in buffers are zero.

    Raises:
        TypeError: it is no module, or it has 64-bit floating-point parameters that JAX has not.
        ValueError: another mode.
    """
    torch = _torch()
    if not torch.is_module(module):
        raise TypeError(
            f"torch_module: expected a torch.nn.Module, got a {type(module).__qualname__}; torch_function "
            f"takes functions"
        )
    if mode not in ("eval", "train"):
        raise ValueError(f"torch_module: mode is {mode!r}; expected 'eval' or 'train'")
    parameters, buffers = torch.state_of(module)
    params = {
        "parameters": {n: _to_jax(f"parameter {n}", x) for n, x in parameters.items()},
        "buffers": {n: _to_jax(f"buffer {n}", x) for n, x in buffers.items()},
    }
    fn = torch.Module(module, mode == "train")
    fn.__name__ = fn.__qualname__ = type(module).__qualname__
    fn.__module__ = type(module).__module__
    check = functools.partial(_check_params, {kind: set(names) for kind, names in params.items()})
    f = _differentiable(fn, result, vmap_method, graph, name, _without_buffers, check)
    return f, params


def _torch() -> Any:
    _adapters.get("torch")
    return importlib.import_module("._adapters.torch_functions", __package__)


def _to_jax(what: str, x: Any) -> Any:
    x = x.cpu()
    if x.dtype.itemsize == 8 and not x.dtype.is_floating_point and not x.dtype.is_complex:
        return jnp.asarray(x.numpy())
    try:
        return jnp.array(np.asarray(from_external(x, copy=True, device=_imports.cpu_device())))
    except TypeError as error:
        raise TypeError(f"torch_module: {what}: {error}") from error


def _check_params(expected: Mapping[str, set[str]], name: str, args: Any, kwargs: Any) -> None:
    """Raises TypeError where a module is not called with its parameters and buffers."""
    params = args[0] if args else None
    if not (isinstance(params, Mapping) and params.keys() == expected.keys()):
        raise TypeError(
            f"{name}: the first argument is the params that torch_module returned, "
            f"{{'parameters': {{...}}, 'buffers': {{...}}}}, got {_views.type_name(params)}"
            + (f" with {sorted(map(str, params))}" if isinstance(params, Mapping) else "")
        )
    for kind, names in expected.items():
        given = set(params[kind])
        if given != names:
            said = [f"lacks {n!r}" for n in sorted(names - given)]
            said += [f"has {n!r}, which the module has not" for n in sorted(given - names)]
            raise TypeError(f"{name}: params[{kind!r}] {', and '.join(said)}")
    key = kwargs.get("key")
    if key is not None and not (getattr(key, "shape", ()) and key.dtype == np.uint32):
        raise TypeError(
            f"{name}: key= takes jax.random.key_data(key), an array of uint32, got "
            f"{_views.type_name(key) if not hasattr(key, 'dtype') else f'{key.dtype}{list(key.shape)}'}"
        )


def _without_buffers(args: Any) -> Any:
    """Which leaves of the arguments have no derivative, as a tree of bools."""
    params, *rest = args
    return (
        {
            "parameters": jax.tree.map(lambda _: False, params["parameters"]),
            "buffers": jax.tree.map(lambda _: True, params["buffers"]),
        },
        *jax.tree.map(lambda _: False, rest),
    )


# ---- derivatives ---------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
class _Arguments:
    """Arguments by position as residuals: arrays are children, and what is static is not."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten(self.args)
        arrays = [x for x in leaves if _is_array(x)]
        return arrays, (tree, tuple(None if _is_array(x) else ById(x) for x in leaves))

    @classmethod
    def tree_unflatten(cls, how: Any, arrays: Any) -> "_Arguments":
        tree, statics = how
        rest = iter(arrays)
        return cls(jax.tree.unflatten(tree, [next(rest) if s is None else s.x for s in statics]))


class _Key:
    """Abstract arguments as a key."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        leaves, tree = jax.tree.flatten(arguments)
        kinds = (jax.ShapeDtypeStruct, str, bool, int, float, complex)
        self.is_told = all(type(x) in kinds for x in leaves)
        self._parts = tree, tuple((type(x), x) for x in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _differentiable(
    fn: Callable[..., Any],
    result: Any,
    vmap_method: str | None,
    graph: str,
    name: str | None,
    no_gradient: Callable[[Any], Any] | None = None,
    check: Callable[[str, Any, Any], None] | None = None,
) -> Function[..., Any]:
    """A Function of torch's, with torch's derivatives.

    `no_gradient` says which arguments have none; `check` raises where the arguments cannot be right.
    """
    torch = _torch()
    shown = str(name or getattr(fn, "__name__", type(fn).__name__))

    known = functools.lru_cache(64)(lambda key: torch.shapes(shown, fn, *key.arguments))

    def described(args: Any, kwargs: Any) -> Any:
        key = _Key((args, kwargs))
        return known(key) if key.is_told else torch.shapes(shown, fn, args, kwargs)

    def declared(*args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(shown, args, kwargs)
        if result is not None:
            return result(*args, **kwargs) if callable(result) else result
        found, random = described(args, kwargs)
        if random and isinstance(fn, torch.Module) and kwargs.get("key") is None:
            or_else = ", or use mode='eval'" if fn.is_training else ""
            raise ResultError(
                f"{shown}: it uses random numbers ({', '.join(sorted(random))}), which a function of JAX "
                f"takes as an argument: pass key=jax.random.key_data(key){or_else}"
            )
        if random and not isinstance(fn, torch.Module):
            raise ResultError(
                f"{shown}: it uses random numbers ({', '.join(sorted(random))}), and JAX may drop or "
                f"repeat a call; make them in JAX and pass them, or say result="
            )
        return found

    f = call(fn, declared, framework="torch", vmap_method=vmap_method, graph=graph, name=name)
    # Where the function takes whole batches, so do these, of operands that all have a batch axis.
    method = "broadcast_all" if vmap_method == "expand_dims" else vmap_method

    @functools.cache
    def reverse() -> Function[..., Any]:
        made = _differentiable(
            functools.partial(torch.pull_back, fn), _cotangents, method, "off", None
        )
        made.callee.name = f"{f.name} backward"
        return made

    @functools.cache
    def forward() -> Function[..., Any]:
        def results(args: Any, kwargs: Any, tangents: Any) -> Any:
            outs = declared(*args, **kwargs)
            return outs, [x for x in jax.tree.leaves(outs) if _is_inexact(x)]

        made = _differentiable(
            functools.partial(torch.push_forward, fn), results, method, "off", None
        )
        made.callee.name = f"{f.name} forward"
        return made

    def moving(args: Any) -> list[bool]:
        """For each leaf whether it has a derivative."""
        fixed = (
            no_gradient(args) if no_gradient is not None else jax.tree.map(lambda _: False, args)
        )
        return [
            _is_inexact(x) and not no
            for x, no in zip(jax.tree.leaves(args), jax.tree.leaves(fixed), strict=True)
        ]

    def fwd(*args: Any, **kwargs: Any) -> Any:
        return f(*args, **kwargs), _Arguments(args)

    def bwd(residuals: _Arguments, ct: Any, **kwargs: Any) -> Any:
        args = residuals.args
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(args)
        given = [c for c in jax.tree.leaves(ct) if c.dtype != jax.dtypes.float0]
        found = iter(reverse()(args, kwargs, given))
        cotangents = [next(found) if _is_inexact(x) else None for x in leaves]
        kept = zip(cotangents, moving(args), strict=True)
        return tree.unflatten([c if m else None for c, m in kept])

    def rule(primals: Any, tangents: Any, **kwargs: Any) -> Any:
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(primals)
        given = [
            t if m else jnp.zeros_like(x)
            for x, t, m in zip(leaves, tree.flatten_up_to(tangents), moving(primals), strict=True)
            if _is_inexact(x)
        ]
        outs, moved = forward()(primals, kwargs, given)
        rest = iter(moved)
        return outs, jax.tree.map(lambda x: next(rest) if _is_inexact(x) else None, outs)

    f.defvjp(fwd, bwd)
    f.defjvp(rule)
    return f


def _cotangents(args: Any, kwargs: Any, cotangents: Any) -> list[Any]:
    return [_abstract(x) for x in jax.tree.leaves(args) if _is_inexact(x)]
