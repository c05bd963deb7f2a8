# SPDX-License-Identifier: Apache-2.0
"""Where native authors find the headers and the CMake package."""

from pathlib import Path

_package = Path(__file__).parent


def get_include() -> str:
    """The include directory: compile with -I of it, and include <jaxbridge/jaxbridge.hpp>.

    Raises:
        FileNotFoundError: this installation has no headers.
    """
    for directory in (
        _package / "include",
        _package.parents[1] / "include",
    ):  # installed, a checkout
        if (directory / "jaxbridge/jaxbridge.hpp").is_file():
            return str(directory)
    raise FileNotFoundError(f"there are no headers beside {_package}; install jaxbridge's wheel")


def get_cmake_dir() -> str:
    """The directory of the CMake package: -Djaxbridge_DIR of it, then find_package(jaxbridge).

    Raises:
        FileNotFoundError: this installation has none, as a checkout that is not installed.
    """
    directory = _package / "cmake"
    if not (directory / "jaxbridgeConfig.cmake").is_file():
        raise FileNotFoundError(
            f"there is no CMake package in {directory}; install jaxbridge's wheel"
        )
    return str(directory)
