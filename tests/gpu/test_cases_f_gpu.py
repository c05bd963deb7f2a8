# SPDX-License-Identifier: Apache-2.0
"""Letter F of the acceptance cases on a GPU: callbacks and their errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from gpu_cases import like, memory_kind

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("framework", ["cupy", "numpy", "buffer"])
def test_F08_runtime_error_on_a_scalar(cp, gpu, framework, jit):
    """The same catchable error as on the CPU; the process lives on."""

    def fails(v, out):
        raise RuntimeError("on the GPU")

    f = jaxbridge.call(fails, like, framework=framework, out="out")
    x = jax.device_put(jnp.float32(2), gpu)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="on the GPU") as caught, jaxbridge.reraise():
            jax.block_until_ready((jax.jit(f) if jit else f)(x))
        assert type(caught.value) is RuntimeError
        assert float(jaxbridge.call(lambda v: -v, like)(x)) == -2
    cpu = jax.device_put(jnp.float32(2), jax.devices("cpu")[0])
    on_cpu = jaxbridge.call(fails, like, framework="numpy", out="out")
    with pytest.raises(RuntimeError, match="on the GPU") as caught:
        on_cpu(cpu)
    assert type(caught.value) is RuntimeError


def test_F11_a_gibibyte_does_not_leave_the_device(cp, gpu):
    n = 1 << 28  # float32: 1 GiB
    pointers = []

    def add(v, out):
        pointers.append((v.data.ptr, out.data.ptr))
        cp.add(v, 1, out=out)

    f = jaxbridge.call(add, like, out="out")
    x = jax.block_until_ready(jax.device_put(jnp.ones(n, jnp.float32), gpu))
    program = jax.jit(lambda v: f(f(v)).sum())
    expected = float(program(x))
    pointers.clear()
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            y = program(x)
            jax.block_until_ready(y)
            made = cp.cuda.runtime.memGetInfo()
    assert made and float(y) == expected == 3 * n
    assert all(memory_kind(p) == "device" for pair in pointers for p in pair)
    assert pointers[0][0] == x.unsafe_buffer_pointer(), "the operand itself, not a copy"
    assert pointers[0][1] == pointers[1][0], "one call's result is the next one's operand"


def test_F11_results_and_returned_arrays_stay_on_the_device(cp, gpu):
    x = jax.block_until_ready(jax.device_put(jnp.arange(1 << 20, dtype=jnp.float32), gpu))
    f = jax.jit(jaxbridge.call(lambda v: v[::-1] * 2, like))
    f(x)
    with jax.transfer_guard("disallow"):
        y = jax.block_until_ready(f(x))
    assert y.devices() == {gpu}
    np.testing.assert_array_equal(y, np.arange(1 << 20, dtype=np.float32)[::-1] * 2)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("framework", [None, "cupy", "torch", "numpy", "buffer"])
def test_F12_the_arguments_type_is_the_same_everywhere(cp, gpu, needs, framework, shape):
    if framework == "torch":
        needs("torch")
    types = []

    def fn(out, v):
        types.append((f"{type(v).__module__}.{type(v).__name__}", type(out) is type(v)))

    f = jaxbridge.call(fn, like, framework=framework, out=0, vmap_method="sequential")
    v = jax.device_put(jnp.ones(shape), gpu)
    for program in (
        f,
        jax.jit(f),
        lambda u: jax.lax.scan(lambda c, _: (f(c), None), u, None, length=1)[0],
        lambda u: jax.vmap(f)(u[None]),
        lambda u: jax.lax.cond(True, f, f, u),
    ):
        jax.block_until_ready(program(v))
    want = {
        None: "cupy.ndarray",
        "cupy": "cupy.ndarray",
        "torch": "torch.Tensor",
        "numpy": "numpy.ndarray",
        "buffer": "jaxbridge._core.Buffer",
    }[framework]
    assert {(name.replace("cupy._core.core", "cupy"), same) for name, same in types} == {
        (want, True)
    }
    assert len(types) == 5

    # The platform decides, not the machine: on the CPU it is NumPy.
    types.clear()
    if framework in (None, "numpy"):
        f(jax.device_put(jnp.ones(shape), jax.devices("cpu")[0]))
        assert types == [("numpy.ndarray", True)]


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", ["int32", "float32", "complex64"])
def test_F13_one_array_api_function_on_both(cp, gpu, shape, dtype):
    """0-d int32 on a GPU among them; the function writes into what it gets."""

    def double(v, out):
        xp = cp.get_array_module(v)  # CuPy 14 has no __array_namespace__
        out[...] = xp.add(v, v) + xp.asarray(1, dtype=v.dtype)

    def returned(v):
        xp = cp.get_array_module(v)  # CuPy 14 has no __array_namespace__
        return xp.add(v, v) + xp.asarray(1, dtype=v.dtype)

    value = np.full(shape, 20).astype(dtype)
    for device in (jax.devices("cpu")[0], gpu):
        x = jax.device_put(value, device)
        for f in (jaxbridge.call(double, like, out="out"), jaxbridge.call(returned, like)):
            for y in (f(x), jax.jit(f)(x)):
                assert y.shape == shape and y.devices() == {device}
                np.testing.assert_array_equal(y, np.full(shape, 41))
