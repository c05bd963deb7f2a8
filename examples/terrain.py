# SPDX-License-Identifier: Apache-2.0
"""Terrain from a few heights: a Gaussian process whose likelihood has a Bessel function in it.

The covariance of heights is Matern's, which is made of K_nu, the modified Bessel function of the second
kind, for any smoothness nu: SciPy has that, and JAX has not. `from_ufunc` brings it, with its derivative,
into the likelihood, which is maximised by its gradient. The data is real: elevations round Jacksboro, USA,
which come with matplotlib.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
import scipy.special

import jaxbridge

kv = jaxbridge.from_ufunc(scipy.special.kv)
KM_PER_DEGREE = 111.2


def load(points: int, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """All elevations in km, their grid spacing in km (east, north), and places and heights of some."""
    from matplotlib import cbook

    data = cbook.get_sample_data("jacksboro_fault_dem.npz")
    height = data["elevation"][::-1] / 1000.0
    middle = math.radians(float(data["ymin"] + data["ymax"]) / 2)
    spacing = np.array([data["dx"] * math.cos(middle), data["dy"]]) * KM_PER_DEGREE
    rows, columns = height.shape
    chosen = np.random.default_rng(seed).choice(rows * columns, points, replace=False)
    places = np.stack([chosen % columns, chosen // columns], 1) * spacing
    return height, spacing, places, height.reshape(-1)[chosen]


def matern(distance: Any, length: Any, nu: float) -> Any:
    """The correlation of two heights at a distance above zero."""
    z = math.sqrt(2 * nu) * distance / length
    return 2 ** (1 - nu) / scipy.special.gamma(nu) * z**nu * kv(nu, z)


def distances(a: Any, b: Any) -> Any:
    return jnp.sqrt(jnp.maximum(jnp.sum((a[:, None] - b[None]) ** 2, -1), 1e-12))


def covariance(places: Any, theta: Any, nu: float) -> Any:
    """theta: logarithms of the length, and of the standard deviations of heights and of noise."""
    length, height, noise = jnp.exp(theta)
    n = len(places)
    i, j = np.triu_indices(n, 1)
    pairs = jnp.sqrt(jnp.sum((places[i] - places[j]) ** 2, -1))
    upper = jnp.zeros((n, n)).at[i, j].set(matern(pairs, length, nu))
    return height**2 * (upper + upper.T + jnp.eye(n)) + noise**2 * jnp.eye(n)


def minus_log_likelihood(theta: Any, places: Any, heights: Any, nu: float) -> Any:
    factor = jnp.linalg.cholesky(covariance(places, theta, nu))
    white = jax.scipy.linalg.solve_triangular(factor, heights, lower=True)
    return jnp.sum(white**2) / 2 + jnp.sum(jnp.log(jnp.diag(factor)))


def fit(places: Any, heights: Any, nu: float) -> tuple[Any, float]:
    """The parameters of the largest likelihood, and its logarithm."""
    loss = jax.jit(
        jax.value_and_grad(lambda theta: minus_log_likelihood(theta, places, heights, nu))
    )
    begin = np.log([3.0, heights.std(), 0.01])
    found = scipy.optimize.minimize(
        lambda theta: [np.asarray(x, float) for x in loss(theta)],
        begin,
        jac=True,
        method="L-BFGS-B",
        bounds=[(math.log(0.1), math.log(100)), (None, None), (math.log(1e-3), None)],
    )
    return found.x, -float(found.fun)


def predict(places: Any, heights: Any, theta: Any, nu: float, at: Any) -> tuple[Any, Any]:
    """Mean and standard deviation of the heights at other places."""
    length, height, noise = np.exp(theta)
    factor = jnp.linalg.cholesky(covariance(places, theta, nu))
    between = height**2 * matern(distances(places, at), length, nu)
    white = jax.scipy.linalg.solve_triangular(factor, between, lower=True)
    mean = white.T @ jax.scipy.linalg.solve_triangular(factor, heights, lower=True)
    return mean, jnp.sqrt(height**2 + noise**2 - jnp.sum(white**2, 0))


def plot(path: Path, height: Any, spacing: Any, places: Any, guess: Any, likelihoods: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    rows, columns = height.shape
    extent = (0, columns * spacing[0], 0, rows * spacing[1])
    for axes, image, title in (
        (left, height, "elevation, and where it is known"),
        (middle, guess, "from these heights alone"),
    ):
        shown = axes.imshow(
            image, origin="lower", extent=extent, cmap="terrain", vmin=0.2, vmax=1.1
        )
        axes.set(title=title, xlabel="km", ylabel="km")
    figure.colorbar(shown, ax=middle, label="km")
    left.plot(*places.T, "k.", markersize=2)
    right.plot(likelihoods.keys(), likelihoods.values(), "o-")
    right.set(title="log-likelihood", xlabel="smoothness nu")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--nu", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.3, 2.2])
    parser.add_argument("--plot", type=Path, default=Path("terrain.png"))
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # CuPy has no kv
    jax.config.update("jax_enable_x64", True)
    height, spacing, places, known = load(options.points)
    _, _, elsewhere, truth = load(200, seed=1)
    mean = known.mean()

    fits = {nu: fit(places, known - mean, nu) for nu in options.nu}
    for nu, (theta, likelihood) in fits.items():
        length, deviation, noise = np.exp(theta)
        print(
            f"nu {nu:.1f}: length {length:.2f} km, heights {1000 * deviation:.0f} m, "
            f"noise {1000 * noise:.0f} m, log-likelihood {likelihood:.1f}"
        )
    nu = max(fits, key=lambda nu: fits[nu][1])
    theta = fits[nu][0]
    guess, deviation = predict(places, known - mean, theta, nu, elsewhere)
    error = np.asarray(guess) + mean - truth
    inside = np.mean(np.abs(error) < 2 * np.asarray(deviation))
    print(
        f"nu {nu:.1f} at {len(truth)} other places: wrong by {1000 * error.std():.0f} m, of "
        f"{1000 * truth.std():.0f} m; {100 * inside:.0f} % within two standard deviations"
    )

    rows, columns = height.shape
    grid = np.stack(np.meshgrid(np.arange(0, columns, 6), np.arange(0, rows, 6)), -1)
    everywhere, _ = predict(places, known - mean, theta, nu, grid.reshape(-1, 2) * spacing)
    image = np.asarray(everywhere).reshape(grid.shape[:2]) + mean
    plot(options.plot, height, spacing, places, image, {nu: fits[nu][1] for nu in fits})
    print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
