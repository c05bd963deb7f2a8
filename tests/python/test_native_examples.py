# SPDX-License-Identifier: Apache-2.0
"""G08: the examples of native functions are compiled and run."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxbridge
from native_libraries import compiler

examples = Path(__file__).parents[2] / "examples"
X = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)


def expected(x, decay):
    y = np.zeros_like(x)
    last = np.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        y[:, t] = last = x[:, t] + decay * last
    return y


def package(directory, library):
    """The package of examples/native, with its library in place."""
    target = directory / "jb_ops"
    shutil.copytree(examples / "native/src/jb_ops", target)
    shutil.copyfile(library, target / "libops.so")
    spec = importlib.util.spec_from_file_location("jb_ops", target / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    module.__package__ = "jb_ops"
    sys.modules["jb_ops"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def by_one_line(tmp_path_factory):
    """The library, by the line that the project's CMakeLists.txt shows."""
    compiler()
    line = re.search(r"^#   (g\+\+ .*)$", (examples / "native/CMakeLists.txt").read_text(), re.M)[1]
    line = re.sub(r"\"\$\(.*?\)\"", jaxbridge.get_include(), line)
    directory = tmp_path_factory.mktemp("one_line")
    shutil.copyfile(examples / "native/ops.cpp", directory / "ops.cpp")
    subprocess.run(line.split(), cwd=directory, check=True)
    return directory / "libops.so"


def test_G08_a_documented_project_is_built_and_called(by_one_line, tmp_path):
    ops = jaxbridge.load(by_one_line)
    np.testing.assert_allclose(ops.filter(X, decay=0.5), expected(X, 0.5), rtol=1e-5)
    module = package(tmp_path, by_one_line)
    f = jax.jit(lambda x: (module.filter(x, 0.5) ** 2).sum())
    gradient = jax.grad(f)(X)
    step = np.zeros_like(X)
    step[3, 7] = 1
    # Twice the transpose, at the result.
    np.testing.assert_allclose(
        gradient[3, 7], (2 * expected(X, 0.5) * expected(step, 0.5)).sum(), rtol=1e-4
    )


def test_cmake_project(tmp_path):
    compiler()
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake, which is not installed")
    try:
        directory = jaxbridge.get_cmake_dir()
    except FileNotFoundError as error:
        pytest.skip(f"needs jaxbridge as it is installed: {error}")
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(examples / "native"), "-B", str(build)]
    subprocess.run([*configure, f"-Djaxbridge_DIR={directory}"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    ops = jaxbridge.load(build / "libops.so")
    np.testing.assert_allclose(ops.filter(X, decay=0.5), expected(X, 0.5), rtol=1e-5)
    subprocess.run(
        ["cmake", "--install", str(build), "--prefix", str(tmp_path / "wheel")], check=True
    )
    assert (tmp_path / "wheel/jb_ops/libops.so").exists()
