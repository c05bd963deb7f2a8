# SPDX-License-Identifier: Apache-2.0
"""What could go wrong with memory of others that JAX updates in place: bad input, aliases, interrupts."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import Only
from jaxbridge import _core, _kept, _memory
from owned_memory import Exchanged, needs_updates, owned
from processes import run

# ---- where JAX does other things -----------------------------------------------------------------


@needs_updates
@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: jax.jit(f)(1.0),
        lambda f: jax.grad(f)(1.0),
        lambda f: jax.vmap(f)(jnp.ones(2)),
        lambda f: jax.make_jaxpr(f)(1.0),
    ],
)
def test_inplace_in_a_trace_is_an_error_also_where_the_array_is_known(transformed):
    block = owned()
    step = jaxbridge.inplace(lambda x, y: (x + y, y), has_aux=True)
    step(block, 1.0)
    for call in (lambda y: step(block, 1.0), lambda y: step(block, y)):
        with pytest.raises(RuntimeError, match="inside a function that JAX traces"):
            transformed(call)
    step(block, 1.0)
    np.testing.assert_array_equal(block, np.arange(8) + 2)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["argnums", "static_argnums"])
@pytest.mark.parametrize(
    "given",
    [1.5, "0", (0, "x"), (0.0,), object()],
    ids=["1.5", "text", "text inside", "float inside", "object"],
)
def test_positions_are_whole_numbers(option, given):
    with pytest.raises(
        TypeError, match=rf"inplace: {option}=.*expected the position of an argument"
    ):
        jaxbridge.inplace(lambda x, y: x, **{"argnums": 2, option: given})


@needs_updates
def test_positions_may_be_numbers_of_numpy():
    block = owned()
    jaxbridge.inplace(lambda n, x: x + n, np.int64(1), static_argnums=np.int32(0))(2, block)
    np.testing.assert_array_equal(block, np.arange(8) + 2)


def test_inplace_needs_a_function():
    with pytest.raises(TypeError, match=r"inplace: expected a function of JAX, got builtins\.int"):
        jaxbridge.inplace(3)


@needs_updates
def test_a_stream_is_looked_at_before_the_borrow():
    with pytest.raises(TypeError, match="expected a handle or a stream object"):
        jaxbridge.borrow(jaxbridge.ref(owned()), "numpy", stream="x")


@needs_updates
def test_sharded_of_bad_input_leaves_nothing_behind():
    """A shape of floats would be found again in JAX's caches for the shape of whole numbers."""
    out = run(
        """
        import jax, numpy as np, jaxbridge
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        s = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P("d"))
        parts = [jaxbridge.empty((2,), "float32") for _ in range(2)]
        for part in parts: part[...] = 0
        for bad in ((parts, (4.0,), s), (None, (4,), s), (parts, (4,), P("d"))):
            try: jaxbridge.sharded(*bad)
            except TypeError as e: assert "sharded:" in str(e) and "expected a" in str(e), e
            else: raise AssertionError(bad)
        try: jaxbridge.sharded(parts, (-4,), s)
        except ValueError as e: assert "not that of an array" in str(e), e
        else: raise AssertionError
        jaxbridge.inplace(lambda x: x + 1)(jaxbridge.sharded(iter(parts), np.array([4]), s))
        print(*parts)
        """
    )
    assert out.stdout == "[1. 1.] [1. 1.]\n", out.stderr


# ---- one memory twice ----------------------------------------------------------------------------


@needs_updates
@pytest.mark.parametrize(
    "other",
    [
        lambda a: a,
        lambda a: a[:4],
        lambda a: a[1::2],
        lambda a: {"x": [1.0, a[3:]]},
        lambda a: jaxbridge.from_external(a, copy=False),
        lambda a: jaxbridge.ref(a),
        lambda a: jaxbridge.ref(a[16:]),
    ],
    ids=["itself", "part", "strided", "in a tree", "from_external", "Ref", "Ref of a part"],
)
def test_an_argument_in_the_memory_of_one_that_is_updated_is_an_error(other):
    """JAX on the CPU reads NumPy arrays where they are: after parts of them were updated."""
    block = owned(32)
    step = jaxbridge.inplace(lambda x, y=0, z=0: x + 1)
    for call in (lambda: step(block, other(block)), lambda: step(block, z=other(block))):
        with pytest.raises(ValueError, match="got memory that it updates as another argument"):
            call()
    np.testing.assert_array_equal(block, np.arange(32))
    step(block, block.copy(), z=jaxbridge.from_external(owned(), copy=False))
    step(block, jaxbridge.ref(owned(64)))
    step(block, block[:0])
    np.testing.assert_array_equal(block, np.arange(32) + 3)


@needs_updates
def test_one_array_without_elements_twice_is_an_error():
    none = jaxbridge.empty((0,), "float32")
    step = jaxbridge.inplace(lambda x: x)
    with pytest.raises(ValueError, match="two of the arrays are in the same memory"):
        step([none, none])
    step([none, none[:]])


@needs_updates
def test_one_array_in_calls_of_two_functions_is_an_error():
    block = owned()
    inside, go_on = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        assert go_on.wait(60)
        return x + 1

    waiting = jaxbridge.inplace(jaxbridge.call(wait, lambda x: x))
    other = jaxbridge.inplace(lambda x: x * 2)
    other(block)
    thread = threading.Thread(target=waiting, args=(block,))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="in use by a call that has not returned"):
        other(block)
    waiting.clear()
    with pytest.raises(RuntimeError, match="in use by a call that has not returned"):
        waiting(block)
    go_on.set()
    thread.join()
    np.testing.assert_array_equal(block, np.arange(8) * 2 + 1)
    assert _kept.in_use == {}


# ---- arrays that change, and that go -------------------------------------------------------------


@needs_updates
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_array_of_another_dtype_is_imported_anew():
    block = owned()
    step = jaxbridge.inplace(lambda x: x + 1)
    step(block)
    block.dtype = np.int32
    before = block.copy()
    step(block)
    np.testing.assert_array_equal(block, before + 1)


@needs_updates
def test_a_tensor_of_other_strides_is_not_the_same(needs):
    needs("torch")
    import torch

    tensor = torch.from_numpy(owned(4).reshape(2, 2))
    step = jaxbridge.inplace(lambda x: x.at[0, 1].add(100))
    step(tensor)
    tensor.t_()
    with pytest.raises(BufferError, match="not those of a row-major array"):
        step(tensor)
    assert tensor.tolist() == [[0, 2], [101, 3]]


@needs_updates
@pytest.mark.parametrize(
    "made_of",
    [
        lambda a: jaxbridge.buffer(a.ctypes.data, a.shape, a.dtype, "cpu", owner=a),
        lambda a: Only(a, "__dlpack__", "__dlpack_device__"),
        Exchanged,
        memoryview,
    ],
    ids=["buffer", "DLPack", "without weak references", "memoryview"],
)
def test_inplace_keeps_nothing_of_any_kind_of_array(made_of):
    step = jaxbridge.inplace(lambda x: x + 1)
    for _ in range(3):
        block = owned()
        owner, address = weakref.ref(block.base), block.ctypes.data
        given = made_of(block)
        step(given)
        step(given)
        np.testing.assert_array_equal(block, np.arange(8) + 2)
        del block, given
        gc.collect()
        assert owner() is None and _core.live_imports(address) == 0


@needs_updates
def test_memory_that_its_capsule_keeps_is_there_in_a_call():
    """An exporter may give memory that lives as long as the capsule."""
    block, owners = owned(), []

    class Exporter:
        def __dlpack__(self, **options):
            exported = owned()
            owners.append(weakref.ref(exported.base))
            return exported.__dlpack__(**options)

        def __dlpack_device__(self):
            return block.__dlpack_device__()

    alive = []
    look = jaxbridge.call(lambda x: alive.append(owners[-1]() is not None) or x, lambda x: x)
    exporter = Exporter()
    step = jaxbridge.inplace(look)
    step(exporter)
    step(exporter)
    gc.collect()
    assert alive == [True, True] and [owner() for owner in owners] == [None] * len(owners)


# ---- half way ------------------------------------------------------------------------------------


@needs_updates
def test_an_interrupt_comes_after_the_update():
    """The array may go as soon as the call has raised, and XLA would write where it was."""
    out = run(
        """
        import jax, numpy as np, jaxbridge
        from jaxbridge import _core, _kept
        block = jaxbridge.empty((1000, 1000), "float32"); block[...] = np.eye(1000)
        step = jaxbridge.inplace(lambda x: jax.lax.fori_loop(0, 8, lambda i, c: (c @ c) + 1e-3, x))
        step(block)
        block[...] = np.eye(1000)
        def interrupt(*_): raise KeyboardInterrupt
        own, _kept.Kept.end = _kept.Kept.end, interrupt
        for kept in step._memories.values(): before = kept.memory.parts[0].use
        try: step(block)
        except KeyboardInterrupt: pass
        else: raise AssertionError
        after = block.copy()
        _kept.Kept.end = own
        assert _kept.in_use == {} and step._memories == {}
        while before() is not None: _core.release_unused()  # XLA is done with it
        np.testing.assert_array_equal(block, after)
        block[...] = 0
        step(block)
        print("right")
        """
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_a_borrow_that_could_not_end_goes_on(monkeypatch):
    block = owned()
    r = jaxbridge.ref(block)
    b = jaxbridge.borrow(r, "numpy")
    b.acquire()

    def fails(*_):
        raise RuntimeError("the stream is being captured")

    with monkeypatch.context() as patch:
        patch.setattr(_memory.Memory, "take_back", fails)
        with pytest.raises(RuntimeError, match="being captured"):
            b.release()
    with pytest.raises(RuntimeError, match="lent to numpy"):
        r[...]
    b.release()
    assert r[1] == 1


# ---- several devices -----------------------------------------------------------------------------

SHARDED = """
import jax, jax.numpy as jnp, numpy as np, jaxbridge
from jaxbridge import _core
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("d",))
def sharded(spec, shape):
    s = NamedSharding(mesh, spec)
    parts = [jaxbridge.empty(s.shard_shape(shape), "float32") for _ in jax.devices()]
    for p in parts: p[...] = 1
    return parts, jaxbridge.sharded(parts, shape, s)
"""


@needs_updates
def test_replicated_memory():
    out = run(
        SHARDED
        + """
parts, x = sharded(P(), (4,))
r = jaxbridge.ref(x)
jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(r)
with jaxbridge.borrow(r, "numpy") as xs:
    assert [a.ctypes.data for a in xs] == [p.ctypes.data for p in parts]
jaxbridge.release(r)
jaxbridge.inplace(lambda x: x + 1)(x)
print([p.tolist() for p in parts])
""",
        devices=3,
    )
    assert out.stdout == f"{[[3.0] * 4] * 3}\n", out.stderr


@needs_updates
def test_in_the_mesh_of_a_context():
    """The look at whether JAX updates in place is on one device."""
    out = run(
        SHARDED
        + """
parts, x = sharded(P("d"), (6,))
with jax.set_mesh(mesh):
    r = jaxbridge.ref(x)
    jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(r)
    jaxbridge.release(r)
    jaxbridge.inplace(lambda x: x + 1)(x)
print([p.tolist() for p in parts])
""",
        devices=3,
    )
    assert out.stdout == f"{[[3.0] * 2] * 3}\n", out.stderr


@needs_updates
def test_a_call_on_a_ref_of_several_devices_is_made_inside_shard_map():
    out = run(
        SHARDED
        + """
parts, x = sharded(P("d"), (6,))
r = jaxbridge.ref(x)
def update(x): x += 1
f = jaxbridge.call(update, None)
try: jax.jit(lambda r: f(r))(r)
except NotImplementedError as e: assert "call it inside jax.shard_map" in str(e), e
else: raise AssertionError
jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=None))(r)
jax.block_until_ready(r[...])
print([p.tolist() for p in parts])
""",
        devices=3,
    )
    assert out.stdout == f"{[[2.0] * 2] * 3}\n", out.stderr


def test_release_of_what_is_joined():
    out = run(
        SHARDED
        + """
parts, x = sharded(P("d"), (6,))
a = jaxbridge.from_external(x, copy=False)
assert float((a + 1).sum()) == 12
jaxbridge.release(a)
print([_core.live_imports(p.ctypes.data) for p in parts])
try: jaxbridge.release(a)
except ValueError as e: assert "before" in str(e)
else: raise AssertionError
""",
        devices=3,
    )
    assert out.stdout == "[0, 0, 0]\n", out.stderr


@needs_updates
def test_an_argument_that_has_one_part_in_common_is_an_error():
    out = run(
        SHARDED
        + """
parts, x = sharded(P("d"), (6,))
step = jaxbridge.inplace(lambda x, y: x + 1)
for a in (jaxbridge.from_external(x, copy=False), jaxbridge.ref(x)):
    try: step(parts[2], a)
    except ValueError as e: print("got memory that it updates" in str(e))
""",
        devices=3,
    )
    assert out.stdout == "True\nTrue\n", out.stderr
