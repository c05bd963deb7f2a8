# SPDX-License-Identifier: Apache-2.0
"""Programs that leave the process: jax.export, and the persistent compile cache."""

import importlib
import inspect
import json
import os
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
import processes
from jaxbridge import _core, errors

LIBRARY = inspect.cleandoc("""
    import enum, functools
    import jax, jaxbridge, numpy as np

    class Color(enum.Enum):
        RED = 1

    def like(x, *rest, **kw):
        return x

    def twice(v, k=2):
        return v * k

    def rotate(v):
        return v * v.dtype.type(1j)

    def helper(v):
        return v + 100

    def with_statics(v, options, *, mode, then):
        return then(v * options["n"][0]) + (10 if mode is Color.RED else 20)

    def two(v):
        return v + 1, {"sum": v.sum()}

    def update(state, v):
        state += v

    @jaxbridge.function(result=like)
    def decorated(v):
        return v + 5

    def closure(cell):
        return lambda v: v + cell[0]

    by_name = jaxbridge.call(lambda v: v + 7, like, name="library.seven")
    captures = jaxbridge.call(closure([9]), like, name="library.captures")
    by_out = jaxbridge.call(
        lambda v, *, out: np.add(v, 1, out=out), like, out="out", name="library.out"
    )
    platforms = jaxbridge.call({"cpu": twice, "cuda": helper}, like)
    """)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("programs")
    (place / "a_program_library.py").write_text(LIBRARY)
    return place


@pytest.fixture(scope="module")
def library(folder):
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module("a_program_library")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["a_program_library"]


def export(f, *args, **options):
    checks = jaxbridge.export_checks()
    return jax.export.export(jax.jit(f), disabled_checks=checks, **options)(*args)


def programs(library):
    """Name: (program, its operands, the result)."""
    call, like = jaxbridge.call, library.like
    x = jnp.arange(3, dtype=jnp.float32)
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return {
        "def": (call(library.twice, like), [x], [0, 2, 4]),
        "default": (lambda v: call(library.twice, like)(v, k=5), [x], [0, 5, 10]),
        "decorated": (library.decorated, [x], [5, 6, 7]),
        "named lambda": (library.by_name, [x], [7, 8, 9]),
        "named closure": (library.captures, [x], [9, 10, 11]),
        "out": (library.by_out, [x], [1, 2, 3]),
        "ufunc": (call(np.square, like), [x], [0, 1, 4]),
        "complex": (call(library.rotate, like), [x.astype(jnp.complex64)], [0, 1j, 2j]),
        "statics": (
            lambda v: call(library.with_statics, like)(
                v, {"n": (3, None)}, mode=library.Color.RED, then=library.helper
            ),
            [x],
            [110, 113, 116],
        ),
        "tree": (
            lambda v: call(library.two, lambda u: (u, {"sum": result}))(v)[1]["sum"][None],
            [x],
            [3],
        ),
        "in place": (call(library.update, like, inout={0: 0}), [x, x], [0, 2, 4]),
        "vmap": (
            jax.vmap(call(library.twice, like, vmap_method="sequential")),
            [x[:, None]],
            [[0], [2], [4]],
        ),
        "scan": (
            lambda v: jax.lax.scan(
                lambda c, _: (call(library.decorated.callee.functions["cpu"], like)(c), None),
                v,
                None,
                3,
            )[0],
            [x],
            [15, 16, 17],
        ),
        "platforms": (library.platforms, [x], [0, 2, 4]),
    }


RUN = """
    import json, sys, pathlib
    import numpy as np
    import jax, jax.export, jax.numpy as jnp, jaxbridge
    {before}
    folder = pathlib.Path(sys.argv[1])
    outcomes = {{}}
    for file in sorted(folder.glob("*.exported")):
        operands = [np.load(f) for f in sorted(folder.glob(file.stem + ".*.npy"))]
        program = jax.export.deserialize(bytearray(file.read_bytes()))
        try:
            y = np.asarray(program.call(*operands))
            outcomes[file.stem] = [str(y.dtype), *np.stack([y.real, y.imag]).tolist()]
        except jax.errors.JaxRuntimeError as error:
            outcomes[file.stem] = str(error)
    print(json.dumps(outcomes))
    """


@pytest.fixture(scope="module")
def exported(library, tmp_path_factory):
    """A folder with all programs, serialised."""
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, which jax.export serialises with")
    place = tmp_path_factory.mktemp("exported")
    for name, (f, operands, _) in programs(library).items():
        (place / f"{name}.exported").write_bytes(export(f, *operands).serialize())
        for i, operand in enumerate(operands):
            np.save(place / f"{name}.{i}.npy", operand)
    return place


def outcomes_of(exported, before, **options):
    done = processes.run(RUN.format(before=before), exported, devices=1, **options)
    return json.loads(done.stdout)


def test_exported_programs_run_where_the_module_is_imported(exported, library, folder):
    outcomes = outcomes_of(exported, "import a_program_library", path=folder)
    for name, (_, operands, want) in programs(library).items():
        dtype = str(operands[0].dtype)
        y = np.asarray(want, dtype)
        assert outcomes[name] == [dtype, y.real.tolist(), y.imag.tolist()], name


def test_exported_programs_say_which_module_is_missing(exported, library, folder):
    outcomes = outcomes_of(exported, "", path=folder)
    assert outcomes.pop("ufunc")[1] == [0, 1, 4], "NumPy is there always"
    assert len(outcomes) == len(programs(library)) - 1
    for name, text in outcomes.items():
        assert "NOT_FOUND" in text and "not registered in this process" in text, (name, text)
        assert "import a_program_library" in text or (
            "'a_program_library' is not imported in this process; import it first" in text
        ), (name, text)


CHANGES = {
    "def": ("v * k", "v * k + 0"),
    "default": ("k=2", "k=3"),
    "decorated": ("v + 5", "v + 6"),
    "named lambda": ("v + 7", "v + 8"),
    "named closure": ("v + cell[0]", "v - cell[0]"),
    "out": ('like, out="out"', "like, out=-1"),
    "statics": ("v + 100", "v + 101"),  # the function among the arguments
    "complex": ("def rotate", "def turn"),
    "tree": ("def two(v):", "def two(v, k=1):"),
    "in place": ("state += v", "state -= v"),
    "platforms": ('"cuda": helper', '"cuda": two'),
}


def test_exported_programs_never_find_a_wrong_function(exported, tmp_path):
    """With other code in the second process, each program is refused, and says why."""
    source = LIBRARY
    for old, new in CHANGES.values():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "a_program_library.py").write_text(source)
    outcomes = outcomes_of(exported, "import a_program_library", path=tmp_path)
    assert outcomes.pop("ufunc")[1] == [0, 1, 4]
    for name, text in outcomes.items():
        assert isinstance(text, str), (name, text)
        assert "NOT_FOUND" in text
        if name == "complex":
            assert "has no 'rotate'" in text
        elif name == "statics":
            assert "'a_program_library:helper', one of its arguments, has other code here" in text
        elif name == "out":
            assert "whose framework=, out=, graph= or scratch= in this process is not" in text
        else:
            assert "whose code in this process is not the one that" in text, (name, text)


def test_only_what_changed_is_refused(exported, tmp_path, library):
    source = LIBRARY.replace("v + 5", "v + 6").replace("import enum", "# a comment\nimport enum")
    (tmp_path / "a_program_library.py").write_text(source)
    outcomes = outcomes_of(exported, "import a_program_library", path=tmp_path)
    refused = {name for name, outcome in outcomes.items() if isinstance(outcome, str)}
    assert refused == {"decorated", "scan"}


def test_for_several_platforms_on_a_machine_without_them(library):
    x = jnp.arange(3, dtype=jnp.float32)
    for f in (jaxbridge.call(library.twice, library.like), library.platforms, library.by_name):
        program = export(f, x, platforms=("cpu", "cuda"))
        assert program.platforms == ("cpu", "cuda")
        assert program.mlir_module().count("custom_call @jaxbridge.call") == 1
        assert program.call(x).shape == (3,)


def test_a_text_that_was_changed_is_refused():
    """Any change: it may name another argument, value or function."""
    pytest.importorskip("flatbuffers", reason="needs flatbuffers, which jax.export serialises with")
    processes.run("""
        import jax, jax.export, jax.numpy as jnp, jaxbridge

        f = jaxbridge.call(lambda v, w, k: v + w * k, lambda v, w, k: v, name="added")
        x = jnp.ones(4)
        exported = jax.export.export(
            jax.jit(lambda a, b: f(a, b, 3)), disabled_checks=jaxbridge.export_checks()
        )(x, x)
        program = bytes(exported.serialize())
        for old, new in [
            (b'["slot",1]', b'["slot",9]'),
            (b'["slot",1]', b'["slot",0]'),
            (b'["int","3"]', b'["int","7"]'),
            (b'"operands":2', b'"operands":9'),
            (b'"operands":2', b'"operands"\\xff2'),
        ]:
            assert program.count(old) == 1, old
            f.clear()
            jax.clear_caches()
            changed = jax.export.deserialize(bytearray(program.replace(old, new)))
            try:
                changed.call(x, x).block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                assert "damaged" in str(error), error
            else:
                raise AssertionError(new)
        assert float(jax.export.deserialize(bytearray(program)).call(x, x)[0]) == 4
    """)


def test_symbolic_shapes(library):
    (n,) = jax.export.symbolic_shape("n")
    f = jaxbridge.call(library.twice, library.like)
    program = export(f, jax.ShapeDtypeStruct((n,), jnp.float32))
    for size in range(1, 70):  # more than there are plans kept
        x = jnp.arange(size, dtype=jnp.float32)
        np.testing.assert_array_equal(program.call(x), 2 * np.arange(size))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: jaxbridge.call(lambda v: v, m.like),
        lambda m: jaxbridge.call(m.closure([1]), m.like),
        lambda m: lambda v: jaxbridge.call(m.with_statics, m.like)(v, 1, mode=object(), then=id),
    ],
    ids=["lambda", "closure", "static object"],
)
def test_anonymous_functions_are_refused_at_export(library, make):
    x = jnp.arange(3, dtype=jnp.float32)
    text = (
        r"anonymous function cannot be exported.*no other process could find it.*name=|has no text"
    )
    with pytest.raises(NotImplementedError, match=text):
        export(make(library), x)


def test_without_export_checks_jax_refuses(library):
    x = jnp.arange(3, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"custom calls? .*jaxbridge\.call|jaxbridge\.call"):
        jax.export.export(jax.jit(library.by_name))(x)
    checks = jaxbridge.export_checks()
    assert checks and all(isinstance(c, jax.export.DisabledSafetyCheck) for c in checks)


def test_an_exported_program_in_the_process_that_made_it(library):
    x = jnp.arange(3, dtype=jnp.float32)
    for name, (f, operands, want) in programs(library).items():
        program = export(f, *operands)
        np.testing.assert_array_equal(program.call(*operands), want, err_msg=name)
        np.testing.assert_array_equal(jax.jit(program.call)(*operands), want, err_msg=name)
    assert x.shape == (3,)


def test_named_functions_live_on(library, collected):
    x = jnp.arange(3, dtype=jnp.float32)
    program = export(jaxbridge.call(library.twice, library.like), x)
    collected()
    np.testing.assert_array_equal(program.call(x), [0, 2, 4])
    size = _core.registry_size()
    collected()
    assert _core.registry_size() == size


def test_errors_of_exported_programs_can_be_raised_again(library):
    def fail(v):
        raise ZeroDivisionError("from a program")

    fail.__qualname__ = "fail"
    f = jaxbridge.call(fail, library.like, name="fails in a program")
    x = jnp.arange(3, dtype=jnp.float32)
    program = export(f, x)
    with pytest.raises(ZeroDivisionError, match="from a program"), jaxbridge.reraise():
        jax.block_until_ready(program.call(x))


def test_resolver_names_what_is_missing():
    from jaxbridge import _programs, _spec

    spec = {
        "durable": True, "named": True, "name": "lost", "modules": ["a_lost_module"], "references": {},
    }  # fmt: skip
    with pytest.raises(errors.NotRegisteredError, match="'lost'.*import a_lost_module first"):
        _programs._resolve(_spec.key_of(json.dumps(spec)), json.dumps(spec))
    spec |= {"named": False, "references": {"cpu": "a_lost_module:f"}}
    with pytest.raises(errors.NotRegisteredError, match="'a_lost_module' is not imported"):
        _programs._resolve(_spec.key_of(json.dumps(spec)), json.dumps(spec))


# ---- the persistent compile cache ----------------------------------------------------------------

CACHED = """
    import json, sys
    import jax
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    import jax.numpy as jnp
    import jaxbridge
    import a_program_library as m

    events = []
    jax.monitoring.register_event_listener(lambda event, **kw: events.append(event))
    x = jnp.arange(3, dtype=jnp.float32)
    outcomes = {}

    def run(name, f):
        f.__name__ = {"again": "named"}.get(name, name.split()[0])  # the cache's files show it
        events.clear()
        value = jax.jit(f)(x).tolist()
        hits = sum(e.endswith("/cache_hits") for e in events)
        misses = sum(e.endswith("/cache_misses") for e in events)
        outcomes[name] = [value, hits, misses]

    run("def", lambda v: jaxbridge.call(m.twice, m.like)(v))
    run("named", lambda v: m.by_name(v))
    run("captures", lambda v: m.captures(v))
    run("statics", lambda v: jaxbridge.call(m.with_statics, m.like)(v, {"n": (3,)}, mode=1, then=m.helper))
    offset = [1 if "other" in sys.argv else 2]
    run("anonymous", lambda v: jaxbridge.call(m.closure(offset), m.like)(v))
    jax.clear_caches()
    run("again", lambda v: m.by_name(v))
    run("anonymous again", lambda v: jaxbridge.call(m.closure(offset), m.like)(v))
    print(json.dumps(outcomes))
    """


def test_the_persistent_cache_hits_in_another_process(folder, tmp_path):
    """And it never finds a wrong function: other code is another entry."""
    cache, changed = tmp_path / "cache", tmp_path / "changed"
    changed.mkdir()
    (changed / "a_program_library.py").write_text(
        LIBRARY.replace("v * k", "v * k + 50").replace("v + cell[0]", "v - cell[0]")
    )

    def run(path, *args):
        done = processes.run(CACHED, cache, *args, path=path, devices=1)
        return json.loads(done.stdout)

    first = run(folder)
    files = set(os.listdir(cache))
    assert first["def"] == [[0, 2, 4], 0, 1] and first["named"] == [[7, 8, 9], 0, 1]
    assert first["captures"] == [[9, 10, 11], 0, 1] and first["statics"][1:] == [0, 1]
    assert first["anonymous"][:2] == [[2, 3, 4], 0]
    assert first["again"] == [[7, 8, 9], 1, 0]

    second = run(folder, "other")
    for name in ("def", "named", "captures", "statics"):
        assert second[name] == [first[name][0], 1, 0], name
    # An anonymous function that captures what can change is found in no other process.
    assert second["anonymous"][:2] == [[1, 2, 3], 0]
    assert second["anonymous again"][0] == [1, 2, 3]
    before, new = (
        {name.split("-")[0] for name in names}  # without the hash, whose digits can spell "def"
        for names in (files, set(os.listdir(cache)) - files)
    )
    assert {"jit_def", "jit_named"} <= before and not {"jit_def", "jit_named"} & new

    third = run(changed)
    assert third["def"] == [[50, 52, 54], 0, 1]
    assert third["captures"] == [[-9, -8, -7], 0, 1]
    assert third["named"] == [[7, 8, 9], 1, 0]
