# SPDX-License-Identifier: Apache-2.0
"""Memory of others that JAX updates in place, on the CPU: `ref`, `borrow`, `inplace`, `sharded`, `release`.

docs/memory.md refers to these tests by name.
"""

import copy
import ctypes
import functools
import gc
import pickle
import re
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from interchange import Only, is_dead
from jaxbridge import _compat, _core
from processes import run

# JAX before 0.8.3 updates a copy of memory of the host: there all of this is an error.
updates_host_memory = _compat.jax_version >= (0, 8, 3)
needs_updates = pytest.mark.skipif(
    not updates_host_memory, reason="JAX before 0.8.3 updates a copy of memory of the host"
)


def owned(size: int = 8, dtype: str = "float32") -> np.ndarray:
    a = jaxbridge.empty((size,), dtype)
    a[...] = np.arange(size)
    return a


def content(ref) -> np.ndarray:
    """What the owner sees, once JAX is done."""
    with jaxbridge.borrow(ref, "numpy") as x:
        return x.copy()


def pointer(ref) -> int:
    return jaxbridge.pointer(ref)


@pytest.mark.skipif(updates_host_memory, reason="JAX 0.8.3 and later update memory of the host")
def test_jax_that_updates_a_copy_is_an_error():
    block = owned()
    for make in (jaxbridge.ref, jaxbridge.inplace(lambda x: x + 1)):
        with pytest.raises(RuntimeError, match=r"updates a copy of it; JAX 0\.8\.3 and later"):
            make(block)
    np.testing.assert_array_equal(block, np.arange(8))


# ---- a Ref, in all that JAX has ------------------------------------------------------------------


def plus_one(r):
    r[...] = r[...] + 1


def in_fori_loop(r):
    def body(i, c):
        r[i] += 1
        return c

    jax.lax.fori_loop(0, 8, body, 0)


def in_scan(r):
    def body(c, x):
        r[...] = r[...] + x
        return c, None

    jax.lax.scan(body, 0, jnp.array([0.25, 0.75]))


def in_cond(r):
    jax.lax.cond(r[1] > 0, lambda: plus_one(r), lambda: None)


def in_while_loop(r):
    def body(i):
        r[...] = r[...] + 0.5
        return i + 1

    jax.lax.while_loop(lambda i: i < 2, body, 0)


def in_nested_jit(r):
    jax.jit(plus_one)(r)


def by_addupdate(r):
    jax.ref.addupdate(r, ..., jnp.ones(8))


def by_slices(r):
    r[:4] = r[:4] + 1
    r[4:] = r[4:] + 1


PROGRAMS = [
    plus_one,
    in_fori_loop,
    in_scan,
    in_cond,
    in_while_loop,
    in_nested_jit,
    by_addupdate,
    by_slices,
]


@needs_updates
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["argument", "closure", "eager"])
def test_updates_are_in_the_owners_memory(program, how):
    block = owned()
    r = jaxbridge.ref(block)
    assert isinstance(r, jax.ref.Ref)
    for _ in range(3):
        if how == "argument":
            jax.jit(program)(r)
        elif how == "closure":
            jax.jit(lambda: program(r))()
        else:
            program(r)
        assert pointer(r) == block.ctypes.data
    np.testing.assert_array_equal(content(r), np.arange(8) + 3)
    np.testing.assert_array_equal(block, np.arange(8) + 3)


@needs_updates
def test_derivatives_of_functions_that_read_it():
    block = owned()
    r = jaxbridge.ref(block)

    def loss(w):
        return jnp.sum(w**2 * r[...])

    w = jnp.arange(8.0)
    for gradient in (jax.grad(loss)(w), jax.jit(jax.grad(loss))(w)):
        np.testing.assert_array_equal(gradient, 2 * np.arange(8.0) * np.arange(8))
    np.testing.assert_array_equal(jax.vmap(lambda x: x * r[...])(jnp.ones((2, 8)))[1], block)
    assert pointer(r) == block.ctypes.data


@needs_updates
def test_vmap_over_a_ref_updates_it():
    block = owned()
    pointers = []
    f = jaxbridge.call(lambda x: pointers.append(x.ctypes.data), None, vmap_method="sequential")
    r = jaxbridge.ref(block)

    def add(r, x):
        r[...] = r[...] + x
        f(r)

    for mapped in (jax.vmap(add), jax.jit(jax.vmap(add))):
        mapped(r, jnp.arange(8.0))
        assert pointer(r) == block.ctypes.data
    np.testing.assert_array_equal(content(r), np.arange(8) * 3)
    np.testing.assert_array_equal(block, np.arange(8) * 3)
    assert len(pointers) == 16


@needs_updates
@pytest.mark.skipif(_compat.jax_version < (0, 12), reason="jax.ref.freeze copies before JAX 0.12")
def test_freeze_gives_the_array_in_the_same_memory():
    block = owned()
    r = jaxbridge.ref(block)
    jax.jit(plus_one)(r)
    array = jax.ref.freeze(r)
    assert array.unsafe_buffer_pointer() == block.ctypes.data
    np.testing.assert_array_equal(array, np.arange(8) + 1)


@needs_updates
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "complex64", "float8_e5m2"]
)
def test_any_dtype(dtype):
    block = jaxbridge.empty((2, 3), jnp.dtype(dtype))
    block[...] = np.zeros((2, 3))
    r = jaxbridge.ref(block)
    jax.jit(lambda r: r.__setitem__((0, 1), jnp.ones((), r.dtype)))(r)
    assert content(r).real.astype(np.float32).tolist() == [[0, 1, 0], [0, 0, 0]]
    assert block[0, 1] == 1 and pointer(r) == block.ctypes.data


@needs_updates
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3)])
def test_no_axes_and_no_elements(shape):
    block = jaxbridge.empty(shape, "float32")
    block[...] = 0
    r = jaxbridge.ref(block)
    jax.jit(plus_one)(r)
    assert content(r).shape == shape
    np.testing.assert_array_equal(block, np.ones(shape))


@needs_updates
def test_a_part_of_a_larger_allocation():
    whole = owned(64)
    r = jaxbridge.ref(whole[16:32])
    jax.jit(plus_one)(r)
    want = np.arange(64) + (np.arange(64) // 16 == 1)
    np.testing.assert_array_equal((content(r), whole)[1], want)


# ---- what cannot be in place ---------------------------------------------------------------------


def readonly() -> np.ndarray:
    a = owned()
    a.flags.writeable = False
    return a


def readonly_view(a: np.ndarray) -> np.ndarray:
    a = a[:]
    a.flags.writeable = False
    return a


NOT_IN_PLACE = {
    "read-only": (readonly, BufferError, "it is read-only; give its owner's writable array"),
    "strided": (
        lambda: owned(16)[::2],
        BufferError,
        r"strides \(8,\) are not those of a dense.*; give the whole array, and take the part of it in",
    ),
    "column-major": (
        lambda: owned(6).reshape(2, 3).T,
        BufferError,
        r"strides \(4, 12\) are not those of a row-major array; give its transpose",
    ),
    "negative strides": (lambda: owned()[::-1], BufferError, "not those of a dense array"),
    "misaligned": (
        lambda: owned(16)[1:9],
        BufferError,
        "no multiple of 64.*jaxbridge.empty makes memory that is aligned; of a part, give the whole",
    ),
    "64 bit": (lambda: owned(dtype="float64"), TypeError, "64-bit types are off"),
    "structured": (lambda: np.zeros(4, "f4,i4"), TypeError, "no arrays of dtype"),
    "pointers": (
        lambda: (ctypes.POINTER(ctypes.c_float) * 4)(),
        TypeError,
        "LP_c_float_Array_4: NumPy makes no array of its memory",
    ),
    "no array": (lambda: 3.0, TypeError, "expected an array with DLPack"),
    "JAX's own": (lambda: jnp.ones(3), TypeError, "array of another library"),
    "a Ref": (lambda: jax.new_ref(jnp.ones(3)), TypeError, "array of another library"),
}


@needs_updates
@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_what_cannot_be_in_place_is_an_error(name):
    make, kind, text = NOT_IN_PLACE[name]
    given = make()
    step = jaxbridge.inplace(lambda x: x + 1)
    for what, take in (("ref", jaxbridge.ref), ("inplace", step)):
        before = np.array(given, copy=True) if isinstance(given, np.ndarray) else None
        with pytest.raises(kind, match=text) as caught:
            take(given)
        assert what in str(caught.value) or "dtype" in text or "array" in text
        if before is not None:
            np.testing.assert_array_equal(np.asarray(given), before)
            assert _core.live_imports(given.ctypes.data) == 0


@needs_updates
def test_a_ref_is_of_one_array():
    tree = {"q": owned(), "p": owned(4)}
    for given in (tree, list(tree.values())):
        with pytest.raises(
            TypeError, match=r"expected one array, .* jax\.tree\.map\(jaxbridge\.ref, x\)"
        ):
            jaxbridge.ref(given)
    refs = jax.tree.map(jaxbridge.ref, tree)
    jax.jit(lambda refs: jax.tree.map(plus_one, refs))(refs)
    np.testing.assert_array_equal(content(refs["p"]), np.arange(4) + 1)


@needs_updates
def test_64_bit_types_where_they_are_on(x64):
    block = owned(dtype="float64")
    r = jaxbridge.ref(block)
    jax.jit(plus_one)(r)
    np.testing.assert_array_equal(content(r), np.arange(8) + 1)
    jaxbridge.inplace(lambda x: x * 2)(block)
    np.testing.assert_array_equal(block, (np.arange(8) + 1) * 2)


@needs_updates
def test_an_update_while_something_holds_the_array_is_noticed():
    """On the CPU JAX makes a copy then, and says nothing."""
    block = owned()
    r = jaxbridge.ref(block)
    copies = _compat.jax_version < (0, 12)
    held = jaxbridge.view(_compat.ref_array(r) if copies else jax.ref.freeze(r))
    jax.jit(plus_one)(r)
    with pytest.raises(RuntimeError, match="something else held the array during an update"):
        jaxbridge.borrow(r).acquire()
    with pytest.raises(RuntimeError, match="a copy of it"):
        jaxbridge.call(lambda x: None, None)(r)
    np.testing.assert_array_equal(np.asarray(held), np.arange(8))


@needs_updates
def test_inside_a_trace_there_is_no_memory():
    block = owned()
    with pytest.raises(RuntimeError, match="ref: inside a function that JAX traces"):
        jax.jit(lambda: jaxbridge.ref(block)[...])()
    r = jaxbridge.ref(block)
    with pytest.raises(RuntimeError, match="borrow: inside a function that JAX traces"):
        jax.jit(lambda: jaxbridge.borrow(r, "numpy").acquire()[0])()
    assert r[1] == 1
    jaxbridge.release(r)
    step = jaxbridge.inplace(lambda x: x + 1)
    uses = [
        lambda: jax.jit(lambda: step(block))(),
        lambda: jax.jit(step)(block),
        lambda: jax.lax.scan(lambda c, _: (c, step(block)), 0, None, length=2),
        lambda: jax.vmap(lambda x: (step(block), x)[1])(jnp.ones(2)),
        lambda: jax.grad(lambda x: (step(block), x)[1])(1.0),
    ]

    def all_are_errors():
        for use in uses:
            with pytest.raises(RuntimeError, match="inside a function that JAX traces"):
                use()

    all_are_errors()
    assert _core.live_imports(block.ctypes.data) == 0
    step(block)
    all_are_errors()  # although it is known what the call would do
    np.testing.assert_array_equal(block, np.arange(8) + 1)
    step(block)
    np.testing.assert_array_equal(block, np.arange(8) + 2)


# ---- external functions --------------------------------------------------------------------------


def watching(block, pointers):
    def function(x):
        pointers.append(x.ctypes.data)
        x += 1

    return jaxbridge.call(function, None)


def calls_it(f, r):
    f(r)


def reads_and_calls(f, r):
    before = r[...].sum()
    f(r)
    return before, r[...].sum()


def calls_in_a_loop(f, r):
    jax.lax.fori_loop(0, 3, lambda i, c: (f(r), c)[1], 0)


def calls_in_a_scan(f, r):
    jax.lax.scan(lambda c, x: (f(r), (c, r[0]))[1], 0, jnp.arange(2))


def calls_in_a_branch(f, r):
    jax.lax.cond(r[1] > 0, lambda: f(r), lambda: None)


def writes_and_calls(f, r):
    r[0] = r[0] * 2
    f(r)
    r[1] = r[1] * 2
    f(r)


@needs_updates
@pytest.mark.parametrize(
    "program",
    [
        calls_it,
        reads_and_calls,
        calls_in_a_loop,
        calls_in_a_scan,
        calls_in_a_branch,
        pytest.param(
            writes_and_calls,
            marks=pytest.mark.skipif(
                _compat.jax_version < (0, 11, 2),
                reason="XLA copies before JAX 0.11.2, which is an error (the next test)",
            ),
        ),
    ],
    ids=lambda f: f.__name__,
)
def test_an_external_function_gets_the_memory_itself(program):
    block, other = owned(), owned()
    pointers = []
    f = watching(block, pointers)
    r = jaxbridge.ref(block)
    mine = jax.new_ref(jnp.asarray(other))
    with jax.disable_jit(False):
        got = jax.jit(lambda r: program(f, r))(r)
        seen = list(pointers)
        want = jax.jit(lambda r: program(f, r))(mine)
    assert seen and set(seen) == {block.ctypes.data}
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(content(r), mine[...])


@needs_updates
def test_a_copy_that_xla_made_is_an_error():
    block = owned()
    calls = []
    f = jaxbridge.call(lambda x: calls.append(1), None)
    r = jaxbridge.ref(block)
    held = jaxbridge.view(_compat.ref_array(r))  # on the CPU JAX takes other memory then
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"argument 0 is a Ref of another library"):
        f(r)
    assert calls == [] and held.pointer == block.ctypes.data


@needs_updates
def test_eager_calls_get_the_memory_itself():
    block = owned()
    pointers = []
    f = watching(block, pointers)
    r = jaxbridge.ref(block)
    f(r)
    with jax.disable_jit():
        f(r)
    assert pointers == [block.ctypes.data] * 2
    np.testing.assert_array_equal(block, np.arange(8) + 2)


@needs_updates
def test_uses_are_in_program_order():
    block = owned(1)
    order = []

    def log(x):
        order.append(float(x[0]))
        x[0] += 10

    f = jaxbridge.call(log, None)
    r = jaxbridge.ref(block)

    @jax.jit
    def program(r):
        f(r)
        r[0] = r[0] * 2
        f(r)
        return r[0]

    assert float(program(r)) == 30
    assert float(program(r)) == 90
    assert order == [0, 20, 30, 80]


@needs_updates
def test_a_slice_that_is_passed_on_is_a_copy():
    block = owned()
    pointers = []
    f = watching(block, pointers)
    r = jaxbridge.ref(block)

    def program(r):
        f(r[:4])

    double = jaxbridge.call(lambda x: x * 2, lambda x: x)
    np.testing.assert_array_equal(jax.jit(lambda r: double(r[2:4]))(r), [4, 6])
    with pytest.raises(Exception, match="read-only"):
        jax.block_until_ready(jax.jit(program)(r))
        jax.effects_barrier()
    np.testing.assert_array_equal(block, np.arange(8))


@needs_updates
def test_two_refs_on_one_memory_in_one_call_are_an_error():
    block = owned()
    f = jaxbridge.call(lambda x, y: None, None)
    error = jax.errors.JaxRuntimeError
    with pytest.raises(error, match=r"argument 0 and .*argument 1 are in the same memory"):
        f(jaxbridge.ref(block), jaxbridge.ref(block))
    with pytest.raises(error, match="are in the same memory"):
        f(jaxbridge.ref(block), jaxbridge.from_external(block, copy=False))
    with pytest.raises(error, match="are in the same memory"):
        jax.jit(lambda a, b: f(a, b))(jaxbridge.ref(block), jaxbridge.ref(block))
    np.testing.assert_array_equal(block, np.arange(8))


@needs_updates
def test_one_ref_twice_is_an_error():
    r = jaxbridge.ref(owned())
    f = jaxbridge.call(lambda x, y: None, None)
    with pytest.raises(TypeError, match=r"one jax\.Ref is passed as two arguments"):
        f(r, r)
    with pytest.raises(ValueError, match=r"[Rr]ef"):
        jax.jit(lambda a, b: plus_one(a))(r, r)


@needs_updates
def test_each_ref_is_an_import_of_its_own():
    block = owned()
    a, b = jaxbridge.ref(block), jaxbridge.ref(block)
    jax.jit(plus_one)(a)
    content(a)
    np.testing.assert_array_equal(content(b), np.arange(8) + 1)
    assert _core.live_imports(block.ctypes.data) == 2


@needs_updates
def test_an_error_half_way_leaves_the_ref_as_jax_does():
    block = owned()

    def fails(x):
        x[0] = 99
        raise KeyError("no")

    f = jaxbridge.call(fails, None)
    r = jaxbridge.ref(block)
    with pytest.raises(KeyError, match="no"):
        f(r)
    own = jax.new_ref(jnp.arange(8.0))
    with pytest.raises(KeyError, match="no"):
        f(own)
    # JAX has lost the content of both; a new Ref has what the memory has.
    for lost in (r, own):
        with pytest.raises(RuntimeError, match="deleted"):
            lost[...]
    for use in (jaxbridge.release, lambda r: jaxbridge.borrow(r).acquire()):
        with pytest.raises(RuntimeError, match="has no content: a program that updated it failed"):
            use(r)
    np.testing.assert_array_equal(jaxbridge.ref(block)[1:], np.arange(1, 8))


# ---- borrow --------------------------------------------------------------------------------------


@needs_updates
@pytest.mark.parametrize("framework", ["numpy", "view", "numba", "torch", "warp"])
def test_borrow_is_writable_and_in_order(framework, needs):
    if framework in ("numba", "torch", "warp"):
        needs(framework)
    block = owned()
    r = jaxbridge.ref(block)
    jax.jit(plus_one)(r)
    with jaxbridge.borrow(r, framework) as x:
        a = x if isinstance(x, np.ndarray) else np.asarray(x.numpy() if framework == "warp" else x)
        assert a.ctypes.data == block.ctypes.data
        np.testing.assert_array_equal(a, np.arange(8) + 1)
        a[0] = 50
    jax.jit(plus_one)(r)
    assert content(r)[0] == 51


@needs_updates
def test_jax_does_not_have_what_is_borrowed():
    block = owned()
    r = jaxbridge.ref(block)
    closes_over = jax.jit(lambda: r[...])
    closes_over()
    uses = [
        lambda: jax.jit(plus_one)(r),
        closes_over,
        lambda: r[...],
        lambda: r.__setitem__(0, 1.0),
        lambda: jax.ref.freeze(r),
        lambda: jaxbridge.pointer(r),
        lambda: jaxbridge.release(r),
        lambda: jaxbridge.call(lambda x: None, None)(r),
    ]
    with jaxbridge.borrow(r, "numpy") as x:
        for use in uses:
            with pytest.raises(RuntimeError, match="lent to numpy: JAX has it again at the end"):
                use()
        x[...] = 7
    np.testing.assert_array_equal(closes_over(), np.full(8, 7))


@needs_updates
def test_nested_and_concurrent_borrows():
    r = jaxbridge.ref(owned())
    with jaxbridge.borrow(r, "numpy") as x, jaxbridge.borrow(r, "view") as y:
        x[0] = 5
        assert np.asarray(y)[0] == 5
    first, second = jaxbridge.borrow(r, "numpy"), jaxbridge.borrow(r, "view")
    first.acquire()
    second.acquire()
    first.release()
    with pytest.raises(RuntimeError, match="lent to view"):
        r[...]
    second.release()
    assert r[0] == 5


@needs_updates
def test_an_exception_in_the_block_ends_the_borrow():
    r = jaxbridge.ref(owned())
    with pytest.raises(KeyError), jaxbridge.borrow(r, "numpy") as x:
        x[0] = 5
        raise KeyError
    assert r[0] == 5


@needs_updates
def test_a_borrow_has_one_beginning_and_one_end():
    b = jaxbridge.borrow(jaxbridge.ref(owned()), "numpy")
    with pytest.raises(RuntimeError, match="it has not begun"):
        b.release()
    b.acquire()
    with pytest.raises(RuntimeError, match="it has begun already"):
        b.acquire()
    b.release()
    with pytest.raises(RuntimeError, match="has ended"):
        b.release()
    b.acquire()
    b.release()


@needs_updates
def test_what_cannot_be_borrowed():
    r = jaxbridge.ref(owned())
    for given in (jnp.ones(3), jax.new_ref(jnp.ones(3)), owned()):
        with pytest.raises(TypeError, match=r"expected a Ref that jaxbridge\.ref made"):
            jaxbridge.borrow(given)
    with pytest.raises(ValueError, match="'jax' is not known"):
        jaxbridge.borrow(r, "jax")
    with pytest.raises(TypeError, match="stream: expected a handle or a stream object"):
        jaxbridge.borrow(r, "numpy", stream="default")
    with pytest.raises(TypeError, match="it has no memory while it is traced"):
        jax.jit(lambda r: jaxbridge.borrow(r))(r)
    with pytest.raises(TypeError, match="expected a Ref"):
        jax.jit(lambda r: jaxbridge.borrow(r).acquire())(r)
    jaxbridge.release(r)
    with pytest.raises(RuntimeError, match="was released"):
        jaxbridge.borrow(r).acquire()


@needs_updates
@pytest.mark.parametrize(
    "framework, shape, dtype, text",
    [
        ("numba", (4,), "bfloat16", "bfloat16"),
        ("warp", (1, 1, 1, 1, 2), "float32", "arrays of at most 4 axes, not 5"),
    ],
)
def test_what_a_framework_cannot_have_stays_with_jax(framework, shape, dtype, text, needs):
    needs(framework)
    block = jaxbridge.empty(shape, jnp.dtype(dtype))
    block[...] = 1
    r = jaxbridge.ref(block)
    with pytest.raises(TypeError, match=text):
        jaxbridge.borrow(r, framework).acquire()
    assert r[...].sum() == block.size


@needs_updates
def test_a_ref_has_no_copy():
    r = jaxbridge.ref(owned())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"cannot be copied or pickled: take what is in it, ref\["
        ):
            copied(r)
    np.testing.assert_array_equal(copy.deepcopy(r[...]), np.arange(8))


# ---- the end -------------------------------------------------------------------------------------


@needs_updates
def test_the_owner_lives_as_long_as_the_ref():
    block = owned()
    owner = weakref.ref(block.base)
    r = jaxbridge.ref(block)
    del block
    gc.collect()
    jax.jit(plus_one)(r)
    assert owner() is not None and r[1] == 2
    del r
    assert is_dead(owner)


def closing_over(r):
    return jax.jit(lambda: r[1])


@needs_updates
def test_a_program_that_closes_over_a_ref_keeps_the_owner():
    block = owned()
    owner = weakref.ref(block.base)
    r = jaxbridge.ref(block)
    program = closing_over(r)
    program()
    del block, r
    gc.collect()
    assert owner() is not None and float(program()) == 1
    del program
    jax.clear_caches()
    assert is_dead(owner)


@needs_updates
def test_release_lets_the_owner_of_a_ref_go():
    block = owned()
    owner, address = weakref.ref(block.base), block.ctypes.data
    r = jaxbridge.ref(block)
    jax.jit(plus_one)(r)
    del block
    jaxbridge.release(r)
    assert _core.live_imports(address) == 0
    assert is_dead(owner)
    for use in (lambda: r[...], lambda: jax.jit(plus_one)(r), lambda: jaxbridge.pointer(r)):
        with pytest.raises(RuntimeError, match="this ref was released"):
            use()
    with pytest.raises(ValueError, match="released before"):
        jaxbridge.release(r)


@needs_updates
def test_exit_with_refs_and_borrows_open():
    out = run(
        """
        import jax, jaxbridge
        block = jaxbridge.empty((4,), "float32"); block[...] = 1
        r = jaxbridge.ref(block)
        f = jax.jit(lambda r: r.__setitem__(..., r[...] + 1))
        f(r)
        step = jaxbridge.inplace(lambda x: x + 1)
        other = jaxbridge.empty((4,), "float32"); other[...] = 1
        step(other)
        b = jaxbridge.borrow(r, "numpy")
        print(b.acquire(), other)
        """
    )
    assert out.stdout == "[2. 2. 2. 2.] [2. 2. 2. 2.]\n", out.stderr
    assert out.stderr == ""


# ---- inplace -------------------------------------------------------------------------------------


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


# ---- what XLA is given ---------------------------------------------------------------------------


@needs_updates
def test_on_cuda_the_program_begins_with_a_fence():
    step = jaxbridge.inplace(jnp.zeros_like)
    block = owned()
    step(block)
    (program,) = step._programs.values()
    lowered = program.trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower(
        lowering_platforms=("cuda",)
    )
    text = lowered.as_text()
    assert text.count("jaxbridge.fence") == 1
    assert "has_side_effect = true" in text
    assert "output_operand_alias<output_tuple_indices = [0]" in text
    assert "tf.aliasing_output = 0" in text
    # Nothing that would keep programs out of JAX's caches.
    assert f"{block.ctypes.data:x}" not in text and str(block.ctypes.data) not in text
    cpu = program.trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower().as_text()
    assert "custom_call" not in cpu


# ---- several devices -----------------------------------------------------------------------------

SHARDED = """
import jax, jax.numpy as jnp, numpy as np, jaxbridge
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("d",))
def parts(n=4):
    out = []
    for i in range(n):
        a = jaxbridge.empty((2, 3), "float32"); a[...] = i
        out.append(a)
    return out
def whole(ps): return np.concatenate(ps)
sharding = NamedSharding(mesh, P("d"))
"""


@needs_updates
def test_a_ref_of_sharded_memory():
    out = run(
        SHARDED
        + """
ps = parts()
r = jaxbridge.ref(jaxbridge.sharded(ps, (8, 3), sharding))
where = [p.ctypes.data for p in ps]
before = r.sharding
@jax.jit
def f(r): r[...] = r[...] * 2 + jnp.arange(8.0)[:, None]
f(r); f(r)
assert r.sharding == before
with jaxbridge.borrow(r, "numpy") as xs:
    assert [x.ctypes.data for x in xs] == where
want = np.repeat(np.arange(4.0), 2)[:, None] * np.ones(3)
for _ in range(2): want = want * 2 + np.arange(8.0)[:, None]
np.testing.assert_array_equal(whole(ps), want)
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P("d"))
def g(x): return x + 1
r[...] = g(r[...])
with jaxbridge.borrow(r, "numpy") as xs:
    np.testing.assert_array_equal(np.concatenate(xs), want + 1)
jaxbridge.release(r)
assert all(jaxbridge._core.live_imports(p) == 0 for p in where)
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_inplace_of_sharded_memory():
    out = run(
        SHARDED
        + """
ps = parts()
x = jaxbridge.sharded(ps, (8, 3), sharding)
step = jaxbridge.inplace(lambda x, y: (x + y, x.sum()), has_aux=True)
total = step(x, 1.0)
assert float(total) == 36, total
step(x, 1.0)
np.testing.assert_array_equal(whole(ps), np.repeat(np.arange(4.0), 2)[:, None] * np.ones(3) + 2)
assert len(step._programs) == 1
single = jaxbridge.empty((3,), "float32"); single[...] = 1
step(single, 1.0)
np.testing.assert_array_equal(single, [2, 2, 2])
a = jaxbridge.from_external(x)
assert a.sharding == sharding and a.shape == (8, 3)
assert [s.data.unsafe_buffer_pointer() for s in a.addressable_shards] == [p.ctypes.data for p in ps]
for bad, text in (
    (lambda: jaxbridge.sharded(ps[:3], (8, 3), sharding), "3 parts for 4 devices"),
    (lambda: jaxbridge.ref(jaxbridge.sharded([*ps[:3], single], (8, 3), sharding)), "part 3 is float32[3]"),
    (lambda: jaxbridge.ref(jaxbridge.sharded([*ps[:3], ps[0]], (8, 3), sharding)), "the same memory"),
):
    try: bad()
    except ValueError as e: assert text in str(e), e
    else: raise AssertionError(text)
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
@pytest.mark.parametrize(
    "where",
    [
        "jax.set_mesh(mesh)",
        "jax.no_tracing()",
        "jax.disable_jit()",
    ],
)
def test_the_first_use_is_in_whatever_the_thread_has_set(where):
    out = run(
        SHARDED
        + f"""
ps = parts()
with {where}:
    r = jaxbridge.ref(jaxbridge.sharded(ps, (8, 3), sharding))
r[...] = r[...] + 1
with jaxbridge.borrow(r):
    assert [p[0, 0] for p in ps] == [1, 2, 3, 4]
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_shard_map_gets_the_parts():
    out = run(
        SHARDED
        + """
ps = parts()
where = {p.ctypes.data for p in ps}
r = jaxbridge.ref(jaxbridge.sharded(ps, (8, 3), sharding))
pointers = set()
f = jaxbridge.call(lambda x: pointers.add(x.ctypes.data), None)
def add(r):
    r[...] = r[...] + 10 * jax.lax.axis_index("d")
def call(r):
    f(r)
for body in (add, call, add):
    jax.jit(lambda r: jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=None)(r))(r)
    with jaxbridge.borrow(r, "numpy") as xs:
        assert {x.ctypes.data for x in xs} == where
assert [p[0, 0] for p in ps] == [0, 21, 42, 63] and pointers == where
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_replicated_parts_are_updated_all():
    out = run(
        SHARDED
        + """
for mesh, spec, shape in (
    (mesh, P(), (8, 3)),
    (jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), P("a"), (4, 3)),
):
    ps = []
    for _ in range(4):
        ps.append(jaxbridge.empty(shape, "float32")); ps[-1][...] = 1
    where = [p.ctypes.data for p in ps]
    x = jaxbridge.sharded(iter(ps), (8, 3), NamedSharding(mesh, spec))
    step = jaxbridge.inplace(lambda x: x * 2)
    step(x); step(x)
    assert all((p == 4).all() for p in ps)
    r = jaxbridge.ref(x)
    for _ in range(2):
        jax.jit(lambda r: r.__setitem__(..., r[...] + 1))(r)
        with jaxbridge.borrow(r, "numpy") as xs:
            assert [x.ctypes.data for x in xs] == where
    assert all((p == 6).all() for p in ps)
    jaxbridge.release(r)
    step.clear()
    assert all(jaxbridge._core.live_imports(p) == 0 for p in where)
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


def test_the_parts_have_to_fit_the_sharding():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    with pytest.raises(ValueError, match="2 parts for 1 devices"):
        jaxbridge.sharded([owned(), owned()], (16,), NamedSharding(mesh, PartitionSpec("d")))
    for bad in (PartitionSpec("d"), mesh, jax.devices()[0], None):
        with pytest.raises(TypeError, match=r"expected a jax\.sharding\.Sharding"):
            jaxbridge.sharded([owned()], (8,), bad)
    assert jaxbridge.sharded([owned()], 8, NamedSharding(mesh, PartitionSpec("d"))).shape == (8,)


def test_the_page_names_tests_that_there_are():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/memory.md").read_text()))
    files = (
        "python/test_memory.py",
        "python/test_memory_edges.py",
        "python/test_native_memory.py",
        "gpu/test_memory_gpu.py",
    )
    there = {
        name
        for file in files
        for name in re.findall(
            r"^def (test_\w+)", (root / "tests" / file).read_text(), re.MULTILINE
        )
    }
    assert named and named - there == set()
