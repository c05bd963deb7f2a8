# SPDX-License-Identifier: Apache-2.0
"""What the packaging tests need: the wheel that set-up built, and an almost empty environment."""

import pathlib
import subprocess
import sys
import venv
import zipfile

import pytest

from environments import ROOT, clean_environ, distributions_for


@pytest.fixture(scope="session")
def wheel() -> pathlib.Path:
    wheels = list((ROOT / "build" / "dist").glob("jaxbridge-*.whl"))
    if len(wheels) != 1:
        pytest.fail(f"expected one wheel in build/dist, found {len(wheels)}; run: make setup")
    return wheels[0]


@pytest.fixture(scope="session")
def unpacked(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="session")
def bare_python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An environment that holds jax, numpy, what these require, and the wheel.

    It is made without a network: its site-packages has links to the distributions of the running
    environment, one for each name that they installed, and the wheel is installed by pip.
    """
    directory = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = directory / "lib" / version / "site-packages"
    for distribution in distributions_for("jax", "numpy"):
        tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            source = pathlib.Path(distribution.locate_file(top))
            link = site / top
            if not link.exists():
                link.symlink_to(source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", str(wheel)],
        capture_output=True,
        text=True,
        env=clean_environ(),
    )
    # Not --no-deps: pip finds what the wheel requires among the links, or fails here.
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return python
