# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxbridge`."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxbridge import _diagnostics

_sections = [
    "versions",
    "driver",
    "devices",
    "ffi",
    "frameworks",
    "environment",
    "calls",
    "loaded",
    "hints",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxbridge", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_text_shows_versions_and_a_call() -> None:
    done = run(JAXBRIDGE_DEBUG="1")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{s}:" for s in _sections]
    assert f"  jax: {jax.__version__}" in lines
    assert "  JAXBRIDGE_DEBUG: 1" in lines
    assert any(line.startswith("  numpy on cpu: ok, ") for line in lines)


@pytest.fixture(scope="module")
def found() -> Any:
    """The report of a machine that has no driver."""
    done = run("--json", JAXBRIDGE_CUDA_DRIVER="/nowhere/libcuda.so.1")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_json_is_the_same_report(found: Any) -> None:
    assert list(found) == _sections
    assert found["versions"]["jaxbridge"] == importlib.metadata.version("jaxbridge")
    assert found["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"
    numpy = next(call for call in found["calls"] if call["framework"] == "numpy")
    assert numpy["platform"] == "cpu"
    assert numpy["ok"] is True
    assert numpy["seconds"] > 0


def test_handler_versions_fit_jaxlib() -> None:
    found = _diagnostics.report()["ffi"]
    header = found["jaxlib's header"]
    assert header.startswith("0.")
    if found["runtime"].startswith("0."):
        assert found["runtime"] == header
        answered = found["answered by jaxbridge"].partition(".")[2]
        assert int(answered) <= int(header.partition(".")[2])


def test_machine_without_cuda_says_so(found: Any) -> None:
    assert found["driver"]["devices"] == 0
    assert "no CUDA driver" in found["driver"]["error"]
    assert "/nowhere/libcuda.so.1" in found["driver"]["error"]
    assert list(found["devices"]) == ["cpu"]
    assert "no CUDA here: calls run on the CPU" in found["hints"]


@pytest.mark.parametrize("section", _sections)
def test_probe_that_raises_is_reported(
    section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Any:
        raise OSError("the probe's own fault")

    monkeypatch.setattr(_diagnostics, "_calls_to_make", lambda: [("cpu", "numpy")])
    monkeypatch.setitem(_diagnostics._probes, section, broken)
    status = _diagnostics.main([])
    text = capsys.readouterr().out
    assert f"{section}:\n  error: OSError: the probe's own fault" in text
    assert [line for line in text.splitlines() if line[:1] != " "] == [f"{s}:" for s in _sections]
    # Only calls that were made tell that all is well.
    assert status == (1 if section == "calls" else 0)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_failed_call_is_shown_and_is_the_exit_status(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: Any) -> Any:
        raise ValueError("no such call")

    monkeypatch.setattr(_diagnostics, "_plus_one", broken)
    monkeypatch.setattr(_diagnostics, "_calls_to_make", lambda: [("cpu", "numpy")])
    assert _diagnostics.main(arguments) == 1
    text = capsys.readouterr().out
    assert "no such call" in text
    if arguments:
        assert json.loads(text)["calls"][0]["ok"] is False
    else:
        assert "numpy on cpu: FAILED: " in text


def test_wrong_value_is_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnostics, "_calls_to_make", lambda: [("cpu", "numpy")])
    monkeypatch.setattr(_diagnostics.np, "array_equal", lambda a, b: False)
    (call,) = _diagnostics.report()["calls"]
    assert not call["ok"]
    assert "expected" in call["error"]


def test_no_call_at_all_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_diagnostics, "_calls_to_make", list)
    assert _diagnostics.main([]) == 1


def test_two_cupy_distributions_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    both = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: both.get(name) or version(name))
    assert _diagnostics._frameworks()["cupy"] == both
    (hint,) = [h for h in _diagnostics._hints() if "overwrite" in h]
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in hint


def test_unknown_argument_is_refused() -> None:
    done = run("--jsn")
    assert done.returncode == 2
    assert "--jsn" in done.stderr


def test_loaded_cuda_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = """
7f00-7f01 r--p 00000000 08:01 1    /a place/lib/libcudart.so.12
7f01-7f02 r-xp 00001000 08:01 1    /a place/lib/libcudart.so.12
7f03-7f04 r-xp 00000000 08:01 2    /usr/lib/libcuda.so.550.54
7f05-7f06 r-xp 00000000 08:01 3    /b/libcudnn_graph.so.9
7f07-7f08 r-xp 00000000 08:01 4    /b/libcudart-1a2b.so.12.4
7f09-7f0a r-xp 00000000 08:01 5    /b/libcudata.so.1
7f0b-7f0c rw-p 00000000 00:00 0
7f0d-7f0e r-xp 00000000 08:01 6    /b/libc.so.6"""
    monkeypatch.setattr(Path, "read_text", lambda self, **kw: maps.strip())
    assert _diagnostics._loaded() == {
        "default backend": "cpu",
        "CUDA libraries": [
            "/a place/lib/libcudart.so.12",
            "/b/libcudart-1a2b.so.12.4",
            "/b/libcudnn_graph.so.9",
            "/usr/lib/libcuda.so.550.54",
        ],
    }
