# SPDX-License-Identifier: Apache-2.0
"""scratch="xla" on a real device: temporaries in XLA's memory."""

import gc
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

N = 1 << 16


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(N, dtype=jnp.float32) / N


@pytest.fixture(params=["cupy", "torch"])
def xp(request, needs):
    needs(request.param)
    return pytest.importorskip(request.param)


def in_use(xp):
    if xp.__name__ == "cupy":
        return xp.get_default_memory_pool().used_bytes()
    return xp.cuda.memory_allocated()


def test_values(x, xp):
    def fn(v):
        return xp.sin(v) * 2 + xp.cos(v) * xp.exp(-v)

    f = jaxbridge.call(fn, like, framework=xp.__name__, scratch="xla")
    program = jax.jit(lambda v: jax.lax.fori_loop(0, 20, lambda i, c: f(c) * 0.5, v))
    want = np.asarray(x, np.float64)
    for _ in range(20):
        want = (np.sin(want) * 2 + np.cos(want) * np.exp(-want)) * 0.5
    before = in_use(xp)
    for _ in range(5):
        np.testing.assert_allclose(program(x), want, rtol=1e-4)
    assert in_use(xp) == before


def test_where_it_comes_from(x, xp):
    """Not from the framework's pool; outside the call it allocates as before."""
    seen = []

    def fn(v, out):
        temporary = v * 2
        seen.append(in_use(xp))
        out[...] = temporary

    f = jaxbridge.call(fn, like, framework=xp.__name__, scratch="xla", out="out")
    np.testing.assert_allclose(jax.jit(f)(x), np.asarray(x) * 2)
    if xp.__name__ == "cupy":
        assert seen == [in_use(xp)]
    own = xp.ones(N, device="cuda") if xp.__name__ == "torch" else xp.ones(N)
    assert float(own.sum()) == N


def test_an_array_that_is_kept(x, xp):
    kept = []

    def fn(v, out):
        temporary = v + 1
        kept.append(temporary)
        out[...] = temporary

    f = jaxbridge.call(fn, like, framework=xp.__name__, scratch="xla", out="out")
    for _ in range(2):
        with pytest.raises(errors.ViewKeptError, match=rf"kept an? \w+ float32\[{N}\]"):
            f(x)
    kept.clear()
    gc.collect()
    fine = jaxbridge.call(lambda v: v + 1, like, framework=xp.__name__, scratch="xla")
    for _ in range(3):
        np.testing.assert_allclose(fine(x), np.asarray(x) + 1)


def test_a_cycle_is_not_kept(x, xp):
    def fn(v, out):
        cycle = [v + 1]
        cycle.append(cycle)
        out[...] = cycle[0]

    f = jaxbridge.call(fn, like, framework=xp.__name__, scratch="xla", out="out")
    for _ in range(3):
        np.testing.assert_allclose(f(x), np.asarray(x) + 1)


def test_an_exception(x, xp):
    def fn(v, out):
        temporary = v + 1
        raise KeyError(f"on purpose {temporary.shape}")

    f = jaxbridge.call(fn, like, framework=xp.__name__, scratch="xla", out="out")
    for _ in range(3):
        with pytest.raises(KeyError, match="on purpose"):
            f(x)
    fine = jaxbridge.call(lambda v: v * 3, like, framework=xp.__name__, scratch="xla")
    np.testing.assert_allclose(jax.jit(fine)(x), np.asarray(x) * 3)


def test_other_frameworks_say_so(x, needs):
    with pytest.raises(ValueError, match='scratch="xla" is there for cupy and torch'):
        jaxbridge.call(lambda v, out: None, like, framework="buffer", scratch="xla", out="out")


PROGRAM = """
    import sys
    import jax, jax.numpy as jnp
    import jaxbridge
    name, scratch = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    xp = __import__(name)
    total = jax.devices()[0].memory_stats()["bytes_limit"]
    n = int(total / 0.9 * 0.2) // 4  # a fifth of the device: more than is left beside JAX

    def fn(v):
        big = xp.empty(n, dtype=xp.float32, device="cuda") if name == "torch" else xp.empty(n, "float32")
        big[:4] = v[:4]
        big[-4:] = v[:4] * 2
        return big[-4:] + big[:4]

    f = jaxbridge.call(fn, lambda v: v, framework=name, scratch=scratch)
    x = jnp.arange(4, dtype=jnp.float32)
    print("result", jax.jit(f)(x).tolist(), jax.jit(lambda v: f(f(v)))(x).tolist())
"""


def with_most_of_the_device(name, *args):
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), name, *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_jax_has_most_of_the_device(xp):
    without = with_most_of_the_device(xp.__name__)
    assert without.returncode != 0 and "emory" in without.stderr
    there = with_most_of_the_device(xp.__name__, "xla")
    assert there.returncode == 0, there.stderr
    assert "result [0.0, 3.0, 6.0, 9.0] [0.0, 9.0, 18.0, 27.0]" in there.stdout
