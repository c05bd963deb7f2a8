# SPDX-License-Identifier: Apache-2.0
"""torch_function and torch_module: torch's derivatives, shapes and modules in JAX programs."""

import copy
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

torch = pytest.importorskip("torch", reason="needs torch (make frameworks)")

X = jnp.array([0.3, -1.2, 2.0])
Y = jnp.array([1.0, 2.0, -0.5])


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def external(x, y):
    return torch.sin(x) * y + x**3


def native(x, y):
    return jnp.sin(x) * y + x**3


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "forward over reverse": lambda f: jax.hessian(f, (0, 1)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, 1), 0),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.grad(lambda x, y: jax.hessian(f)(x, y).sum()),
    "hvp": lambda f: lambda x, y: jax.jvp(lambda x: jax.grad(f)(x, y), (x,), (y,))[1],
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](y, x),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "through scan": lambda f: jax.grad(
        lambda x, y: jax.lax.scan(lambda c, _: (c * f(c, y) / 9, None), x, None, length=2)[0].sum()
    ),
    "vmap of grad": lambda f: lambda x, y: jax.vmap(jax.grad(f), (0, None))(jnp.stack([x, y]), y),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: jax.vmap(f, (None, 0))(x, jnp.stack([y, x])).sum(), (0, 1)
    ),
}


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_derivatives_of_every_order(method):
    f = jaxbridge.torch_function(external, vmap_method=method)

    def every(g):
        loss = lambda x, y: jnp.sum(jnp.cos(g(x, y)) * x)
        return lambda x, y: {name: d(loss)(x, y) for name, d in DERIVATIVES.items()}

    want = jax.jit(every(native))(X, Y)
    close(jax.jit(every(f))(X, Y), want)
    eager = DERIVATIVES["forward over reverse"](lambda x, y: jnp.sum(jnp.cos(f(x, y)) * x))
    close(eager(X, Y), want["forward over reverse"])


def test_complex_numbers_have_jaxs_convention():
    f = jaxbridge.torch_function(lambda z, x: torch.exp(1j * z) * x + z.conj())
    g = lambda z, x: jnp.exp(1j * z) * x + jnp.conj(z)
    z = jnp.array([1 + 2j, 0.3 - 1j], jnp.complex64)
    x = jnp.array([1.0, 2.0])
    for d in (
        lambda f: jax.grad(lambda z, x: (jnp.abs(f(z, x)) ** 2).sum(), (0, 1)),
        lambda f: lambda z, x: jax.jvp(f, (z, x), (1j * z, x))[1],
        lambda f: lambda z, x: jax.vjp(f, z, x)[1](1j * z),
    ):
        close(d(f)(z, x), d(g)(z, x))


def test_functions_without_forward_mode_in_torch():
    """The transpose of their reverse mode is that."""

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**3

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, ct):
            (x,) = ctx.saved_tensors
            return ct * 3 * x**2

    for f, g in (
        (Cube.apply, lambda x: x**3),
        (lambda x: torch.nn.functional.huber_loss(x, 0 * x, reduction="none"),
         lambda x: jnp.where(jnp.abs(x) < 1, x * x / 2, jnp.abs(x) - 0.5)),
    ):  # fmt: skip
        h = jaxbridge.torch_function(f)
        close(jax.jvp(h, (X,), (Y,)), jax.jvp(g, (X,), (Y,)))
        close(*(jax.hessian(lambda x, k=k: jnp.sin(k(x)).sum())(X) for k in (h, g)))


def test_trees_statics_integers_and_keywords():
    def fn(x, index, mode, *, scale):
        value = torch.sin(x["u"]) if mode == "sin" else x["u"]
        return {"out": value[index] * x["v"] * scale, "n": index + 1}

    f = jaxbridge.torch_function(fn)
    index = jnp.array([2, 0, 0])

    def loss(g, x):
        return (g(x, index, "sin", scale=2.0)["out"] ** 2).sum()

    def of_jax(x, index, mode, *, scale):
        return {"out": jnp.sin(x["u"])[index] * x["v"] * scale}

    x = {"u": X, "v": Y}
    out = f(x, index, "sin", scale=2.0)
    np.testing.assert_array_equal(out["n"], index + 1)
    assert out["n"].dtype == jnp.int32
    for d in (jax.grad, jax.jacfwd):
        got = jax.jit(d(lambda x: loss(f, x)))(x)
        close(got, d(lambda x: loss(of_jax, x))(x))
    # A result or an argument that the other does not depend on.
    g = jaxbridge.torch_function(lambda x, y: (x * 2, x.detach(), torch.ones(2)))
    close(jax.grad(lambda x, y: sum(o.sum() for o in g(x, y)), (0, 1))(X, Y), (2 * X / X, 0 * Y))
    close(jax.jvp(g, (X, Y), (Y, X))[1], (2 * Y, 0 * X, jnp.zeros(2)))


def test_half_precision_and_rank_0():
    f = jaxbridge.torch_function(lambda x, s: (x * s).sum())
    x = X.astype(jnp.bfloat16)
    got = jax.grad(f, (0, 1))(x, jnp.float32(2))
    assert [g.dtype for g in got] == [jnp.bfloat16, jnp.float32]
    close(got[0].astype(jnp.float32), [2, 2, 2])


# ---- shapes and errors ---------------------------------------------------------------------------


def test_shapes_are_torchs_and_told_without_running():
    runs = []

    def fn(x):
        runs.append(type(x).__name__)
        return {"pair": (x.sum(0, keepdim=True), x.to(torch.int8)), "list": [x[..., None]]}

    f = jaxbridge.torch_function(fn)
    shape = jax.eval_shape(f, jax.ShapeDtypeStruct((5, 2), jnp.float16))
    spec = jax.ShapeDtypeStruct
    assert shape == {
        "pair": (spec((1, 2), jnp.float16), spec((5, 2), jnp.int8)),
        "list": [spec((5, 2, 1), jnp.float16)],
    }
    assert runs == ["FakeTensor"]
    f(jnp.ones((5, 2), jnp.float16)), f(jnp.ones((5, 2), jnp.float16))
    assert runs == ["FakeTensor", "Tensor", "Tensor"]  # and that is remembered


@pytest.mark.parametrize(
    "fn, error, match",
    [
        (lambda x: x.add_(1), errors.InputChangedError, r"writes to array 0 .* float32\[3\]"),
        (lambda x: (x[:2].zero_(), x)[1], errors.InputChangedError, "x.clone"),
        (lambda x: x[x > 0], errors.ResultError, "aten.nonzero.* depends on values"),
        (lambda x: x * x.sum().item(), errors.ResultError, "say result="),
        (torch.rand_like, errors.ResultError, "random numbers .rand_like.*make them in JAX"),
        (lambda x: torch.dropout(x, 0.5, True), errors.ResultError, "random numbers"),
        (lambda x: (x, 3.0), errors.ResultError, "a result is a float; expected tensors"),
    ],
)
def test_what_a_function_may_not_do_is_an_error_when_it_is_traced(fn, error, match):
    with pytest.raises(error, match=match):
        jax.make_jaxpr(jaxbridge.torch_function(fn))(X)


def test_declared_results():
    f = jaxbridge.torch_function(lambda x: x * x.sum().item(), result=lambda x: x)
    close(jax.jit(f)(X), X * X.sum())
    close(jax.jvp(jaxbridge.torch_function(external, result=lambda x, y: x), (X, Y), (Y, X)),
          jax.jvp(native, (X, Y), (Y, X)))  # fmt: skip
    # Writing to an argument is then seen by the call.
    g = jaxbridge.torch_function(lambda x: x.add_(1), result=lambda x: x)
    with pytest.raises(errors.InputChangedError):
        g(X)
    with pytest.raises(TypeError, match="expected a function"):
        jaxbridge.torch_function(3)


def test_what_torch_cannot_differentiate_has_torchs_error():
    f = jaxbridge.torch_function(lambda x: torch.from_numpy(np.sin(x.numpy())), result=lambda x: x)
    close(f(X), jnp.sin(X))
    with pytest.raises(RuntimeError, match="requires grad"):
        jax.grad(lambda x: f(x).sum())(X)


def test_nothing_of_torchs_lives_after_a_call():
    made = []

    def fn(x):
        inner = torch.sin(x)
        made.append(weakref.ref(inner))
        return inner * inner

    f = jaxbridge.torch_function(fn, result=lambda x: x)
    gc.collect()
    gc.disable()
    try:
        jax.block_until_ready(jax.jit(jax.grad(lambda x: f(x).sum()))(X))
        jax.block_until_ready(jax.jvp(f, (X,), (X,)))
        jax.block_until_ready(jax.hessian(lambda x: f(x).sum())(X))
        assert len(made) > 5
        assert [r() for r in made] == [None] * len(made)
    finally:
        gc.enable()


def test_what_it_holds_ends_with_it():
    class Held:
        pass

    def use():
        held = Held()
        f = jaxbridge.torch_function(lambda x: (x * 2, held)[0])
        jax.block_until_ready(jax.grad(lambda x: f(x).sum())(X))
        return weakref.ref(held)

    alive = use()
    gc.collect(), gc.collect()
    assert alive() is None


# ---- modules -------------------------------------------------------------------------------------


X4 = np.random.default_rng(0).standard_normal((3, 4), np.float32)


def network(dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4),
        torch.nn.BatchNorm1d(4),
        torch.nn.Tanh(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(4, 1),
    )


INPUT = jnp.asarray(np.random.RandomState(0).randn(6, 3), jnp.float32)
KEY = jax.random.key_data(jax.random.key(7))


def in_torch(module, x):
    """Output, and gradients of the sum of its squares, by torch."""
    out = module(torch.tensor(np.asarray(x)))
    (out**2).sum().backward()
    return out.detach().numpy(), {n: p.grad.numpy() for n, p in module.named_parameters()}


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_module_is_what_it_is_in_torch(mode):
    module = network()
    f, params = jaxbridge.torch_module(module, mode=mode)
    assert module.training  # as it was
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(params["buffers"]) == names
    assert set(params["parameters"]) == set(dict(module.named_parameters()))

    def loss(weights):
        out = f({**params, "parameters": weights}, INPUT)
        return ((out[0] if mode == "train" else out) ** 2).sum()

    out, gradient = f(params, INPUT), jax.jit(jax.grad(loss))(params["parameters"])
    want, wanted = in_torch(module.train(mode == "train"), INPUT)
    close(gradient, wanted)
    if mode == "eval":
        np.testing.assert_allclose(out, want, rtol=1e-5)
    else:
        np.testing.assert_allclose(out[0], want, rtol=1e-5)
        for name, b in module.named_buffers():
            np.testing.assert_allclose(out[1][name], b.numpy(), rtol=1e-5)
        assert out[1]["1.num_batches_tracked"] == 1


def test_derivatives_in_buffers_are_zero():
    f, params = jaxbridge.torch_module(network())
    g = jax.grad(lambda p: (f(p, INPUT) ** 2).sum(), allow_int=True)(params)
    assert not g["buffers"]["1.running_mean"].any() and not g["buffers"]["1.running_var"].any()
    assert g["buffers"]["1.num_batches_tracked"].dtype == jax.dtypes.float0
    assert g["parameters"]["0.weight"].any()
    tangents = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == jnp.float32 else
                            np.zeros(x.shape, jax.dtypes.float0), params)  # fmt: skip
    zero = {**tangents, "parameters": jax.tree.map(jnp.zeros_like, tangents["parameters"])}
    tangent = jax.jvp(lambda p: f(p, INPUT), (params,), (zero,))[1]
    assert not tangent.any()


# Of torch itself, where it is asked first.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_second_order_of_a_module():
    f, params = jaxbridge.torch_module(network())
    module = network().eval()

    def loss(w):
        weights = {**params["parameters"], "4.weight": w}
        return (jnp.sin(f({**params, "parameters": weights}, INPUT)) ** 2).sum()

    def of_torch(w):
        weights = {**dict(module.named_parameters()), "4.weight": w}
        out = torch.func.functional_call(module, weights, torch.tensor(np.asarray(INPUT)))
        return (torch.sin(out) ** 2).sum()

    want = torch.func.hessian(of_torch)(module[4].weight.detach()).detach().numpy()
    close(jax.jit(jax.hessian(loss))(params["parameters"]["4.weight"]), want)


def test_training_with_buffers_in_a_program():
    """The state goes through a scan, and a network learns."""
    f, params = jaxbridge.torch_module(network(0.1), mode="train")
    target = jnp.sin(INPUT[:, :1] * 2)

    def loss(weights, buffers, key):
        out, buffers = f({"parameters": weights, "buffers": buffers}, INPUT, key=key)
        return ((out - target) ** 2).mean(), buffers

    def step(state, key):
        weights, buffers = state
        (value, buffers), g = jax.value_and_grad(loss, has_aux=True)(weights, buffers, key)
        return (jax.tree.map(lambda w, d: w - 0.1 * d, weights, g), buffers), value

    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 40))
    (_, buffers), losses = jax.jit(
        lambda p, keys: jax.lax.scan(step, (p["parameters"], p["buffers"]), keys)
    )(params, keys)
    assert buffers["1.num_batches_tracked"] == 40
    assert losses[-8:].mean() < losses[:4].mean() / 2


def test_dropout_takes_a_key():
    f, params = jaxbridge.torch_module(network(0.5), mode="train")
    with pytest.raises(
        errors.ResultError, match=r"Sequential: it uses random .*pass key=.*mode='eval'"
    ):
        jax.make_jaxpr(f)(params, INPUT)
    before = torch.random.get_rng_state()
    out = f(params, INPUT, key=KEY)[0]
    np.testing.assert_array_equal(out, f(params, INPUT, key=KEY)[0])
    assert (out != f(params, INPUT, key=KEY + 1)[0]).any()
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(TypeError, match=r"key.*jax\.random\.key_data"):
        f(params, INPUT, key=jax.random.key(0))

    # The backward pass has the mask of the forward one.
    def loss(w):
        weights = {**params["parameters"], "4.weight": w}
        return (f({**params, "parameters": weights}, INPUT, key=KEY)[0] ** 2).sum()

    w = params["parameters"]["4.weight"]
    direction = jnp.arange(1.0, 5)[None]
    want = (loss(w + 0.01 * direction) - loss(w - 0.01 * direction)) / 0.02
    np.testing.assert_allclose((jax.grad(loss)(w) * direction).sum(), want, rtol=2e-3)
    # Without it in eval mode.
    g, params = jaxbridge.torch_module(network(0.5))
    np.testing.assert_array_equal(g(params, INPUT), g(params, INPUT))


def test_attention_without_dropout_is_not_random():
    module = torch.nn.TransformerEncoderLayer(4, 2, 8)
    f, params = jaxbridge.torch_module(module)
    gradient = jax.grad(lambda p: (f(p, X4) ** 2).sum())(params)["parameters"]
    (module.eval()(torch.tensor(X4)) ** 2).sum().backward()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-3, atol=1e-5)
    attention = torch.nn.functional.scaled_dot_product_attention
    g = jaxbridge.torch_function(lambda x, p: attention(x, x, x, dropout_p=p))
    x = jnp.asarray(X4)[None, None]
    assert g(x, 0.0).shape == x.shape
    with pytest.raises(errors.ResultError, match="random numbers"):
        g(x, 0.5)


class Cached(torch.nn.Module):
    """Keeps what it computes, and its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.waves = None

    def forward(self, x):
        if self.waves is None:
            self.waves = torch.cos(torch.arange(x.shape[-1]))
        self.used = self.weight
        self.register_buffer("seen", x)
        return x * self.waves * self.weight


@pytest.mark.parametrize("make", [lambda: torch.nn.LSTM(2, 3), lambda: torch.nn.GRU(2, 3), Cached])
def test_what_a_module_keeps_in_its_attributes_is_of_one_call(make):
    module = make()
    f, params = jaxbridge.torch_module(module)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    program = jax.jit(jax.grad(lambda p: sum((y**2).sum() for y in jax.tree.leaves(f(p, x)))))
    for _ in range(2):
        gradient = program(params)["parameters"]
    sum((y**2).sum() for y in jax.tree.leaves(module(torch.tensor(x)))).backward()
    for name, p in module.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-4, atol=1e-5)


def test_the_module_and_the_function_are_apart():
    module = network()
    f, params = jaxbridge.torch_module(module)
    before = f(params, INPUT)
    state = copy.deepcopy(module.state_dict())
    jax.grad(lambda p: f(p, INPUT).sum(), allow_int=True)(params)
    now = module.state_dict()
    assert all(torch.equal(x, now[name]) for name, x in state.items())
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():
        module[0].weight.zero_()
    module[2] = torch.nn.ReLU()
    np.testing.assert_array_equal(f(params, INPUT), before)
    assert params["parameters"]["0.weight"].any()


def test_a_module_that_writes_to_its_state_in_eval_mode():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * self.count

    f, params = jaxbridge.torch_module(Counts())
    with pytest.raises(errors.InputChangedError, match=r"Counts: the function writes to array 0"):
        jax.make_jaxpr(f)(params, X)
    g, params = jaxbridge.torch_module(Counts(), mode="train")
    out, buffers = g(params, X)
    close(out, X)
    close(g({**params, "buffers": buffers}, X), (2 * X, {"count": 2.0}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda p, x: (x,), r"first argument is the params .*got jax"),
        (lambda p, x: (p["parameters"], x), r"got builtins\.dict with \['0\.bias', '0\.weight'\]"),
        (lambda p, x: ({"parameters": p["parameters"]}, x), r"with \['parameters'\]"),
        (
            lambda p, x: (
                {**p, "parameters": {"0.weight": p["parameters"]["0.weight"], "w": x}},
                x,
            ),
            r"params\['parameters'\] lacks '0\.bias', and has 'w', which the module has not",
        ),
    ],
    ids=["none", "parameters alone", "no buffers", "other names"],
)
def test_a_module_without_its_parameters_is_an_error(arguments, message):
    f, params = jaxbridge.torch_module(torch.nn.Sequential(torch.nn.Linear(3, 2)))
    with pytest.raises(TypeError, match=message):
        f(*arguments(params, jnp.ones(3)))


@pytest.mark.parametrize("key", [1, jnp.ones(2)], ids=["number", "floats"])
def test_a_key_is_an_array_of_numbers(key):
    f, params = jaxbridge.torch_module(torch.nn.Dropout(0.5), mode="train")
    with pytest.raises(TypeError, match=r"key= takes jax\.random\.key_data"):
        f(params, jnp.ones(3), key=key)


def test_tied_parameters_and_buffers_that_are_set():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x):
            if self.training:
                self.last = x.sum(0)
            return self.b(torch.tanh(self.a(x)))

    module = Tied()
    f, params = jaxbridge.torch_module(module, mode="train")
    assert list(params["parameters"]) == ["a.weight"]
    _, wanted = in_torch(module, INPUT)
    gradient = jax.grad(lambda p: (f(p, INPUT)[0] ** 2).sum())(params)
    close(gradient["parameters"], wanted)
    close(f(params, INPUT)[1], {"last": INPUT.sum(0)})


def test_one_module_in_several_threads():
    """Each has its own copy, into which torch puts the parameters of a call."""
    barrier = threading.Barrier(2, timeout=30)

    class Meets(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            if meet:
                barrier.wait()
            return x * self.w

    meet = False
    f, params = jaxbridge.torch_module(Meets(), result=lambda p, x: x)
    f(params, X)  # JAX makes the program in one thread
    meet = True
    outs = {}

    def run(n):
        outs[n] = np.asarray(f({"parameters": {"w": jnp.float32(n)}, "buffers": {}}, X))

    threads = [threading.Thread(target=run, args=(n,)) for n in (2, 3)]
    [t.start() for t in threads], [t.join(60) for t in threads]
    close(outs, {2: 2 * X, 3: 3 * X})


def test_vmap_over_parameters():
    """An ensemble."""
    f, params = jaxbridge.torch_module(network())
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    got = jax.jit(jax.vmap(f, (0, None)))(many, INPUT)
    want = [f(params, INPUT), f(jax.tree.map(lambda x: 2 * x, params), INPUT)]
    np.testing.assert_allclose(got, np.stack(want), rtol=1e-5)


def test_what_is_no_module():
    with pytest.raises(
        TypeError, match="expected a torch.nn.Module, got a function; torch_function"
    ):
        jaxbridge.torch_module(external)
    with pytest.raises(ValueError, match="mode is 'test'; expected 'eval' or 'train'"):
        jaxbridge.torch_module(network(), mode="test")
    with pytest.raises(TypeError, match=r"parameter weight: .*float64"):
        jaxbridge.torch_module(torch.nn.Linear(2, 2).double())
