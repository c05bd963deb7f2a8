# SPDX-License-Identifier: Apache-2.0
"""Public failures with lifetimes: letter E of the acceptance cases, in their forms for the CPU.

Streams need a device: tests/gpu/test_cases_e_gpu.py. Calls to the driver: tests/cpp/test_last_use.cpp.
"""

import gc
import resource
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from interchange import Only, is_dead, memory
from jaxbridge import _core
from processes import run


def test_E03_a_bare_capsule_and_back():
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    for _ in range(100):
        y = jaxbridge.from_external(jaxbridge.view(x).__dlpack__(), copy=False)
        assert y.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
        x = jax.jit(lambda v: v + 1)(y)
    np.testing.assert_array_equal(x, np.arange(1 << 16) + 100)


def test_E04_stream_0_is_refused():
    for handle in (0, -2):
        fields = dict(memory(4, np.dtype("f4")).__array_interface__, stream=handle)
        with pytest.raises(Exception, match=r"stream|driver") as caught:
            _core.view_of_interface(fields, None, None, True)
        assert caught.type in (ValueError, RuntimeError)


def test_E07_the_owner_lives_until_the_last_use_has_ended():
    """A program that is still waiting for its input when everybody has let go of the memory."""
    block = memory(1 << 12, np.dtype("f4"))
    want = block.copy()
    owner = weakref.ref(block.base)
    go_on = threading.Event()
    entered = threading.Event()

    def wait(v):
        entered.set()
        assert go_on.wait(60)
        return v

    slow = jaxbridge.call(wait, lambda v: v)
    array = jaxbridge.from_external(block, copy=False)
    results = []
    thread = threading.Thread(target=lambda a: results.append(jax.jit(slow)(a) * 2), args=(array,))
    thread.start()
    assert entered.wait(60)
    del array, block
    gc.collect()
    assert owner() is not None
    go_on.set()
    thread.join(60)
    np.testing.assert_array_equal(results[0], want * 2)
    del thread
    jax.block_until_ready(results)
    assert is_dead(owner)


def test_E07_views_that_are_made_of_views():
    block = memory(16, np.dtype("f4"))
    owner = weakref.ref(block.base)
    array = jaxbridge.from_external(block, copy=False)
    out = jaxbridge.to_external(jaxbridge.from_external(jaxbridge.view(array)), "numpy")[::2]
    del block, array
    gc.collect()
    assert owner() is not None
    np.testing.assert_array_equal(out, (np.arange(1, 17) % 8)[::2])
    del out
    assert is_dead(owner)


@pytest.mark.parametrize("framework", ["numpy", "torch", "warp", "view"])
def test_E09_memory_stays_flat(framework, needs):
    if framework not in ("numpy", "view"):
        needs(framework)
    x = jnp.ones((1000, 1000), jnp.float32)  # 4 MB
    used = []
    for i in range(600):
        y = jaxbridge.from_external(jaxbridge.to_external(x, framework), copy=True)
        del y
        if i in (100, 599):
            used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert used[1] - used[0] < 100_000, "kB, of 2 GB that went through"


def test_E09_a_capsule_that_nobody_takes_frees_once():
    block = memory(16, np.dtype("f4"))
    v = jaxbridge.buffer(block.ctypes.data, (16,), "f4", "cpu", owner=block)
    before = sys.getrefcount(v)
    for max_version in (None, (1, 0)):
        capsule = v.__dlpack__(max_version=max_version)
        assert sys.getrefcount(v) == before + 1
        del capsule
        assert sys.getrefcount(v) == before
        taken = np.from_dlpack(Only(v, "__dlpack__", "__dlpack_device__"))
        assert sys.getrefcount(v) == before + 1
        del taken
        assert sys.getrefcount(v) == before


def test_E10_a_failed_export_leaves_nothing_behind():
    block = memory(64, np.dtype("u1"))
    odd = np.lib.stride_tricks.as_strided(block.view("f4"), (3,), (6,))
    v = jaxbridge.buffer(odd.ctypes.data, (3,), "f4", "cpu", strides=(6,), owner=block)
    before = sys.getrefcount(v), sys.getrefcount(block)
    for _ in range(100):
        with pytest.raises(BufferError, match="no whole number of float32"):
            v.__dlpack__()
        with pytest.raises(BufferError, match="another device"):
            v.__dlpack__(dl_device=(2, 0), copy=False)
        with pytest.raises(BufferError, match="move it to another device"):
            v.__dlpack__(dl_device=(2, 0))
    assert (sys.getrefcount(v), sys.getrefcount(block)) == before
    # It comes in all the same, as a copy.
    np.testing.assert_array_equal(jaxbridge.from_external(v), np.asarray(odd))


def test_E10_a_failed_import_leaves_nothing_behind():
    block = memory(12, np.dtype("f8"))
    for given in (block, block[::-1], Only(block, "__dlpack__", "__dlpack_device__"), [block]):
        before = sys.getrefcount(block)
        for copy in (None, False, True):
            with pytest.raises(TypeError, match="x64"):
                jaxbridge.from_external(given, copy=copy)
        assert sys.getrefcount(block) == before
    x = jnp.ones(4, jnp.int4)
    before = sys.getrefcount(x)
    for _ in range(10):
        with pytest.raises(Exception, match=r".+"):
            jaxbridge.view(x)
    assert sys.getrefcount(x) == before


def test_owners_go_on_any_thread():
    owners = []
    for _ in range(20):
        block = memory(16, np.dtype("f4"))
        owners.append(weakref.ref(block.base))
        arrays = [jaxbridge.from_external(block, copy=False)]
        del block
        thread = threading.Thread(target=arrays.clear)
        thread.start()
        thread.join()
    assert all(map(is_dead, owners))


def test_an_owner_that_holds_its_view_is_collected():
    class Owner:
        pass

    owner = Owner()
    block = memory(4, np.dtype("f4"))
    owner.view = jaxbridge.buffer(block.ctypes.data, (4,), "f4", "cpu", owner=owner)
    dead = weakref.ref(owner)
    del owner
    assert is_dead(dead)


def test_owners_at_exit():
    """Arrays, views and capsules that are alive when the interpreter ends."""
    program = """
import atexit, jax, jax.numpy as jnp, numpy as np, jaxbridge
block = jaxbridge.empty(16, "f4")
block[...] = 3
class Owner:
    def __del__(self):
        print("freed", flush=True)
owner = Owner()
v = jaxbridge.buffer(block.ctypes.data, (16,), "f4", "cpu", owner=(owner, block))
array = jaxbridge.from_external(v, copy=False)
out = jaxbridge.to_external(array, "numpy")
capsule = jaxbridge.view(array).__dlpack__()
np.kept = (array, out, capsule, v)
print(float(jax.jit(jnp.sum)(array)))
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "48.0"
    assert done.stderr == ""
