# SPDX-License-Identifier: Apache-2.0
"""`jaxbridge.testing`: what a program calls on a platform that is not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge.errors import SignatureError
from jaxbridge.testing import external_calls
from native_libraries import built

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def test_a_kernel_on_cuda():
    f = jaxbridge.cuda_kernel(
        ".version 8.0\n",
        "axpy",
        signature="x: float32[n, m], a: float32, inout y: float32[n, m], n: int32",
        grid=1,
        block=1,
    )
    (found,) = external_calls(lambda x: f(x, x + 1, a=2.0), X)
    assert found.name == "axpy" and found.target == "jaxbridge.call_capturable"
    assert found.operands == ("float32[2,3]",) * 2 and found.results == ("float32[2,3]",)
    assert found.aliases == ((1, 0),) and found.attributes == {}
    with pytest.raises(TypeError, match="argument 'x' is float32"):
        external_calls(lambda x: f(x[0], x[0], a=2.0), X)
    with pytest.raises(jaxbridge.errors.PlatformError, match="none for cpu"):
        external_calls(lambda x: f(x, x, 2.0), X, platform="cpu")


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"grid": 1.5}, TypeError, "grid is 1.5; expected one to three integers"),
        ({"grid": (1, 2.5)}, TypeError, r"grid is \(1, 2.5\); expected one to three integers"),
        ({"grid": lambda x, a: None}, TypeError, "grid is None; expected one to three integers"),
        ({"grid": (1, 65536)}, ValueError, "0 to 2147483647, 65535 and 65535"),
        ({"block": (32, 32, 2)}, ValueError, "of more than 1024 threads"),
        ({"block": (1, 1, 65)}, ValueError, "1 to 1024, 1024 and 64"),
        ({"grid": ()}, ValueError, r"grid is \(\); expected one to three numbers"),
        ({"grid": (1, 2, 3, 4)}, ValueError, r"grid is \(1, 2, 3, 4\); expected one to three"),
        ({"block": 0}, ValueError, r"block is \(0,\); expected"),
        ({"shared": 1.5}, TypeError, "shared is 1.5; expected bytes"),
        ({"shared": -1}, ValueError, "shared is -1 bytes"),
        ({"grid": "o // 2"}, SignatureError, "o"),
        ({"options": "-DA"}, TypeError, "expected a list of texts"),
        ({"name": 3}, TypeError, "the kernel's name is 3; expected a text"),
        *(
            ({"signature": f"x: float32[n, m], a: {t}"}, SignatureError, "not passed by value")
            for t in ("complex64", "complex128", "bfloat16", "int4")
        ),
    ],
)
def test_kernels_that_cannot_be_launched(change, error, text):
    """Said when they are made, but for what a function of the arguments returns."""
    how = {"signature": "x: float32[n, m], a: float32", "grid": 1, "block": 1, "name": "k"}
    with pytest.raises(error, match=text):
        f = jaxbridge.cuda_kernel(".version 8.0\n", **{**how, **change})
        if callable(change.get("grid")):
            external_calls(lambda x: f(x, a=2.0), X)


def test_a_grid_that_raises_says_what_it_gets():
    f = jaxbridge.cuda_kernel(
        ".version 8.0\n",
        "k",
        signature="x: float32[n, m], a: float32",
        grid=lambda x, *, a: 1 // 0,
        block=1,
    )
    with pytest.raises(ZeroDivisionError) as caught:
        external_calls(lambda x: f(x, a=2.0), X)
    (note,) = caught.value.__notes__
    assert "function grid= of k, which gets the arrays by position" in note


def test_calls_of_a_library_inside_of_control_flow():
    ops = jaxbridge.load(built("ops.cpp", "libops"))
    with jax.enable_x64(True):
        loop = jax.jit(
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: ops.scale(y, 3), ops.sums(x)[:, None])
        )
        first, second = external_calls(loop, X, platform="cpu")
        assert (first.name, second.name) == ("ops.sums", "ops.scale")
        assert first.results == ("float32[2]", "float32[3]")  # the workspace, too
        assert second.attributes == {"a": "3.000000e+00 : f64"}
        with pytest.raises(jaxbridge.errors.PlatformError, match="none for cuda"):
            external_calls(loop, X)


def test_targets_of_others_and_types():
    spec = [jax.ShapeDtypeStruct((2,), jnp.complex64), jax.ShapeDtypeStruct((), np.bool_)]
    f = jaxbridge.ffi("somebody.s", spec)
    (found,) = external_calls(lambda x: f(x, n=3, s="a{b}, ="), jnp.zeros((0, 4), jnp.bfloat16))
    assert found.name == found.target == "somebody.s"
    assert found.operands == ("bfloat16[0,4]",) and found.results == ("complex64[2]", "bool[]")
    assert found.attributes == {"n": "3 : i64", "s": '"a{b}, ="'}


def test_nothing_external():
    assert external_calls(lambda x: jnp.sin(x), X) == []
    with pytest.raises(ValueError, match="expected 'cpu' or 'cuda'"):
        external_calls(lambda x: x, X, platform="tpu")
