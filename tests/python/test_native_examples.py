# SPDX-License-Identifier: Apache-2.0
"""G08: the examples of native functions are compiled and run."""

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge.testing import external_calls
from native_libraries import compiler
from test_examples import run

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


# ---- what people would write -----------------------------------------------------------------------


def script(path):
    """An example, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, examples / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stencil(tmp_path):
    out = run("stencil.py", tmp_path, "--size", "32", "--steps", "300")
    assert float(re.search(r"after 100 steps: (\S+)", out)[1]) < 1e-6
    stencil = script("stencil.py")
    field = jax.ShapeDtypeStruct((20, 50), np.float32)
    loop = jax.jit(lambda u, v: stencil.simulate(u, v, 10))
    (call,) = external_calls(loop, field, field, platform="cuda")
    assert call.name == "gray_scott" and call.results == ("float32[20,50]",) * 2
    assert external_calls(loop, field, field, platform="cpu") == []
    with contextlib.suppress(ImportError):  # is it CUDA C++?
        import cuda.core  # noqa: F401

        from jaxbridge import _device_code

        image = _device_code._with_cuda_core(stencil.SOURCE, "gray_scott", (), "sm_90")
        assert image[:4] == b"\x7fELF"


def build(source, directory, *options):
    command = [compiler(), "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
    library = directory / f"lib{Path(source).stem}.so"
    command += [
        f"-I{jaxbridge.get_include()}",
        str(examples / source),
        *options,
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No such file or directory" in done.stderr or "cannot find -l" in done.stderr:
        pytest.skip(f"needs what {source} includes: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return library


def test_fftw(tmp_path):
    library = build("fftw/dst.cpp", tmp_path, "-lfftw3")
    out = run("fftw/poisson.py", tmp_path, "--library", str(library), "--size", "31")
    before, after = map(float, re.search(r"misfit (\S+) -> (\S+)", out).groups())
    assert after < before / 10
    with jax.enable_x64(True):
        f = np.random.default_rng(0).normal(size=(7, 12))
        dst = jaxbridge.load(library).dst
        np.testing.assert_allclose(dst(dst(f)) / (4 * 8 * 13), f, atol=1e-12)
        k = np.arange(1, 8)
        line = np.sin(np.pi * np.outer(k, k) / 8) * 2
        np.testing.assert_allclose(dst(f[:, :7]), line @ f[:, :7] @ line, atol=1e-11)


def test_sparse(tmp_path):
    pytest.importorskip("scipy")
    out = run("sparse/conductivity.py", tmp_path, "--size", "12")
    before, after = map(float, re.search(r"misfit (\S+) -> (\S+)", out).groups())
    assert after < before / 10
    sparse = script("sparse/conductivity.py")
    pattern = sparse.Pattern(np.array([0, 0, 1, 2, 2]), np.array([2, 0, 1, 0, 2]))
    solve = sparse.solver(None)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        values, b = jnp.asarray(rng.normal(size=5)), jnp.asarray(rng.normal(size=3))

        def with_jax(values, b):
            dense = jnp.zeros((3, 3)).at[pattern.rows, pattern.columns].set(values)
            return jnp.linalg.solve(dense, b)

        mine = jax.grad(lambda v, b: (solve(pattern, v, b) ** 2).sum(), (0, 1))(values, b)
        theirs = jax.grad(lambda v, b: (with_jax(v, b) ** 2).sum(), (0, 1))(values, b)
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9)
