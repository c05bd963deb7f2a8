# SPDX-License-Identifier: Apache-2.0
"""A process for each GPU, which jax.distributed joins; and a process that sees one GPU of two."""

import textwrap

import pytest

import processes

CUDA = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

TOGETHER = """
    connect(local_device_ids=[process])
    import jax.numpy as jnp, numpy as np
    import jaxbridge
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    assert jax.process_count() == 2 and jax.device_count() == 2
    (device,) = jax.local_devices()
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    X = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = jax.make_array_from_callback((8, 4), NamedSharding(mesh, P("i")), lambda index: X[index])
    shapes = []

    def check(y, want):
        (shard,) = y.addressable_shards
        np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-5)
"""


def together(source, **options):
    program = textwrap.dedent(TOGETHER) + textwrap.dedent(source)
    return processes.run_together(program, 2, env=CUDA, timeout=150, **options)


def test_a_process_for_each_device(needs):
    needs("cupy")
    done = together("""
        import cupy as cp

        def work(v):
            shapes.append((v.shape, v.device.id, jaxbridge.current().device))
            return cp.sin(v)

        f = jaxbridge.call(work, lambda v: v, framework="cupy")
        elementwise = jaxbridge.call(work, lambda v: v, elementwise=True, framework="cupy")
        replayed = jaxbridge.call(work, lambda v: v, graph="replay", framework="cupy")
        for g in (f, replayed):
            added = lambda v: jax.lax.psum(g(v).sum(0), "i") + g(v)
            program = jax.jit(jax.shard_map(added, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
            for _ in range(5):
                check(program(x), np.sin(X).sum(0) + np.sin(X))
        check(jax.jit(lambda v: elementwise(v * 2) + 1)(x), np.sin(2 * X) + 1)
        assert replayed.stats()["replays"] > 0
        assert {s for s, *_ in shapes} == {(4, 4)}
        assert {(a, b) for _, a, b in shapes} == {(process, process)}, shapes

        # Memory of others, of which each process has its part.
        with cp.cuda.Device(process):
            part = cp.full((4, 4), process, cp.float32)
            cp.cuda.Device().synchronize()
        r = jaxbridge.ref(jaxbridge.sharded([part], (8, 4), NamedSharding(mesh, P("i"))))
        step = jax.jit(lambda r: r.__setitem__(..., r[...] * 2 + r[...].sum()))
        step(r)
        jaxbridge.release(r)
        with cp.cuda.Device(process):
            assert part.get().tolist() == [[2.0 * process + 16] * 4] * 4, part
        print("right")
    """)
    assert [p.stdout.strip().splitlines()[-1] for p in done] == ["right"] * 2


def test_I07_jax_sees_the_second_device_alone(needs):
    """CuPy and torch see both: devices are told by what they are, not by JAX's numbers."""
    needs("cupy")
    needs("torch")
    out = processes.run(
        """
        import jax
        jax.config.update("jax_cuda_visible_devices", "1")
        import cupy as cp, numpy as np, torch
        import jaxbridge

        (device,) = jax.devices("cuda")
        try:
            jax.block_until_ready(jax.numpy.ones(3, device=device))
        except jax.errors.JaxRuntimeError as error:  # 0.11.2: "Device id 1 is out of range [0, 1)"
            raise SystemExit(print("JAX itself cannot:", error))
        assert cp.cuda.runtime.getDeviceCount() == torch.cuda.device_count() == 2
        a = jax.device_put(np.arange(6, dtype=np.float32), device)
        x, t = jaxbridge.to_external(a, "cupy"), jaxbridge.to_external(a, "torch")
        assert x.device.id == 1 and t.device.index == 1, (x.device, t.device)
        assert x.get().tolist() == t.tolist() == list(range(6))
        with cp.cuda.Device(1):
            y = cp.arange(6, dtype=cp.float32)
        b = jaxbridge.from_external(y, copy=False)
        assert b.devices() == {device} and (b + 1).tolist() == list(range(1, 7))
        b = jaxbridge.from_external(torch.ones(6, device="cuda:1"), copy=False)
        assert b.devices() == {device} and (b + 1).tolist() == [2] * 6
        with cp.cuda.Device(0):
            z = cp.arange(6, dtype=cp.float32)
        try:
            jaxbridge.from_external(z)
        except RuntimeError as error:
            assert "CUDA device 0" in str(error), error
        else:
            raise AssertionError("an array of a device that JAX does not have")

        seen = set()
        for framework in ("cupy", "torch"):
            f = jaxbridge.call(
                lambda v: (seen.add((str(v.device), jaxbridge.current().device)), v + 1)[1],
                lambda v: v, framework=framework,
            )
            assert jax.jit(lambda v: f(f(v)))(a).tolist() == list(range(2, 8))
        assert seen == {("<CUDA Device 1>", 1), ("cuda:1", 1)}, seen
        r = jaxbridge.ref(y)
        jax.jit(lambda r: r.__setitem__(..., r[...] * 2))(r)
        jax.block_until_ready(r[...])
        assert y.get().tolist() == [0, 2, 4, 6, 8, 10]
        print("right")
        """,
        env=CUDA,
        timeout=120,
    )
    if out.stdout.startswith("JAX itself cannot"):
        pytest.skip(f"jax_cuda_visible_devices without the first device: {out.stdout.strip()}")
    assert out.stdout.strip() == "right", out.stderr
