# SPDX-License-Identifier: Apache-2.0
"""Our declarations of DLPack against each copy of its header that an installed package brings."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _headers() -> list[Path]:
    """Headers that say their version; others only include one."""
    site = Path(sysconfig.get_path("platlib"))
    found = [*site.rglob("dlpack.h"), *Path("/usr/include").glob("dlpack/dlpack.h")]
    return [
        h for h in sorted(found) if "define DLPACK_MAJOR_VERSION" in h.read_text(errors="replace")
    ]


def test_declarations_are_those_of_the_installed_headers() -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    headers = _headers()
    if not headers:
        pytest.skip("no installed package has DLPack's header (torch has; make frameworks)")
    failed = []
    for header in headers:
        ran = subprocess.run(
            [
                compiler,
                "-std=c++20",
                "-fsyntax-only",
                f"-I{ROOT / 'include'}",
                f'-DJAXBRIDGE_DLPACK_HEADER="{header}"',
                str(ROOT / "tests/compile/abi_dlpack.cpp"),
            ],
            capture_output=True,
            text=True,
        )
        if ran.returncode != 0:
            version = re.findall(r"define DLPACK_M\w+_VERSION (\d+)", header.read_text())
            failed.append(f"{header} (DLPack {'.'.join(version)}):\n{ran.stderr}")
    assert not failed, "\n".join(failed)
