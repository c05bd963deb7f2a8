# SPDX-License-Identifier: Apache-2.0
"""Interrupts in a call of `inplace`, wherever Python looks for one: the next call is as any other."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core, _inplace, _kept
from owned_memory import needs_updates, owned

events = sys.monitoring.events
tool = sys.monitoring.OPTIMIZER_ID


def code_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    of_classes = [x for c in vars(module).values() if isinstance(c, type) for x in vars(c).values()]
    for x in (*vars(module).values(), *of_classes):
        code = getattr(x, "__code__", None)
        if code is not None and code.co_filename == module.__file__:
            yield code
            yield from (c for c in code.co_consts if isinstance(c, types.CodeType))


class Interrupts:
    """Raises KeyboardInterrupt at the places of these numbers, and counts those that are passed.

    Python looks for signals where a function begins, and where one that is written in C has returned.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] = ()
        self.passed = 0
        self.places: list[Any] = []

    def __enter__(self) -> "Interrupts":
        sys.monitoring.use_tool_id(tool, "interrupts")
        sys.monitoring.register_callback(tool, events.PY_START, self._pass)
        sys.monitoring.register_callback(tool, events.C_RETURN, self._pass)
        for code in {*code_of(_inplace), *code_of(_kept)}:
            sys.monitoring.set_local_events(tool, code, events.PY_START | events.CALL)
        return self

    def __exit__(self, *exc: object) -> None:
        for code in {*code_of(_inplace), *code_of(_kept)}:
            sys.monitoring.set_local_events(tool, code, 0)
        for event in (events.PY_START, events.C_RETURN):
            sys.monitoring.register_callback(tool, event, None)
        sys.monitoring.free_tool_id(tool)

    def _pass(self, code: types.CodeType, *about: Any) -> None:
        self.passed += 1
        if self.passed in self.numbers:
            self.places.append((code.co_name, *about))
            raise KeyboardInterrupt

    def at(self, *numbers: int) -> None:
        self.numbers, self.passed, self.places = numbers, 0, []


def a_tree(state, y):
    return [state[0] + y, state[1] * 2], state[0].sum()


CALLS = {
    "one": (lambda: jaxbridge.inplace(lambda x: x + 1), lambda a, b: (a,)),
    "a tree": (lambda: jaxbridge.inplace(a_tree, has_aux=True), lambda a, b: ([a, b], 1.0)),
}


@needs_updates
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("apart", [0, 1, 2, 3, 5, 8])
def test_after_an_interrupt_a_call_goes_on(kind, is_known, apart):
    """`apart`: after how many places a second one comes; 0: none."""
    make, arguments = CALLS[kind]
    a, b = owned(), owned()
    args = arguments(a, b)
    step = make()
    step(*args)
    with Interrupts() as interrupts:
        place = 1
        while True:
            if not is_known:
                step.clear()
            interrupts.at(place, place + apart)
            try:
                step(*args)
            except KeyboardInterrupt:
                at = interrupts.places
            else:
                break
            interrupts.at()
            a[...] = 0
            step(*args)
            step(*args)
            assert a.tolist() == [2] * 8, at
            place += 1
    assert place > 12
    _kept.in_use.clear()  # of calls that were interrupted as they left


@needs_updates
@pytest.mark.parametrize("in_a_frame", [False, True])
def test_an_interrupt_as_the_results_come_is_raised_after_the_update(in_a_frame):
    """They are lost then; the update goes on, and the array may go as soon as the call has raised."""
    block = jaxbridge.empty((600, 600), "float32")
    step = jaxbridge.inplace(lambda x: jax.lax.fori_loop(0, 8, lambda i, c: (c @ c) + 1e-3, x))
    block[...] = np.eye(600)
    step(block)
    other = jaxbridge.inplace(lambda x: x)  # has an array of its own in the memory
    other(block)
    (program,) = step._programs.values()
    uses = [kept.memory.parts[0].use for kept in step._memories.values()]

    class Signal:
        """The program, and a signal as it returns."""

        def __call__(self, *args: Any) -> Any:
            results = program(*args)
            if not in_a_frame:
                del results
            raise KeyboardInterrupt

    for kept in step._memories.values():
        kept.program = Signal()
    block[...] = np.eye(600)
    with pytest.raises(KeyboardInterrupt):
        step(block)
    assert [use() for use in uses] == [None], "XLA still has it"
    after = block.copy()
    _core.release_unused()
    np.testing.assert_array_equal(block, after)


@needs_updates
def test_memory_of_a_call_that_could_not_leave_it_is_taken_over():
    block = owned()
    step = jaxbridge.inplace(lambda x: x + 1)
    start = block.ctypes.data
    other = _kept.in_use[start] = _kept.Call()
    with pytest.raises(RuntimeError, match="in use by a call that has not returned"):
        step(block)
    assert _kept.in_use == {start: other}
    other.has_ended = True
    step(block)
    assert _kept.in_use == {} and block[0] == 1


@needs_updates
def test_an_error_before_the_program_runs_forgets_nothing():
    block = owned()
    step = jaxbridge.inplace(lambda x, y: x + jnp.sum(y))
    step(block, 1.0)
    (kept,) = step._memories.values()
    with pytest.raises(ValueError, match="memory that it updates as another argument"):
        step(block, block)
    assert [*step._memories.values()] == [kept] and not kept.memory.array.is_deleted()
