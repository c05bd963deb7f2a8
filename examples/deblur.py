# SPDX-License-Identifier: Apache-2.0
"""Deblurs a photograph: one jitted loop around an image filter that is not JAX's.

Richardson-Lucy deconvolution with a total-variation prior and Nesterov's acceleration, as one
`lax.scan`. Its forward operator is `uniform_filter`: SciPy's on the CPU, CuPy's on CUDA.
"""

import argparse
import struct
import sys
import time
import zlib
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.ndimage

import jaxbridge

WINDOW = (13, 13, 1)  # of the filter: rows, columns, colours
NOISE = 0.005  # standard deviation; white is 1
PRIOR = 0.003  # weight of the total variation
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
    length = jnp.sqrt(jnp.sum(down**2 + right**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.diff(down / length, axis=0, prepend=0) + jnp.diff(right / length, axis=1, prepend=0)


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


PHOTOGRAPHS = {
    "scikit-image's astronaut": lambda: import_module("skimage.data").astronaut(),
    "scikit-learn's china.jpg": lambda: import_module("sklearn.datasets").load_sample_image(
        "china.jpg"
    ),
    "matplotlib's grace_hopper.jpg": lambda: import_module("matplotlib.image").imread(
        import_module("matplotlib.cbook").get_sample_data("grace_hopper.jpg", asfileobj=False)
    ),
}


def photograph(size: int) -> tuple[np.ndarray, str]:
    """The middle of a photograph that an installed package brings along; values from 0 to 1."""
    failures = ""
    for name, load in PHOTOGRAPHS.items():
        try:
            pixels = np.asarray(load(), np.float32)[..., :3] / 255
        except Exception as error:
            failures += f"\n  {name}: {type(error).__name__}: {error}"
            continue
        side = min(size, *pixels.shape[:2])
        top, left = ((n - side) // 2 for n in pixels.shape[:2])
        return pixels[top : top + side, left : left + side], name
    sys.exit(f"no photograph found: pip install scikit-image pillow{failures}")


def panel(image: np.ndarray, caption: str) -> np.ndarray:
    """An image as bytes under a line of text: five octal digits a character, three pixels each."""
    glyphs = "25755 65656 65556 74647 34553 72227 44447 65555 25552 65655 34216 72222 55557 75557 \
26227 61247 61216 55711 74616 34652 71222 75757 25316 00002 00000".split()
    font = dict(zip("ABDEGILNORSTU0123456789. ", glyphs, strict=True))
    rows = [[int(font[c][row]) * 2 >> b & 1 for c in caption for b in (3, 2, 1, 0)] for row in range(5)]
    scale = max(1, len(image) // 128)
    text = np.kron(rows, np.full((scale, scale, 1), 255, np.uint8))[:, : len(image) - scale]
    ...
