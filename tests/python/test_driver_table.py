# SPDX-License-Identifier: Apache-2.0
"""The driver functions that the core declares, against CUDA's own typedefs, where a toolkit is installed.

cuGetProcAddress goes by the symbol and a version, and a later CUDA can mean another function by the name
that C sources use: cuGraphInstantiate is one with five parameters there, and one with three in cuda.h.
"""

import glob
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "src/core/cuda/driver.hpp"


def declared():
    """(name, version, parameter types) of each entry of the table."""
    text = re.sub(r"\\\n", " ", HEADER.read_text())
    start = text.index("#define JAXBRIDGE_CUDA_DRIVER_FUNCTIONS(X)")
    body = text[start : text.index("\n", start)]
    for name, version, rest in re.findall(r"X\((\w+), (\d+),\s*\(([^()]*)\)\)", body):
        yield name, int(version), types_of(rest)


def types_of(parameters):
    out = []
    for p in parameters.split(","):
        p = re.sub(r"\s+", " ", p).strip()
        if p in ("", "void"):
            continue
        stars = p.count("*")
        words = [w for w in p.replace("*", " ").split() if w not in ("const", "struct")]
        kinds = {
            "std::size_t": "size_t",
            "std::uint64_t": "cuuint64_t",
            "CUDA_MEMCPY3D_v2": "CUDA_MEMCPY3D",
        }
        type_words = (
            words[:-1] if len(words) > 1 and words[-1] not in ("int", "long", "char") else words
        )
        kind = " ".join(kinds.get(w, w) for w in type_words)
        # Versions of pointers and enumerations by name; the width is the same.
        kind = re.sub(r"_v\d+$", "", kind)
        out.append(kind + "*" * stars)
    return out


def typedefs():
    found = sorted(glob.glob("/usr/local/cuda*/include/cudaTypedefs.h"))
    found += glob.glob("/usr/include/cudaTypedefs.h")
    if not found:
        pytest.skip("needs cudaTypedefs.h of a CUDA toolkit, and none is installed")
    text = Path(found[-1]).read_text()
    table = {}
    pattern = r"typedef CUresult \(CUDAAPI \*PFN_(\w+?)_v(\d+)\)\s*\(([^;]*)\);"
    for name, version, parameters in re.findall(pattern, text):
        table.setdefault(name, {})[int(version)] = types_of(parameters)
    return table


def test_the_table_is_read():
    table = {name: types for name, _, types in declared()}
    assert len(table) > 40
    assert table["cuGraphLaunch"] == ["CUgraphExec", "CUstream"]
    assert table["cuCtxSynchronize"] == []
    assert table["cuMemAlloc"] == ["CUdeviceptr*", "size_t"]


def test_every_function_has_the_parameters_of_its_version():
    table = typedefs()
    for name, version, types in declared():
        versions = [v for v in table[name] if v <= version]
        assert versions, f"{name}: no version of it is as old as {version}: {sorted(table[name])}"
        assert table[name][max(versions)] == types, f"{name} at {version}"
