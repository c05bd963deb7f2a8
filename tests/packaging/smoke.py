# SPDX-License-Identifier: Apache-2.0
"""Run by test_wheel.py in each environment that holds the wheel: calls under jit, real values."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxbridge


def halve(x, *, out):
    np.multiply(x, 0.5, out=out)


def main() -> None:
    package = pathlib.Path(jaxbridge.__file__).parent
    assert package.is_relative_to(pathlib.Path(sys.prefix)), package

    call = jaxbridge.call(halve, lambda x: x, framework="numpy", out="out")
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(call)(x), np.asarray(x) / 2)

    def body(carry, _):
        return call(carry), carry.sum()

    last, sums = jax.jit(lambda x: jax.lax.scan(body, x, length=3))(x)
    np.testing.assert_allclose(last, np.asarray(x) / 8)
    np.testing.assert_allclose(sums, [15, 7.5, 3.75])
    print("python", *sys.version_info[:2], "jax", jax.__version__, "called")


if __name__ == "__main__":
    main()
