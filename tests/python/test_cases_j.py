# SPDX-License-Identifier: Apache-2.0
"""Public failures with `jax.Ref`: letter J of the acceptance cases, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import memory
from jaxbridge import _compat
from processes import run

needs_updates = pytest.mark.skipif(
    _compat.jax_version < (0, 8, 3), reason="JAX before 0.8.3 updates a copy of memory of the host"
)


def ones(*shape, dtype="float32"):
    a = jaxbridge.empty(shape, dtype)
    a[...] = 1
    return a


@needs_updates
def test_J02_one_ref_twice_and_two_refs_on_one_memory():
    block = memory(16, np.dtype("f4"))
    r = jaxbridge.ref(block)

    def write(a, b):
        a[0] = 5.0
        return b[0]

    with pytest.raises(ValueError, match=r"[Rr]ef"):
        jax.jit(write)(r, r)
    with pytest.raises(ValueError, match=r"[Rr]ef"):
        jax.jit(lambda a: write(a, r))(r)
    # Overlapping ones: an external call refuses what it would write to twice, or read and write.
    other = jaxbridge.ref(block[:8])
    f = jaxbridge.call(lambda a, b: None, None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="are in the same memory"):
        f(r, other)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, jaxbridge
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, AxisType
def memory_of(mesh, spec, shape, dtype):
    sharding = NamedSharding(mesh, spec)
    parts = []
    for _ in range(4):
        a = jaxbridge.empty(sharding.shard_shape(shape), dtype); a[...] = 1
        parts.append(a)
    return jaxbridge.sharded(parts, shape, sharding), parts
devices = np.array(jax.devices()[:4]).reshape(2, 2)
"""


@needs_updates
def test_J03_a_read_leaves_address_and_sharding():
    out = run(
        SHARDED
        + """
x, parts = memory_of(Mesh(devices, ("a", "b")), P("a", "b"), (4, 4), "int32")
r = jaxbridge.ref(x)
before = r.sharding
value = r[...]
assert r.sharding == before == value.sharding, (before, value.sharding)
with jaxbridge.borrow(r, "numpy") as xs:
    assert [a.ctypes.data for a in xs] == [p.ctypes.data for p in parts]
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_J04_the_type_of_a_value_is_that_of_the_ref():
    out = run(
        SHARDED
        + """
mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
x, _ = memory_of(mesh, P("a", "b"), (4, 4), "int32")
r = jaxbridge.ref(x)
seen = []
@jax.jit
def read(r):
    value = r[...]
    seen.append((jax.typeof(value).sharding.spec, jax.typeof(r).inner_aval.sharding.spec))
    return value
with jax.set_mesh(mesh):
    out = read(r)
assert seen == [(P("a", "b"), P("a", "b"))], seen
assert out.sharding.spec == P("a", "b")
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_J05_refs_in_shard_map():
    out = run(
        SHARDED
        + """
mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
x, parts = memory_of(mesh, P("d"), (8, 2), "float32")
r = jaxbridge.ref(x)
def body(r):
    r[...] = r[...] + jax.lax.axis_index("d")
mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=None)
jax.jit(mapped)(r)
with jaxbridge.borrow(r, "numpy") as xs:
    assert [float(a[0, 0]) for a in xs] == [1, 2, 3, 4], xs
    assert [a.ctypes.data for a in xs] == [p.ctypes.data for p in parts]
try:
    jax.jit(jax.shard_map(lambda: jaxbridge.ref(parts[0])[...], mesh=mesh, in_specs=(), out_specs=P()))()
except RuntimeError as error:
    assert "make the Ref outside" in str(error), error
print("right")
""",
        devices=4,
    )
    assert out.stdout == "right\n", out.stderr


@needs_updates
def test_J06_a_derivative_of_what_stores_its_argument():
    block = jaxbridge.empty((), "float32")
    block[...] = 0
    r = jaxbridge.ref(block)

    def f(v):
        r[...] = jax.lax.stop_gradient(v)
        return v * 3

    assert float(jax.grad(f)(2.0)) == 3
    assert float(r[...]) == 2 and jaxbridge.pointer(r) == block.ctypes.data


@needs_updates
def test_J07_a_function_with_rules_of_its_own_and_a_ref():
    block = jaxbridge.empty((), "float32")
    block[...] = 1
    r = jaxbridge.ref(block)

    def count(x):
        x += 1

    counts = jaxbridge.call(count, None)

    @jax.custom_jvp
    def square(v):
        return v * v

    @square.defjvp
    def rule(primals, tangents):
        (v,), (t,) = primals, tangents
        return square(v), 2 * v * t

    @jax.jit
    def program(r, v):
        counts(r)
        value, slope = jax.value_and_grad(square)(v)
        counts(r)
        return value, slope, r[...]

    assert [float(x) for x in program(r, 3.0)] == [9, 6, 3]
    assert float(block) == 3


@needs_updates
def test_J08_no_ref_of_memory_inside_jit():
    block = ones(4)
    for attempt in (
        lambda: jax.jit(lambda: jaxbridge.ref(block))(),
        lambda: jax.jit(lambda v: jaxbridge.ref(v))(jnp.ones(3)),
        lambda: jax.vmap(lambda v: jaxbridge.ref(block)[...] + v)(jnp.ones(2)),
    ):
        with pytest.raises(
            RuntimeError, match="make the Ref outside, and pass it in or close over it"
        ):
            attempt()
    # Nor may one be returned: JAX says so.
    r = jaxbridge.ref(block)
    with pytest.raises(ValueError, match=r"[Rr]ef"):
        jax.jit(lambda r: r)(r)
    assert float(r[0]) == 1
