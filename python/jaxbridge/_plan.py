# SPDX-License-Identifier: Apache-2.0
"""What happens in Python at one call: views in, the function, results out.

A plan is made once for each platform and list of shapes. Everything that can be decided then is decided
then. The core makes the views and calls the function itself, or `work` where more than that is to be done.
"""

import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import _adapters, _config, _core, _frames
from ._context import current
from ._errors import InputChangedError, ResultError, ViewKeptError, add_note
from ._returned import Described, Finish, finisher
from ._spec import Slot, Template
from ._state import States

if TYPE_CHECKING:
    from ._call_site import CallSite

# Of operand views, views of the function's own results, and all result buffers.
Work = Callable[[list[Any], list[Any], list[Any]], None]


def make_plan(
    site: "CallSite",
    states: dict[Any, States],
    platform: str,
    operands: Described,
    results: Described,
) -> _core.Plan:
    """The work of one call.

    Args:
        site: the call.
        states: what state= has made for it, by platform and operands; plans come and go.
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

    in_place_results = {result for _, result in site.in_place}
    own = [i for i in range(len(results)) if i not in in_place_results]

    def viewer(described: tuple[Any, tuple[int, ...]]) -> Any:
        return adapter.viewer(np.dtype(described[0]), described[1], at)

    has_scope = not staged and adapter.scopes(platform)
    checks_memory = adapter.always_checks_memory or _config.debug
    checks_inputs = adapter.always_checks_inputs or _config.debug
    finish = finisher(site, adapter, [results[i] for i in own])
    how: dict[str, Any] = {
        "operand_viewers": [viewer(d) for d in operands],
        "own_viewers": [(i, viewer(results[i])) for i in own],
        "scope": functools.partial(adapter.scope, platform) if has_scope else None,
        "capture_scope": adapter.capture_scope if platform == "cuda" and not staged else None,
        "staged": staged,
    }
    arguments = site.arguments
    if site.callee.makes_state:
        key = (platform, *((np.dtype(dtype), shape) for dtype, shape in operands))
        how["state"] = states.setdefault(key, _states(site, operands))
        arguments = _with_state(arguments, len(operands))
    if has_scope and platform == "cuda" and site.options.scratch == "xla":
        how["scope"] = adapter.scratch_scope
        how["scratch"] = True
    checks = checks_memory or checks_inputs
    flat = None if checks else _flat_arguments(site, arguments, len(operands))
    if flat is not None:
        positions, keywords = flat
        return _core.Plan(
            **how,
            function=fn,
            arguments=positions,
            keywords=keywords or None,
            finish=finish,
            writes=site.out is not None or not own,
        )
    work = _caller(site, fn, arguments, adapter, finish, checks_memory)
    if checks_memory and site.in_place:
        work = _checking_memory(site, adapter, work)
    if checks_inputs:
        work = _checking_inputs(site, adapter, work)
    return _core.Plan(**how, work=_debugging(work, own) if _config.debug else work)


def _states(site: "CallSite", operands: Described) -> States:
    """What makes the function's state: from the arguments, with abstract arrays."""
    make = site.callee.functions["state"]
    abstract = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for dtype, shape in operands]

    def made() -> Any:
        args, kwargs = site.arguments.fill(abstract)  # lists and dicts are its own
        return make(current(), *args, **kwargs)

    return States(site.name, made)


def _with_state(arguments: Template, operand_count: int) -> Template:
    """The arguments with the state as one more keyword, after the operands."""
    args, kwargs = arguments.tree
    return Template((args, {**kwargs, "state": Slot(operand_count)}))


def _flat_arguments(
    site: "CallSite", arguments: Template, operand_count: int
) -> tuple[list[tuple[str, Any]], tuple[str, ...]] | None:
    """The function's arguments, positional ones first, and the names of the others.

    None where an argument is a tree, but for tuples that are static, or the results are one of depth.
    """
    args, kwargs = arguments.tree
    out: Any = site.out
    if not all(isinstance(a, Slot) or _is_constant(a) for a in (*args, *kwargs.values())):
        return None  # a list or dict is made anew for each call
    result: list[tuple[str, Any]] = []
    if out is not None:
        tree = site.own_results.tree
        if isinstance(tree, Slot):
            result = [("result", 0)]
        elif type(tree) in (list, tuple) and all(isinstance(x, Slot) for x in tree):
            result = [(f"result {type(tree).__name__}", None)]
        else:
            return None

    def given(a: Any) -> tuple[str, Any]:
        if not isinstance(a, Slot):
            return "value", a
        return ("operand", a.index) if a.index < operand_count else ("state", None)

    as_argument = [given(a) for a in args]
    if out == 0:
        as_argument = result + as_argument
    elif out == -1:
        as_argument += result
    names = list(kwargs)
    as_argument += [given(a) for a in kwargs.values()]
    if isinstance(out, str):
        as_argument += result
        names += [out]
    return as_argument, tuple(names)


def _is_constant(x: Any) -> bool:
    """Whether a static argument is the same object at each call: no function can change its structure."""
    if type(x) is tuple:
        return all(map(_is_constant, x))
    return x is None or (not isinstance(x, Slot) and jax.tree_util.all_leaves([x]))


def _caller(
    site: "CallSite",
    fn: Callable[..., Any],
    arguments: Template,
    adapter: Any,
    finish: Finish,
    checks: bool,
) -> Work:
    """Calls the function on views of the operands, and takes its results."""
    fill_arguments, fill_results = arguments.fill, site.own_results.fill
    out: Any = site.out
    memory, paths = adapter.memory, site.own_results.paths()

    def work(views: list[Any], own: list[Any], buffers: list[Any]) -> None:
        args, kwargs = fill_arguments(views)
        if out is None:
            value = fn(*args, **kwargs)
        else:
            results = fill_results(own)
            before = [memory(o) for o in own] if checks else ()
            if out == -1:
                value = fn(*args, results, **kwargs)
            elif out == 0:
                value = fn(results, *args, **kwargs)
            else:
                value = fn(*args, **kwargs, **{out: results})
            for position, there in enumerate(before):
                if memory(own[position]) != there:
                    raise _moved(site, f"result{paths[position]}")
            if value is None or value is results:
                return
        finish(value, own, buffers)

    return work


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


def _checking_inputs(site: "CallSite", adapter: Any, work: Work) -> Work:
    """`work`, and afterwards an error where an argument that is not in place was written."""
    paths = site.arguments.paths()
    writable = {operand for operand, _ in site.in_place}
    watched = [i for i in range(site.operand_count) if i not in writable]

    def checked(views: list[Any], own: list[Any], buffers: list[Any]) -> None:
        called = _core.current_call()
        if _config.debug and called is not None and called[3]:
            work(views, own, buffers)  # a capture, in which no content can be looked at
            return
        # The very arrays that the function gets: torch counts the changes of each.
        before = [(i, views[i], adapter.snapshot(views[i])) for i in watched]
        work(views, own, buffers)
        for i, view, token in before:
            if not adapter.unchanged(view, token):
                raise InputChangedError(
                    f"{site.name}: the function changed its argument "
                    f"{argument_name(paths.get(i, str(i)))} in place; "
                    f"declare it with inout=, pass a jax.Ref, or write to a copy"
                )

    return checked


def _checking_memory(site: "CallSite", adapter: Any, work: Work) -> Work:
    """`work`, and afterwards an error where an argument in place is not on XLA's memory any more."""
    paths = site.arguments.paths()
    memory = adapter.memory

    def checked(views: list[Any], own: list[Any], buffers: list[Any]) -> None:
        before = [(i, views[i], memory(views[i])) for i, _ in site.in_place]
        work(views, own, buffers)
        for i, view, there in before:
            if memory(view) != there:
                raise _moved(site, f"argument {argument_name(paths.get(i, str(i)))}")

    return checked


def _moved(site: "CallSite", what: str) -> ResultError:
    return ResultError(
        f"{site.name}: the function gave {what} other memory, or another size, and XLA does not see "
        f"what it wrote there; write to the array itself, as out.copy_(x) does, in place of "
        f"out.data = x, out.set_(x) or an out= of another size"
    )


def _debugging(work: Work, own_results: Sequence[int]) -> Work:
    """JAXBRIDGE_DEBUG=1: results start as a pattern, and the device is waited for."""

    def debugged(views: list[Any], own: list[Any], buffers: list[Any]) -> None:
        for i in own_results:
            _core.fill(buffers[i], 0xA5)
        work(views, own, buffers)
        _, ordinal, stream, capturing = _core.current_call() or ("", 0, 0, False)
        if stream and not capturing:
            _core.synchronize(stream, ordinal)

    return debugged


def end_lease(
    site: "CallSite",
    held: Callable[[], tuple[list[int], list[int]]],
    exception: BaseException | None,
) -> None:
    """Asked when views outlived a call: looks again without what may hold them legitimately.

    Args:
        site: the call.
        held: gives the positions of the operands and results that views are alive of.
        exception: what the function raised.

    Raises:
        ViewKeptError: the function did keep a view. Where it raised, its own exception gets a note.
    """
    caller = sys._getframe().f_back
    may_hold = exception is not None and _frames.end(exception, sys.exception(), caller)
    for attempt in range(12):
        if held() == ([], []):
            return
        if attempt < 3:
            gc.collect(attempt)  # what is in a cycle since the call began is young
        else:
            time.sleep(0.001)  # a thread of the framework's can be on its way to drop its last view
    operands, results = held()
    argument_paths, result_paths = site.arguments.paths(), _result_paths(site)
    names = [f"argument {argument_name(argument_paths.get(i, str(i)))}" for i in operands]
    names += [f"result{result_paths.get(i, f' {i}')}" for i in results]
    if not names:
        return
    called: Any = _core.current_call()
    copies = _adapters.get(site.framework_on(called[0])).how_to_copy
    message = (
        f"{site.name}: the function kept a view of {', '.join(names)} after it returned. The memory is "
        f"XLA's and is used again: copy what is needed later (for example {copies})"
    )
    if exception is None:
        raise ViewKeptError(message)
    if not may_hold:
        add_note(exception, message)


def _result_paths(site: "CallSite") -> dict[int, str]:
    """The paths of the results that the function makes, by their number among all."""
    in_place = {result for _, result in site.in_place}
    paths = site.own_results.paths()
    own = [i for i in range(len(paths) + len(in_place)) if i not in in_place]
    return {own[position]: path for position, path in paths.items()}


def operand_names(site: "CallSite") -> list[str]:
    """What messages call the operands."""
    paths = site.arguments.paths()
    return [
        f"{site.name}: argument {argument_name(paths.get(i, str(i)))}"
        for i in range(site.operand_count)
    ]


def argument_name(path: str) -> str:
    """`[0][2]['x']` (of (args, kwargs)) as `2['x']`; `[1]['y']` as `y`."""
    if path.startswith("[0]"):
        return path[3:].replace("[", "", 1).replace("]", "", 1)
    if path.startswith("[1]['"):
        return path[5:].replace("']", "", 1)
    return path
