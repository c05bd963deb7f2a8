# SPDX-License-Identifier: Apache-2.0
"""`cuda_kernel` and functions for CUDA of `bind`, without a GPU."""

import contextlib
import ctypes
import gc
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_gpu import Program, array, fake

import jaxbridge
from jaxbridge import _config, _device_code
from jaxbridge.errors import PlatformError, SignatureError
from processes import run

with contextlib.suppress(ImportError):  # Numba looks among a kernel's globals
    from numba import cuda

N = 16
X = jnp.zeros(N, jnp.float32)
PTX = ".version 8.0\n.target sm_80\n// has axpy\n"
Body = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32))
launches = []


def define(name, count, body):
    launched = Body(lambda words, shape: body(words[:count], shape[:6]))
    define.kept.append(launched)
    fake("define_kernel", None, ctypes.c_char_p(name), ctypes.c_size_t(count), launched)


define.kept = []


def floats(address):
    return np.ctypeslib.as_array((ctypes.c_float * N).from_address(address))


def axpy_body(words, shape):
    x, a, y, n = words
    (a,) = np.asarray([a & 0xFFFFFFFF], np.uint32).view(np.float32)
    launches.append((tuple(shape), int(np.int32(n & 0xFFFFFFFF)), float(a)))
    floats(y)[:] += a * floats(x)


@pytest.fixture(autouse=True)
def kernels():
    launches.clear()
    define(b"axpy", 4, axpy_body)


SIGNATURE = "x: float32[n], a: float32 = 2.0, inout y: float32[n], n: int32"


def made(**changes):
    how = {"signature": SIGNATURE, "grid": "(n + 3) // 4", "block": 4, **changes}
    return jaxbridge.cuda_kernel(PTX, "axpy", **how)


def test_launch():
    f = made()
    program, stream = Program(f, X, X), fake.stream()
    x, y = array(N, 1), array(N, 3)
    program([x, y], [y], stream)
    np.testing.assert_array_equal(y, 5)
    assert launches == [((4, 1, 1, 4, 1, 1), N, 2.0)]
    assert f.stats()["calls"] == 1


@pytest.mark.parametrize(
    "grid, block",
    [
        ((4, 1), (2, 2)),
        (lambda x, y, a: x.shape[0] // 4, ["n // 4"]),
        (np.int64(4), "max(n // 8, 4)"),
    ],
)
def test_grid_and_block(grid, block):
    x, y = array(N, 1), array(N, 0)
    Program(made(grid=grid, block=block), X, X, a=0.5)([x, y], [y], fake.stream())
    ((gx, gy, gz, bx, by, bz), n, a) = launches[0]
    assert (gx * gy * gz, bx * by * bz, n, a) == (4, 4, N, 0.5)


def test_a_call_on_parts_has_their_lengths_and_grid():
    whole = Program(made(elementwise=True), X, X)
    part = whole.of_parts([["float32", [8]]] * 2, [["float32", [8]]])
    x, y = array(N, 1), array(N, 3)
    for _ in range(2):
        part([x[:8], y[:8]], [y[:8]], fake.stream())
    whole([x, y], [y], fake.stream())
    assert launches == [((2, 1, 1, 4, 1, 1), 8, 2.0)] * 2 + [((4, 1, 1, 4, 1, 1), N, 2.0)]
    del whole  # and with it the one on parts
    gc.collect()
    with pytest.raises(RuntimeError, match="anonymous function"):
        part([x[:8], y[:8]], [y[:8]], fake.stream())


def test_wrong_grids_and_blocks():
    for changes, text in [
        ({"grid": -1}, "grid is .*-1.*expected one to three numbers from 0"),
        ({"block": 2048}, "block is .*2048.*from 1 to 1024"),
        ({"grid": (1, 2, 3, 4)}, "expected one to three numbers"),
        ({"shared": -1}, "shared is -1"),
        ({"grid": "n // (n - 16)"}, "axpy: grid: .* cannot be computed with"),
        ({"block": lambda x, y, a: "m"}, "axpy: block: 'm': m is neither"),
    ]:
        with pytest.raises((ValueError, SignatureError), match=text):
            Program(made(**changes), X, X)


def test_expressions_are_looked_at_at_once():
    for changes, text in [
        ({"grid": "m"}, "cuda_kernel: grid: 'm': m is neither a length"),
        ({"grid": (1, "n /")}, "cuda_kernel: grid: 'n /' is no expression"),
        ({"block": ["a"]}, "cuda_kernel: block: 'a': a is neither"),
        ({"shared": "4 * m"}, "cuda_kernel: shared: .*: m is neither"),
        ({"signature": "x: float32[n], out y: float32[m]"}, "out y: float32.m.: 'm': m is neither"),
    ]:
        with pytest.raises(SignatureError, match=text):
            made(**changes)


def test_arrays_without_elements_launch_nothing():
    f = made(grid="n", block="min(n, 64)")
    empty = array(0)
    Program(f, X[:0], X[:0])([empty, empty], [empty], fake.stream())
    assert launches == [] and f.stats()["calls"] == 1


def test_wrong_code_and_signatures():
    with pytest.raises(TypeError, match="name the kernel"):
        jaxbridge.cuda_kernel(PTX, signature=SIGNATURE, grid=1, block=1)
    with pytest.raises(TypeError, match="a text without zeros"):
        jaxbridge.cuda_kernel(PTX, "axpy\0", signature=SIGNATURE, grid=1, block=1)
    with pytest.raises(TypeError, match="the code is int"):
        jaxbridge.cuda_kernel(3, "axpy", signature=SIGNATURE, grid=1, block=1)
    with pytest.raises(SignatureError, match="gets no stream"):
        made(signature="x: float32[n], stream")
    with pytest.raises(SignatureError, match="returns nothing"):
        made(signature="x: float32[n], out y: float32[n] -> int")
    with pytest.raises(SignatureError, match="a: complex128: it is not passed by value"):
        made(signature="x: float32[n], a: complex128, inout y: float32[n]")


def test_code_from_files_and_bytes(tmp_path, monkeypatch):
    how = {"signature": SIGNATURE, "grid": 1, "block": N}
    compiled = []
    monkeypatch.setattr(_device_code, "_compiled", lambda *a: compiled.append(a) or b"\x7fELF")

    def image(code, **more):
        return jaxbridge.cuda_kernel(code, "axpy", **how, **more).callee.code.image()

    source = "__global__ void axpy() {}"
    for name, code in (("k.ptx", PTX), ("k.cu", source), ("k.cubin", b"\x7fELF\0\xff")):
        path = tmp_path / name
        path.write_bytes(code if isinstance(code, bytes) else code.encode())
        assert image(path) == image(code)
        with pytest.raises(TypeError, match="the name of a file; pass pathlib.Path"):
            image(str(path))
    assert image(PTX.encode()) == image(PTX.encode() + b"\0") == image(PTX) == PTX.encode() + b"\0"
    assert image(source.encode(), options=["-DA"]) == b"\x7fELF"
    assert [c[:3] for c in compiled] == [(source, "axpy", ())] * 2 + [(source, "axpy", ("-DA",))]
    fatbin = b"\x50\xed\x55\xba\0"
    assert image(fatbin) == fatbin and image(b"\xff\0\xff") == b"\xff\0\xff"
    with pytest.raises(TypeError, match="has a zero in it"):
        image(PTX + "\0" + PTX)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"capturable": "no"}, "capturable is 'no'; expected True or False"),
        ({"options": "-DA"}, "options is '-DA'; expected a list of texts"),
        ({"options": [3]}, "options is .*3.*; expected a list of texts"),
        ({"export_name": 3}, "name is 3"),
    ],
)
def test_options_of_another_type(changes, text):
    with pytest.raises(TypeError, match=text):
        made(**changes)


def test_it_is_not_there_on_the_cpu():
    with pytest.raises(PlatformError, match="axpy: there is a function for cuda, none for cpu"):
        made()(X, X)


def test_a_kernel_that_is_not_there():
    f = jaxbridge.cuda_kernel(PTX, "sub", signature=SIGNATURE, grid=1, block=1)
    with pytest.raises(RuntimeError, match="sub: the code has no kernel 'sub'"):
        y = array(N)
        Program(f, X, X)([array(N), y], [y], fake.stream())


def test_launches_that_come_again_are_graphs():
    f = made()
    program, stream = Program(f, X, X), fake.stream()
    x, y = array(N, 1), array(N, 0)
    for k in range(1, 6):
        program([x, y], [y], stream)
        np.testing.assert_array_equal(y, 2 * k)
    stats = f.stats()
    assert (stats["calls"], stats["captures"], stats["replays"], stats["cache_size"]) == (
        5,
        1,
        3,
        1,
    )
    x[:] = 10  # what is in the memory is not frozen
    program([x, y], [y], stream)
    np.testing.assert_array_equal(y, 30)
    f.clear()
    assert f.stats()["cache_size"] == 0
    program([x, y], [y], stream)
    np.testing.assert_array_equal(y, 50)


def test_one_module_for_all_shapes_as_long_as_a_program():
    jax.clear_caches()
    gc.collect()
    f = made()
    before = modules()
    programs = [Program(f, X, X), Program(f, X, X, a=3.0), Program(f, X[:4], X[:4])]
    x, y = array(N, 1), array(N, 0)
    stream = fake.stream()
    for program in programs[:2]:
        program([x, y], [y], stream)
    np.testing.assert_array_equal(y, 5)
    assert modules() == before + 1
    del f, programs, program
    jax.clear_caches()
    gc.collect()
    assert modules() == before


def modules():
    names = [name for name, _ in fake.calls()]
    return names.count("cuModuleLoadData") - names.count("cuModuleUnload")


def test_export_needs_a_name():
    f = made()
    with pytest.raises(NotImplementedError, match=r"anonymous function cannot.*export_name="):
        jax.export.export(jax.jit(f), platforms=["cuda"])(X, X)


def test_vmap():
    f = made(vmap_method="sequential")
    text = (
        jax.jit(jax.vmap(f)).trace(X[None], X[None]).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert "jaxbridge.call_capturable" in text
    with pytest.raises(TypeError, match="of rank 2"):
        whole = made(vmap_method="broadcast_all")
        jax.jit(jax.vmap(whole)).trace(X[None], X[None]).lower(lowering_platforms=("cuda",))


def test_capturable():
    for capturable, name in ((True, "jaxbridge.call_capturable"), (False, "jaxbridge.call")):
        traced = jax.jit(made(capturable=capturable)).trace(X, X)
        assert f"@{name}(" in traced.lower(lowering_platforms=("cuda",)).as_text()
    empty = jax.jit(made()).trace(X[:0], X[:0])  # no blocks, no launch: XLA takes no empty graph
    assert "@jaxbridge.call(" in empty.lower(lowering_platforms=("cuda",)).as_text()


def test_debug_mode(monkeypatch):
    monkeypatch.setattr(_config, "debug", True)

    does = "right"

    def body(words, shape):
        if does != "nothing":
            axpy_body(words, shape)
        if does == "spoils":
            floats(words[0])[1] += 1

    define(b"axpy", 4, body)
    program = Program(made(), X, X)
    assert "@jaxbridge.call(" in program.text  # what XLA captures could not be looked at
    x, y = array(N, 1), array(N, 3)
    for k in range(1, 4):  # replays, too
        program([x, y], [y], fake.stream())
        np.testing.assert_array_equal(y, 3 + 2 * k)
    does = "spoils"
    with pytest.raises(RuntimeError, match="axpy: argument 'x' was written to, and"):
        program([x, y], [y], fake.stream())
    does = "nothing"
    out = Program(made(signature="x: float32[n], a: float32 = 2.0, out y: float32[n], n: int32"), X)
    out([x], [y], fake.stream())
    assert set(y.view(np.uint32)) == {0xA5A5A5A5}


def scale(x, a, y):
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i, 0] = a * x[i, 0]


def test_numba_kernels_get_their_arrays():
    pytest.importorskip("numba.cuda")
    seen = []
    f = jaxbridge.cuda_kernel(
        cuda.jit(scale),
        signature="x: float32[n, 2], a: float32, out y: float32[n, 2]",
        grid=1,
        block=32,
    )
    words = 2 * 9 + 1
    assert f.name == f.__name__ == "scale"
    define(f.callee.code.name.encode(), words, lambda words, shape: seen.append(words))
    x, y = array(8, 1).reshape(4, 2), array(8).reshape(4, 2)
    Program(f, jnp.zeros((4, 2), jnp.float32), a=2.0)([x], [y], fake.stream())
    (got,) = seen
    assert got[:9] == [0, 0, 8, 4, x.ctypes.data, 4, 2, 8, 4]
    assert got[10:] == [0, 0, 8, 4, y.ctypes.data, 4, 2, 8, 4]


def lowered(f, *args, **kwargs):
    traced = jax.jit(lambda *operands: f(*operands, **kwargs)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


COUNTED = """.version 8.0
.shared .b8 _cudapy_smem_{second}[4];
.shared .b8 _cudapy_smem_{first}[4];
.visible .entry _ZN8__main__5scaleB{length}v{first}B3cw5E5Array(
.global .u64 _ZN8__main__6helperB{length}v{second}5ArrayE;
.global .u8 plainB99v1;
"""


def test_a_kernel_of_numba_that_is_made_again_is_the_same(monkeypatch):
    """Numba counts what it compiles, and puts that into names. With texts as it makes them."""
    count = iter(range(8, 100, 2))

    def compile_it(function, types, **how):
        first = next(count)
        return COUNTED.format(length=1 + len(str(first)), first=first, second=first + 1), None

    numba = types.ModuleType("numba")
    numba.cuda = types.ModuleType("numba.cuda")
    numba.from_dtype = str
    numba.types = types.SimpleNamespace(Array=lambda *a, **k: a)
    numba.cuda.compile = compile_it
    monkeypatch.setitem(sys.modules, "numba", numba)
    monkeypatch.setitem(sys.modules, "numba.cuda", numba.cuda)
    kernel = type("Dispatcher", (), {"__module__": "numba.cuda", "py_func": staticmethod(scale)})()

    def made_of(**changes):
        signature = "x: float32[n, 2], a: float32, out y: float32[n, 2]"
        how = {"signature": signature, "grid": 1, "block": 32, **changes}
        return jaxbridge.cuda_kernel(kernel, **how)

    first, *others = (made_of() for _ in range(4))  # 8, 10, ...
    code = first.callee.code
    assert code.name == "_ZN8__main__5scaleB2v1B3cw5E5Array"
    assert code.image().decode() == "\n".join(
        [
            ".version 8.0",
            ".shared .b8 _cudapy_smem_1[4];",
            ".shared .b8 _cudapy_smem_2[4];",
            ".visible .entry _ZN8__main__5scaleB2v1B3cw5E5Array(",
            ".global .u64 _ZN8__main__6helperB2v25ArrayE;",
            ".global .u8 plainB99v1;",
            "\0",
        ]
    )
    x = jnp.zeros((4, 2), jnp.float32)
    text = lowered(first, x, a=2.0)
    for other in others:
        assert other.callee.code.image() == code.image()
        assert lowered(other, x, a=2.0) == text
    for _ in range(2):  # and so it can have a name in other processes
        named = made_of(export_name="test_kernel.scale")
    assert named.name == "test_kernel.scale"
    with pytest.raises(ValueError, match=r"belongs to another.*the kernel _ZN8__main__"):
        made_of(export_name="test_kernel.scale", block=64)
    for changes in ({"name": "scale"}, {"options": ["-DA"]}):
        with pytest.raises(
            TypeError, match="a kernel of numba.cuda has a name, and Numba compiles"
        ):
            made_of(**changes)


def test_a_kernel_that_numba_compiles_again_is_the_same(tmp_path):
    """In other processes, too."""
    pytest.importorskip("numba.cuda")
    module = tmp_path / "kernels.py"
    module.write_text(KERNELS)
    code = "import sys, kernels; sys.stdout.write(kernels.texts(int(sys.argv[1])))"
    one = run(code, 0, path=tmp_path, env={"PYTHONHASHSEED": "1"}).stdout
    assert one.startswith("module")
    assert run(code, 12, path=tmp_path, env={"PYTHONHASHSEED": "2"}).stdout == one


KERNELS = """
import jax, jaxbridge, numpy as np
from numba import cuda, float32

def cuda_kernel_of_numba(x, a, y):
    shared = cuda.shared.array(32, np.float32)
    i = cuda.grid(1)
    if i < y.shape[0]:
        shared[i] = a * x[i]
        y[i] = shared[i]

def nothing(x):
    x[0] = cuda.shared.array(1, np.float32)[0]

def texts(before):
    for _ in range(before):
        cuda.compile(nothing, (float32[::1],), device=False, abi="numba", cc=(7, 5))
    f = jaxbridge.cuda_kernel(
        cuda.jit(cuda_kernel_of_numba),
        signature="x: float32[n], a: float32, out y: float32[n]", grid=1, block=32,
    )
    lowered = jax.jit(lambda x: f(x, a=2.0)).trace(np.zeros(4, np.float32)).lower(
        lowering_platforms=("cuda",)
    )
    return lowered.as_text() + f.callee.code.image().decode()
"""


def test_as_many_parameters_as_cuda_has():
    """Eight matrices of Numba's are 72 words."""
    seen = []
    define(b"axpy", 512, lambda words, shape: seen.append(words))

    def called(count):
        signature = ", ".join(f"{'out ' if i == 0 else ''}x{i}: float32[n]" for i in range(count))
        f = jaxbridge.cuda_kernel(PTX, "axpy", signature=signature, grid=1, block=1)
        arrays = [array(N) for _ in range(count)]
        Program(f, *([X] * (count - 1)))(arrays[1:], arrays[:1], fake.stream())
        return [a.ctypes.data for a in arrays]

    assert called(512) == seen[0]
    with pytest.raises(
        ValueError, match="axpy: it has at most 512 words of parameters, and these are 513"
    ):
        called(513)


def test_options_of_code_that_is_compiled_already():
    for code in (PTX, PTX.encode(), b"\x7fELF has axpy"):
        with pytest.raises(TypeError, match="this code is compiled already: leave them out"):
            jaxbridge.cuda_kernel(
                code, "axpy", signature=SIGNATURE, grid=1, block=1, options=["-DA"]
            )


def test_source_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setattr(_config, "cache_directory", str(tmp_path))
    compiled = []

    def compile_it(source, name, options, architecture):
        compiled.append((name, options, architecture))
        return b"\x7fELF has axpy"

    monkeypatch.setattr(_device_code, "_compiler", lambda: ("fake", "1", compile_it))
    for _ in range(2):
        f = jaxbridge.cuda_kernel(
            "extern __global__ ...", "axpy", signature=SIGNATURE, grid=1, block=N, options=["-DA"]
        )
        x, y = array(N, 1), array(N, 0)
        Program(f, X, X)([x, y], [y], fake.stream())
        np.testing.assert_array_equal(y, 2)
    assert compiled == [("axpy", ("-DA",), "sm_90")]
    assert [p.suffix for p in tmp_path.iterdir()] == [".cubin"]


def test_bound_functions_get_the_stream():
    seen = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(x, stream, y):
        seen.append((x, stream, y))
        return 0

    f = jaxbridge.bind(launch, "x: float32[n], stream, out y: float32[n] -> int32")
    program, stream = Program(f, X), fake.stream()
    x, y = array(N), array(N)
    program([x], [y], stream)
    assert seen == [(x.ctypes.data, stream, y.ctypes.data)]
