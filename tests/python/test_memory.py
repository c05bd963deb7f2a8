# SPDX-License-Identifier: Apache-2.0
"""Memory of others that JAX updates in place, on the CPU: `ref`, `borrow`, `sharded`, `release`.

docs/memory.md refers to these tests by name.
"""

import ctypes
import gc
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import is_dead
from jaxbridge import _compat, _core
from owned_memory import needs_updates, owned, updates_host_memory
from processes import run


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


# ---- what XLA is given ---------------------------------------------------------------------------


@needs_updates
def test_on_cuda_the_program_tells_of_its_end():
    step = jaxbridge.inplace(jnp.zeros_like)
    block = owned()
    step(block)
    (program,) = step._programs.values()
    lowered = program.trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower(
        lowering_platforms=("cuda",)
    )
    text = lowered.as_text()
    assert text.count("jaxbridge.enqueued") == 1
    assert "output_operand_alias<output_tuple_indices = []" in text
    assert "tf.aliasing_output = 0" in text
    # Nothing that would keep programs out of JAX's caches.
    assert f"{block.ctypes.data:x}" not in text and str(block.ctypes.data) not in text
    cpu = program.trace(jax.ShapeDtypeStruct((8,), jnp.float32)).lower().as_text()
    assert "custom_call" not in cpu


@needs_updates
def test_on_cuda_the_program_tells_of_its_end_after_all_that_it_computes():
    """What fails in `aux` fails before that, or nobody would hear of it."""

    def fun(x, y, key):
        same = x.reshape(2, 4)
        external = jaxbridge.call(np.negative, lambda v: v, framework="numpy")(y)
        return x + 1, (x, y, 3.0, None, same, external, jax.random.split(key), y.astype(jnp.int4))

    step = jaxbridge.inplace(fun, has_aux=True)
    x, y = owned(), jnp.ones(3)
    aux = step(x, y, key=jax.random.key(0))
    np.testing.assert_array_equal(aux[0], np.arange(8))
    np.testing.assert_array_equal(aux[5], [-1] * 3)
    (program,) = step._programs.values()
    traced = program.trace(jax.ShapeDtypeStruct((8,), jnp.float32), y, key=jax.random.key(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [part for part in text.splitlines() if "jaxbridge.enqueued" in part]
    # The new value, y, and what is computed beside it; what `x` was is no more by then.
    types = line.rpartition(" : ")[2].partition(" -> ")[0]
    assert types == (
        "(tensor<8xf32>, tensor<3xf32>, tensor<2x4xf32>, tensor<3xf32>, tensor<2x2xui32>, tensor<3xi4>)"
    )
    assert line.count("output_operand_alias<") == 1


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_names_tests_that_there_are():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/memory.md").read_text()))
    files = (
        "python/test_memory.py",
        "python/test_borrow.py",
        "python/test_sharded.py",
        "python/test_inplace.py",
        "python/test_memory_edges.py",
        "python/test_interrupts.py",
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
