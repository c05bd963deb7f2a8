# SPDX-License-Identifier: Apache-2.0
"""Finds the functions of programs that were lowered elsewhere: exported, or in a compile cache."""

import json
from typing import Any

from . import _core, _errors, _identity, _spec
from ._call_site import CallSite, target_of_part
from ._callee import Callee, named
from ._errors import NotRegisteredError
from ._function import Function
from ._spec import Template


def _resolve(key: int, text: str) -> Any:
    """Finds the target of a program that was lowered elsewhere. Asked by the core.

    Raises:
        NotRegisteredError: what is missing, and what to import.
    """
    spec = json.loads(text)
    name = spec["name"]
    if "whole" in spec:
        part = target_of_part(spec["whole"], text, spec["types"])
        if part is not None:
            return part
    if not spec["durable"]:
        raise NotRegisteredError(
            f"the program calls {name!r}, an anonymous function (or one with an argument that has no "
            f"text) of another process; give it a name (name=) and build the program again"
        )
    if _spec.key_of(text) != key:
        raise ValueError("the text is not the one of the key")
    try:
        found = named.get(name) if spec["named"] else _by_reference(spec)
        if found is None:
            raise LookupError(_what_is_missing(spec))
        arguments = _spec.decode(spec["arguments"])
        own_results = _spec.decode(spec["own_results"])
    except LookupError as error:
        raise NotRegisteredError(
            f"the program calls the function {name!r}, which is not registered in this process: {error}"
        ) from error
    found.tell()
    if found.identities != spec["identities"]:
        raise NotRegisteredError(
            f"the program calls the function {name!r}, whose code in this process is not the one that "
            f"the program was built with; build the program again"
        )
    options = found.options
    if (found.frameworks, options.out, options.graph, options.scratch) != (
        spec["frameworks"],
        spec["out"],
        spec["graph"],
        spec["scratch"],
    ):
        raise NotRegisteredError(
            f"the program calls the function {name!r}, whose framework=, out=, graph= or scratch= in this "
            f"process is not the one that the program was built with; build the program again"
        )
    witness = _identity.Witness()
    for tree in (arguments, own_results):
        _spec.encode(tree, found.token, witness)
    site = CallSite(
        found,
        key,
        text,
        witness,
        Template(arguments),
        spec["operands"],
        Template(own_results),
        tuple((a, b) for a, b in spec["in_place"]),
        tuple(spec["external"]),
        spec["side_effect"],
        True,
        types=spec.get("types"),
    )
    return site.hold().registration.target


def _what_is_missing(spec: dict[str, Any]) -> str:
    if not spec["modules"]:
        return "make it first, as its author did: bind(..., name=), cuda_kernel(..., export_name=)"
    return f"import {' and '.join(spec['modules'])} first"


def _by_reference(spec: dict[str, Any]) -> Callee:
    callees = {}
    for platform, ref in spec["references"].items():
        found = _identity.resolve(ref)
        callees[platform] = (
            found.callee.functions[platform] if isinstance(found, Function) else found
        )
    state = callees.pop("state", None)
    return Callee(
        callees,
        framework=spec["frameworks"],
        options={
            "out": spec["out"],
            "inout": None,
            "elementwise": spec["elementwise"],
            "vmap_method": None,
            "has_side_effect": spec["side_effect"],
            "graph": spec["graph"],
            "scratch": spec["scratch"],
        },
        state=state,
        name=None,
    )


def _resolve_for_core(key: int, text: str) -> Any:
    try:
        return _resolve(key, text)
    except NotRegisteredError as error:
        # The core passes on the text; the mark leads back to the exception.
        raise NotRegisteredError(
            _errors.printable(f"{error}\n{_errors.keep(error, key)}")
        ) from error
    except Exception as error:
        raise NotRegisteredError(
            f"the program's description of an external function is damaged ({type(error).__name__}); "
            f"build the program again"
        ) from error


_core.set_resolver(_resolve_for_core)
