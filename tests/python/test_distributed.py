# SPDX-License-Identifier: Apache-2.0
"""Programs over several processes, which jax.distributed joins: here two on the CPU, over loopback."""

import textwrap

import pytest

import processes

# Four devices, two of each process: values that one process alone would give.
TOGETHER = """
    connect()
    import jax.numpy as jnp, numpy as np
    import jaxbridge
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    assert jax.process_count() == 2 and jax.local_device_count() == 2 and jax.device_count() == 4
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    X = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = jax.make_array_from_callback((8, 4), NamedSharding(mesh, P("i")), lambda index: X[index])
    shapes = []

    def work(v):
        shapes.append(v.shape)
        return np.sin(v)

    def check(y, want):
        assert y.shape == want.shape
        for shard in y.addressable_shards:
            np.testing.assert_allclose(shard.data, want[shard.index], rtol=1e-6)
        assert len(y.addressable_shards) == 2

    f = jaxbridge.call(work, lambda v: v)
    elementwise = jaxbridge.call(work, lambda v: v, elementwise=True)
"""


def last_lines(done):
    # The transport of collectives writes there, too.
    return [process.stdout.strip().splitlines()[-1] for process in done]


def together(source, *args, **options):
    # Each part has its own indentation.
    program = textwrap.dedent(TOGETHER) + textwrap.dedent(source)
    return processes.run_together(program, 2, *args, **options)


def test_calls_over_the_devices_of_two_processes():
    done = together("""
        # Under shard_map each device calls with its part.
        program = jax.jit(jax.shard_map(
            lambda v: jax.lax.psum(f(v).sum(0), "i") + f(v), mesh=mesh, in_specs=P("i"), out_specs=P("i")
        ))
        check(program(x), np.sin(X).reshape(4, 2, 4).sum((0, 1)) + np.sin(X))
        assert set(shapes) == {(2, 4)} and len(shapes) in (2, 4)

        # So does a call that may be split, in plain jit and eagerly.
        shapes.clear()
        check(elementwise(x), np.sin(X))
        check(jax.jit(lambda v: elementwise(v * 2) + 1)(x), np.sin(2 * X) + 1)
        assert shapes == [(2, 4)] * 4
        assert "all-gather" not in jax.jit(elementwise).lower(x).compile().as_text()

        # Any other gets whole arrays, on each device.
        shapes.clear()
        check(jax.jit(f, out_shardings=x.sharding)(x), np.sin(X))
        assert shapes == [(8, 4)] * 2

        # One with a side effect is made in one process.
        shapes.clear()
        log = jaxbridge.call(work, lambda v: v, has_side_effect=True)
        y = jax.jit(log, out_shardings=x.sharding)(x)
        check(y, np.sin(X))
        jax.effects_barrier()
        print(shapes)
    """)
    assert last_lines(done) == ["[(8, 4)]", "[]"]


def test_an_exception_in_one_process_is_raised_there():
    done = together("""
        def fail(v):
            if v[0, 0] == 0:
                raise ZeroDivisionError("only here")
            return v

        bad = jaxbridge.call(fail, lambda v: v)
        y = jax.jit(jax.shard_map(bad, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
        try:
            check(y(x), X)
        except jax.errors.JaxRuntimeError as error:
            print("ZeroDivisionError: only here" in str(error))
        else:
            print("values")
    """)
    assert last_lines(done) == ["True", "values"]


# A program that was exported where its function is, and is run by two processes, one without it.
EXPORT = """
    import jax, jax.export, numpy as np
    import distributed_library, jaxbridge, sys
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("i")))
    program = jax.jit(jax.shard_map(distributed_library.f, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    exported = jax.export.export(program, disabled_checks=jaxbridge.export_checks())(x)
    open(sys.argv[1], "wb").write(exported.serialize())
"""
LIBRARY = """
    import jaxbridge

    def work(x):
        return x * 2

    f = jaxbridge.call(work, lambda x: x)
"""


@pytest.mark.parametrize("then", ["nothing", "collective"])
def test_a_function_that_one_process_does_not_have_is_an_error_there(tmp_path, then):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, which jax.export serialises with")
    (tmp_path / "distributed_library.py").write_text(textwrap.dedent(LIBRARY))
    path = tmp_path / "program"
    processes.run(EXPORT, path, devices=4, path=tmp_path)
    done = together(
        """
        import os, sys, threading, jax.export

        path, then = sys.argv[1:]
        exported = jax.export.deserialize(bytearray(open(path, "rb").read()))
        if jax.process_index() == 0:
            import distributed_library

        def program(x):
            y = exported.call(x)
            return y + y.sum() if then == "collective" else y

        if then == "collective" and jax.process_index() == 0:
            # The other's part of the sum never comes: XLA waits for it, for half a minute.
            print("waits", flush=True)
            threading.Timer(5, os._exit, [0]).start()
        try:
            y = jax.jit(program, out_shardings=x.sharding)(x)
            check(y, 2 * X + (2 * X.sum() if then == "collective" else 0))
            print("values")
        except jax.errors.JaxRuntimeError as error:
            print("not registered in this process" in str(error), flush=True)
            if then == "collective":
                os._exit(0)  # without JAX's own wait for the others
        """,
        path,
        then,
        path=tmp_path,
    )
    assert last_lines(done) == ["waits" if then == "collective" else "values", "True"]
