# SPDX-License-Identifier: Apache-2.0
"""state= on the CPU: when it is made, who shares it, when it ends, and what is said of mistakes."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _state


def like(x, *rest, **kw):
    return x


class Maker:
    """Makes states and keeps count of them."""

    class State:
        def __init__(self, *args, **kwargs):
            self.args, self.kwargs = args, kwargs

    def __init__(self):
        self.refs = []

    def __call__(self, context, *args, **kwargs):
        state = self.State(context, *args, **kwargs)
        self.refs.append(weakref.ref(state))
        return state

    def alive(self):
        gc.collect()
        return sum(r() is not None for r in self.refs)


def test_it_is_made_of_the_arguments():
    maker, seen = Maker(), []

    def fn(tree, k, *, flag, state):
        seen.append(state)
        return tree["a"] * k

    f = jaxbridge.call(fn, lambda tree, k, *, flag: tree["a"], state=maker)
    x = jnp.ones(3)
    for _ in range(3):
        assert f({"a": x, "b": [x]}, 2, flag=True).tolist() == [2, 2, 2]
    (context, tree, k), kwargs = seen[0].args, seen[0].kwargs
    spec = jax.ShapeDtypeStruct((3,), np.dtype(np.float32))
    assert (tree, k, kwargs) == ({"a": spec, "b": [spec]}, 2, {"flag": True})
    assert context == jaxbridge.Context("cpu", 0, 0, False)
    assert all(s is seen[0] for s in seen) and len(maker.refs) == 1


def test_many_shapes_keep_their_states():
    """More than the plans that are kept: nothing is made twice, nor what it counted lost."""
    made = []

    def fn(x, state):
        state["calls"] += 1
        return x * 0 + state["calls"]

    f = jaxbridge.call(fn, like, state=lambda context, x: made.append(x.shape) or {"calls": 0})
    program = jax.jit(lambda: [f(jnp.ones(n)) for n in range(1, 71)])
    for turn in range(1, 4):
        assert {float(r[0]) for r in program()} == {turn}
    assert len(made) == 70


def test_transforms():
    maker = Maker()
    f = jaxbridge.call(lambda x, state: x + 1, like, state=maker, vmap_method="sequential")
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.vmap(f)(x), x + 1)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, v: (c, f(v)), 0, x)[1], x + 1)
    assert len(maker.refs) == 1
    g = jaxbridge.call(lambda x, state: x + 1, like, state=maker, elementwise=True)
    np.testing.assert_array_equal(jax.vmap(g)(x), x + 1)
    assert maker.refs[-1]().args[1].shape == (2, 3)


def test_it_ends_with_clear_and_with_the_programs():
    maker = Maker()
    f = jaxbridge.call(lambda x, state: x + 1, like, state=maker)
    program = jax.jit(f)
    program(jnp.ones(3)).block_until_ready()
    program(jnp.ones(4)).block_until_ready()
    assert maker.alive() == 2
    f.clear()
    assert maker.alive() == 0
    program(jnp.ones(3)).block_until_ready()
    assert maker.alive() == 1 and len(maker.refs) == 3
    del program, f
    jax.clear_caches()
    assert maker.alive() == 0


class Model:
    def __init__(self, k):
        self.k = k

    @jaxbridge.function(result=lambda self, x: x, state=lambda context, self, x: self.k * 10)
    def apply(self, x, *, state):
        return x + state


def test_methods():
    assert float(Model(2).apply(jnp.zeros(()))) == 20
    assert float(jax.jit(Model(3).apply)(jnp.zeros(()))) == 30


def test_an_error_in_it_is_told_as_such():
    f = jaxbridge.call(lambda x, state: x, like, state=lambda x: x.shape, name="test.wrong_maker")
    with pytest.raises(TypeError) as raised:
        f(jnp.ones(3))
    assert (
        "raised by the state= of test.wrong_maker, which gets (context" in raised.value.__notes__[0]
    )


def test_a_state_that_needs_itself():
    def make():
        return states(0, 0)

    states = _state.States("test.itself", make)
    with pytest.raises(RuntimeError, match="test.itself: making the state called the function"):
        states(0, 0)


def test_states_that_need_each_other_in_two_threads():
    """Each of them is being made, and needs the other: an error, where both would wait for ever."""
    both_are_being_made = threading.Barrier(2)
    states, raised = {}, {}

    def make(other):
        both_are_being_made.wait(timeout=60)
        return states[other](0, 0)

    for one, other in (("one", "other"), ("other", "one")):
        states[one] = _state.States(f"test.{one}", lambda other=other: make(other))

    def call(name):
        try:
            states[name](0, 0)
        except RuntimeError as error:
            both_are_being_made.abort()  # who waited makes what failed here
            raised[name] = error

    threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert any("making the state called the function" in str(e) for e in raised.values())


def coroutine_maker():
    async def make(context, x):
        return 1

    return make


def generator_maker():
    def make(context, x):
        yield 1

    return make


@pytest.mark.parametrize("maker", [3, coroutine_maker(), generator_maker()])
def test_no_maker(maker):
    with pytest.raises(TypeError, match=r"state is .*; expected None or a function state\(context"):
        jaxbridge.call(lambda x, state: x, like, state=maker)


def positional_only(x, state, /):
    return x


@pytest.mark.parametrize("fn", [lambda x: x, positional_only])
def test_no_parameter_for_it(fn):
    with pytest.raises(TypeError, match="has no such parameter"):
        jaxbridge.call(fn, like, state=lambda context, x: 1)


def test_two_uses_of_the_keyword():
    def fn(x, state):
        return x

    with pytest.raises(ValueError, match="out='state', and state= is passed as that keyword"):
        jaxbridge.call(fn, like, out="state", state=lambda context, x: 1)
    f = jaxbridge.call(fn, like, state=lambda context, x: 1)
    with pytest.raises(TypeError, match="the keyword 'state' takes what state= made"):
        f(jnp.ones(3), state=2)


def body(x, state=None):
    return x


@pytest.mark.parametrize("first", [True, False])
def test_one_name_for_two_definitions(first):
    name = f"test.state.two_definitions.{first}"
    with_it = {"state": lambda context, x: 1}
    jaxbridge.call(body, like, name=name, **(with_it if first else {}))
    with pytest.raises(ValueError, match="belongs to another function already"):
        jaxbridge.call(body, like, name=name, **({} if first else with_it))


def test_the_state_of_a_graph_of_xla_is_freed_too():
    """On the CPU graph= means nothing; what text tells is held by the process until clear()."""

    class State:
        pass

    alive = weakref.WeakSet()

    def make(context, v):
        alive.add(state := State())
        return state

    f = jaxbridge.call(
        lambda v, state: v, lambda v: v, state=make, graph="xla", name="state of xla, freed"
    )
    program = jax.jit(f)
    program(jnp.zeros(3))
    assert len(alive) == 1
    f.clear()
    gc.collect()
    assert len(alive) == 0
    program(jnp.zeros(3))
    assert len(alive) == 1
