# SPDX-License-Identifier: Apache-2.0
"""Derivatives, batches and modules on a device: torch's, CuPy's ufuncs and FFT, JAXbind's conventions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jaxbridge
from jaxbridge import errors
from jaxbridge.compat import jaxbind

pytestmark = pytest.mark.gpu
X = np.array([0.3, -1.2, 2.0], np.float32)
Y = np.array([1.0, 2.0, -0.5], np.float32)


@pytest.fixture(autouse=True)
def on_the_device():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def close(got, want, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


# ---- torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_derivatives_of_a_torch_function(method):
    torch = pytest.importorskip("torch")
    places = set()

    def external(x, y):
        places.add(x.device.type)
        return torch.sin(x) * y + x**3

    def native(x, y):
        return jnp.sin(x) * y + x**3

    def derivatives(f):
        def loss(x, y):
            return jnp.sum(jnp.cos(f(x, y)) * x)

        return lambda x, y: (
            jax.grad(loss, (0, 1))(x, y),
            jax.jacfwd(loss, (0, 1))(x, y),
            jax.hessian(loss)(x, y),
            jax.vmap(jax.grad(loss), (0, None))(jnp.stack([x, 2 * x]), y),
            jax.grad(lambda x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, x])).sum())(x, y),
        )

    f = jaxbridge.torch_function(external, vmap_method=method)
    close(jax.jit(derivatives(f))(X, Y), jax.jit(derivatives(native))(X, Y))
    assert "cuda" in places  # and on the CPU where only shapes are asked for


def test_a_torch_module_is_trained_on_the_device():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    )
    step, params = jaxbridge.torch_module(module, mode="train")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)).astype(np.float32), rng.normal(size=(32, 1)).astype(np.float32)

    @jax.jit
    def train(params, x, y):
        def loss(weights):
            out, buffers = step({**params, "parameters": weights}, x)
            return jnp.mean((out - y) ** 2), buffers

        (value, buffers), g = jax.value_and_grad(loss, has_aux=True)(params["parameters"])
        weights = jax.tree.map(lambda w, g: w - 0.1 * g, params["parameters"], g)
        return value, {"parameters": weights, "buffers": buffers}

    device = jax.devices("cuda")[0]
    params = jax.device_put(params, device)
    module.to("cuda").train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    tx, ty = torch.as_tensor(x, device="cuda"), torch.as_tensor(y, device="cuda")
    for _ in range(3):
        value, params = train(params, x, y)
        optimizer.zero_grad()
        want = torch.nn.functional.mse_loss(module(tx), ty)
        want.backward()
        optimizer.step()
        np.testing.assert_allclose(value, want.item(), rtol=1e-4)
    theirs = {n: p.detach().cpu().numpy() for n, p in module.state_dict().items()}
    ours = {**params["parameters"], **params["buffers"]}
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.devices() == {device}
        np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_dropout_has_the_same_mask_in_the_backward_pass():
    torch = pytest.importorskip("torch")
    module = torch.nn.Dropout(0.5)
    f, params = jaxbridge.torch_module(module, mode="train")
    x = jnp.ones(1000)
    key = jnp.array([1, 2], jnp.uint32)

    def run(x):
        out, _ = f(params, x, key=key)
        return out

    out, backward = jax.vjp(jax.jit(run), x)
    (g,) = backward(jnp.ones(1000))
    np.testing.assert_array_equal(out, g)
    assert set(np.unique(out)) == {0, 2}
    with pytest.raises(errors.JaxbridgeError):
        f(params, x)


def test_torch_keeps_no_memory():
    torch = pytest.importorskip("torch")
    f = jaxbridge.torch_function(lambda x: (x @ x).sin())
    g = jax.jit(jax.grad(lambda x: f(x).sum()))
    x = jnp.ones((512, 512))
    jax.block_until_ready(g(x))
    used = torch.cuda.memory_allocated()
    for _ in range(20):
        jax.block_until_ready(g(x))
    assert torch.cuda.memory_allocated() <= used


# ---- CuPy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("gamma", (1.7,)), ("gammaln", (1.7,)), ("digamma", (1.7,)), ("gammainc", (1.2, 0.7)),
        ("erf", (0.4,)), ("erfc", (0.4,)), ("erfinv", (0.4,)), ("ndtr", (0.3,)),
        ("j0", (0.8,)), ("j1", (0.8,)), ("y0", (0.8,)), ("y1", (0.8,)), ("i0", (0.8,)), ("i1", (0.8,)),
    ],
)  # fmt: skip
def test_derivatives_of_special_functions(name, at, x64):
    """A gradient of the ufunc on the device is that on the CPU, where differences have checked it."""
    pytest.importorskip("cupy")
    special = pytest.importorskip("scipy.special")
    f = jaxbridge.from_ufunc(getattr(special, name))
    i = len(at) - 1  # a derivative in the last argument is known of each of these
    points = [np.linspace(a, a + 0.4, 5) for a in at]
    g = jax.jit(jax.grad(lambda *a: f(*a).sum(), i))
    (device,) = g(*points).devices()
    assert device.platform in ("cuda", "gpu")
    with jax.default_device(jax.devices("cpu")[0]):
        want = g(*points)
    close(g(*points), want, rtol=1e-9)
    check_grads(lambda v: f(*points[:i], v), (jnp.asarray(points[i]),), 1, rtol=1e-5)


def test_bessel_functions_of_an_order(x64):
    """CuPy has no jv: SciPy's runs, on copies."""
    special = pytest.importorskip("scipy.special")
    jv = jaxbridge.from_ufunc(special.jv)
    x = jnp.linspace(0.5, 3, 7)
    np.testing.assert_allclose(
        jax.jit(jax.grad(lambda x: jv(1.5, x).sum()))(x), special.jvp(1.5, x), rtol=1e-9
    )


def test_a_linear_operator_of_cupys():
    pytest.importorskip("cupy")

    def transform(x, out):
        import cupy

        assert isinstance(x, cupy.ndarray)
        out[...] = cupy.fft.fft(x)

    fft = jaxbridge.call(
        {"cuda": transform}, lambda x: x, out=-1, vmap_method="broadcast_all", name="fft"
    )
    fft.deflinear(fft)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(3, 16)) + 1j * rng.normal(size=(3, 16))).astype(np.complex64)

    def loss(f):
        return lambda x: jnp.sum(jnp.abs(f(x)) ** 4)

    close(jax.jit(jax.grad(loss(fft)))(x), jax.grad(loss(jnp.fft.fft))(x), rtol=1e-3, atol=1e-2)
    close(jax.vmap(fft)(x), jnp.fft.fft(x), atol=1e-4)
    close(jax.vmap(jax.grad(loss(fft)))(x), jax.grad(loss(jnp.fft.fft))(x), rtol=1e-3, atol=1e-2)
    close(jax.linear_transpose(fft, x)(x)[0], jnp.fft.fft(x), atol=1e-4)


def test_a_linear_call_of_jaxbinds():
    pytest.importorskip("cupy")

    def transform(out, args, kwargs_dump):
        import cupy

        axis = jaxbind.load_kwargs(kwargs_dump)["axis"]
        out[0][...] = cupy.fft.fft(args[0], axis=axis)

    def like(x, *, axis):
        return ((x.shape, x.dtype),)

    f = functools.partial(
        jaxbind.get_linear_call({"cuda": transform}, {"cuda": transform}, like, like), axis=0
    )
    x = (np.arange(6.0) + 1j).astype(np.complex64)
    (y,) = jax.jit(f)(x)
    close(y, jnp.fft.fft(x), atol=1e-4)
    (batch,) = jax.vmap(f)(jnp.stack([x, 2 * x]))
    close(batch[1], 2 * jnp.fft.fft(x), atol=1e-4)
    close(jax.vjp(f, x)[1]([x])[0], jnp.fft.fft(x), atol=1e-4)
