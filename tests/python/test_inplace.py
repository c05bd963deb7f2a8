# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries that JAX updates in their own memory, on the CPU: `inplace`.

docs/memory.md refers to these tests by name.
"""

import functools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from interchange import Only
from jaxbridge import _core
from owned_memory import needs_updates, owned, readonly_view


@needs_updates
def test_inplace_writes_the_new_values_into_the_memory():
    block = owned()
    step = jaxbridge.inplace(lambda x, y: x + y)
    for i in range(1, 4):
        assert step(block, 1.0) is None
        np.testing.assert_array_equal(block, np.arange(8) + i)


@needs_updates
def test_inplace_of_trees_and_of_several_arguments():
    state = {"q": owned(), "p": (owned(4, "int32"),)}
    more = owned(2)

    def f(scale, state, more, *, shift):
        return (
            ({"q": state["q"] * scale, "p": (state["p"][0] + 1,)}, more - shift),
            state["q"].sum(),
        )

    step = jaxbridge.inplace(f, argnums=(1, 2), has_aux=True)
    assert float(step(2.0, state, more, shift=1.0)) == 28
    np.testing.assert_array_equal(state["q"], np.arange(8) * 2)
    np.testing.assert_array_equal(state["p"][0], np.arange(4) + 1)
    np.testing.assert_array_equal(more, np.arange(2) - 1)


@needs_updates
def test_what_is_in_the_way_is_said_with_its_place():
    state = {"q": owned(), "p": [owned(), owned(16)[1:9]]}
    step = jaxbridge.inplace(lambda dt, x, y: (x, y), argnums=(2, 1))
    with pytest.raises(BufferError, match="no multiple of 64") as caught:
        step(0.1, state, owned())
    assert caught.value.__notes__ == ["This is argument 1 at ['p'][1] of <lambda>."]
    with pytest.raises(TypeError, match="expected an array") as caught:
        step(0.1, {"a": owned()}, 3.0)
    assert caught.value.__notes__ == ["This is argument 2 of <lambda>."]


@needs_updates
def test_inplace_of_positions_of_numpy():
    block = owned()
    jaxbridge.inplace(lambda y, x: x + y, np.int64(1))(1.0, block)
    np.testing.assert_array_equal(block, np.arange(8) + 1)


@needs_updates
def test_inplace_of_static_arguments_by_name():
    step = jaxbridge.inplace(
        lambda x, mode="add": x + 1 if mode == "add" else x * 2, static_argnums=1
    )
    block = owned()
    step(block, "multiply")
    step(block, mode="multiply")
    step(block, mode="add")
    step(block)
    np.testing.assert_array_equal(block, np.arange(8) * 4 + 2)


@needs_updates
def test_inplace_of_arguments_of_any_name():
    block = owned()
    step = jaxbridge.inplace(
        lambda x, taken, **others: x + taken + others["given"] + others["self"]
    )
    step(block, taken=1.0, given=2.0, self=3.0)
    np.testing.assert_array_equal(block, np.arange(8) + 6)


@needs_updates
def test_inplace_makes_methods():
    class Simulation:
        factor = 3.0

        @functools.partial(jaxbridge.inplace, argnums=1, static_argnums=0)
        def step(self, x):
            return x * self.factor

    block = owned()
    Simulation().step(block)
    Simulation.step(Simulation(), block)
    np.testing.assert_array_equal(block, np.arange(8) * 9)
    assert repr(Simulation.step) == "<jaxbridge.inplace of step, argnums=(1,)>"


@needs_updates
def test_inplace_keeps_the_order_of_argnums():
    a, b = owned(), owned()
    b[...] = 100
    jaxbridge.inplace(lambda x, y: (y + 1, x + 2), argnums=(1, 0))(a, b)
    # New values come in the order of argnums: of b, then of a.
    np.testing.assert_array_equal(b, np.full(8, 101))
    np.testing.assert_array_equal(a, np.arange(8) + 2)


@needs_updates
def test_inplace_of_arrays_that_change_places():
    a, b = owned(), owned()
    b[...] = 100
    jaxbridge.inplace(lambda x, y: (y, x), argnums=(0, 1))(a, b)
    np.testing.assert_array_equal(a, np.full(8, 100))
    np.testing.assert_array_equal(b, np.arange(8))


@needs_updates
def test_inplace_that_does_not_look_at_the_old_values():
    block = owned()
    jaxbridge.inplace(jnp.zeros_like)(block)
    np.testing.assert_array_equal(block, np.zeros(8))
    jaxbridge.inplace(lambda x: x)(block)
    np.testing.assert_array_equal(block, np.zeros(8))


@needs_updates
def test_inplace_sees_what_the_owner_writes():
    block = owned()
    step = jaxbridge.inplace(lambda x: x + 1)
    for i in range(5):
        block[0] = i
        step(block)
        assert block[0] == i + 1


@needs_updates
def test_inplace_traces_once_and_imports_once():
    traces = []

    def f(x, n):
        traces.append(n)
        return x + n

    step = jaxbridge.inplace(f, static_argnums=1)
    block = owned()
    for n in (1, 1, 2, 2, 1):
        step(block, n)
        assert _core.live_imports(block.ctypes.data) == 1
    assert traces == [1, 2]
    np.testing.assert_array_equal(block, np.arange(8) + 7)


@needs_updates
def test_inplace_keeps_no_array_that_its_user_has_not():
    step = jaxbridge.inplace(lambda x: x + 1)
    addresses = []
    for _ in range(3):
        block = owned()
        gone = weakref.ref(block)
        step(block)
        addresses.append(block.ctypes.data)
        del block
        assert gone() is None
        assert _core.live_imports(addresses[-1]) == 0
    kept = owned()
    step(kept)
    step.clear()
    assert _core.live_imports(kept.ctypes.data) == 0
    step(kept)
    np.testing.assert_array_equal(kept, np.arange(8) + 2)


@needs_updates
def test_inplace_notices_an_array_that_has_moved():
    step = jaxbridge.inplace(lambda x: x + 1)
    block = owned()
    step(block)
    block.flags.writeable = False
    with pytest.raises(BufferError, match="it is read-only"):
        step(block)
    np.testing.assert_array_equal(block, np.arange(8) + 1)

    # An array whose memory changes, as a simulator's own type may do.
    class Moving(Only):
        pass

    first, second = owned(), owned()
    moving = Moving(first, "__dlpack__", "__dlpack_device__")
    step(moving)
    moving._array = second
    step(moving)
    for a in (first, second):
        np.testing.assert_array_equal(a, np.arange(8) + 1)


@needs_updates
@pytest.mark.parametrize(
    "change, want",
    [
        (lambda a: a[:4], np.float32([2, 3, 4, 5, 5, 6, 7, 8])),
        (lambda a: a[:4].reshape(2, 2), np.float32([2, 3, 4, 5, 5, 6, 7, 8])),
        (lambda a: a.view(np.int32), (np.arange(8, dtype="f4") + 1).view("i4") + 1),
        (lambda a: a.reshape(4, 2).T, "strides"),
        (readonly_view, "read-only"),
    ],
    ids=["fewer", "shape", "dtype", "strides", "read-only"],
)
def test_inplace_notices_an_array_that_has_changed(change, want):
    """At the same address: what the owner's object says now counts, and never what it said before."""
    block = owned()
    thing = Only(block, "__dlpack__", "__dlpack_device__")
    step = jaxbridge.inplace(lambda x: x + 1)
    step(thing)
    thing._array = change(block)
    if isinstance(want, str):
        with pytest.raises(BufferError, match=want):
            step(thing)
        np.testing.assert_array_equal(block, np.arange(8) + 1)
    else:
        step(thing)
        np.testing.assert_array_equal(block.view(want.dtype), want)


@needs_updates
@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
def test_inplace_notices_another_dtype_and_shape_of_a_numpy_array():
    block = owned()
    seen = []
    step = jaxbridge.inplace(lambda x: (seen.append((x.shape, x.dtype.name)), x)[1])
    step(block)
    block.dtype = np.int32
    step(block)
    block.shape = (2, 4)
    step(block)
    assert seen == [((8,), "float32"), ((8,), "int32"), ((2, 4), "int32")]


@needs_updates
def test_inplace_notices_a_part_that_has_become_read_only():
    part = owned()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    whole = jaxbridge.sharded([part], (8,), NamedSharding(mesh, PartitionSpec("d")))
    step = jaxbridge.inplace(lambda x: x + 1)
    step(whole)
    part.flags.writeable = False
    with pytest.raises(BufferError, match="it is read-only"):
        step(whole)
    np.testing.assert_array_equal(part, np.arange(8) + 1)


@needs_updates
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda t: t.t_(), "strides"),
        (lambda t: t.requires_grad_(), "requires grad"),
    ],
    ids=["transposed", "requires grad"],
)
def test_inplace_notices_a_tensor_that_has_changed(change, text, needs):
    needs("torch")
    import torch

    block = owned(16)
    tensor = torch.from_numpy(block.reshape(4, 4))
    step = jaxbridge.inplace(lambda x: x + jnp.arange(4))
    step(tensor)
    before = block.copy()
    change(tensor)
    with pytest.raises(BufferError, match=text):
        step(tensor)
    np.testing.assert_array_equal(block, before)


@needs_updates
def test_inplace_is_compiled_where_jit_is_disabled():
    block = owned()
    step = jaxbridge.inplace(lambda x, y: (x + y, x.sum()), has_aux=True)
    with jax.disable_jit():
        assert float(step(block, 1.0)) == 28
        assert float(step(block, 1.0)) == 36
        assert jax.config.jax_disable_jit
    np.testing.assert_array_equal(block, np.arange(8) + 2)


@needs_updates
@pytest.mark.parametrize(
    "mode, fun, what",
    [
        (jax.debug_nans, lambda x: jnp.log(x - 1), "NaN"),
        (jax.debug_infs, lambda x: 1 / x, "infinity"),
    ],
    ids=["nans", "infs"],
)
def test_inplace_where_jax_looks_for_nans_and_infinities(mode, fun, what):
    block = owned()
    step = jaxbridge.inplace(lambda x: (fun(x), x.astype(int)), has_aux=True)
    with mode(True):
        with pytest.raises(FloatingPointError, match=f"{what} is in what <lambda> returned"):
            step(block)
        block[...] = 3
        assert step(block)[0] == 3  # and is in place
    np.testing.assert_allclose(block, fun(np.full(8, 3, "float32")))


@needs_updates
def test_inplace_raises_what_an_external_function_raised():
    def fails(x):
        if x[0] > 1:
            raise KeyError("too much")
        return x + 1

    f = jaxbridge.call(fails, lambda x: x)
    step = jaxbridge.inplace(f)
    block = owned()
    step(block)
    step(block)
    with pytest.raises(KeyError, match="too much"):
        step(block)
    block[...] = 0
    step(block)
    np.testing.assert_array_equal(block, np.ones(8))


@needs_updates
@pytest.mark.parametrize(
    "fun, kind, text",
    [
        (lambda x: x[:4], TypeError, r"returned float32\[4\] as the new value of an array of"),
        (lambda x: x.astype(int), TypeError, r"returned int32\[8\]"),
        (lambda x: (x, x), TypeError, "returned new values of the structure"),
        (lambda x: None, TypeError, "returned new values of the structure"),
    ],
)
def test_inplace_of_new_values_that_do_not_fit(fun, kind, text):
    block = owned()
    step = jaxbridge.inplace(fun)
    with pytest.raises(kind, match=text):
        step(block)
    np.testing.assert_array_equal(block, np.arange(8))
    # Nothing is left that would be in the way of the next one.
    jaxbridge.inplace(lambda x: x + 1)(block)
    np.testing.assert_array_equal(block, np.arange(8) + 1)


@needs_updates
def test_inplace_of_bad_arguments():
    f = lambda x, y=0: x
    with pytest.raises(ValueError, match="argnums"):
        jaxbridge.inplace(f, argnums=())
    with pytest.raises(ValueError, match="argnums"):
        jaxbridge.inplace(f, argnums=(0, 0))
    with pytest.raises(ValueError, match="count from the first"):
        jaxbridge.inplace(f, argnums=-1)
    with pytest.raises(ValueError, match="cannot be static"):
        jaxbridge.inplace(f, static_argnums=0)
    for bad in ("0", 0.0, ["x"], None):
        with pytest.raises(TypeError, match="argnums=.*: expected the position of an argument"):
            jaxbridge.inplace(f, argnums=bad)
    with pytest.raises(TypeError, match="static_argnums='y': expected the position"):
        jaxbridge.inplace(f, static_argnums="y")
    with pytest.raises(TypeError, match=r"expected a function of JAX, got builtins\.int"):
        jaxbridge.inplace(3)
    for empty in (None, {}, [()]):
        with pytest.raises(TypeError, match="there is no array in argument 0"):
            jaxbridge.inplace(f)(empty)
    with pytest.raises(TypeError, match="got 0 arguments by position"):
        jaxbridge.inplace(f)(x=owned())
    with pytest.raises(TypeError, match=r"returned .*; with has_aux=True"):
        jaxbridge.inplace(f, has_aux=True)(owned())
    block = owned()
    with pytest.raises(ValueError, match="two of the arrays are in the same memory"):
        jaxbridge.inplace(lambda x, y: (x, y), argnums=(0, 1))(block, block[:])
    with pytest.raises(ValueError, match="two of the arrays are in the same memory"):
        jaxbridge.inplace(lambda x: x)([block, block])
    with pytest.raises(TypeError, match="a bare capsule is used up"):
        jaxbridge.inplace(f)(block.__dlpack__())


@needs_updates
@pytest.mark.parametrize(
    "other",
    [
        lambda block: block,
        lambda block: block[::-2],
        lambda block: {"a": [1.0, block[7:]]},
        jaxbridge.from_external,
        jaxbridge.ref,
    ],
    ids=["itself", "a view", "in a tree", "from_external", "a Ref"],
)
def test_memory_that_is_updated_is_no_other_argument(other):
    """On the CPU JAX uses NumPy's arrays where they are: half of the new values would be read."""
    block = owned()
    step = jaxbridge.inplace(lambda x, y, **more: x + 1)
    uses = [lambda: step(block, other(block)), lambda: step(block, 1.0, more=other(block))]
    for _ in range(2):
        for use in uses:
            with pytest.raises(
                ValueError, match="got memory that it updates as another argument too"
            ):
                use()
    np.testing.assert_array_equal(block, np.arange(8))
    step(block, other(owned()))
    np.testing.assert_array_equal(block, np.arange(8) + 1)


@needs_updates
def test_one_array_in_two_threads_is_an_error():
    block = owned()
    inside, go_on = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        assert go_on.wait(60)
        return x + 1

    f = jaxbridge.call(wait, lambda x: x)
    step = jaxbridge.inplace(f)
    thread = threading.Thread(target=step, args=(block,))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="in use by a call that has not returned"):
        step(block)
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(block, np.arange(8) + 1)
    step(block)
    np.testing.assert_array_equal(block, np.arange(8) + 2)


@needs_updates
def test_threads_with_arrays_of_their_own():
    step = jaxbridge.inplace(lambda x: x + 1)
    blocks = [owned() for _ in range(4)]

    def work(block):
        for _ in range(50):
            step(block)

    threads = [threading.Thread(target=work, args=(b,)) for b in blocks]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for b in blocks:
        np.testing.assert_array_equal(b, np.arange(8) + 50)


@needs_updates
def test_inplace_of_a_tensor(needs):
    needs("torch")
    import torch

    block = owned()
    tensor = torch.from_numpy(block)
    step = jaxbridge.inplace(lambda x: x * 2)
    step(tensor)
    step(tensor)
    assert tensor.tolist() == (np.arange(8) * 4).tolist()
    other = torch.from_numpy(owned())
    tensor.set_(other)
    step(tensor)
    assert other.tolist() == (np.arange(8) * 2).tolist()
    assert block.tolist() == (np.arange(8) * 4).tolist()


@needs_updates
def test_inplace_is_an_in_place_operation_to_autograd(needs):
    needs("torch")
    import torch

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    for given in (lambda t: t, lambda t: jaxbridge.sharded([t], (8,), sharding)):
        saved, weight = torch.from_numpy(owned()), torch.ones(8, requires_grad=True)
        loss = (saved * weight).sum()
        jaxbridge.inplace(lambda x: x * 2)(given(saved))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():  # has no versions
        tensor = torch.from_numpy(owned())
        jaxbridge.inplace(lambda x: x * 2)(tensor)
    assert tensor.tolist() == (np.arange(8) * 2).tolist()
