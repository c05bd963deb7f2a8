# SPDX-License-Identifier: Apache-2.0
"""What `torch_function` and `torch_module` have torch do: derivatives, result shapes, modules.

Nothing is kept after a call: torch's graph of a derivative is made and freed in the call that asks for it.
"""

import concurrent.futures
import contextlib
import copy
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from jaxbridge._errors import InputChangedError, ResultError

from .torch import _to_numpy, _to_torch

# Untyped: what they return depends on an argument, which torch does not say.
_func: Any = torch.func

_Tensor = torch.Tensor


# ---- derivatives ---------------------------------------------------------------------------------


def _is_inexact(x: Any) -> bool:
    return isinstance(x, _Tensor) and (x.is_floating_point() or x.is_complex())


def _of_moving(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    """`fn` of its floating-point arguments by position, as a function from tensors to tensors; these."""
    leaves, tree = jax.tree.flatten(args)
    moving = [i for i, x in enumerate(leaves) if _is_inexact(x)]

    def fun(*values: Any) -> tuple[tuple[Any, ...], Any]:
        full = list(leaves)
        for i, x in zip(moving, values, strict=True):
            full[i] = x
        out = fn(*jax.tree.unflatten(tree, full), **kwargs)
        # Results that do not depend on the arguments, and numbers, are constants.
        return tuple(x for x in jax.tree.leaves(out) if _is_inexact(x)), out

    return fun, [leaves[i] for i in moving]


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Torch records what is done, whatever the thread's modes are."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def pull_back(fn: Callable[..., Any], args: Any, kwargs: Any, cotangents: Any) -> list[Any]:
    """The cotangents of the floating-point arguments by position, from those of the results."""
    fun, moving = _of_moving(fn, args, kwargs)
    with _recording():
        _, pull = _func.vjp(lambda *values: fun(*values)[0], *moving)
        # Torch's cotangents of complex numbers are the conjugates of JAX's.
        found = pull(tuple(c.conj() if c.is_complex() else c for c in cotangents))
    return [x.conj() if x.is_complex() else x for x in found]


@functools.cache
def _load_forward_mode() -> None:
    with warnings.catch_warnings():  # its first use imports what torch itself deprecates
        warnings.simplefilter("ignore")
        _func.jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def push_forward(fn: Callable[..., Any], args: Any, kwargs: Any, tangents: Any) -> Any:
    """The results, and the tangents of the floating-point ones."""
    _load_forward_mode()
    fun, moving = _of_moving(fn, args, kwargs)
    with _recording():
        try:
            _, moved, out = _func.jvp(fun, tuple(moving), tuple(tangents), has_aux=True)
        except NotImplementedError:
            # Torch has no forward mode of some functions. The transpose of the reverse mode is that.
            outs, pull, out = _func.vjp(fun, *moving, has_aux=True)
            zeros = [torch.zeros_like(x) for x in outs]
            _, push = _func.vjp(lambda *cotangents: pull(cotangents), *zeros)
            moved = push(tuple(tangents))
    return out, list(moved)


# ---- result shapes -------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Sees whether random numbers are used."""

    def __init__(self) -> None:
        super().__init__()
        self.random: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(
            func, args, kwargs
        ):
            self.random.add(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def _drops_nothing(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all that would be random is a dropout, as in attention, and of a share of zero."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, given) == 0)
    return False


def shapes(name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, set[str]]:
    """The results of `fn` as a tree of `jax.ShapeDtypeStruct`, and which random functions it calls.

    Args:
        name: for messages.
        fn: the function.
        args: trees of `jax.ShapeDtypeStruct`, and what is static.
        kwargs: likewise.

    Raises:
        InputChangedError: it writes to an argument.
        ResultError: the shapes depend on values, or a result is no tensor.
    """
    watch = _Watch()
    fakes: list[tuple[Any, int]] = []

    def fake(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        made = torch.empty(x.shape, dtype=_to_torch[np.dtype(x.dtype)])
        fakes.append((made, made._version))
        return made

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), watch:
        given = jax.tree.map(fake, (args, kwargs))
        try:
            out = fn(*given[0], **given[1])
        except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
            raise ResultError(
                f"{name}: the shapes of the results cannot be told without running it ({error}); say "
                f"result="
            ) from error
        except torch._subclasses.fake_tensor.DataDependentOutputException as error:
            raise ResultError(
                f"{name}: {error.func} depends on values, so the shapes of the results cannot be told "
                f"without running it; say result="
            ) from error
        except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
            raise ResultError(
                f"{name}: the shape of {error.func} depends on values, and results have shapes that are "
                f"known before; return arrays of one shape"
            ) from error
    for position, (x, version) in enumerate(fakes):
        if x._version != version:
            raise InputChangedError(
                f"{name}: the function writes to array {position} of its arguments, {_described(x)}, and "
                f"arguments are values: use operations that are not in place, or x.clone()"
            )

    def described(x: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(x, _Tensor):
            raise ResultError(
                f"{name}: a result is a {type(x).__qualname__}; expected tensors, in tuples, lists and "
                f"dicts: wrap the function in one that returns these"
            )
        return jax.ShapeDtypeStruct(tuple(x.shape), _to_numpy[x.dtype])

    return jax.tree.map(described, out), watch.random


def _described(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


# ---- modules -------------------------------------------------------------------------------------


# The CPU's random numbers are of the process; CUDA's of a device, whose calls take turns.
_random = threading.Lock()


class Module:
    """A module as a function of its parameters and buffers.

    It has a copy of the module without their memory; each thread has its own, since torch puts
    parameters into a module for the time of a call.
    """

    def __init__(self, module: Any, training: bool) -> None:
        self._module = _without_memory(copy.deepcopy(module)).train(training)
        self.is_training = training
        self._of_thread = threading.local()

    def __call__(self, params: Any, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        module = getattr(self._of_thread, "module", None)
        if module is None:
            module = self._of_thread.module = self._copy()
        # They have no derivative, and some functions insist on that.
        buffers = {name: b.detach() for name, b in params["buffers"].items()}
        if self.is_training:  # they are updated
            buffers = {name: b.clone() for name, b in buffers.items()}
        state = {**params["parameters"], **buffers}
        with _seeded(key), _unchanged(module):
            out = torch.func.functional_call(module, state, args, kwargs)
        if not self.is_training:
            return out
        return out, {name: state[name] for name in buffers}

    def _copy(self) -> Any:
        # In a thread without the modes of this one, in which torch would make tensors of other kinds.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(copy.deepcopy, self._module).result()


@contextlib.contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """Takes from a module what a call leaves in its attributes.

    Recurrent ones keep their parameters in a list, others what they compute once: here that is JAX's
    memory, or without any where only shapes were asked for.
    """
    before = [(part, dict(part.__dict__), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)


def _without_memory(module: Any) -> Any:
    """The module itself, with tensors of no memory; what was one tensor is one."""
    made: dict[int, Any] = {}

    def abstract(x: Any) -> Any:
        if id(x) not in made:
            tensor = x.detach().to("meta")
            is_parameter = isinstance(x, torch.nn.Parameter)
            made[id(x)] = torch.nn.Parameter(tensor, x.requires_grad) if is_parameter else tensor
        return made[id(x)]

    state = [
        (part, name, x)
        for part in module.modules()
        for named in (part.named_parameters, part.named_buffers)
        for name, x in named(recurse=False, remove_duplicate=False)
    ]
    for part, name, x in state:
        setattr(part, name, abstract(x))
    return module


@contextlib.contextmanager
def _seeded(key: Any) -> Iterator[None]:
    if key is None or isinstance(key, torch._subclasses.FakeTensor):
        yield
        return
    high, low = (int(n) & 0xFFFFFFFF for n in key.reshape(-1)[-2:].tolist())
    devices = [key.device] if key.device.type == "cuda" else []
    with _random, torch.random.fork_rng(devices):
        torch.manual_seed((high << 32 | low) & 0x7FFFFFFFFFFFFFFF)
        yield


def state_of(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers by name, as tensors that need no gradient."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    buffers = {name: b.detach() for name, b in module.named_buffers()}
    return parameters, buffers


def is_module(x: Any) -> bool:
    return isinstance(x, torch.nn.Module)
