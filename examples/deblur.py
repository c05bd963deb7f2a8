# SPDX-License-Identifier: Apache-2.0
"""Deblurs a photograph: one jitted loop around an image filter that is not JAX's.

Richardson-Lucy deconvolution with a total-variation prior and Nesterov's acceleration, as one
`lax.scan`. Its forward operator is `uniform_filter`: SciPy's on the CPU, CuPy's on CUDA.
"""

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageDraw
import scipy.ndimage

import jaxbridge

WINDOW = (11, 11, 1)  # of the filter: rows, columns, colours
NOISE = 0.003  # standard deviation; white is 1
PRIOR = 0.001  # weight of the total variation
ran_on: set[str] = set()  # what the filter saw when it was called


def blur_on_cpu(image, size, output) -> None:
    scipy.ndimage.uniform_filter(image, size, output=output)
    note(f"scipy.ndimage {scipy.__version__}", image)


def blur_on_cuda(image, size, output) -> None:
    import cupy  # here: a machine without a GPU has no CuPy
    from cupyx.scipy import ndimage

    ndimage.uniform_filter(image, size, output=output)
    note(f"cupyx.scipy.ndimage {cupy.__version__}", image)


def note(library: str, image) -> None:
    where = jaxbridge.current()
    array = f"{type(image).__module__.partition('.')[0]}.{type(image).__name__}"
    ran_on.add(f"{library} on {where.platform}:{where.device}, on {array} in XLA's own memory")


# One function for both platforms.
blur = jaxbridge.call(
    {"cpu": blur_on_cpu, "cuda": blur_on_cuda},
    lambda image, size: jax.ShapeDtypeStruct(image.shape, image.dtype),
    out="output",
    name="blur",
)


def curvature(x):
    """Divergence of the normalised gradient: along it the total variation falls."""
    down, right = jnp.diff(x, axis=0, append=x[-1:]), jnp.diff(x, axis=1, append=x[:, -1:])
    # Not a quotient by sqrt: jitted for the CPU that one is wrong on JAX 0.11.2 (NaN).
    scale = jax.lax.rsqrt(jnp.sum(down**2 + right**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.diff(down * scale, axis=0, prepend=0) + jnp.diff(right * scale, axis=1, prepend=0)


@jax.jit
def iterate(state, observed, steps):
    def step(state, k):
        x, before = state
        z = jnp.maximum(x + k / (k + 3) * (x - before), 1e-4)
        ratio = observed / jnp.maximum(blur(z, WINDOW), 1e-4)
        # The window is symmetric: the filter is its own transpose.
        better = z * blur(ratio, WINDOW) / (1 - PRIOR * curvature(z))
        return (jnp.maximum(better, 1e-4), x), None

    return jax.lax.scan(step, state, steps)[0]


PHOTOGRAPHS = ["skimage/data/astronaut.png", "sklearn/datasets/images/china.jpg"]
PHOTOGRAPHS += ["matplotlib/mpl-data/sample_data/grace_hopper.jpg"]


def photograph(size: int) -> tuple[np.ndarray, str]:
    """The middle of the first photograph that is there, with values from 0 to 1, and its name."""
    for name in PHOTOGRAPHS:
        package, path = name.split("/", 1)
        if (spec := find_spec(package)) and (file := Path(spec.origin).parent / path).exists():
            pixels = np.asarray(PIL.Image.open(file).convert("RGB"), np.float32) / 255
            side = min(size, *pixels.shape[:2])
            top, left = ((n - side) // 2 for n in pixels.shape[:2])
            return pixels[top : top + side, left : left + side], name
    sys.exit(f"none of {', '.join(PHOTOGRAPHS)} is installed: pip install scikit-image")


def write_png(path: Path, images: dict[str, np.ndarray]) -> None:
    """The images side by side, each under its caption."""
    side, bar = len(next(iter(images.values()))), 24
    sheet = PIL.Image.new("RGB", (side * len(images), side + bar))
    for i, (caption, image) in enumerate(images.items()):
        pixels = (np.clip(image, 0, 1) * 255 + 0.5).astype(np.uint8)
        sheet.paste(PIL.Image.fromarray(pixels), (side * i, bar))
        PIL.ImageDraw.Draw(sheet).text((side * i + 6, 6), caption)
    sheet.save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--size", type=int, default=512, help="pixels on a side, at most")
    parser.add_argument("--platform", choices=("cpu", "cuda"), help="default: JAX's own choice")
    parser.add_argument("--output", type=Path, default=Path("deblur.png"))
    options = parser.parse_args()

    truth, name = photograph(options.size)

    def error(x) -> float:
        return float(np.linalg.norm(np.clip(x, 0, 1) - truth) / np.linalg.norm(truth))

    device = jax.devices(options.platform)[0]
    print(f"{name}: {len(truth)} x {len(truth)} pixels in colour, blurred by a window of {WINDOW}")
    print(f"jaxbridge {jaxbridge.__version__}, JAX {jax.__version__} on {device.device_kind}")
    noise = np.random.default_rng(0).normal(0, NOISE, truth.shape).astype(np.float32)
    observed = jnp.clip(blur(jax.device_put(truth, device), WINDOW) + noise, 1e-3, 1)
    state, times = (observed, observed), []
    before = after = error(observed)
    for start in range(0, options.iterations, 10):
        steps = jnp.arange(start, min(start + 10, options.iterations))
        began = time.perf_counter()
        state = jax.block_until_ready(iterate(state, observed, steps))
        times.append((time.perf_counter() - began) / len(steps))
        after = error(state[0])
        print(
            f"{steps[-1] + 1:5} of {options.iterations} iterations, error {after:.4f}", flush=True
        )
    print(f"the filter: {', '.join(sorted(ran_on))}; {blur.stats()['calls']} calls")
    # The first ten are left out: they compile JAX's program and CuPy's kernels.
    print(f"time per iteration: {1e3 * np.median(times[1:] or times or [0]):.2f} ms")
    print(f"relative error: {before:.4f} before, {after:.4f} after")
    images = {
        f"blurred, with noise: error {before:.3f}": np.asarray(observed),
        f"restored: error {after:.3f}": np.asarray(state[0]),
        "original": truth,
    }
    write_png(options.output, images)
    print(f"before, after and the original: {options.output}")
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
