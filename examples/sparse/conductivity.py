# SPDX-License-Identifier: Apache-2.0
"""A sparse direct solver with its implicit derivative: the conductivity of a plate from its temperatures.

On a GPU the systems are solved by cuDSS (solve.cpp, compile it first), on the CPU by SciPy.

    python examples/sparse/conductivity.py [--size 24] [--library examples/sparse/libsolve.so]
"""

import argparse
import hashlib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg

import jaxbridge


class Pattern:
    """Where a square sparse matrix has elements, in compressed rows; static, and known to the host."""

    def __init__(self, rows, columns):
        self.size = int(rows.max()) + 1
        self.order = np.lexsort((columns, rows))  # of the elements as they were given
        self.rows, self.columns = rows[self.order], columns[self.order]
        starts = np.searchsorted(self.rows, np.arange(self.size + 1))
        self.starts, self.columns = starts.astype(np.int32), self.columns.astype(np.int32)
        text = self.starts.tobytes() + self.columns.tobytes()
        self.key = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


def with_scipy(values, starts, columns, b, out):
    matrix = scipy.sparse.csr_array((values, columns, starts), shape=(b.size, b.size))
    out[...] = scipy.sparse.linalg.spsolve(matrix.tocsc(), b)


on_cpu = jaxbridge.call({"cpu": with_scipy}, lambda values, starts, columns, b: b, out="out")


def solver(on_cuda):
    def direct(pattern, values, b):
        arrays = (values, pattern.starts, pattern.columns, b)
        if on_cuda is None:
            return on_cpu(*arrays)
        return jax.lax.platform_dependent(
            *arrays, cuda=partial(on_cuda, pattern=pattern.key), cpu=on_cpu
        )

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def solve(pattern, values, b):
        """x with A x = b, where A has `values` at the places of `pattern`."""
        return direct(pattern, values, b)

    def forward(pattern, values, b):
        x = direct(pattern, values, b)
        return x, (values, x)

    def backward(pattern, residuals, ct):
        values, x = residuals
        transposed = Pattern(pattern.columns, pattern.rows)
        of_b = direct(transposed, values[transposed.order], ct)  # A^T of_b = ct
        return -of_b[pattern.rows] * x[pattern.columns], of_b

    solve.defvjp(forward, backward)
    return solve


def plate(n):
    """The five-point operator of a plate of n x n cells: its pattern, and values from conductivities."""
    cell = np.arange(n * n).reshape(n, n)
    one = np.concatenate([cell[:, :-1].ravel(), cell[:-1].ravel()])  # neighbours
    other = np.concatenate([cell[:, 1:].ravel(), cell[1:].ravel()])
    pattern = Pattern(
        np.concatenate([one, other, cell.ravel()]), np.concatenate([other, one, cell.ravel()])
    )

    def values(conductivity):
        k = conductivity.ravel()
        between = 2 / (1 / k[one] + 1 / k[other])
        total = jnp.full(n * n, 1e-2).at[one].add(between).at[other].add(between)
        return jnp.concatenate([-between, -between, total])[pattern.order]

    return pattern, values


def main():
    jax.config.update("jax_enable_x64", True)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=24)
    parser.add_argument("--library", type=Path, default=Path(__file__).with_name("libsolve.so"))
    options = parser.parse_args()
    library = jaxbridge.load(options.library).solve if options.library.exists() else None
    solve = solver(library)

    n = options.size
    pattern, values = plate(n)
    heat = np.random.default_rng(0).normal(size=n * n)
    true = np.ones((n, n))
    true[n // 4 : n // 2, n // 4 : n // 2] = 4  # a better conductor inside
    measured = solve(pattern, values(jnp.asarray(true)), heat)

    def misfit(log_k):
        x = solve(pattern, values(jnp.exp(log_k)), heat)
        return jnp.sum((x - measured) ** 2) / jnp.sum(measured**2)

    log_k = jnp.zeros((n, n))

    def step(i, log_k):
        return log_k - 0.1 * 0.95**i * jnp.sign(jax.grad(misfit)(log_k))

    found = jax.jit(lambda log_k: jax.lax.fori_loop(0, 60, step, log_k))(log_k)
    print(f"misfit {misfit(log_k):.2e} -> {misfit(found):.2e}")


if __name__ == "__main__":
    main()
