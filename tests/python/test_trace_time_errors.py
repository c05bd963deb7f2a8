# SPDX-License-Identifier: Apache-2.0
"""What can be known of a call when it is traced, and is an error there."""

import builtins
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from failing import jax_error
from jaxbridge import _adapters, errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


kept = []


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


def test_missing_framework_at_trace_time(x, monkeypatch):
    real = builtins.__import__

    def without_torch(name, *args, **kw):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kw)

    for module in [m for m in sys.modules if m.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "jaxbridge._adapters.torch", raising=False)
    monkeypatch.delitem(_adapters._loaded, "torch", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_torch)
    ran = []
    f = jaxbridge.call(lambda v: ran.append(1), F32, framework="torch")
    for program in (f, jax.jit(f)):
        with pytest.raises(ImportError, match='framework="torch".*pip install torch'):
            program(x)
    with pytest.raises(ImportError, match="pip install torch"):
        jax.jit(f).lower(x)
    assert not ran


def test_missing_framework_of_another_platform_does_not_count(x):
    f = jaxbridge.call(lambda v: v, F32)  # CuPy on CUDA
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "jaxbridge.call" in text
    np.testing.assert_array_equal(f(x), x)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8"])
def test_another_byte_order(x, dtype):
    name = np.dtype(dtype).name
    f = jaxbridge.call(lambda a, v: v, lambda a, v: v)
    text = f"argument 0 is an array of another byte order \\({dtype}\\).*x.astype\\('{name}'\\)"
    with pytest.raises(TypeError, match=text):
        f(np.arange(3).astype(dtype), x)
    for spec in (jax.ShapeDtypeStruct((4,), dtype), np.zeros(4, dtype)):
        with pytest.raises(TypeError, match=f"another byte order.*declare {name}"):
            jax.jit(jaxbridge.call(lambda v: v, spec))(x)
    np.testing.assert_array_equal(f(x.astype("float32"), x), x)


def test_results_that_are_a_python_number():
    f = jaxbridge.call(lambda v: v + 1, like, name=None)
    text = r"hold 1.0; expected.*static.*jnp.asarray\(1.0\)"
    with pytest.raises(TypeError, match=text):
        f(1.0)
    for given in (jnp.asarray(1.0), np.float32(1)):
        assert f(given) == 2


def test_a_failing_declaration_of_results_is_named(x):
    def results(v):
        return v.missing

    f = jaxbridge.call(np.copy, results, name="the.test")
    for program in (f, jax.jit(f)):
        with pytest.raises(AttributeError, match="missing") as caught:
            program(x)
        (note, *_) = caught.value.__notes__
        assert note.startswith("raised by the result_shape_dtypes of the.test")


@pytest.mark.parametrize(
    "results",
    [
        "float32",
        lambda v: "float32",
        lambda v: [object()],
        lambda v: jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        lambda v: types.SimpleNamespace(shape=3, dtype="float32"),
        lambda v: types.SimpleNamespace(shape=(3,), dtype="no dtype"),
    ],
)
def test_declared_results_that_are_none(x, results):
    f = jaxbridge.call(np.copy, results)
    with pytest.raises(TypeError, match=r"copy: the declared results \(result_shape_dtypes\) hold"):
        f(x)


@pytest.mark.parametrize(
    "framework, copied",
    [
        ("numpy", "x.copy()"),
        ("numba", "x.copy(), on CUDA x.copy_to_host()"),
        ("torch", "x.clone()"),
        ("warp", "warp.clone(x)"),
        ("buffer", "numpy.array(x)"),
    ],
)
def test_a_kept_view_says_how_to_copy(x, framework, copied, needs):
    if framework != "buffer":
        needs(framework)
    f = jaxbridge.call(lambda v, out: kept.append(v), like, framework=framework, out=-1)
    with pytest.raises(errors.ViewKeptError) as caught:
        f(x)
    kept.clear()
    assert str(caught.value).endswith(f"(for example {copied})")


def test_unknown_platform(x):
    with pytest.raises(errors.PlatformError, match="not on tpu"):
        jax.jit(jaxbridge.call(np.copy, F32)).trace(x).lower(lowering_platforms=("tpu",))


def test_key_that_nobody_registered(x):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    spec = '{"durable":false,"name":"lost"}'
    text = jax_error(jax.jit(lambda v: rule(v, key=np.int64(12345), spec=spec)), x)
    assert "'lost'" in text and "anonymous" in text and "name=" in text


@pytest.mark.parametrize("attributes", [{}, {"key": np.int64(1)}, {"spec": "{}"}])
def test_custom_calls_of_others_are_refused(x, attributes):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    assert "serves what jaxbridge lowers" in jax_error(jax.jit(lambda v: rule(v, **attributes)), x)


@pytest.mark.parametrize("spec", ["", "[", "{}", "null", '{"durable":true}'])
def test_spec_that_is_no_spec(x, spec):
    from jaxbridge import _lowering

    rule = jax.ffi.ffi_call(_lowering._target, F32)
    jax_error(jax.jit(lambda v: rule(v, key=np.int64(54321), spec=spec)), x)


@pytest.mark.parametrize("way", ["eager", "reraise", "jit"])
def test_the_exception_of_a_later_call_is_the_original_too(way):
    """From its second call on a program takes jaxlib's fast path, which raises a ValueError."""

    class OwnError(Exception):
        pass

    def fn(v):
        if v[0] < 0:
            raise OwnError("negative")
        return v

    f = jaxbridge.call(fn, lambda v: v)
    g = f if way == "eager" else jax.jit(f)
    x = jnp.ones(3)
    for _ in range(3):
        jax.block_until_ready(g(x))
    if way == "eager":
        with pytest.raises(OwnError):
            g(-x)
    elif way == "reraise":
        with pytest.raises(OwnError), jaxbridge.reraise():
            jax.block_until_ready(g(-x))
    else:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="OwnError: negative"):
            jax.block_until_ready(g(-x))
    jax.block_until_ready(g(x))


def test_an_exception_that_cannot_be_described_is_the_original_all_the_same():
    class Hostile(Exception):
        def __str__(self):
            raise KeyboardInterrupt

    def fn(v):
        raise Hostile

    with pytest.raises(Hostile):
        jaxbridge.call(fn, lambda v: v)(jnp.ones(2))
