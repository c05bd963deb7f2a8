# SPDX-License-Identifier: Apache-2.0
"""borrow: memory of others for the time of a block."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from owned_memory import needs_updates, owned


def content(ref) -> np.ndarray:
    """What the owner sees, once JAX is done."""
    with jaxbridge.borrow(ref, "numpy") as x:
        return x.copy()


def plus_one(r):
    r[...] = r[...] + 1


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
