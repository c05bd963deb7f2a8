# SPDX-License-Identifier: Apache-2.0
"""scratch= as XLA's calls on CUDA meet it, without a GPU."""

import threading

import numpy as np
import pytest
from fake_gpu import N, Program, X, array, copies, fake, like

import fake_xla
import jaxbridge
from jaxbridge import _adapters, _core


class ScratchAdapter(type(_adapters.get("buffer"))):
    """A framework whose only allocator is the scratch of the call."""

    name = "cupy"

    def __init__(self):
        self.log = []

    def scopes(self, platform):
        return True

    def scope(self, platform, ordinal, stream):
        raise AssertionError("there is scratch memory")

    def scratch_scope(self, ordinal, stream, scratch):
        adapter = self

        class Scope:
            def __enter__(self):
                adapter.scratch = scratch

            def __exit__(self, kind, *rest):
                adapter.log.append((kind, scratch.live))

        return Scope()


@pytest.fixture
def adapter(monkeypatch):
    adapter = ScratchAdapter()
    monkeypatch.setitem(_adapters._loaded, "cupy", adapter)
    return adapter


def scratch_program(fn):
    apart = []

    def own(v, out):
        return (apart, fn(v, out))[1]

    f = jaxbridge.call(own, like, framework={"cuda": "cupy"}, out="out", scratch="xla")
    return Program(f, X)


def test_scratch_memory(adapter):
    seen = []

    def fn(v, out):
        scratch = adapter.scratch
        assert scratch.allocate(0) == 0
        blocks = [scratch.allocate(n) for n in (1, 1000, 1 << 20)]
        assert len(set(blocks)) == 3 and all(b % 16 == 0 for b in blocks)
        assert sorted(n for _, n in scratch.live) == [1, 1000, 1 << 20]
        scratch.free(blocks[1])
        scratch.free(blocks[1])  # once is enough
        scratch.free(12345)
        seen.append(scratch)
        _core.copy(v, out)

    program, stream = scratch_program(fn), fake.stream()
    a, b = array(N, 4), array(N)
    for _ in range(2):
        program([a], [b], stream)
        np.testing.assert_array_equal(b, 4)
        assert fake_xla.live_blocks() == 0
    assert [sorted(n for _, n in live) for _, live in adapter.log] == [[1, 1 << 20]] * 2
    assert seen[0].live == []
    seen[0].free(1)
    with pytest.raises(MemoryError, match="the call runs, and it has ended"):
        seen[0].allocate(8)


def test_scratch_memory_after_an_exception(adapter):
    def fn(v, out):
        adapter.scratch.allocate(100)
        raise KeyError("on purpose")

    program, stream = scratch_program(fn), fake.stream()
    with pytest.raises(RuntimeError, match="on purpose"):
        program([array(N)], [array(N)], stream)
    assert adapter.log[0][0] is KeyError
    assert fake_xla.live_blocks() == 0


def test_no_more_memory(adapter):
    def fn(v, out):
        adapter.scratch.allocate(1 << 60)

    program, stream = scratch_program(fn), fake.stream()
    with pytest.raises(RuntimeError, match="MemoryError: XLA has no 1152921504606846976 bytes"):
        program([array(N)], [array(N)], stream)


def test_scratch_hooks(adapter):
    """The allocator in C: for the thread that is in a call, and for no other."""
    import ctypes

    allocate_at, free_at = _core.scratch_hooks()
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
        allocate_at
    )
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
        free_at
    )
    kept = []

    def fn(v, out):
        assert allocate(8, 0, None) is None
        _core.enter_scratch_hooks(adapter.scratch)
        a, b = allocate(100, 0, None), allocate(200, 0, None)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(allocate(8, 0, None)))
        thread.start()
        thread.join()
        assert elsewhere == [None]
        free(a, 100, 0, None)
        assert [n for _, n in adapter.scratch.live] == [200]
        kept.append(b)
        _core.leave_scratch_hooks()
        assert allocate(8, 0, None) is None

    program, stream = scratch_program(fn), fake.stream()
    program([array(N)], [array(N)], stream)
    assert fake_xla.live_blocks() == 0
    # Whoever still has it must not get it once more.
    address = kept.pop()
    program([array(N)], [array(N)], stream)
    assert kept[0] != address
    free(address, 200, 0, None)  # long after
    free(kept.pop(), 200, 0, None)
    assert fake_xla.live_blocks() == 0


@pytest.mark.parametrize("kept", [8 << 10, 17 << 10, 1 << 20])
def test_scratch_hooks_step_over_what_was_kept(adapter, kept):
    """A large block that outlived its call leaves room for small ones behind it."""
    import ctypes

    allocate_at, free_at = _core.scratch_hooks()
    size = ctypes.c_ssize_t
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, size, ctypes.c_int, ctypes.c_void_p)(allocate_at)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, size, ctypes.c_int, ctypes.c_void_p)(free_at)
    asked, got = [kept, 100], []

    def fn(v, out):
        _core.enter_scratch_hooks(adapter.scratch)
        nbytes = asked.pop(0)
        got.append((allocate(nbytes, 0, None), nbytes))
        _core.leave_scratch_hooks()

    program, stream = scratch_program(fn), fake.stream()
    for _ in range(2):
        program([array(N)], [array(N)], stream)
    (orphan, _), (block, _) = got
    assert block is not None and not orphan <= block < orphan + kept
    for address, nbytes in got:
        free(address, nbytes, 0, None)
    assert fake_xla.live_blocks() == 0


def test_other_frameworks_and_graphs():
    with pytest.raises(ValueError, match='scratch="xla" is there for cupy and torch'):
        jaxbridge.call(copies, like, framework="buffer", out="out", scratch="xla")
    for graph in ("replay", "verify", "xla"):
        with pytest.raises(ValueError, match='framework="numpy" works on the host'):
            jaxbridge.call(copies, like, framework="numpy", graph=graph)
    with pytest.raises(ValueError, match='scratch="xla" is memory for one call'):
        jaxbridge.call(copies, like, scratch="xla", graph="replay")
    with pytest.raises(ValueError, match="scratch is 'cuda'; expected None or \"xla\""):
        jaxbridge.call(copies, like, scratch="cuda")
    with pytest.raises(ValueError, match="expected one of off, replay, verify, xla"):
        jaxbridge.call(copies, like, graph="always")
    with pytest.raises(TypeError, match="state is 3; expected None or a function"):
        jaxbridge.call(copies, like, state=3)
    g = jaxbridge.call(lambda v, state: v, like, state=lambda context, v: 1)
    with pytest.raises(TypeError, match="the keyword 'state' takes what state= made"):
        g(X, state=2)
