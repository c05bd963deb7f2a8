# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases of letter M: programs that were lowered in another process."""

import textwrap

import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxbridge
import processes

LIBRARY = """
    import jaxbridge

    calls = []

    def work(x):
        calls.append(x.shape)
        return x * FACTOR

    def like(x):
        return x

    plain = jaxbridge.call(work, like)
    split = jaxbridge.call(work, like, elementwise=True)
"""
CACHED = """
    import sys
    import jax, numpy as np
    import case_library
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    which, folder, factor = sys.argv[1:]
    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("compilation_cache/cache_hits") else None
    )
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    if which == "split":
        mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))

    def program(x):
        return getattr(case_library, which)(x) + 1

    # Not for what came before.
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    y = jax.jit(program)(x)
    np.testing.assert_array_equal(y, np.asarray(x) * float(factor) + 1)
    assert set(case_library.calls) == {(2, 4) if which == "split" else (8, 4)}
    print(len(hits))
"""


@pytest.fixture
def cached(tmp_path):
    """Runs CACHED in a process of its own; returns the hits and the entries of the cache."""
    folder = tmp_path / "cache"

    def run(which, factor=2):
        library = textwrap.dedent(LIBRARY).replace("FACTOR", str(factor))
        (tmp_path / "case_library.py").write_text(library)
        done = processes.run(CACHED, which, folder, factor, devices=4, path=tmp_path)
        entries = [
            p for p in folder.iterdir() if "program" in p.name and not p.name.endswith("atime")
        ]
        return int(done.stdout), len(entries)

    return run


def test_M01_another_process_hits_the_cache(cached):
    assert cached("plain") == (0, 1)
    assert cached("plain") == (1, 1)
    # Another function is never taken for the one that was compiled.
    assert cached("plain", factor=3) == (0, 2)
    assert cached("plain", factor=3) == (1, 2)


def test_M02_ten_runs_of_a_split_call_make_one_entry(cached):
    assert cached("split") == (0, 1)
    for _ in range(9):
        assert cached("split") == (1, 1)


EXPORTED = """
    import sys
    import jax, jax.export, numpy as np
    import jaxbridge

    what, path = sys.argv[1:]
    x = np.array([1 + 2j, 3 - 1j], np.complex64)
    if what == "export":
        import case_library

        exported = jax.export.export(
            jax.jit(lambda x: case_library.plain(x) + 1), disabled_checks=jaxbridge.export_checks()
        )(x)
        open(path, "wb").write(exported.serialize())
        sys.exit()
    exported = jax.export.deserialize(bytearray(open(path, "rb").read()))
    try:
        exported.call(x).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        assert "not registered in this process" in str(error), error
        assert "'case_library' is not imported" in str(error), error
    else:
        raise AssertionError("found, and never imported")
    import case_library

    np.testing.assert_array_equal(exported.call(x), 2 * x + 1)
"""


def test_M03_an_exported_program_runs_once_the_module_is_imported(tmp_path):
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, which jax.export serialises with")
    library = textwrap.dedent(LIBRARY).replace("FACTOR", "2")
    (tmp_path / "case_library.py").write_text(library)
    for what in ("export", "run"):
        processes.run(EXPORTED, what, tmp_path / "program", path=tmp_path)


def test_M03_an_anonymous_function_is_refused_at_export():
    anonymous = jaxbridge.call(lambda x: x * 2, lambda x: x)
    with pytest.raises(NotImplementedError, match="anonymous function cannot be exported"):
        jax.export.export(jax.jit(anonymous), disabled_checks=jaxbridge.export_checks())(
            jnp.ones(3)
        )
