# SPDX-License-Identifier: Apache-2.0
"""`load`: functions of C++ libraries."""

import ctypes
import inspect
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import jaxbridge.testing
from native_libraries import built, compiler, sources
from processes import run


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def ops():
    return jaxbridge.load(built("ops.cpp", "libops"))


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_what_a_library_says_of_itself(ops):
    assert list(ops) == [
        *("scale", "axpy", "matmul", "attributes", "count", "sums", "split", "fill", "fails"),
        *("thread_of", "bump", "place"),
    ]
    assert str(inspect.signature(ops.scale)) == "(x, a=2.0)"
    assert str(inspect.signature(ops.axpy)) == "(x, y, a)"
    assert ops.scale.__name__ == "scale" and ops.scale.name == "ops.scale"
    assert ops.scale.__doc__.startswith("a * x, of a matrix.\n")
    assert "x: float32[*, *], a: float64 = 2.0, out float32[*, *]" in ops.scale.__doc__
    assert ops["scale"] is ops.scale and len(ops) == 12 and "scale" in dir(ops)
    with pytest.raises(AttributeError, match="exports no function 'sclae'; it has"):
        ops.sclae  # noqa: B018


def test_values(ops):
    np.testing.assert_array_equal(ops.scale(X), 2 * X)
    np.testing.assert_array_equal(ops.scale(X, a=3), 3 * X)
    np.testing.assert_array_equal(jax.jit(lambda x: ops.scale(x, -1.0) + 1)(X), 1 - X)
    np.testing.assert_array_equal(ops.matmul(X, X.T), X @ X.T)
    np.testing.assert_array_equal(ops.sums(X), X.sum(1))
    a, b = ops.split(np.arange(5.0), 2)
    np.testing.assert_array_equal(a, [0, 1])
    np.testing.assert_array_equal(b, [2, 3, 4])


def test_many_rows_on_the_threads(ops):
    x = np.random.default_rng(0).integers(0, 9, (10_000, 3)).astype(np.float32)
    for _ in range(5):
        np.testing.assert_array_equal(ops.sums(x), x.sum(1))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_overloads_by_dtype(ops, dtype):
    x, y = np.arange(3).astype(dtype), np.ones(3, dtype)
    out = ops.axpy(x, y, 2)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, 2 * x + y)
    np.testing.assert_array_equal(y, 1)  # the caller's own


def test_a_library_with_kernels_built_by_nvcc(tmp_path):
    out = tmp_path / "libtwice.so"
    command = [compiler("nvcc"), "-std=c++20", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    command += [f"-I{jaxbridge.get_include()}", str(sources / "twice.cu"), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    twice = jaxbridge.load(out).twice
    np.testing.assert_array_equal(twice(X), 2 * X)
    (call,) = jaxbridge.testing.external_calls(twice, X, platform="cuda")
    assert call.name == "twice.twice" and call.results == ("float32[2,3]",)


def test_no_overload(ops):
    with pytest.raises(
        TypeError, match=r"no overload takes \(int32\[3\], int32\[3\]\)(.|\n)*c"
    ) as e:
        ops.axpy(np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32), 2)
    reason = "argument 'x' is int32[3], expected complex64[...]"
    assert f"x: complex64[...], a: complex64, inout y: complex64[...]: {reason}" in str(e.value)


def test_attributes_arrive(ops):
    d = {"n": 7, "in": {"x": 2.5}, "s": "text", "l": [1, 2]}
    got = ops.attributes(X, True, -3, 2**62, 0.5, 1 - 2j, "héé", [1, 2.5], [True, False, True], d)
    expected = [1, -3, 2.0**62, 0.5, 1, -2, 5, 3.5, 2, 7, 2.5, -1, 2, 11]
    np.testing.assert_array_equal(got, expected)
    got = ops.attributes(X[0], False, 0, 0, 0, 0, "", [], [], {}, o=9)
    np.testing.assert_array_equal(got, [0] * 9 + [-1, -1, 9, 1, 11])
    for u64 in (2**63, 2**64 - 1):
        got = ops.attributes(X, False, 0, u64, 0, 0, "", [], [], {})
        assert got[2] == float(u64)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (
            {"x": X.astype(np.float64)},
            TypeError,
            r"'x' is float64\[2,3\], expected float32\[\*, \*\]",
        ),
        ({"x": X[0]}, TypeError, r"'x' is float32\[3\], of rank 1, expected .*, of rank 2"),
        ({"x": "text"}, TypeError, "'x' is a str, expected an array"),
        ({"a": "text"}, TypeError, r"'a' is 'text', expected a number \(float64\)"),
        ({"a": X}, TypeError, "'a' is an array, expected one float64; arrays come first"),
        ({"b": 1}, TypeError, "unexpected keyword argument 'b'"),
    ],
)
def test_wrong_arguments_of_scale(ops, change, error, text):
    with pytest.raises(error, match=text):
        ops.scale(**{"x": X, **change})


def test_wrong_attributes(ops):
    good = dict(x=X, b=True, i8=0, u64=0, f=0, c=0, s="", l=[], bits=[], d={})
    ops.attributes(**good)
    for name, value, error, text in [
        ("b", 1, TypeError, "expected True or False"),
        ("i8", 128, OverflowError, "which int8 does not hold"),
        ("i8", 1.5, TypeError, "expected an integer"),
        ("u64", -1, OverflowError, "which uint64 does not hold"),
        ("s", b"", TypeError, "expected a string"),
        ("l", [[1.0]], TypeError, "expected a list of float64"),
        ("d", {1: 2}, TypeError, "has the key 1, expected strings"),
        ("d", {"a": object()}, TypeError, "a dictionary holds numbers"),
        ("f", 1j, TypeError, "expected a number"),
        ("o", 2**31, OverflowError, "which int32 does not hold"),
        ("f", 1e39, OverflowError, "is 1e\\+39, which float32 does not hold"),
        ("c", 10**400, OverflowError, "an integer that complex128 does not hold"),
        ("s", "\ud800", ValueError, "which UTF-8 does not hold"),
        ("l", [1.0, 10**400], OverflowError, "an integer that float64 does not hold"),
        ("l", [[1.0], [2.0, 3.0]], TypeError, "expected a list of float64"),
        ("bits", [True, 2], TypeError, "is 2, expected True or False"),
        ("d", {"a": 2**63}, OverflowError, "which int64 does not hold"),
        ("d", {"a": [1, -(2**63) - 1]}, OverflowError, "which int64 does not hold"),
        ("d", {"": 1}, TypeError, "has the key '', expected strings with characters"),
        ("d", {"a": "\ud800"}, ValueError, "which UTF-8 does not hold"),
        ("d", {"\ud800": 1}, ValueError, "which UTF-8 does not hold"),
    ]:
        with pytest.raises(error, match=f"argument {name!r}.*{text}"):
            ops.attributes(**{**good, name: value})
    with pytest.raises(TypeError, match="'i8' is static.* static_argnames="):
        jax.jit(lambda n: ops.attributes(**{**good, "i8": n}))(3)
    for name in ("l", "d", "s"):
        with pytest.raises(TypeError, match=f"{name!r}.* is static.* static_argnames="):
            wrapped = {"l": lambda n: [n, 1.0], "d": lambda n: {"a": n}, "s": lambda n: n}[name]
            jax.jit(lambda n, name=name, w=wrapped: ops.attributes(**{**good, name: w(n)}))(3)
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        ops.attributes(X)


def test_lengths_that_do_not_fit(ops):
    with pytest.raises(TypeError, match=r"'y' is float32\[2,3\], and k is 3 in argument 'x'"):
        ops.matmul(X, X)


def test_a_shape_function_says_no(ops):
    with pytest.raises(TypeError, match="ops.split: at is 9, of 5"):
        ops.split(np.arange(5.0), 9)


def test_results_by_the_caller_that_are_none(ops):
    with pytest.raises(TypeError, match="expected a pytree of jax.ShapeDtypeStruct"):
        ops.fill(1.0, result_shape_dtypes=3)
    with pytest.raises(ValueError, match="more elements than an int64 can count"):
        ops.fill(1.0, result_shape_dtypes=jax.ShapeDtypeStruct((2**40, 2**40), np.float32))


def test_results_by_the_caller(ops):
    with pytest.raises(TypeError, match="exports no rule .* result_shape_dtypes="):
        ops.fill(1.5)
    spec = jax.ShapeDtypeStruct((2, 2), np.float32)
    for declared in (spec, jnp.zeros((2, 2), jnp.float32), lambda value: spec):
        filled = ops.fill(1.5, result_shape_dtypes=declared)
        np.testing.assert_array_equal(filled, np.full((2, 2), 1.5))
    with pytest.raises(TypeError, match="hold.*numpy.float32.*expected a tuple of lengths"):
        ops.fill(1.5, result_shape_dtypes=[np.float32])
    with pytest.raises(ValueError, match="vmap_method is 'foo'; expected one of sequential"):
        jaxbridge.load(ops.path, vmap_method="foo")
    with pytest.raises(
        TypeError, match="says float64.* for result 0, and the function has out float32"
    ):
        ops.fill(1.5, result_shape_dtypes=jax.ShapeDtypeStruct((2,), np.float64))
    told = jaxbridge.load(ops.path, results={"fill": lambda value: spec})
    np.testing.assert_array_equal(jax.jit(told.fill)(np.float32(2)), np.full((2, 2), 2))
    with pytest.raises(ValueError, match="results= names .*'nothing'"):
        jaxbridge.load(ops.path, results={"nothing": spec})


@pytest.mark.parametrize(
    "how, text",
    [
        ("status", "OUT_OF_RANGE: fails: of its own"),
        ("throw", "INTERNAL: fails: thrown"),
        ("bad_alloc", "RESOURCE_EXHAUSTED: fails: out of memory"),
        ("int", "UNKNOWN: fails: an exception that is no std::exception"),
    ],
)
def test_errors(ops, how, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        ops.fails(X, how)


@pytest.fixture(scope="module")
def edges():
    return jaxbridge.load(built("edges.cpp", "libedges"))


@pytest.mark.parametrize(
    "how, text",
    [
        ("latin1", r"throws: caf\? \?\?\? \U0001f600 \?"),
        ("null", "throws: an exception without a text"),
    ],
)
def test_errors_whose_text_is_none(edges, how, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        edges.throws(X[0], how)


def test_errors_on_the_threads():
    """In a process of its own, as it was the end of it."""
    run(
        """
        import sys, jax, numpy as np, pytest, jaxbridge
        edges = jaxbridge.load(sys.argv[1])
        x = np.arange(8000, dtype=np.float32)
        for bad in (0, 17, 7999, -2):
            with pytest.raises(jax.errors.JaxRuntimeError, match="add_one: of a piece"):
                edges.add_one(x, bad=bad)
            np.testing.assert_array_equal(edges.add_one(x), x + 1)
        with pytest.raises(jax.errors.JaxRuntimeError, match="nested: of an inner piece"):
            edges.nested(x, bad=True)
        """,
        built("edges.cpp", "libedges"),
    )


@pytest.mark.parametrize("grain", [1, 0, -3, 7, 999, 1000, 2**63 - 1])
def test_pieces_for_the_threads(edges, grain):
    x = np.arange(1000, dtype=np.float32)
    np.testing.assert_array_equal(edges.add_one(x, grain), x + 1)
    np.testing.assert_array_equal(edges.nested(x), x + 1)
    assert edges.huge_pieces(x[:1], grain)[0] >= 1


def test_parameters_of_an_export(edges):
    assert edges.quoted(X[0])[0] == 8 and edges.quoted(X[0], n=3, s="")[0] == 3
    assert edges.many(X[0], *[0] * 34, 9)[0] == 9
    assert edges.no_results(X[0]) == ()


def test_results_that_are_updated_need_no_rule(edges):
    for make in (lambda f: f, jax.jit):
        a, b = make(edges.twice)(X, X.astype(np.float64))
        assert (a.dtype, b.dtype) == (np.float32, np.float64)
        np.testing.assert_array_equal(a, 2 * X)
        np.testing.assert_array_equal(b, 2 * X)
    r = jax.new_ref(jnp.ones(3, jnp.float32))
    edges.twice(r, np.ones((1, 1)))
    assert r[...].tolist() == [2, 2, 2]


def test_a_missing_rule_is_named(edges):
    text = r'export it with \.result\(jaxbridge::shape\("\[...\]"\), jaxbridge::same_as<1>\)'
    with pytest.raises(TypeError, match=text):
        edges.updates_and_gives(X[0], X[0])
    spec = (jax.ShapeDtypeStruct((1,), np.float32), jax.ShapeDtypeStruct((3,), np.float32))
    z, y = edges.updates_and_gives(X[0], X[0], result_shape_dtypes=spec)
    assert z.tolist() == [1] and y.tolist() == [1, 1, 2]


def test_a_rule_that_does_not_fit_what_is_updated(edges):
    with pytest.raises(
        TypeError, match="float32\\[3\\] cannot be a result of float32\\[4\\]: they are one memory"
    ):
        edges.wrong_rule(X[0], X[0])


def test_state_is_one_for_each_device(ops):
    first = np.asarray(ops.count(np.zeros(1, np.float32)))
    again = np.asarray(ops.count(np.zeros(1, np.float32)))
    assert again[0] == first[0] + 1 and first[1] == first[2] == 0


def test_several_devices():
    code = """
import sys, jax, numpy as np, jaxbridge
ops = jaxbridge.load(sys.argv[1])
for k, device in enumerate(jax.devices()):
    with jax.default_device(device):
        for n in (1, 2):
            assert list(np.asarray(ops.count(np.zeros(1, np.float32)))) == [n, k, k]
"""
    path = str(built("ops.cpp", "libops"))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    run_python(code, path, **flags)


def run_python(code, *args, **variables):
    import os

    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_vmap(ops):
    batch = np.stack([X, X + 1, X + 2])
    np.testing.assert_array_equal(jax.vmap(ops.scale)(batch), 2 * batch)  # sequential, as exported
    x, y = np.ones((4, 3), np.float32), np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(jax.vmap(lambda a, b: ops.axpy(a, b, 2))(x, y), 2 + y)
    text = r"ops.matmul: vmap needs to know how: export it with .vmap\(\)"
    with pytest.raises(jaxbridge.errors.BatchingError, match=text):
        jax.vmap(ops.matmul)(batch, np.stack([X.T] * 3))
    whole = jaxbridge.load(ops.path, vmap_method="broadcast_all")
    with pytest.raises(TypeError, match='of rank 3.*others need vmap_method="sequential"'):
        jax.vmap(whole.matmul)(batch, np.stack([X.T] * 3))


def test_refs(ops):
    ref = jax.new_ref(jnp.arange(3.0))
    assert ops.axpy(np.ones(3), ref, 2.0) is None
    np.testing.assert_array_equal(ref[...], [2, 3, 4])
    out = ops.axpy(ref, np.ones(3), 2.0)
    np.testing.assert_array_equal(out, [5, 7, 9])
    np.testing.assert_array_equal(ref[...], [2, 3, 4])

    @jax.jit
    def loop(ref):
        jax.lax.fori_loop(0, 3, lambda i, _: ops.axpy(jnp.ones(3), ref, 1.0) or 0, 0)

    loop(ref)
    np.testing.assert_array_equal(ref[...], [5, 6, 7])


def test_derivatives_are_refused_by_name(ops):
    with pytest.raises(jaxbridge.errors.DerivativeError, match="ops.scale"):
        jax.grad(lambda x: ops.scale(x).sum())(X)


def test_a_loop_and_a_retrace_call_no_python(ops):
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return jax.lax.fori_loop(0, 50, lambda i, y: ops.scale(y, 1.0), x)

    before = ops.scale.stats()["calls"]
    np.testing.assert_array_equal(f(X), X)
    assert ops.scale.stats()["calls"] == before + 50 and len(traces) == 1


def test_calls_go_on_while_python_holds_the_gil(ops):
    """A call that needed the GIL would wait for the thread that never gives it."""
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda i, y: ops.scale(y, 1.0), x))
    x = jnp.asarray(np.zeros((512, 512), np.float32))
    f(x).block_until_ready()
    calls = ops.scale.stats()["calls"]
    # ctypes.PyDLL keeps the GIL while it runs.
    sleep = ctypes.PyDLL(None).usleep
    gate = threading.Event()

    def run():
        gate.set()
        f(x).block_until_ready()

    worker = threading.Thread(target=run)
    worker.start()
    gate.wait()
    for _ in range(200):
        sleep(20_000)
        if ops.scale.stats()["calls"] >= calls + 200:
            break
    worker.join()
    assert ops.scale.stats()["calls"] == calls + 200


# ---- the library as a file -----------------------------------------------------------------------


def test_plain_jax_ffi(ops):
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_scale_cpu
    jax.ffi.register_ffi_target("test_native.scale", jax.ffi.pycapsule(handler), platform="cpu")
    call = jax.ffi.ffi_call("test_native.scale", jax.ShapeDtypeStruct(X.shape, X.dtype))
    np.testing.assert_array_equal(call(X, a=np.float64(4)), 4 * X)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="attribute 'a' is missing, or not float64"
    ):
        jax.block_until_ready(call(X, a=np.float32(5)))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"operand 'x' is float32\[3\], expected float32\[\*,\*\]"
    ):
        jax.block_until_ready(call(X[0], a=np.float64(4)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="got 2 operands, expected 1"):
        jax.block_until_ready(call(X, X, a=np.float64(4)))


def test_another_compiler():
    """clang's library has the same handlers and descriptions."""
    clang = shutil.which("clang++-14") or shutil.which("clang++")
    if clang is None:
        pytest.skip("needs clang++, which is not installed")
    ops = jaxbridge.load(built("ops.cpp", "libops_clang", "-D_GLIBCXX_ASSERTIONS", by=clang))
    np.testing.assert_array_equal(ops.scale(X, a=3), 3 * X)
    np.testing.assert_array_equal(ops.sums(X), X.sum(1))


def test_two_libraries_with_the_same_names():
    first, second = (jaxbridge.load(version(n)) for n in (1, 2))
    assert first.name == second.name == "version"
    for _ in range(2):
        assert first.version(np.zeros(1, np.float32)) == 1
        assert second.version(np.zeros(1, np.float32)) == 2
    assert jax.jit(lambda x: second.version(first.version(x)))(np.zeros(1, np.float32)) == 3


def version(n):
    options = ("-fno-exceptions", "-fno-rtti", f"-DVERSION={n}")
    return built("version.cpp", "libversion", *options)


def test_a_library_that_is_built_again(tmp_path):
    path = tmp_path / "libversion.so"
    old, new = version(3), version(4)
    shutil.copyfile(old, path)
    first = jaxbridge.load(path)
    f = jax.jit(lambda x: first.version(x))
    assert f(np.zeros(1, np.float32)) == 3
    path.unlink()  # as a linker does
    shutil.copyfile(new, path)
    second = jaxbridge.load(path)
    assert second.version(np.zeros(1, np.float32)) == 4
    assert f(np.zeros(1, np.float32)) == 3 and first.version(np.ones(2, np.float32))[0] == 4
    assert jaxbridge.load(path).version is not second.version
    assert jaxbridge.load(path).version.callee.is_same_as(second.version.callee)


@pytest.mark.parametrize("by", ["others", "a load that refused it"])
def test_a_library_that_was_open_before_it_was_built_again(by, tmp_path):
    """The loader would give the old file."""
    path = tmp_path / "libversion.so"
    if by == "others":
        shutil.copyfile(version(3), path)
        ctypes.CDLL(str(path))  # is never closed
    else:
        shutil.copyfile(built("liars.c", "liar2", "-DLIE=2"), path)
        with pytest.raises(ImportError, match="too short"):
            jaxbridge.load(path)
    path.unlink()
    shutil.copyfile(version(4), path)
    assert jaxbridge.load(path).version(np.zeros(1, np.float32)) == 4


@pytest.mark.parametrize("how", ["copyfile", "hard link"])
def test_a_library_that_is_overwritten_while_it_is_open(how, tmp_path):
    """In a process of its own, which it can end."""
    path = tmp_path / "libversion.so"
    shutil.copyfile(version(3), path)
    shutil.copyfile(path, f"{path}.same")
    (tmp_path / "libother.so").hardlink_to(path)
    done = run(
        """
        import os, pathlib, shutil, sys, jaxbridge
        path, new, how = sys.argv[1:]
        jaxbridge.load(path)
        shutil.copyfile(path + ".same", path)
        print(list(jaxbridge.load(path)))  # with what it was, it is what it was
        shutil.copyfile(new, path)
        if how == "hard link":
            path = pathlib.Path(path).with_name("libother.so")
        for _ in range(2):
            try:
                jaxbridge.load(path)
            except ImportError as error:
                print(error)
        os.unlink(path)
        shutil.copyfile(new, path)
        print(list(jaxbridge.load(path)), flush=True)
        os._exit(0)
        """,
        path,
        version(4),
        how,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "['version']" and len(lines) == 4, done.stdout
    for line in lines[1:3]:
        assert "it was overwritten while this process has it open" in line
        assert "start a new one" in line and "mv and install" in line


def test_a_library_that_is_written_while_it_is_loaded(tmp_path, monkeypatch):
    path = tmp_path / "libversion.so"
    shutil.copyfile(version(7), path)
    opened = jaxbridge._core.open_library

    def meanwhile(p):
        found = opened(p)
        path.unlink()
        shutil.copyfile(version(8), path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(jaxbridge._core, "open_library", meanwhile)
        with pytest.raises(ImportError, match="it was written while it was loaded; load it again"):
            jaxbridge.load(path)
    assert jaxbridge.load(path).version(np.zeros(1, np.float32)) == 8


def test_a_library_that_is_cut_short(tmp_path):
    """In a process of its own, as it was the end of it."""
    whole = built("liars.c", "whole", "-DLIE=0").read_bytes()
    for size in (0, 70, 4096, len(whole) // 2, len(whole) - 4000):
        (tmp_path / f"cut{size}.so").write_bytes(whole[:size])
    done = run(
        """
        import pathlib, sys, jaxbridge
        for path in sorted(pathlib.Path(sys.argv[1]).glob("cut*.so")):
            try:
                jaxbridge.load(path)
            except ImportError as error:
                print(path.stat().st_size, error)
        """,
        tmp_path,
    )
    assert done.stdout.count("the file is cut short") >= 3, done.stdout


def test_a_cpu_library_on_cuda(ops):
    traced = jax.jit(ops.scale).trace(X)
    with pytest.raises(
        jaxbridge.errors.PlatformError,
        match=r"ops.scale: there is a function for cpu, none for cuda; export one for it, too",
    ):
        traced.lower(lowering_platforms=("cuda",))


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        jaxbridge.load(tmp_path / "none.so")
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(ImportError, match="text.so"):
        jaxbridge.load(text)
    import _ctypes

    with pytest.raises(ImportError, match="exports no jaxbridge_library_v1.*jaxbridge.bind"):
        jaxbridge.load(_ctypes.__file__)


_lies = {
    0: "the code of one is no handler of XLA's",
    1: "too short, or outside of the library",
    2: "too short, or outside of the library",
    3: "built for version 7 of jaxbridge's native interface",
    4: "a function of it is too short, or outside",
    5: "its list of functions has no end",
    6: "a function's name is no identifier",
    7: "a function's name is no identifier",
    8: "'float33' is no dtype",
    9: r"3 names \('x, y, z'\) for 1 parameters",
    10: "the code of one is outside",
    11: "the count of calls of one is outside",
    12: "the rules for the results of one are outside",
    13: "the platform of one is number 9",
    14: "a text of one is outside",
    15: "the code of one is no handler of XLA's",
    16: "a function of it is too short, or outside",
    17: "'utf-8' codec can't decode byte",
    18: "a parameter cannot be called 'lambda'",
    19: r"one says \.vmap\('typo'\); expected one of sequential, ",
    20: r"one says \.vmap\(\) and \.elementwise\(\)",
    21: "the default: argument 'a' is 'text', expected a number",
    22: r"x: float32\[2 \* k\]: .*: k is neither a length of an argument nor",
}


@pytest.mark.parametrize("lie", sorted(_lies))
def test_a_library_that_lies(lie):
    with pytest.raises(ImportError, match=_lies[lie]):
        jaxbridge.load(built("liars.c", f"liar{lie}", f"-DLIE={lie}"))


@pytest.mark.parametrize(
    "rule, text",
    [
        ("same_as 5", "its rule is same_as<5>, and there are 1 operands"),
        ("same_as x", "result 0: invalid literal"),
        ("[q]", "'q': q is neither a length of an argument nor"),
        ("[*]", "no rule says its shape"),
        ("[...]", "no rule says its shape"),
        ("[1, 2]", "its rule .* gives rank 2"),
        ("[n +]", "'n \\+' is no expression"),
        ("", "gives rank 0"),
    ],
)
def test_a_rule_that_lies(rule, text):
    with pytest.raises(ImportError, match=f"what one says of itself cannot be: .*{text}"):
        jaxbridge.load(built("liars.c", "liar_of_rules", "-DLIE=23", f'-DRULE="{rule}"'))


def test_export(ops, tmp_path):
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(
        jax.jit(lambda x: ops.scale(x, 3.0)), disabled_checks=jaxbridge.export_checks()
    )(X)
    text = exported.mlir_module()
    assert f"jaxbridge.native.ops.{ops.content[:16]}.scale" in text
    program = tmp_path / "program"
    program.write_bytes(exported.serialize())
    code = """
import sys, jax, numpy as np, jaxbridge
x = np.arange(6, dtype=np.float32).reshape(2, 3)
f = jax.export.deserialize(open(sys.argv[1], "rb").read()).call
if sys.argv[3] == "load":
    jaxbridge.load(sys.argv[2])
    np.testing.assert_array_equal(f(x), 3 * x)
else:
    try:
        jax.block_until_ready(f(x))
    except Exception as e:
        assert "jaxbridge.native.ops" in str(e), e
    else:
        raise AssertionError("no error")
"""
    run_python(code, str(program), ops.path, "load")
    run_python(code, str(program), ops.path, "forget")


def test_lowered_text_has_no_address(ops):
    text = jax.jit(ops.scale).trace(X).lower().as_text()
    call = next(line for line in text.splitlines() if "custom_call" in line)
    assert "{a = 2.000000e+00 : f64}" in call


def test_ffi():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_axpy_cpu
    jax.ffi.register_ffi_target("test_native.axpy", jax.ffi.pycapsule(handler), platform="cpu")
    f = jaxbridge.ffi("test_native.axpy", lambda x, y, a: y, inout={1: 0}, elementwise=True)
    x, y = np.ones(3, np.float32), np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(f(x, y, a=np.float32(2)), y + 2)
    np.testing.assert_array_equal(
        jax.vmap(lambda y: f(x, y, a=np.float32(2)))(y[None]), y[None] + 2
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="attribute 'a' is missing"):
        f(x, y, a=2.0)
    with pytest.raises(TypeError, match="'a' is passed by keyword, so it is an attribute"):
        jax.jit(lambda a: f(x, y, a=a))(np.float32(2))
    # A Ref is one more result, in the memory of its operand.
    g = jaxbridge.ffi("test_native.axpy", None)
    ref = jax.new_ref(jnp.asarray(y))
    assert g(x, ref, a=np.float32(2)) is None
    np.testing.assert_array_equal(ref[...], y + 2)
    with pytest.raises(TypeError, match="expected the name of one, as jax.ffi.register_ffi_target"):
        jaxbridge.ffi("", None)


@pytest.mark.parametrize(
    "value, error, text",
    [
        (2**63, OverflowError, "which int64 does not hold"),
        ("\ud800", ValueError, "which UTF-8 does not hold"),
        ({"": 1}, TypeError, "has the key '', expected strings"),
        ({1: 1}, TypeError, "has the key 1, expected strings"),
        ({"a": 2**63}, OverflowError, "which int64 does not hold"),
    ],
)
def test_ffi_attributes_that_are_none(value, error, text):
    f = jaxbridge.ffi("nobody registered it", lambda x, **_: x)
    with pytest.raises(error, match=text):
        jax.eval_shape(lambda x: f(x, a=value), X)


def test_ffi_attributes():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    handler = ctypes.CDLL(ops.path).jaxbridge_ffi_attributes_cpu
    jax.ffi.register_ffi_target(
        "test_native.attributes", jax.ffi.pycapsule(handler), platform="cpu"
    )
    f = jaxbridge.ffi("test_native.attributes", jax.ShapeDtypeStruct((14,), np.float64))
    got = f(
        np.zeros((), np.float32),
        b=True,
        i8=np.int8(-3),
        u64=np.uint64(4),
        f=np.float32(0.5),
        c=np.array([1.0, -2.0]),
        s="abc",
        l=np.array([1, 2.5]),
        bits=np.array([1, 0], np.uint8),
        d={"n": 7, "in": {"x": 2.5}},
        o=np.int32(9),
    )
    np.testing.assert_array_equal(got, [1, -3, 4, 0.5, 1, -2, 3, 3.5, 1, 7, 2.5, 9, 0, 11])
    with pytest.raises(TypeError, match="the attribute 's' is <object"):
        f(np.zeros((), np.float32), s=object())
