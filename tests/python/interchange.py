# SPDX-License-Identifier: Apache-2.0
"""What the tests of the exchange share: arrays of every layout, and tables of a page."""

import gc
import importlib.util
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jaxbridge

root = Path(__file__).parents[2]
page = root / "docs/interchange.md"

STANDARD = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
FLOAT8 = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz",
    "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
DTYPES = [*STANDARD, "bfloat16", *FLOAT8]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(name if name in STANDARD else getattr(ml_dtypes, name))


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def memory(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Aligned memory that counts up from 1, as far as the dtype goes."""
    a = jaxbridge.empty(size, dtype)
    numbers = np.arange(1, size + 1) % (2 if dtype.kind == "b" else 8)
    a[...] = numbers.astype(np.float32).astype(dtype)
    return a


# From 64 elements to an array of 2 or 3 axes, in the strides of any library that has views.
LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "row-major": lambda m: m[:24].reshape(4, 6),
    "transposed": lambda m: m[:24].reshape(4, 6).T,
    "permuted": lambda m: m[:24].reshape(2, 3, 4).transpose(2, 0, 1),
    "axes of length 1": lambda m: m[:6].reshape(1, 6, 1)[:, :, ::1],
    "rank 0": lambda m: m[:1].reshape(()),
    "no elements": lambda m: m[:0].reshape(0, 3),
    "strided": lambda m: m[:48].reshape(4, 12)[:, ::2],
    "sliced": lambda m: m[:24].reshape(4, 6)[:, :4],
    "broadcast": lambda m: np.ndarray((3, 4), m.dtype, m, 0, (0, m.itemsize)),
    "negative": lambda m: m[:24].reshape(4, 6)[::-1, ::-1],
    "offset": lambda m: m[1:25].reshape(4, 6),
}
SHARED = frozenset(
    ["row-major", "transposed", "permuted", "axes of length 1", "rank 0", "no elements"]
)
REASONS = {
    "strided": "strided",
    "sliced": "strided",
    "broadcast": "broadcast",
    "negative": "negative",
    "offset": "no multiple of",
}


class Only:
    """An array with one protocol alone."""

    def __init__(self, array: Any, *names: str) -> None:
        self._array = array
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_array") or name not in self.__dict__.get("_names", ()):
            raise AttributeError(name)
        return getattr(self._array, name)


def is_dead(reference: "weakref.ref[Any]") -> bool:
    for _ in range(3):
        if reference() is None:
            return True
        gc.collect()
    return reference() is None


def same_bits(a: Any, b: Any) -> bool:
    """As bytes: a NaN is not equal to itself, and float8 has no comparison everywhere."""
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


# ---- the tables of the page ----------------------------------------------------------------------


def table(columns: Iterable[str], rows: dict[str, dict[str, str]], corner: str) -> str:
    columns = list(columns)
    lines = [
        "| " + " | ".join([corner, *columns]) + " |",
        "|" + "---|" * (len(columns) + 1),
        *(
            "| " + " | ".join([name, *(row[c] for c in columns)]) + " |"
            for name, row in rows.items()
        ),
    ]
    return "\n".join(lines)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {name} -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)


def table_on_page(name: str) -> str:
    found = _place(name).search(page.read_text())
    assert found, f"{page} has no table {name!r}"
    return found[2]


def write_table(name: str, text: str) -> None:
    page.write_text(_place(name).sub(lambda m: m[1] + text + m[3], page.read_text()))


def columns_of(text: str) -> dict[str, list[str]]:
    """A table by columns, under their names; the first one has the names of the rows."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    head, _, *body = lines
    return {name: [row[i] for row in body] for i, name in enumerate(head)}
