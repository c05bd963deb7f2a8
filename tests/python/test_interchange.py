# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out on the CPU: each library, protocol, layout and dtype, with its value, address, dtype
and lifetime. On a device: tests/gpu/test_interchange_gpu.py.

As a program it writes what it finds into docs/interchange.md: python tests/python/test_interchange.py
"""

import itertools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import (
    DTYPES,
    LAYOUTS,
    REASONS,
    SHARED,
    STANDARD,
    Only,
    columns_of,
    dtype_of,
    has,
    is_dead,
    memory,
    same_bits,
    table,
    table_on_page,
    write_table,
)
from processes import run


def test_views_of_the_host_do_without_jax():
    """Who looks at memory has not chosen JAX's platform yet, or the processes that it is of."""
    out = run(
        """
        import numpy as np, jaxbridge
        from jax.extend import backend
        def begins(*_): raise AssertionError("JAX has begun")
        backend.backends = begins
        block = np.arange(4, dtype="float32")
        v = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cpu", owner=block)
        copy = np.from_dlpack(v, copy=True)
        jaxbridge.release(v)
        print(copy, not np.shares_memory(copy, block))
        """
    )
    assert out.stdout == "[0. 1. 2. 3.] True\n", out.stderr


# ---- in ------------------------------------------------------------------------------------------


def torch_tensor(a: np.ndarray[Any, Any]) -> Any:
    import torch

    name = a.dtype.name
    if name in STANDARD:
        return torch.from_numpy(a)
    # As bytes of the same size, with the type put back.
    return torch.from_numpy(a.view(f"u{a.itemsize}")).view(getattr(torch, name))


def warp_array(a: np.ndarray[Any, Any]) -> Any:
    import warp as wp

    made = wp.array(
        ptr=a.ctypes.data,
        dtype=getattr(wp, a.dtype.name),
        shape=a.shape,
        strides=a.strides,
        device="cpu",
        copy=False,
    )
    made.kept = a
    return made


def our_buffer(a: np.ndarray[Any, Any]) -> Any:
    return jaxbridge.buffer(a.ctypes.data, a.shape, a.dtype, "cpu", strides=a.strides, owner=a)


# (library, protocol) -> how an array comes in by it.
WAYS = {
    ("numpy", "itself"): lambda a: a,
    ("numpy", "DLPack"): lambda a: Only(a, "__dlpack__", "__dlpack_device__"),
    ("numpy", "capsule"): lambda a: a.__dlpack__(),
    ("numpy", "capsule 1.x"): lambda a: a.__dlpack__(max_version=(1, 0)),
    ("numpy", "array interface"): lambda a: Only(a, "__array_interface__"),
    ("numpy", "buffer protocol"): memoryview,
    ("torch", "itself"): torch_tensor,
    ("torch", "DLPack"): lambda a: Only(torch_tensor(a), "__dlpack__", "__dlpack_device__"),
    ("warp", "itself"): warp_array,
    ("warp", "array interface"): lambda a: Only(warp_array(a), "__array_interface__"),
    ("buffer", "itself"): our_buffer,
    ("buffer", "DLPack"): lambda a: Only(our_buffer(a), "__dlpack__", "__dlpack_device__"),
}
TORCH = {
    *STANDARD, "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
}  # fmt: skip
WARP = {n for n in STANDARD if not n.startswith("complex")}
# The dtypes that a way has; torch by DLPack: what its exporter has by now.
KNOWS = {
    ("numpy", "itself"): set(DTYPES),
    ("torch", "itself"): TORCH,
    ("torch", "DLPack"): {*STANDARD, "bfloat16"},
    ("warp", "itself"): WARP,
    ("warp", "array interface"): WARP,
    ("buffer", "itself"): set(DTYPES),
    ("buffer", "DLPack"): set(DTYPES),
}
# Torch has no negative strides, Warp's arrays none of rank 0, and no strides of 0.
HAS_NOT = {
    "torch": {"negative"},
    "warp": {"rank 0", "no elements", "broadcast", "negative", "axes of length 1"},
}


def ways() -> list[tuple[str, str]]:
    return [w for w in WAYS if w[0] in ("numpy", "buffer") or has(w[0])]


def is_there(way: tuple[str, str], layout: str, dtype: str) -> bool:
    library, protocol = way
    if layout in HAS_NOT.get(library, ()) or dtype not in KNOWS.get(way, STANDARD):
        return False
    # A read-only array of NumPy's has no unversioned capsule; and a memoryview no view of 0 strides.
    return not (library == "numpy" and layout == "broadcast" and protocol == "capsule")


_program = jax.jit(lambda v: v[...])


def bring_in(way: tuple[str, str], layout: str, dtype: str, copy: bool | None) -> str:
    """One cell: "shared" or "copied", after value, address, dtype and lifetime were checked."""
    block = memory(64, dtype_of(dtype))
    source = LAYOUTS[layout](block)
    want = source.copy()
    array = jaxbridge.from_external(WAYS[way](source), copy=copy)
    assert (array.shape, array.dtype) == (source.shape, source.dtype)
    # Read through a view: what NumPy is given of an array itself is a cycle with it.
    assert same_bits(jaxbridge.view(array), want)
    assert same_bits(_program(array), want)
    shared = array.unsafe_buffer_pointer() == source.ctypes.data or not source.size
    if source.size:
        assert jaxbridge.shares_memory(array, source) == shared
        assert (jaxbridge.pointer(array) == jaxbridge.pointer(source)) == shared
    # What is shared sees a later write, a copy does not.
    if source.size:
        block[...] = np.zeros((), block.dtype)
        assert same_bits(jaxbridge.view(array), want) == (not shared)
    owner = weakref.ref(block.base)
    del block, source
    if want.size:
        assert owner() is not None if shared else is_dead(owner)
    del array
    assert is_dead(owner)
    return "shared" if shared else "copied"


CELLS = [(w, layout) for w in ways() for layout in LAYOUTS]


@pytest.mark.parametrize(
    "way, layout", CELLS, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_layouts_in(way, layout):
    dtypes = [
        d for d in ("float32", "complex64", "bool", "int16", "bfloat16") if is_there(way, layout, d)
    ]
    for dtype in dtypes:
        want = "shared" if layout in SHARED else "copied"
        assert bring_in(way, layout, dtype, None) == want
        if want == "shared":
            assert bring_in(way, layout, dtype, False) == want
        else:
            with pytest.raises(BufferError, match=REASONS[layout] + r".*copy=None"):
                bring_in(way, layout, dtype, False)
        assert bring_in(way, layout, dtype, True) == (
            "copied" if layout != "no elements" else "shared"
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ways(), ids="-".join)
def test_dtypes_in(way, dtype, x64):
    if not is_there(way, "row-major", dtype):
        pytest.skip(f"{way[0]} has no {dtype} by this way")
    assert bring_in(way, "row-major", dtype, False) == "shared"
    assert bring_in(way, "strided", dtype, None) == "copied"


# ---- out -----------------------------------------------------------------------------------------

FRAMEWORKS = {
    "numpy": set(DTYPES),
    "torch": TORCH,
    "numba": set(STANDARD) - {"float16"},
    "warp": {*WARP, "bfloat16"},
    "view": set(DTYPES),
}


def to_numpy(x: Any) -> np.ndarray[Any, Any]:
    """The values and the address, whatever the library."""
    if type(x).__module__.startswith("torch"):
        import torch

        name = str(x.dtype).removeprefix("torch.")
        if name in STANDARD:
            return x.numpy()
        return x.view(getattr(torch, f"uint{8 * x.itemsize}")).numpy().view(dtype_of(name))
    if type(x).__module__.startswith("warp"):
        return x.numpy() if x.dtype.__name__ != "bfloat16" else x.view(_warp("uint16")).numpy()
    return np.asarray(x)


def _warp(name: str) -> Any:
    import warp

    return getattr(warp, name)


def address(x: Any) -> int:
    for name in ("data_ptr", "ptr", "pointer"):
        if hasattr(x, name):
            found = getattr(x, name)
            return found() if callable(found) else found
    return x.ctypes.data


def hand_out(framework: str, dtype: str, shape: tuple[int, ...], copy: bool | None) -> str:
    """One cell on the way out, as bring_in."""
    value = memory(64, dtype_of(dtype))[: int(np.prod(shape))].reshape(shape)
    array = jnp.array(value, copy=True)
    assert array.dtype == dtype_of(dtype)
    out = jaxbridge.to_external(array, framework, copy=copy)
    shared = address(out) == array.unsafe_buffer_pointer()
    assert shared == (not copy) or not value.size
    got = to_numpy(out)
    if framework == "warp":
        got = got.view(value.dtype).reshape(shape)
    assert same_bits(got, value)
    if framework in ("numpy", "numba"):
        assert out.flags.writeable == bool(copy)
    if framework == "view":
        assert out.readonly == (not copy)
    alive = weakref.ref(array)
    del array
    assert same_bits(got, value), "the memory is JAX's, and kept"
    assert copy or alive() is not None
    del out, got
    assert is_dead(alive)
    return "copied" if copy else "shared"


def frameworks() -> list[str]:
    return [f for f in FRAMEWORKS if f in ("numpy", "view") or has(f)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", frameworks())
def test_dtypes_out(framework, dtype, x64):
    if dtype not in FRAMEWORKS[framework]:
        with pytest.raises(TypeError, match=f"{dtype}"):
            hand_out(framework, dtype, (2, 3), None)
        return
    assert hand_out(framework, dtype, (2, 3), None) == "shared"
    assert hand_out(framework, dtype, (2, 3), False) == "shared"
    assert hand_out(framework, dtype, (2, 3), True) == "copied"


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (1, 5), (5, 1), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("framework", frameworks())
def test_shapes_out(framework, shape):
    hand_out(framework, "float32", shape, None)


@pytest.mark.parametrize("framework", frameworks())
def test_transposed_out(framework):
    """JAX keeps the order of axes of what comes in; it goes out with the same strides."""
    source = memory(24, np.dtype("f4")).reshape(2, 3, 4).transpose(2, 0, 1)
    array = jaxbridge.from_external(source, copy=False)
    out = jaxbridge.to_external(array, framework)
    assert address(out) == source.ctypes.data
    np.testing.assert_array_equal(to_numpy(out), source)


@pytest.mark.parametrize("pair", [*itertools.product(frameworks(), frameworks())], ids="-".join)
def test_round_trip(pair):
    """From JAX to one library, back, and to another: one memory all the way."""
    first, second = pair
    start = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    there = jaxbridge.to_external(start, first)
    back = jaxbridge.from_external(there, copy=False)
    out = jaxbridge.to_external(back, second)
    assert address(out) == start.unsafe_buffer_pointer() == jaxbridge.pointer(there)
    np.testing.assert_array_equal(to_numpy(out), [[0, 1, 2], [3, 4, 5]])


# ---- the page ------------------------------------------------------------------------------------


def layouts_table() -> str:
    rows = {
        layout: {
            " ".join(way): bring_in(way, layout, "float32", None)
            if is_there(way, layout, "float32")
            else "-"
            for way in ways()
        }
        for layout in LAYOUTS
    }
    return table([" ".join(w) for w in ways()], rows, "layout")


def dtypes_table() -> str:
    def came_in(library: str, dtype: str) -> str:
        way = (library, "itself")
        return bring_in(way, "row-major", dtype, None) if dtype in KNOWS[way] else "-"

    def went_out(framework: str, dtype: str) -> str:
        return hand_out(framework, dtype, (2, 3), None) if dtype in FRAMEWORKS[framework] else "-"

    libraries = [lib for lib, way in ways() if way == "itself"]
    columns = [f"from {lib}" for lib in libraries] + [f"to {f}" for f in frameworks()]
    rows = {
        dtype: {f"from {lib}": came_in(lib, dtype) for lib in libraries}
        | {f"to {f}": went_out(f, dtype) for f in frameworks()}
        for dtype in DTYPES
    }
    return table(columns, rows, "dtype")


TABLES = {"cpu layouts": layouts_table, "cpu dtypes": dtypes_table}


@pytest.mark.parametrize("name", TABLES)
def test_page_shows_what_is_found(name, x64):
    """For the libraries that are installed; all of them were when the page was written."""
    page = columns_of(table_on_page(name))
    found = columns_of(TABLES[name]())
    assert found.items() <= page.items()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for name, make in TABLES.items():
        write_table(name, make())
