# SPDX-License-Identifier: Apache-2.0
"""The options of `call`: what they may be, and their checks."""

import dataclasses
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

Platform = Literal["cpu", "cuda"]
platforms: tuple[Platform, ...] = ("cpu", "cuda")
# Where a call with that framework can run. NumPy on CUDA works on a copy on the host.
frameworks: dict[str, tuple[Platform, ...]] = {
    "numpy": ("cpu", "cuda"),
    "cupy": ("cuda",),
    "torch": ("cpu", "cuda"),
    "numba": ("cpu", "cuda"),
    "warp": ("cpu", "cuda"),
    "buffer": ("cpu", "cuda"),
}
vmap_methods = (
    "sequential",
    "sequential_unrolled",
    "expand_dims",
    "broadcast_all",
    "batched",
)
# Those with which the function gets whole batches.
whole_batch_methods = ("expand_dims", "broadcast_all", "batched")
graph_modes = ("off", "replay", "verify", "xla")
scratch_modes = (None, "xla")
# Frameworks whose temporaries can come from XLA's memory.
scratch_frameworks = ("cupy", "torch")
default_frameworks = {"cpu": "numpy", "cuda": "cupy"}


def per_platform(value: Any, what: str, name: str) -> dict[str, Any]:
    """`value`, or a mapping from platforms to values, as a dictionary from platforms."""
    if isinstance(value, Mapping):
        unknown = set(value) - set(platforms)
        if unknown or not value:
            raise ValueError(
                f"{name}: {what} by platform takes the keys 'cpu' and 'cuda', got {list(value)}"
            )
        return dict(value)
    return dict.fromkeys(platforms, value)


def check_name(name: Any) -> None:
    """Raises TypeError or ValueError where `name=` is none."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}; expected None or a string that is not empty")
    if name == "":
        raise ValueError("name is ''; expected None or a string that is not empty")
    try:
        (name or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"name is {name!r}; expected text that UTF-8 has") from error


def check_frameworks(name: str, by_platform: Mapping[str, str]) -> None:
    """Raises ValueError where a framework is not known."""
    for framework in by_platform.values():
        if not isinstance(framework, str) or framework not in frameworks:
            raise ValueError(
                f"{name}: framework is {framework!r}; expected one of {', '.join(frameworks)}"
            )


def check_state(
    name: str, state: Any, functions: Iterable[Callable[..., Any]], out: str | int | None
) -> None:
    """Raises TypeError or ValueError where `state=` makes none, or no function takes one."""
    if (
        not callable(state)
        or inspect.iscoroutinefunction(state)
        or inspect.isgeneratorfunction(state)
    ):
        raise TypeError(
            f"{name}: state is {state!r}; expected None or a function state(context, *args, **kwargs) "
            f"that makes it"
        )
    if out == "state":
        raise ValueError(f"{name}: out='state', and state= is passed as that keyword, too")
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue  # a builtin can be without one
        if not any(
            p.kind is p.VAR_KEYWORD or (p.name == "state" and p.kind is not p.POSITIONAL_ONLY)
            for p in parameters
        ):
            raise TypeError(
                f"{name}: state= is passed as the keyword 'state', and {function!r} has no such parameter"
            )


def check_on_cuda(name: str, options: "Options", framework: str | None) -> None:
    """Raises ValueError where the framework on CUDA can't do what an option says."""
    if options.graph != "off" and framework == "numpy":
        raise ValueError(
            f'{name}: graph="{options.graph}" captures work on the device, and framework="numpy" works on '
            f"the host; drop graph=, or use a framework with arrays on CUDA"
        )
    if options.scratch is not None and framework not in (None, *scratch_frameworks):
        raise ValueError(
            f'{name}: scratch="xla" is there for {" and ".join(scratch_frameworks)}, and '
            f'framework="{framework}" does not let one choose where its temporaries come from for one '
            f"call: drop scratch="
        )


@dataclasses.dataclass(frozen=True)
class Options:
    """What stands in the first bracket of `call`, checked."""

    out: str | int | None
    inout: tuple[tuple[int | str, int], ...]
    elementwise: bool
    vmap_method: str | None
    has_side_effect: bool | None
    graph: str
    scratch: str | None


def check(
    name: str,
    out: Any,
    inout: Mapping[int | str, int] | None,
    elementwise: bool,
    vmap_method: str | None,
    has_side_effect: bool | None,
    graph: str,
    scratch: str | None,
) -> Options:
    is_position = type(out) is int and out in (0, -1)
    if not (out is None or is_position or (isinstance(out, str) and out.isidentifier())):
        raise ValueError(
            f"{name}: out is {out!r}; expected None (results are returned), the name of the keyword "
            f"that takes them, 0 (first argument) or -1 (last argument)"
        )
    if isinstance(out, str) and keyword.iskeyword(out):
        raise ValueError(
            f"{name}: out is {out!r}; expected the name of a parameter, and this is a keyword of Python"
        )
    if inout is not None and not isinstance(inout, Mapping):
        raise ValueError(
            f"{name}: inout is {inout!r}; expected a mapping from arguments to results, "
            f"such as {{0: 0}}"
        )
    for option, value in (("elementwise", elementwise), ("has_side_effect", has_side_effect)):
        if not (value is None or isinstance(value, (bool, np.bool_))):
            raise ValueError(
                f"{name}: {option} is {value!r}; expected "
                f"{'None, ' if option == 'has_side_effect' else ''}True or False"
            )
    pairs = tuple((inout or {}).items())
    for argument, result in pairs:
        if type(argument) not in (int, str) or type(result) is not int or result < 0:
            raise ValueError(
                f"{name}: inout is {dict(pairs)!r}; expected a mapping from arguments (position or "
                f"keyword) to positions of results"
            )
    if len({result for _, result in pairs}) != len(pairs):
        raise ValueError(f"{name}: inout is {dict(pairs)!r}: one result cannot be two arguments")
    if vmap_method is not None and vmap_method not in vmap_methods:
        raise ValueError(
            f"{name}: vmap_method is {vmap_method!r}; expected one of {', '.join(vmap_methods)}"
        )
    if graph not in graph_modes:
        raise ValueError(f"{name}: graph is {graph!r}; expected one of {', '.join(graph_modes)}")
    if scratch not in scratch_modes:
        raise ValueError(f'{name}: scratch is {scratch!r}; expected None or "xla"')
    if scratch is not None and graph != "off":
        raise ValueError(
            f'{name}: scratch="xla" is memory for one call, which XLA gives to others before a graph is '
            f'replayed: drop scratch=, since a graph has a pool of its own, or graph="{graph}"'
        )
    if elementwise and vmap_method is not None:
        raise ValueError(f"{name}: elementwise=True already says how to batch; drop vmap_method=")
    return Options(
        out,
        pairs,
        bool(elementwise),
        vmap_method,
        None if has_side_effect is None else bool(has_side_effect),
        graph,
        scratch,
    )
