# SPDX-License-Identifier: Apache-2.0
"""Public failures of CUDA graphs and command buffers: letter H of the acceptance cases.

They need a GPU: tests/gpu/test_cases_h_gpu.py. Here are the forms of H03 and H05 without one; that of H04,
on the fake driver, is in tests/cpp/test_replay.cpp.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import _core


def like(x, *rest, **kw):
    return x


@pytest.mark.parametrize("state", ["not donated", "donated", "a Ref"])
def test_H03_a_step_in_a_python_loop(state):
    """Few lists of addresses come, and stats() says how many; in place it is one."""
    x = jnp.arange(1024, dtype=jnp.float32)
    if state == "a Ref":

        def fn(v):
            v += 1

        f = jaxbridge.call(fn, (), graph="replay")
        ref = jax.new_ref(x + 0)
        step = jax.jit(lambda r: f(r))
        for _ in range(100):
            step(ref)
        y = ref[...]
    else:
        f = jaxbridge.call(lambda v, out: np.add(v, 1, out=out), like, out="out", graph="replay")
        step = jax.jit(f, donate_argnums=0 if state == "donated" else ())
        y = x + 0
        for _ in range(100):
            y = step(y)
    np.testing.assert_array_equal(y, np.arange(1024) + 100)
    stats = f.stats()
    assert stats["calls"] == 100 and stats["captures"] == stats["replays"] == 0
    assert stats["cache_size"] <= (1 if state == "a Ref" else 100)
    assert stats["cache_hits"] == 100 - stats["cache_size"]


def test_H05_capturable_calls_have_a_target_of_their_own():
    """That its metadata has the trait is in tests/cpp/test_entry_points.cpp."""
    names = {(name, platform) for name, platform, _ in _core.handlers()}
    assert {("jaxbridge.call_capturable", "cpu"), ("jaxbridge.call_capturable", "CUDA")} <= names
    for graph, target in [("xla", "jaxbridge.call_capturable"), ("off", "jaxbridge.call")]:
        f = jaxbridge.call({"cuda": lambda v: v, "cpu": lambda v: v}, like, graph=graph)
        traced = jax.jit(f).trace(jnp.ones(3))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert f"custom_call @{target}(" in text
