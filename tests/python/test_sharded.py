# SPDX-License-Identifier: Apache-2.0
"""Memory of others on several devices: sharded."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbridge
from owned_memory import needs_updates, owned
from processes import run

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
