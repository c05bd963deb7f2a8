# SPDX-License-Identifier: Apache-2.0
"""Views of a call's memory end with the call: what is kept is found, and nothing else is."""

import gc
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbridge
from jaxbridge import errors

F32 = jax.ShapeDtypeStruct((4,), jnp.float32)


def like(x, *rest, **kw):
    return x


@pytest.fixture
def x():
    return jnp.arange(4, dtype=jnp.float32)


@pytest.fixture
def kept():
    return []


class Holder:
    pass


def in_generator(v):
    def values():
        yield v
        yield v[1:]

    started = values()
    next(started)
    return started


def in_exception(v):
    return ValueError("holds it", v)


def in_frame(v):
    try:
        raise ValueError
    except ValueError as error:
        return error  # its traceback's frame has v


def in_attribute(v):
    holder = Holder()
    holder.view = v
    return holder


def in_default(v):
    return lambda w=v: w


def in_thread_local(v):
    local = threading.local()
    local.view = v
    return local


KEEPERS = {
    "view": lambda v: v,
    "slice": lambda v: v[1:],
    "reshape": lambda v: v.reshape(2, 2),
    "empty slice": lambda v: v[:0],
    "transpose": lambda v: v.reshape(2, 2).T,
    "as bytes": lambda v: v.view(np.uint8),
    "memoryview": memoryview,
    "ndarray of memoryview": lambda v: np.frombuffer(memoryview(v), np.float32),
    "dlpack": lambda v: np.from_dlpack(v),
    "base": lambda v: v.base,
    "iterator": iter,
    "flat": lambda v: v.flat,
    "masked": lambda v: np.ma.masked_array(v, v > 1),
    "container": lambda v: {"a": [(v,)]},
    "closure": lambda v: lambda: v,
    "default": in_default,
    "attribute": in_attribute,
    "generator": in_generator,
    "exception": in_exception,
    "frame of a caught exception": in_frame,
    "thread-local": in_thread_local,
    "bound method": lambda v: v.sum,
}
COPIES = {
    "copy": lambda v: v.copy(),
    "scalar": lambda v: v[0],
    "computed": lambda v: v + 1,
    "bytes": lambda v: v.tobytes(),
    "list": lambda v: v.tolist(),
    "facts": lambda v: (v.shape, v.dtype, v.strides, v.__array_interface__["data"]),
    "weak reference": weakref.ref,
}


@pytest.mark.parametrize("how", KEEPERS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_kept_view_is_found(x, kept, how, jit):
    def fn(v):
        kept.append(KEEPERS[how](v))
        return v + 1

    f = jaxbridge.call(fn, F32)
    text = r"fn: the function kept a view of argument 0 after it returned.*x\.copy\(\)"
    if jit:
        with pytest.raises(errors.ViewKeptError, match=text), jaxbridge.reraise():
            jax.jit(f)(x)
    else:
        with pytest.raises(errors.ViewKeptError, match=text):
            f(x)
    kept.clear()
    np.testing.assert_array_equal(jaxbridge.call(np.copy, F32)(x), x)


@pytest.mark.parametrize("how", COPIES)
def test_what_is_no_view_may_be_kept(x, kept, how):
    def fn(v):
        kept.append(COPIES[how](v))
        return v + 1

    np.testing.assert_array_equal(jaxbridge.call(fn, F32)(x), np.arange(4) + 1)


@pytest.mark.parametrize(
    "fn",
    [
        lambda v: v,
        lambda v: v[::-1],
        lambda v: v.reshape(2, 2).T.reshape(4),
        lambda v: np.lib.stride_tricks.sliding_window_view(v, 1)[:, 0],
        lambda v: np.frombuffer(memoryview(v), np.float32),
    ],
    ids=["argument", "reversed", "transposed", "windows", "memoryview"],
)
def test_views_may_be_returned(x, fn):
    want = fn(np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(jaxbridge.call(fn, F32)(x), want)


def test_a_reference_cycle_is_no_alarm(x):
    cycles = []

    def fn(v):
        cycle = Holder()
        cycle.view, cycle.self, cycle.frame = v[1:], cycle, sys._getframe()
        cycles.append(weakref.ref(cycle))
        recursive = [v]
        recursive.append(recursive)
        return v + 1

    gc.disable()
    try:
        np.testing.assert_array_equal(jaxbridge.call(fn, F32)(x), np.arange(4) + 1)
    finally:
        gc.enable()
    assert cycles[0]() is None


def test_a_view_that_is_let_go_before_the_end_is_no_alarm(x, kept):
    def fn(v):
        kept.append(v)
        kept.clear()
        finished = in_generator(v)
        next(finished)
        with pytest.raises(StopIteration):
            next(finished)
        kept.append(finished)
        return v + 1

    jaxbridge.call(fn, F32)(x)


# ---- what the error says -------------------------------------------------------------------------


def kept_error(fn, spec, *args, **kwargs):
    options = kwargs.pop("options", {})
    with pytest.raises(errors.ViewKeptError) as caught:
        jaxbridge.call(fn, spec, **options)(*args, **kwargs)
    return str(caught.value)


def test_the_error_names_the_argument(x, kept):
    def fn(a, tree, *, scale, more):
        kept.append((a, tree["b"][1], scale, more["k"], more["n"]))
        return a + 1

    text = kept_error(fn, F32, x, {"b": [x, x]}, scale=x, more={"k": x, "n": 3})
    assert (
        "view of argument 0, argument 1['b'][1], argument more['k'], argument scale after" in text
    )


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_what_is_kept_is_named(x, kept, which):
    def fn(*views):
        kept.append(views[which])
        return views[0] + 1

    assert f"a view of argument {which} after" in kept_error(fn, F32, x, x, x)


def test_kept_results(x, kept):
    def fn(v, *, out):
        out["a"][...] = v
        out["b"][0][...] = v
        kept.append(out["b"][0][1:])

    text = kept_error(fn, {"a": F32, "b": [F32]}, x, options={"out": "out"})
    assert "a view of result['b'][0] after" in text

    def first(out, v):
        kept.append(out)

    assert "a view of result after" in kept_error(first, F32, x, options={"out": 0})
    text = kept_error(first, [F32, F32], x, options={"out": 0})
    assert "a view of result[0], result[1] after" in text


def test_kept_argument_in_place_and_ref(x, kept):
    def fn(state, v):
        kept.append(state)

    text = kept_error(fn, F32, x, x, options={"inout": {0: 0}})
    assert "a view of argument 0 after" in text
    text = kept_error(lambda v, r: kept.append(r), (), x, jax.new_ref(x + 0))
    assert "a view of argument 1 after" in text


def test_buffers_of_a_call_are_revoked(x, kept):
    def fn(v, *, out):
        kept.append((v.base, out.base, v))
        out[...] = v

    kept_error(fn, F32, x, options={"out": "out"})
    for buffer in kept[0][:2]:
        for name in ("pointer", "__array_interface__", "__cuda_array_interface__"):
            with pytest.raises(ValueError, match="ended"):
                getattr(buffer, name)
        with pytest.raises(ValueError, match="ended"):
            buffer.__dlpack__()
        with pytest.raises(ValueError, match="ended"):
            buffer.__dlpack_device__()
        with pytest.raises(BufferError, match="ended"):
            memoryview(buffer)
        assert "ended" in repr(buffer)
        assert buffer.shape == (4,) and buffer.dtype == np.float32


def test_buffer_framework_too(x, kept):
    def fn(b, out):
        kept.append(b)
        np.copyto(np.asarray(out), np.asarray(b))

    with pytest.raises(errors.ViewKeptError, match="argument 0"):
        jaxbridge.call(fn, F32, framework="buffer", out="out")(x)
    with pytest.raises(ValueError, match="ended"):
        kept[0].__dlpack__()


# ---- with exceptions -----------------------------------------------------------------------------


def plain(v):
    part = v[1:]
    raise LookupError(str(part.shape))


def in_helper(v):
    part = v[1:]

    def helper(w):
        again = w[1:]
        raise LookupError(str(again.shape))

    helper(part)


def in_closure(v):
    part = v[1:]

    def helper():
        return part[99], v

    helper()


def in_inner_closure(v):
    def helper():
        return (lambda: v[99])()

    helper()


def in_container_of_closure(v):
    views = {"v": v}

    def helper():
        return views["w"]

    helper()


def in_comprehension(v):
    return [v[i] for i in (1, 99)]


def in_running_generator(v):
    def values():
        for i in (1, 99):
            yield v[i]

    return list(values())


def with_cause(v):
    part = v[1:]
    try:
        in_helper(part)
    except LookupError as error:
        raise LookupError("outer") from error


def with_context(v):
    try:
        in_closure(v)
    except LookupError:
        raise LookupError(str(v.shape))  # noqa: B904


def in_a_group(v):
    def helper(i):
        raise KeyError(v[i])

    caught = []
    for i in range(2):
        try:
            helper(i)
        except KeyError as error:
            caught.append(error)
    raise ExceptionGroup("some", [*caught, ExceptionGroup("more", [caught[0]])])


def in_with(v):
    with np.errstate(all="raise"):
        part = v[1:]
        raise LookupError(str(part.shape))


RAISERS = [
    plain, in_helper, in_closure, in_inner_closure, in_container_of_closure, in_comprehension,
    in_running_generator, with_cause, with_context, in_a_group, in_with,
]  # fmt: skip


@pytest.mark.parametrize("fn", RAISERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_frames_of_an_exception_are_no_alarm(x, fn, jit):
    f = jaxbridge.call(fn, F32)
    with pytest.raises((LookupError, ExceptionGroup)) as caught, jaxbridge.reraise():
        (jax.jit(f) if jit else f)(x)
    assert not isinstance(caught.value, errors.ViewKeptError)
    assert not getattr(caught.value, "__notes__", [])
    assert "kept a view" not in str(caught.value.__context__)


def test_a_view_kept_by_a_function_that_raises_is_a_note(x, kept):
    def fn(v):
        kept.append(v[1:])
        raise LookupError("the reason")

    with pytest.raises(LookupError, match="the reason") as caught:
        jaxbridge.call(fn, F32)(x)
    assert len(caught.value.__notes__) == 1
    assert "kept a view of argument 0" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="ended"):
        _ = kept[0].base.base.pointer


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_locals_of_the_callee_die_with_the_call(x, jit):
    refs = []

    def fn(v):
        thing = Holder()
        thing.view = v[1:]
        refs.append(weakref.ref(thing))
        raise LookupError

    f = jaxbridge.call(fn, F32)
    with pytest.raises((LookupError, jax.errors.JaxRuntimeError)) as caught:
        (jax.jit(f) if jit else f)(x)
    gc.collect()
    assert refs[0]() is None, "although the exception lives"
    del caught


def test_leases_of_calls_inside_a_call(x, kept):
    inner = jax.jit(jaxbridge.call(lambda v: v + 1, like))
    keeper = jaxbridge.call(lambda v: (kept.append(v), v + 1)[1], like)

    def outer(v):
        with pytest.raises(errors.ViewKeptError):
            keeper(x)
        kept.clear()
        return v + np.asarray(inner(x))

    np.testing.assert_array_equal(jaxbridge.call(outer, F32)(x), 2 * np.arange(4) + 1)


def test_leases_of_threads_are_their_own(x, kept):
    barrier = threading.Barrier(2, timeout=30)

    def fn(v):
        barrier.wait()
        if v[0] == 1:
            kept.append(v)
        barrier.wait()
        return v + 1

    f = jax.jit(jaxbridge.call(fn, like))
    outcomes = {}

    def work(i):
        try:
            operand = jax.device_put(jnp.full(3, i, jnp.float32), jax.devices()[i])
            with jaxbridge.reraise():
                outcomes[i] = np.asarray(f(operand)).tolist()
        except errors.ViewKeptError:
            outcomes[i] = "kept"

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert outcomes == {0: [1, 1, 1], 1: "kept"}


def test_an_attribute_error_has_its_object_and_that_is_no_kept_view(x):
    with pytest.raises(AttributeError) as caught:
        jaxbridge.call(lambda v: v.nothing, F32)(x)
    assert not hasattr(caught.value, "__notes__")


class WithAttribute(Exception):
    def __init__(self, value):
        super().__init__("a value is wrong")
        self.value = value


@pytest.mark.parametrize("kind", [ValueError, WithAttribute])
def test_what_an_exception_says_is_no_kept_view(x, kind):
    def fn(v):
        raise kind(v)

    with pytest.raises(kind) as caught:
        jaxbridge.call(fn, F32)(x)
    assert not hasattr(caught.value, "__notes__")


# ---- what is not the call's ----------------------------------------------------------------------


def failing(depth):
    local = ["mine", depth]
    raise KeyError(local)


def innermost(error):
    frames = error.__traceback__
    while frames.tb_next is not None:
        frames = frames.tb_next
    return frames.tb_frame


def test_an_exception_that_is_handled_around_the_call_keeps_its_frames(x, kept):
    def fn(v):
        raise LookupError(str(v.shape))

    def keeper(v):
        kept.append(v)
        try:
            raise LookupError
        except LookupError:
            raise ValueError("of the function")  # noqa: B904

    caught = []
    try:
        failing(1)
    except KeyError as around:
        outer = around
        for f in (fn, keeper):
            try:
                jaxbridge.call(f, F32)(x)
            except Exception as error:
                caught.append(error)
    first, second = caught
    assert type(first) is LookupError and first.__context__ is outer
    assert type(second) is ValueError and type(second.__context__) is LookupError
    assert innermost(outer).f_locals["local"] == ["mine", 1]
    # The exception around the call is no reason to say nothing.
    assert "kept a view of argument 0" in second.__notes__[0]


@pytest.mark.parametrize("how", ["cause", "again"])
def test_an_exception_that_was_made_before_the_call_keeps_its_frames(x, how):
    try:
        failing(1)
    except KeyError as error:
        before = error

    def fn(v):
        part = v[1:]
        if how == "again":
            raise before
        raise ValueError(str(part.shape)) from before

    with pytest.raises((ValueError, KeyError)) as caught:
        jaxbridge.call(fn, F32)(x)
    assert innermost(before).f_locals["local"] == ["mine", 1]
    own = [e.frame for e in caught.traceback if e.name == "fn"]
    assert "part" not in own[0].f_locals


@pytest.mark.parametrize("how", ["cause", "again"])
def test_a_generator_of_the_program_goes_on(x, how):
    def errors_of_work():
        for i in range(3):
            try:
                failing(i)
            except KeyError as error:
                yield error

    def fn(v, error):
        part = v[1:]
        if how == "again":
            raise error
        raise ValueError(str(part.shape)) from error

    f = jaxbridge.call(fn, F32)
    seen = []
    for error in errors_of_work():
        with pytest.raises((ValueError, KeyError)):
            f(x, error)
        seen.append(innermost(error).f_locals["local"])
    assert seen == [["mine", 0], ["mine", 1], ["mine", 2]]


def test_frames_below_the_function_are_cleared_in_causes_too(x):
    def helper(v):
        part = v[1:]
        raise LookupError(str(part.shape))

    def values(v):
        part = v[1:]
        with np.errstate(all="ignore"):
            yield helper(part)

    def fn(v):
        try:
            next(values(v))
        except LookupError as error:
            raise ValueError("the reason") from error

    with pytest.raises(ValueError, match="the reason") as caught:
        jaxbridge.call(fn, F32)(x)
    frames = caught.value.__cause__.__traceback__
    names = []
    while frames is not None:
        names.append(frames.tb_frame.f_code.co_name)
        assert "part" not in frames.tb_frame.f_locals
        frames = frames.tb_next
    assert names == ["fn", "values", "helper"]


# ---- an exception's own code ---------------------------------------------------------------------


class RaisingTraceback(Exception):
    @property
    def __traceback__(self):
        raise RuntimeError("its own code")


class RaisingObject(Exception):
    @property
    def obj(self):
        raise RuntimeError("its own code")


class RaisingNote(Exception):
    def add_note(self, text):
        raise RuntimeError("its own code")


class RaisingNotes(Exception):
    @property
    def __notes__(self):
        raise RuntimeError("its own code")


@pytest.mark.parametrize("kind", [RaisingTraceback, RaisingObject, RaisingNote, RaisingNotes])
@pytest.mark.parametrize("keeps", [False, True])
def test_code_of_the_exception_does_not_replace_it(x, kept, kind, keeps):
    def fn(v):
        if keeps:
            kept.append(v)
        raise kind

    def outcome():
        try:
            jaxbridge.call(fn, F32)(x)
        except Exception as error:
            return type(error)

    assert outcome() is kind


def test_nor_where_the_declared_results_raise_it(x):
    def results(v):
        raise RaisingNote

    with pytest.raises(RaisingNote):
        jaxbridge.call(np.copy, results)(x)


THE_ONE = LookupError("the only one")
KEPT_WITH_IT = []


def raise_the_one(v):
    KEPT_WITH_IT.append(v)
    raise THE_ONE.with_traceback(None)


def test_one_exception_gets_one_note(x):
    f = jaxbridge.call(raise_the_one, F32)
    for _ in range(3):
        with pytest.raises(LookupError):
            f(x)
    KEPT_WITH_IT.clear()
    assert len(THE_ONE.__notes__) == 1
