# SPDX-License-Identifier: Apache-2.0
"""Poisson's equation by FFTW's sine transform, with a derivative: which charges make this potential?

python examples/fftw/poisson.py [--size 63] [--library examples/fftw/libdst.so]
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxbridge


def solver(library):
    """x with -laplacian(x) = f on the unit square, and 0 on its border."""
    transform = jaxbridge.load(library).dst

    @jax.custom_vjp
    def dst(x):
        return transform(x)

    # Linear, and its own transpose.
    dst.defvjp(lambda x: (dst(x), None), lambda _, ct: (dst(ct),))

    def solve(f):
        n, m = f.shape
        k = 2 - 2 * jnp.cos(jnp.pi * jnp.arange(1, n + 1) / (n + 1))
        l = 2 - 2 * jnp.cos(jnp.pi * jnp.arange(1, m + 1) / (m + 1))  # noqa: E741
        eigenvalues = (n + 1) ** 2 * k[:, None] + (m + 1) ** 2 * l
        return dst(dst(f) / eigenvalues) / (4 * (n + 1) * (m + 1))

    return solve


def main():
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=63)
    parser.add_argument("--library", type=Path, default=Path(__file__).with_name("libdst.so"))
    options = parser.parse_args()
    solve = solver(options.library)

    n = options.size
    at = np.arange(1, n + 1) / (n + 1)
    mode = np.outer(np.sin(np.pi * at), np.sin(2 * np.pi * at))
    error = jnp.abs(solve(5 * np.pi**2 * mode) - mode).max()
    print(f"largest error of a smooth solution: {error:.1e}")

    # Two charges, found again from the potential by descent on the misfit, in one jitted loop.
    charges = np.zeros((n, n))
    charges[n // 3, n // 4], charges[2 * n // 3, n // 2] = 1, -1
    potential = solve(charges)

    def misfit(f):
        return jnp.sum((solve(f) - potential) ** 2)

    @jax.jit
    def fit(f):
        scale = (2 * jnp.pi**2) ** 2 / 2  # of the smoothest mode: the largest step that is stable
        return jax.lax.fori_loop(0, 200, lambda _, f: f - scale * jax.grad(misfit)(f), f)

    start = jnp.zeros((n, n))
    print(f"misfit {misfit(start):.2e} -> {misfit(fit(start)):.2e}")


if __name__ == "__main__":
    main()
