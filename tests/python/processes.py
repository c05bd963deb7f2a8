# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in processes of their own."""

import os
import subprocess
import sys
import textwrap
from typing import Any

devices_flag = "--xla_force_host_platform_device_count"


def run(
    source: str,
    *args: Any,
    devices: int = 2,
    env: dict[str, str] | None = None,
    path: Any = None,
    timeout: float = 90,
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with this process's packages.

    Args:
        source: the program; it may be indented.
        args: its arguments.
        devices: how many virtual CPU devices it has.
        env: more environment variables.
        path: a directory from which it can import too.
        timeout: seconds after which it counts as hanging.
        status: the exit status that is asserted; None for any.
    """
    places = [str(path)] if path is not None else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*places, *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{devices_flag}={devices}",
        **(env or {}),
    }
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source), *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if status is not None:
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
