# SPDX-License-Identifier: Apache-2.0
"""Public failures of memory pools, contexts and imports: letter L of the acceptance cases.

L01, L03 and L06 need a GPU: tests/gpu/test_cases_l_gpu.py. L03's form without one, on the fake driver, is
in tests/cpp/test_context.cpp.
"""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxbridge
import processes


def like(x, *rest, **kw):
    return x


class OutOfMemoryError(MemoryError):  # as CuPy's and torch's are called
    pass


class Inner(OutOfMemoryError):
    pass


FULL = {
    "CuPy, torch": OutOfMemoryError(
        "Out of memory allocating 512 bytes (allocated so far: 0 bytes)."
    ),
    "of such a class": Inner("no room"),
    "CUDA runtime": RuntimeError("cudaErrorMemoryAllocation: out of memory"),
    "driver": RuntimeError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    "old torch": RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cuBLAS": RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    "Warp": RuntimeError("Failed to allocate 1024 bytes on device 'cuda:0'"),
}
NOT_FULL = {
    "host": MemoryError("Unable to allocate 1. TiB for an array"),
    "Warp, host": RuntimeError("Failed to allocate 1024 bytes on device 'cpu'"),
    "else": ValueError("out of memory of what was said"),
}
ADVICE = ("XLA_PYTHON_CLIENT_PREALLOCATE=false", "XLA_PYTHON_CLIENT_MEM_FRACTION", 'scratch="xla"')


def raising(error):
    def allocates(v):
        raise error

    return jaxbridge.call(allocates, like)


@pytest.mark.parametrize("error", FULL.values(), ids=list(FULL))
def test_L02_out_of_memory_names_preallocation(error):
    """The exception itself with a note, and the text that XLA carries. On a GPU: tests/gpu."""
    f = raising(error)
    with pytest.raises(type(error)) as caught:
        f(jnp.ones(3))
    assert caught.value is error
    (note,) = caught.value.__notes__
    assert "allocates: the device has no memory left beside JAX" in note
    assert all(word in note for word in ADVICE)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(f)(jnp.ones(3)))
    assert all(word in str(caught.value) for word in (type(error).__name__, str(error), *ADVICE))
    assert error.__notes__ == [note]  # once


@pytest.mark.parametrize("error", NOT_FULL.values(), ids=list(NOT_FULL))
def test_L02_other_errors_have_no_such_note(error):
    with pytest.raises(type(error)):
        raising(error)(jnp.ones(3))
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("first", ["torch", "jax"])
def test_L05_neither_is_imported_early(first, needs):
    """Either order works, and jaxbridge imports no framework before one is asked for. GPU: tests/gpu."""
    needs("torch")
    done = processes.run(
        """
        import json, sys
        for name in sys.argv[1:]:
            __import__(name)
        had = "torch" in sys.modules
        import jaxbridge
        early = [m for m in ("torch", "cupy", "numba", "warp") if m in sys.modules]
        import jax, jax.numpy as jnp, torch
        f = jaxbridge.call(lambda v: torch.add(v, 1), lambda v: v, framework="torch")
        y = jax.jit(f)(jnp.arange(3.0))
        print(json.dumps([had, early, y.tolist(), jax.default_backend()]))
        """,
        *([first, "jax"] if first == "torch" else ["jax"]),
    )
    had, early, y, backend = json.loads(done.stdout)
    assert early == (["torch"] if had else []) and had == (first == "torch")
    assert y == [1, 2, 3] and backend == "cpu"
