# SPDX-License-Identifier: Apache-2.0
"""What happens in Python at one call: views in, the function, results out.

A plan is made once for each platform and list of shapes. Everything that can be decided then is decided
then: `run` is what is left.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import _adapters, _config, _core
from ._errors import InputChangedError, ResultError, ViewKeptError
from ._spec import Slot

if TYPE_CHECKING:
    from ._call_site import CallSite

Described = Sequence[tuple[Any, tuple[int, ...]]]
Run = Callable[[list[Any], list[Any], int, int], None]

_no_rule_for_scalar = object()


def make_plan(
    site: "CallSite", platform: str, operands: Described, results: Described
) -> tuple[Run, bool]:
    """The work of one call, and whether its buffers are to be staged on the host.

    Args:
        site: the call.
        platform: "cpu" or "cuda".
        operands: (dtype, shape) of each operand.
        results: (dtype, shape) of each result.
    """
    fn = site.function_on(platform)
    framework = site.framework_on(platform)
    staged = platform == "cuda" and framework == "numpy"
    at = "cpu" if staged else platform
    adapter = _adapters.get(framework)
    for dtype, shape in [*operands, *results]:
        check_array(site.name, adapter, dtype, len(shape), at)

    view = adapter.view
    in_place_results = {result for _, result in site.in_place}
    own = [i for i in range(len(results)) if i not in in_place_results]
    writable = {operand for operand, _ in site.in_place}

    prepare = _argument_builder(site)
    out = site.out
    if out is None:
        finish = _result_writer(site, adapter, [results[i] for i in own], own)

    def work(operand_buffers: list[Any], result_buffers: list[Any]) -> None:
        views = [view(b) for b in operand_buffers]
        if out is None:
            if prepare is None:
                finish(fn(*views), result_buffers)
            else:
                args, kwargs = prepare(views)
                finish(fn(*args, **kwargs), result_buffers)
            return
        args, kwargs = ((*views,), {}) if prepare is None else prepare(views)
        outs = site.own_results.fill([view(result_buffers[i]) for i in own])
        if isinstance(out, str):
            fn(*args, **kwargs, **{out: outs})
        elif out == 0:
            fn(outs, *args, **kwargs)
        else:
            fn(*args, outs, **kwargs)

    body: Callable[[list[Any], list[Any]], None] = work
    if adapter.always_checks_inputs or _config.debug:
        body = _checking_inputs(site, adapter, work, writable)
    if _config.debug:
        body = _debugging(body, own)

    def run(
        operand_buffers: list[Any], result_buffers: list[Any], ordinal: int, stream: int
    ) -> None:
        scope = adapter.scope(platform, ordinal, stream) if not staged else None
        if scope is None:
            body(operand_buffers, result_buffers)
        else:
            with scope:
                body(operand_buffers, result_buffers)

    return run, staged


def check_array(name: str, adapter: Any, dtype: Any, ndim: int, platform: str) -> None:
    """Whether the framework has such arrays.

    Raises:
        TypeError: it has no such dtype, or not as many axes.
    """
    adapter.check_dtype(np.dtype(dtype), platform)
    if ndim > adapter.max_ndim:
        raise TypeError(
            f'{name}: framework="{adapter.name}" has arrays of {adapter.max_ndim} axes at most, and '
            f'this one has {ndim}; reshape it before the call, or use framework="buffer"'
        )


def _argument_builder(
    site: "CallSite",
) -> Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """From views to (args, kwargs); None where the views are the positional arguments as they are."""
    args, kwargs = site.arguments.tree
    if not kwargs and list(args) == [Slot(i) for i in range(site.operand_count)]:
        return None
    if all(isinstance(a, Slot) for a in (*args, *kwargs.values())):
        positions = [a.index for a in args]
        names = [(name, a.index) for name, a in kwargs.items()]
        return lambda views: (
            tuple([views[i] for i in positions]),
            {name: views[i] for name, i in names},
        )
    return site.arguments.fill


def _result_writer(
    site: "CallSite", adapter: Any, expected: Described, own: Sequence[int]
) -> Callable[[Any, list[Any]], None]:
    """Checks what the function returned against `expected`, then copies it into the buffers."""
    if not own:
        return lambda value, buffers: None
    view, store, signature = adapter.view, adapter.store, adapter.signature
    tree = site.own_results
    paths = tree.paths()
    treedef: Any = jax.tree.structure(tree.fill([0] * len(own)))

    def checked(value: Any, position: int) -> Any:
        dtype, shape = expected[position]
        got = signature(value)
        if got is None:
            try:
                scalar = _as_scalar(value, dtype, shape)
            except OverflowError as error:
                raise ResultError(
                    f"{site.name}: result{paths[position]}: {value!r} does not fit "
                    f"{_text(dtype, shape)}"
                ) from error
            if scalar is not _no_rule_for_scalar:
                return scalar
            raise ResultError(
                f"{site.name}: result{paths[position]}: expected an array of {adapter.name}, "
                f"{_text(dtype, shape)}, got {type(value).__module__}.{type(value).__qualname__}"
            )
        if (got[0] != shape and (shape or got[0] != adapter.scalar_shape)) or got[1] != dtype:
            raise ResultError(
                f"{site.name}: result{paths[position]}: expected {_text(dtype, shape)}, "
                f"got {_text(got[1], got[0])}; change the declared result or convert in the function"
            )
        return value

    if isinstance(tree.tree, Slot):
        index = own[0]

        def write_one(value: Any, buffers: list[Any]) -> None:
            store(checked(value, 0), view(buffers[index]))

        return write_one

    def write(value: Any, buffers: list[Any]) -> None:
        leaves, got = jax.tree.flatten(value)
        if treedef != got:
            leaves, plain = jax.tree.flatten(_plain_tuples(value))
            if treedef != plain:
                raise ResultError(
                    f"{site.name}: expected the results {_structure(treedef)}, got {_structure(got)}"
                )
        # Everything is checked before anything is written.
        values = [checked(leaf, position) for position, leaf in enumerate(leaves)]
        for leaf, index in zip(values, own, strict=True):
            store(leaf, view(buffers[index]))

    return write


def _plain_tuples(value: Any) -> Any:
    """`value` with plain tuples for named ones, which NumPy's linalg and SciPy return."""
    if isinstance(value, tuple):
        return tuple(map(_plain_tuples, value))
    if type(value) is list:
        return list(map(_plain_tuples, value))
    if type(value) is dict:
        return {key: _plain_tuples(v) for key, v in value.items()}
    return value


def _structure(treedef: Any) -> str:
    return str(treedef).removeprefix("PyTreeDef(").removesuffix(")")


def _text(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _as_scalar(value: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A Python number as a rank-0 result of a kind that can hold it, as weak types have it."""
    kinds = {bool: "b", int: "iufc", float: "fc", complex: "c"}
    if shape != () or type(value) not in kinds:
        return _no_rule_for_scalar
    kind = (
        "b"
        if dtype == np.bool_
        else "c"
        if jax.numpy.issubdtype(dtype, np.complexfloating)
        else ("f" if jax.numpy.issubdtype(dtype, np.floating) else "i")
    )
    return np.asarray(value, dtype) if kind in kinds[type(value)] else _no_rule_for_scalar


def _checking_inputs(
    site: "CallSite", adapter: Any, work: Callable[..., None], writable: set[int]
) -> Callable[[list[Any], list[Any]], None]:
    """`work`, and afterwards an error where an argument that is not in place was written."""
    paths = site.arguments.paths()

    def run(operand_buffers: list[Any], result_buffers: list[Any]) -> None:
        watched = [(i, adapter.view(b)) for i, b in enumerate(operand_buffers) if i not in writable]
        before = [adapter.snapshot(v) for _, v in watched]
        work(operand_buffers, result_buffers)
        for (i, v), token in zip(watched, before, strict=True):
            if not adapter.unchanged(v, token):
                raise InputChangedError(
                    f"{site.name}: the function changed its argument "
                    f"{argument_name(paths.get(i, str(i)))} in place; "
                    f"declare it with inout=, pass a jax.Ref, or write to a copy"
                )

    return run


def _debugging(
    work: Callable[[list[Any], list[Any]], None], own: Sequence[int]
) -> Callable[[list[Any], list[Any]], None]:
    """JAXBRIDGE_DEBUG=1: results start as a pattern, and the device is waited for."""

    def run(operand_buffers: list[Any], result_buffers: list[Any]) -> None:
        for i in own:
            _core.fill(result_buffers[i], 0xA5)
        work(operand_buffers, result_buffers)
        for b in (*operand_buffers, *result_buffers)[:1]:
            if b.platform == "cuda":
                _core.synchronize(b.stream, b.ordinal)

    return run


def end_lease(
    site: "CallSite",
    held: Sequence[int],
    operands: list[Any],
    results: list[Any],
    exception: BaseException | None,
) -> None:
    """Asked when views outlived a call: looks again without what may hold them legitimately.

    Raises:
        ViewKeptError: the function did keep a view. Where it raised, that is added as a note.
    """
    del held  # what is held now counts
    if exception is not None:
        seen: set[int] = set()
        queue: list[BaseException | None] = [exception]
        while queue:
            e = queue.pop()
            if e is None or id(e) in seen:
                continue
            seen.add(id(e))
            traceback.clear_frames(e.__traceback__)
            queue += [e.__cause__, e.__context__]
            if isinstance(e, BaseExceptionGroup):
                queue += e.exceptions
    if not (_core.held(operands) or _core.held(results)):
        return
    gc.collect()
    argument_paths = site.arguments.paths()
    names = [
        f"argument {argument_name(argument_paths.get(i, str(i)))}" for i in _core.held(operands)
    ]
    names += [f"result {i}" for i in _core.held(results)]
    if not names:
        return
    message = (
        f"{site.name}: the function kept a view of {', '.join(names)} after it returned. The memory is "
        f"XLA's and is used again: copy what is needed later (for example x.copy())"
    )
    if exception is None:
        raise ViewKeptError(message)
    exception.add_note(message)


def argument_name(path: str) -> str:
    """`[0][2]['x']` (of (args, kwargs)) as `2['x']`; `[1]['y']` as `y`."""
    if path.startswith("[0]"):
        return path[3:].replace("[", "", 1).replace("]", "", 1)
    if path.startswith("[1]['"):
        return path[5:].replace("']", "", 1)
    return path
