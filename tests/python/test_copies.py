# SPDX-License-Identifier: Apache-2.0
"""`copy=` and `device=`: what is a copy, made when, and where it is."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import memory

# ---- copies --------------------------------------------------------------------------------------


def test_a_copy_is_of_the_view_and_not_of_its_owner():
    a = jnp.arange(8, dtype=jnp.float32)
    v = jaxbridge.buffer(jaxbridge.pointer(a) + 16, (2,), "f4", "cpu", owner=a)
    np.testing.assert_array_equal(np.from_dlpack(v, copy=True), [4, 5])
    whole = jaxbridge.view(a)
    np.testing.assert_array_equal(np.from_dlpack(whole, copy=True), a)
    assert not np.shares_memory(np.from_dlpack(whole, copy=True), np.asarray(whole))


def test_copies_while_something_is_traced():
    a = jnp.arange(8.0)
    other = jax.devices()[-1]
    made = []

    @jax.jit
    def program(z):
        made.append(jaxbridge.to_external(a, "numpy", copy=True))
        made.append(np.from_dlpack(jaxbridge.view(a), copy=True))
        made.append(jaxbridge.from_external(a, copy=True))
        made.append(jaxbridge.from_external(a, device=other))
        made.append(jaxbridge.from_external(np.arange(8.0, dtype="f4"), device=other))
        return z

    program(1.0)
    for x in made:
        np.testing.assert_array_equal(x, np.arange(8.0))
    assert not any(isinstance(x, jax.core.Tracer) for x in made)


@pytest.mark.parametrize("copy", [0, 1, "no", np.float32(0)])
def test_copy_is_a_boolean(copy):
    block = memory(8, np.dtype("f4"))
    with pytest.raises(TypeError, match="expected None, True or False"):
        jaxbridge.from_external(block, copy=copy)
    with pytest.raises(TypeError, match="expected None, True or False"):
        jaxbridge.to_external(jnp.ones(3), "numpy", copy=copy)
    with pytest.raises(TypeError, match="expected None, True or False"):
        jaxbridge.view(jnp.ones(3)).__dlpack__(copy=copy)


def test_booleans_of_numpy_are_booleans():
    block = memory(8, np.dtype("f4"))
    assert jaxbridge.shares_memory(jaxbridge.from_external(block, copy=np.False_), block)
    assert not jaxbridge.shares_memory(jaxbridge.from_external(block, copy=np.True_), block)
    jaxbridge.view(jnp.ones(3)).__dlpack__(copy=np.False_)


# ---- device= -------------------------------------------------------------------------------------


def test_a_sharding_is_what_comes_out():
    block = memory(8, np.dtype("f4"))
    mesh = jax.make_mesh((1,), ("x",))
    named = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jaxbridge.from_external(block, device=single, copy=False)
    assert array.sharding == single and jaxbridge.shares_memory(array, block)
    for x in (block, jnp.ones(8)):
        got = jaxbridge.from_external(x, device=named, copy=False)
        assert got.sharding == named and jaxbridge.shares_memory(got, x)
        copy = jaxbridge.from_external(x, device=named, copy=True)
        assert copy.sharding == named and not jaxbridge.shares_memory(copy, x)
    jaxbridge.release(named_block := jaxbridge.from_external(block, device=named, copy=False))
    assert named_block.is_deleted()
    for wrong in ("cpu", 0):
        with pytest.raises(TypeError, match=r"expected a jax\.Device or a Sharding"):
            jaxbridge.from_external(block, device=wrong)


def test_a_sharding_for_more_axes():
    mesh = jax.sharding.Mesh([[jax.devices("cpu")[0]]], ("x", "y"))
    flat = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y"))
    block = memory(8, np.dtype("f4"))
    owner = weakref.ref(block.base)
    for x in (block, jnp.ones(8), block[::2]):
        for copy in (None, True):
            with pytest.raises(ValueError, match="rank"):
                jaxbridge.from_external(x, device=flat, copy=copy)
    del x, block
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize("moves", [False, True])
def test_a_copy_of_an_import_is_made_before_its_owner_writes(moves):
    first, second = jax.devices("cpu")[:2]
    block = memory(1 << 23, np.dtype("f4"))
    for _ in range(4):
        block[...] = 1
        array = jaxbridge.from_external(block, copy=False)
        copies = [jaxbridge.from_external(array, copy=True, device=second if moves else first)]
        if moves:
            copies.append(jaxbridge.from_external(array, device=second))
        block[...] = 5
        assert all((copy == 1).all() for copy in copies)


def test_a_copy_of_an_array_of_jax_is_where_it_says():
    first, second, third = jax.devices("cpu")[:3]
    mesh = jax.sharding.Mesh([first, second], "x")
    x, at_third = jax.device_put(jnp.arange(3.0), first), jax.device_put(jnp.arange(3.0), third)
    weak = jnp.asarray(2.0)
    kind = (
        {m.kind for m in first.addressable_memories()}
        - {first.default_memory().kind, "pinned_host"}
    ).pop()
    u = jax.device_put(x, jax.sharding.SingleDeviceSharding(first, memory_kind=kind))
    named = jax.sharding.NamedSharding(
        jax.sharding.Mesh([first], "x"), jax.sharding.PartitionSpec("x")
    )
    for context, given in ((jax.default_device, second), (jax.set_mesh, mesh)):
        with context(given):
            for device in (first, named):
                for given in (x, jax.device_put(x, second)):
                    copy = jaxbridge.from_external(given, device=device, copy=True)
                    assert copy.devices() == {first} and not jaxbridge.shares_memory(copy, given)
            for given in (x, u, at_third, weak):
                copy = jaxbridge.from_external(given, copy=True)
                assert copy.sharding == given.sharding and copy.weak_type == given.weak_type
                assert copy.committed == given.committed
                assert not jaxbridge.shares_memory(copy, given)
                out = jaxbridge.to_external(given, "numpy", copy=True)
                assert not jaxbridge.shares_memory(out, given)
                np.testing.assert_array_equal(out, np.asarray(given))


def test_columns_are_copied_and_moved_as_what_they_are():
    """Before JAX 0.11 its own `device_put` of such an array is wrong."""
    first, second = jax.devices("cpu")[:2]
    block = memory(6, np.dtype("f4")).reshape(3, 2)
    x = jaxbridge.from_external(block.T, copy=False)
    want = block.T.copy()
    named = jax.sharding.NamedSharding(
        jax.sharding.Mesh([first], "x"), jax.sharding.PartitionSpec("x")
    )
    kinds = [m.kind for m in first.addressable_memories()]
    for given in (x, block.T):
        for options in (
            {"copy": True},
            {"device": second},
            {"device": second, "copy": True},
            {"device": named},
            {"device": named, "copy": True},
            *({"device": x.sharding.with_memory_kind(kind)} for kind in kinds),
        ):
            got = jaxbridge.from_external(given, **options)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(jax.jit(lambda v: v * 1)(got), want)
    for copy in (None, True):
        np.testing.assert_array_equal(jaxbridge.to_external(x, "numpy", copy=copy), want)
    compiled = jax.jit(lambda v: v + 1).lower(jax.ShapeDtypeStruct((2, 3), "f4")).compile()
    np.testing.assert_array_equal(compiled(jaxbridge.from_external(x, copy=True)), want + 1)


def test_a_copy_of_a_replica_is_a_copy():
    devices = jax.devices("cpu")[:2]
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(devices, "x"), jax.sharding.PartitionSpec()
    )
    blocks = [memory(1 << 22, np.dtype("f4")) for _ in devices]
    for block in blocks:
        block[...] = 1
    x = jaxbridge.from_external(jaxbridge.sharded(blocks, blocks[0].shape, everywhere))
    copies = [
        jaxbridge.from_external(x, copy=True, device=devices[0]),
        jaxbridge.from_external(x, copy=True),
        jaxbridge.from_external(x.addressable_shards[1].data, copy=True),
        jaxbridge.from_external(
            jax.device_put(x.addressable_shards[0].data, devices[0]), copy=True
        ),
    ]
    for block in blocks:
        block[...] = 7
    assert all((copy == 1).all() for copy in copies)
    assert copies[1].sharding == everywhere
    keys = jax.device_put(jax.random.key(0), devices[1])
    assert jaxbridge.from_external(keys, copy=True).devices() == {devices[1]}


def test_device_commits_what_is_there():
    x = jnp.ones(3)
    (there,) = x.devices()
    assert not x.committed
    placed = jaxbridge.from_external(x, device=there)
    assert placed.committed and jaxbridge.shares_memory(placed, x)


def test_a_moved_array_of_jax_stays_what_it_is():
    second = jax.devices("cpu")[1]
    weak = jaxbridge.from_external(jnp.asarray(2.0), device=second)
    assert weak.devices() == {second} and weak.weak_type
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        wide = jnp.arange(4.0)
    assert jaxbridge.from_external(wide, device=second).dtype == np.float64
    gone = jnp.ones(4)
    gone.delete()
    for options in ({}, {"copy": True}, {"device": second}, {"device": gone.sharding}):
        with pytest.raises(RuntimeError, match="from_external: the array was deleted or donated"):
            jaxbridge.from_external(gone, **options)
    kinds = {m.kind for m in second.addressable_memories()} - {second.default_memory().kind}
    for kind in kinds:
        at = jax.sharding.SingleDeviceSharding(second, memory_kind=kind)
        with pytest.raises(BufferError, match=f"and is to be at .*{kind}"):
            jaxbridge.from_external(memory(8, np.dtype("f4")), device=at, copy=False)
