# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in processes of their own."""

import concurrent.futures
import os
import socket
import subprocess
import sys
import textwrap
import time
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
    done = _start(source, args, devices, env, path)
    try:
        out, err = done.communicate(timeout=timeout)
    finally:
        done.kill()
    if status is not None:
        assert done.returncode == status, f"status {done.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def run_together(
    source: str,
    count: int,
    *args: Any,
    devices: int = 2,
    env: dict[str, str] | None = None,
    path: Any = None,
    timeout: float = 90,
    status: int | None = 0,
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a Python program in `count` processes at once, which find each other through `jax.distributed`.

    Args:
        source: the program; it may be indented. `connect()` makes it one of the processes, that of number
            `process`; it takes more arguments of `jax.distributed.initialize`.
        count: how many processes.
        args: their arguments.
        devices: how many virtual CPU devices each has.
        env: more environment variables.
        path: a directory from which they can import too.
        timeout: seconds after which they count as hanging, all together.
        status: the exit status that is asserted of each; None for any.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started = []
    try:
        for i in range(count):
            connect = (
                f"lambda **more: jax.distributed.initialize({address!r}, {count}, {i}, **more)"
            )
            head = f"import jax\n\nprocess, connect = {i}, {connect}\n"
            started.append(_start(head + textwrap.dedent(source), args, devices, env, path))
        end = time.monotonic() + timeout
        with concurrent.futures.ThreadPoolExecutor(count) as pool:  # none waits for a full pipe
            outs = list(pool.map(lambda p: p.communicate(timeout=end - time.monotonic()), started))
    finally:
        for process in started:
            process.kill()
    for process, (out, err) in zip(started, outs, strict=True):
        if status is not None:
            assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(started, outs, strict=True)
    ]


def _start(
    source: str, args: Any, devices: int, env: dict[str, str] | None, path: Any
) -> subprocess.Popen[str]:
    places = [str(path)] if path is not None else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*places, *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        # Bytecode is told by size and second: of a module that a test writes twice it can be the old one.
        "PYTHONDONTWRITEBYTECODE": "1",
        "XLA_FLAGS": f"{devices_flag}={devices}",
        **(env or {}),
    }
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(source), *map(str, args)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
