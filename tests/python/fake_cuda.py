# SPDX-License-Identifier: Apache-2.0
"""The fake CUDA driver of the C++ tests, seen from Python: tests/cpp/fakes/fake_cuda.hpp.

Its "device memory" is any memory of the host, so that what a view of CUDA memory does can be seen without a
GPU: what the driver is asked, which stream waits for which, when an owner goes.
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Any

root = Path(__file__).parents[2]
_header = (root / "tests/cpp/fakes/fake_cuda.hpp").read_text()
# The entries of the table, in order.
_entries = re.findall(
    r"^  [\w:* ]+\(\*(\w+)\)", _header[_header.index("struct control") :], re.MULTILINE
)


def library() -> Path | None:
    """The built fake; None where there is none."""
    if found := os.environ.get("JAXBRIDGE_FAKES"):
        return Path(found, "libfake_cuda.so")
    built = sorted(root.glob("build/*/tests/cpp/libfake_cuda.so"))
    plain = [p for p in built if p.parts[-4] in ("release", "gcc", "clang")]
    return plain[0] if plain else None


class Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("arguments", ctypes.c_uint64 * 5),
        ("result", ctypes.c_int),
    )


class FakeCuda:
    """The control of the instance that JAXBRIDGE_CUDA_DRIVER names."""

    def __init__(self) -> None:
        fake = ctypes.CDLL(os.environ["JAXBRIDGE_CUDA_DRIVER"])
        fake.fake_cuda_control.restype = ctypes.POINTER(ctypes.c_void_p * len(_entries))
        self._table = fake.fake_cuda_control().contents

    def __call__(self, name: str, result: Any, *args: Any) -> Any:
        function = ctypes.CFUNCTYPE(result, *map(type, args))
        return function(self._table[_entries.index(name)])(*args)

    def reset(self, devices: int = 2) -> None:
        self("reset", None, ctypes.c_int(devices))

    def declare(
        self, array: Any, device: int, on_host: bool = False, managed: bool = False
    ) -> None:
        self(
            "declare_memory",
            None,
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            ctypes.c_int(device),
            ctypes.c_bool(on_host),
            ctypes.c_bool(managed),
        )

    def declare_foreign(self, array: Any, device: int) -> None:
        """Memory of a context that is not the device's primary one."""
        context = self("make_context", ctypes.c_void_p, ctypes.c_int(device))
        self(
            "declare_foreign_memory",
            None,
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            ctypes.c_int(device),
            ctypes.c_void_p(context),
        )

    def stream(self, device: int = 0) -> int:
        made = self("make_stream", ctypes.c_void_p, ctypes.c_int(device), ctypes.c_bool(True))
        assert made
        return int(made)

    def fail_next(self, symbol: str) -> None:
        """The next call of that driver function returns CUDA_ERROR_UNKNOWN."""
        name, once = ctypes.c_char_p(symbol.encode()), ctypes.c_long(1)
        self("fail", None, name, once, ctypes.c_int(999), ctypes.c_bool(False))

    def blocked_threads(self) -> int:
        """How many threads are in a call that waits."""
        return int(self("blocked_threads", ctypes.c_int))

    def hold(self, stream: int, how: int) -> None:
        """0: not at all; 2: until it is let go."""
        self("hold_stream", None, ctypes.c_void_p(stream), ctypes.c_int(how))

    def calls(self) -> list[tuple[str, list[int]]]:
        out, one, i = [], Call(), 0
        while self(
            "call_at", ctypes.c_bool, ctypes.c_size_t(i), ctypes.c_void_p(ctypes.addressof(one))
        ):
            out.append((one.name.decode(), list(one.arguments)))
            i += 1
        return out

    def clear_calls(self) -> None:
        self("clear_calls", None)
