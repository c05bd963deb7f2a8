# SPDX-License-Identifier: Apache-2.0
"""Programs of calls on parts: derivatives, other processes, other partitioners, and how long they live."""

import ctypes
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _core, _partitioning
from split_calls import P, Watched, X, collectives_in, like, mesh_of, put

# ---- derivatives ---------------------------------------------------------------------------------


def sine_with(kind):
    """A sine on parts, with one kind of rule."""
    sine, cosine = (
        jaxbridge.call(fn, like, out="out", elementwise=True) for fn in (np.sin, np.cos)
    )
    if kind == "defvjp":
        sine.defvjp(lambda x: (sine(x), x), lambda x, ct: (ct * cosine(x),))
    else:
        sine.defjvp(lambda x, t: (sine(*x), cosine(*x) * t[0]))
    cosine.defjvp(lambda x, t: (cosine(*x), -sine(*x) * t[0]))
    return sine


def product():
    """Linear in each of its arguments."""
    times = jaxbridge.call(np.multiply, like, elementwise=True)
    times.deflinear({0: lambda ct, y: times(ct, y), 1: lambda ct, x: times(x, ct)})
    return lambda x: times(x, x)


def sums_of_rows():
    """Linear, along an axis that is whole."""
    there, back = (
        jaxbridge.call(fn, like)
        for fn in (
            lambda x: np.cumsum(x, -1),
            lambda x: np.flip(np.cumsum(np.flip(x, -1), -1), -1),
        )
    )
    for f, transpose in ((there, back), (back, there)):
        f.defsharding("i j -> i k")
        f.deflinear(transpose)
    return there


DERIVATIVES = {
    "defjvp": (lambda: sine_with("defjvp"), jnp.sin, ("a", "b")),
    "defvjp": (lambda: sine_with("defvjp"), jnp.sin, ("a", "b")),
    "a batch": (lambda: jax.vmap(sine_with("defvjp"), 1, 1), jnp.sin, ("a", "b")),
    "deflinear": (product, lambda x: x * x, ("a", "b")),
    "a rule": (sums_of_rows, lambda x: jnp.cumsum(x, -1), ("a", None)),
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit", "shard_map"])
@pytest.mark.parametrize("case", DERIVATIVES)
def test_derivatives_are_made_of_parts(case, kind):
    make, native, spec = DERIVATIVES[case]

    def derivatives(f):
        reverse = lambda x: jax.vjp(f, x)[1](x)[0]

        def program(x):
            outs = [reverse(x), jax.vjp(reverse, x)[1](x)[0]]
            if case in ("defjvp", "deflinear", "a rule"):
                outs += [jax.jvp(f, (x,), (x,))[1], jax.jvp(reverse, (x,), (x,))[1]]
            return outs

        return program

    mesh = mesh_of("Auto" if kind == "shard_map" else kind)
    x = X / 64
    with jax.set_mesh(mesh):
        program = derivatives(make())
        if kind == "shard_map":
            program = jax.shard_map(program, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec))
        operand = put(x, *spec, mesh=mesh)
        compiled = jax.jit(program).lower(operand).compile()
        assert collectives_in(compiled) == set()
        got = compiled(operand)
    for out, want in zip(got, derivatives(native)(x), strict=True):
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
        assert out.sharding.is_equivalent_to(operand.sharding, 2)


# ---- the older partitioner -----------------------------------------------------------------------


def test_without_shardy_arrays_are_gathered():
    if not hasattr(jax.config, "jax_use_shardy_partitioner"):
        pytest.skip("this JAX has one partitioner only")
    before = jax.config.jax_use_shardy_partitioner
    watched = Watched(lambda x: x + 1)
    f = jaxbridge.call(watched, like, elementwise=True)
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    try:
        y, shapes = watched.during(jax.jit(f), put(X, "a"))
        np.testing.assert_array_equal(y, X + 1)
        assert shapes == [((8, 8),)] * 8
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)
        jax.clear_caches()


# ---- programs of other processes -----------------------------------------------------------------

# A program over four devices: it exports, or runs what another has exported or compiled.
OTHER = """
    import sys, pathlib
    import jax, jax.export, jax.numpy as jnp, numpy as np
    import jaxbridge, split_functions
    from jax.sharding import PartitionSpec as P, NamedSharding, AxisType

    what, where = sys.argv[1], pathlib.Path(sys.argv[2])
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4), NamedSharding(mesh, P("a")))
    program = jax.jit(split_functions.program)
    if what == "text":
        print(program.lower(x).as_text())
    elif what == "cache":
        jax.config.update("jax_compilation_cache_dir", str(where))
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        y = program(x)
    elif what == "export":
        exported = jax.export.export(program, disabled_checks=jaxbridge.export_checks())(x)
        where.write_bytes(exported.serialize())
        y = program(x)
    else:
        exported = jax.export.deserialize(where.read_bytes())
        y = jax.jit(exported.call)(x)
    if what != "text":
        np.testing.assert_array_equal(y, np.asarray(x) * 2 + 1)
        print(sorted(split_functions.shapes))
"""
FUNCTIONS = """
    import jaxbridge

    shapes = []

    def work(x):
        shapes.append(x.shape)
        return x * 2

    double = jaxbridge.call(work, lambda x: x, elementwise=True)

    def program(x):
        return double(x) + 1
"""
# The same of a function that gets lengths as numbers.
BOUND = """
    import ctypes
    import jaxbridge

    shapes = []
    floats = ctypes.POINTER(ctypes.c_float)

    @ctypes.CFUNCTYPE(None, floats, floats, ctypes.c_int64, ctypes.c_int64)
    def work(x, y, n, m):
        shapes.append((n, m))
        for i in range(n * m):
            y[i] = x[i] * 2

    signature = "x: float32[n, m], out y: float32[n, m], n: int64, m: int64"
    double = jaxbridge.bind(work, signature, elementwise=True, name="double")

    def program(x):
        return double(x) + 1
"""


@pytest.fixture(params=[FUNCTIONS, BOUND], ids=["call", "bind"])
def other(request, tmp_path):
    """Runs OTHER with a word in a process of its own."""
    import textwrap

    (tmp_path / "split_functions.py").write_text(textwrap.dedent(request.param))

    def run(word, **options):
        done = processes.run(OTHER, word, tmp_path / word[:6], devices=4, path=tmp_path, **options)
        return done.stdout.strip()

    return run


def test_a_split_call_is_the_same_text_in_every_process(other):
    texts = {other("text", env={"PYTHONHASHSEED": str(i)}) for i in range(2)}
    assert len(texts) == 1
    assert _partitioning.target in texts.pop()


def test_an_exported_program_is_split(other, tmp_path):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, with which JAX serializes")
    assert other("export") == str([(2, 4)] * 4)
    (tmp_path / "export").rename(tmp_path / "import")
    assert other("import") == str([(2, 4)] * 4)


def test_a_compiled_program_is_split(other):
    for _ in range(2):
        assert other("cache") == str([(2, 4)] * 4)


# ---- lifetime ------------------------------------------------------------------------------------


def called(add):
    return jaxbridge.call(add, like, elementwise=True)


def bound(add):
    """The same as a function of addresses and lengths."""
    floats = ctypes.POINTER(ctypes.c_float)

    def on_floats(x, y, n, m):
        np.ctypeslib.as_array(y, (n, m))[:] = add(np.ctypeslib.as_array(x, (n, m)))

    pointer = ctypes.CFUNCTYPE(None, floats, floats, ctypes.c_int64, ctypes.c_int64)(on_floats)
    signature = "x: float32[n, m], out y: float32[n, m], n: int64, m: int64"
    return jaxbridge.bind(pointer, signature, elementwise=True)


@pytest.mark.parametrize("made", [called, bound])
def test_nothing_of_a_split_call_is_left(collected, made):
    collected()
    before = _core.registry_size()
    x = put(X, "a")
    refs = []

    def once(i):
        big = np.zeros(1000, np.float32)

        def add(v):
            return v + big[0]

        f = made(add)
        refs.append(weakref.ref(add))
        jax.block_until_ready(jax.jit(f)(x))
        jax.block_until_ready(f(x))

    for i in range(5):
        once(i)
    collected()
    assert [r() for r in refs] == [None] * 5
    assert _core.registry_size() == before


def test_a_function_lives_as_long_as_a_program_with_parts_of_it():
    f = jaxbridge.call(lambda v: v + len(f_alive), like, elementwise=True)
    f_alive = [1]
    x = put(X, "a")
    program = jax.jit(f).lower(x).compile()
    del f
    gc.collect()
    np.testing.assert_array_equal(program(x), X + 1)
