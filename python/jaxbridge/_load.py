# SPDX-License-Identifier: Apache-2.0
"""`load`: functions of shared libraries, which XLA calls by itself."""

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import _core, _lengths, _lowering, _results, _static_values
from ._call_site import CallSite
from ._native_function import (
    NativeFunction,
    SignedCallee,
    after_batching,
    check_rules,
    one_or_all,
    result_types,
    select,
)
from ._options import vmap_methods
from ._signature import MISSING, Parameter, Signature
from .errors import SignatureError

# Of a function's description: abi/native_library.hpp.
_elementwise, _side_effect = 1, 2


class _LibraryCallee(SignedCallee):
    """A function of a library, on each platform that it is exported for."""

    functions: dict[str, Any]
    how_on_both = "export one for it, too: JAXBRIDGE_EXPORT_AS(name, platform, function)"
    how_batched = (
        "export it with .vmap(), or load the library with vmap_method= ('sequential' calls it once for "
        "each element; 'broadcast_all', 'expand_dims' and 'batched' pass whole batches, where it takes "
        "them without a rank, as buffer_view<T>)"
    )

    def __init__(
        self,
        library: "Library",
        name: str,
        exports: Mapping[str, Any],
        signatures: Sequence[Signature],
        results: Any,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(
            f"{library.name}.{name}",
            exports,
            f"content:native:{library.content}:{name}",
            options,
        )
        self.target = f"jaxbridge.native.{library.name}.{library.content[:16]}.{name}"
        self.exports = dict(exports)
        self.signatures = tuple(signatures)
        self.given = results
        # Another process has it once it has loaded the same library.
        self._calls_before = self._total()
        self._registered: set[str] = set()

    @property
    def is_durable(self) -> bool:
        return True

    def _total(self) -> int:
        return sum(f.calls for f in self.exports.values())

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "calls": self._total() - self._calls_before}

    def register(self) -> None:
        """Gives XLA the handlers."""
        for platform, f in self.exports.items():
            handlers = {"execute": f.execute}
            if platform == "cuda" and f.initialize is not None:
                handlers["initialize"] = f.initialize
            _lowering.register_target(self.target, platform, handlers)

    def types(
        self, operands: Sequence[Any], attributes: Mapping[str, Any], given: Any = None
    ) -> list[tuple[tuple[Any, ...], Any]]:
        """(shape, dtype) of all results, hidden ones last."""
        signature = select(self.name, self.signatures, operands)
        export = next(iter(self.exports.values()))
        visible = len(signature.results)
        if given is None:
            given = self.given
        if given is not None:
            if callable(given) and not isinstance(given, jax.ShapeDtypeStruct):
                given = given(*operands, **attributes)
            leaves = jax.tree.leaves(given)
            for leaf in leaves:
                _results.shape_and_dtype(self.name, leaf)
            if len(leaves) != visible:
                raise TypeError(
                    f"{self.name}: result_shape_dtypes has {len(leaves)} arrays, and the function "
                    f"has {visible} results"
                )
            types = [(tuple(x.shape), np.dtype(x.dtype)) for x in leaves]
            for k, (p, (shape, dtype)) in enumerate(zip(signature.results, types, strict=True)):
                if p.dtype not in (None, dtype.name) or (
                    p.shape is not None and len(p.shape) != len(shape)
                ):
                    raise TypeError(
                        f"{self.name}: result_shape_dtypes says {dtype.name}{list(shape)} for result "
                        f"{k}, and the function has {p}"
                    )
            if not signature.hidden:
                return types
            rules = [*("?" for _ in types), *export.results[visible:]]
            hidden = Signature(tuple(signature.operands + signature.attributes + signature.hidden))
            return types + result_types(self.name, hidden, rules[visible:], operands, attributes)
        if export.has_shape_function:
            return self._inferred(export, signature, operands, attributes)
        unknown = [p for p in signature.results if not (p.role == "inout" or _is_known(p))]
        if unknown and not export.results:
            raise TypeError(
                f"{self.name}: the library exports no rule for the shapes of results; pass "
                f"result_shape_dtypes=jax.ShapeDtypeStruct(shape, dtype) of each, or a function of the "
                f"arguments that returns them, or export it with {_rules_for(signature)}"
            )
        return result_types(self.name, signature, export.results, operands, attributes)

    def _inferred(
        self,
        export: Any,
        signature: Signature,
        operands: Sequence[Any],
        attributes: Mapping[str, Any],
    ) -> list[tuple[tuple[Any, ...], Any]]:
        shapes = [(np.dtype(x.dtype).name, x.shape) for x in operands]
        if any(not isinstance(n, (int, np.integer)) for _, s in shapes for n in s):
            raise NotImplementedError(
                f"{self.name}: its shape function is C++, which takes no symbolic lengths; pass "
                f"result_shape_dtypes="
            )
        encoded = {k: _for_core(v) for k, v in _ffi_values(signature, attributes).items()}
        count = len(signature.results) + len(signature.hidden)
        try:
            found = export.infer([(d, list(map(int, s))) for d, s in shapes], encoded, count)
        except ValueError as error:
            raise TypeError(f"{self.name}: {error}") from error
        for k, (p, (dtype, shape)) in enumerate(
            zip([*signature.results, *signature.hidden], found, strict=True)
        ):
            if p.dtype not in (None, dtype) or (p.shape is not None and len(p.shape) != len(shape)):
                raise TypeError(
                    f"{self.name}: its shape function says {dtype}{shape} for result {k}, and the "
                    f"function has {p}"
                )
        return [(tuple(shape), np.dtype(dtype)) for dtype, shape in found]

    def ffi_target(self, site: CallSite, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        signature = select(self.name, self.signatures, operands)
        attributes = dict(site.arguments.tree[1])
        given = attributes.pop("result_shape_dtypes", None)
        hidden: tuple[Any, ...] = ()
        if signature.hidden:
            everything = self.types(operands, attributes, given)
            hidden = tuple(everything[len(signature.results) :])
        return _lowering.FfiTarget(self.target, _ffi_values(signature, attributes), hidden, True)

    def make_target(self, site: CallSite, states: dict[Any, Any]) -> Any:
        return _core.library_function(
            name=self.name,
            functions=list(self.exports.values()),
            operand_names=self.operand_names(site),
            in_place=list(site.in_place),
            external=list(site.external),
        )

    def check_arrays(self, platform: str, operands: Sequence[Any], results: Sequence[Any]) -> None:
        try:
            signature = select(self.name, self.signatures, operands)
        except TypeError as error:
            raise after_batching(error) from None
        for k, (p, x) in enumerate(zip(signature.results, results, strict=False)):
            if p.shape is not None and len(p.shape) != len(x.shape):
                raise after_batching(
                    TypeError(f"{self.name}: result {k} is of rank {len(x.shape)}, expected {p}")
                )


def _is_known(p: Parameter) -> bool:
    return p.shape is not None and "*" not in p.shape


def _rules_for(signature: Signature) -> str:
    """What an export says that has a rule for each result."""
    updated = {result: operand for operand, result in signature.in_place.items()}
    rules = [
        f"jaxbridge::same_as<{updated[k]}>" if k in updated else 'jaxbridge::shape("[...]")'
        for k in range(len(signature.results))
    ]
    return (
        f".result({', '.join([*rules, *('jaxbridge::shape("[...]")' for _ in signature.hidden)])})"
    )


def _check(signatures: Sequence[Signature], rules: Sequence[str]) -> None:
    """Raises SignatureError where an export says what no call can have."""
    count = len(signatures[0].results) + len(signatures[0].hidden)
    if len(rules) not in (0, count):
        raise SignatureError(f"{len(rules)} rules for {count} results")
    for s in signatures:
        for p in s.operands:
            for axis in p.shape or ():
                if axis != "*":
                    _lengths.check_named(str(p), axis, s.length_names)
        check_rules(s, rules)
    for overloads in zip(*(s.attributes for s in signatures), strict=True):
        if overloads[0].default is not MISSING:
            try:
                _static_values.normalize_for("the default", overloads, overloads[0].default)
            except (TypeError, OverflowError, ValueError) as error:
                raise SignatureError(str(error)) from error


def _said(export: Any) -> str:
    return f"{' | '.join(export.signatures)} ({export.parameters or 'no names'})"


def _ffi_values(signature: Signature, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        p.name: _static_values.ffi_value(p, attributes[p.name])
        for p in signature.attributes
        if attributes.get(p.name) is not None
    }


def _for_core(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _for_core(v) for k, v in value.items()}
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    described = (array.dtype.name, array.tobytes())
    return list(described) if array.ndim else described


class Library:
    """The functions of a shared library, as attributes. Made by `load`.

    Attributes:
        path: the file.
        name: its name without "lib" and suffix.
        content: what tells it: a hash of the file.
    """

    def __init__(self, path: str, name: str, content: str, exports: Sequence[Any], **options: Any):
        self.path = path
        self.name = name
        self.content = content
        by_name: dict[str, dict[str, Any]] = {}
        for export in exports:
            of = by_name.setdefault(export.name, {})
            if export.platform in of:
                raise ImportError(f"{path} exports {export.name} for {export.platform} twice")
            of[export.platform] = export
        results = options.pop("results") or {}
        if unknown := set(results) - set(by_name):
            raise ValueError(f"results= names {sorted(unknown)}, which {path} does not export")
        self._functions = {
            name: self._make(name, of, results.get(name), options) for name, of in by_name.items()
        }

    def _make(
        self, name: str, exports: dict[str, Any], results: Any, options: Mapping[str, Any]
    ) -> NativeFunction:
        about = next(iter(exports.values()))
        try:
            doc = about.doc
            signatures = [Signature.parse(s).named(about.parameters) for s in about.signatures]
            _check(signatures, about.results)
        except (SignatureError, UnicodeDecodeError) as error:
            raise ImportError(
                f"{self.path}: what {name} says of itself cannot be: {error}; mend its "
                f"JAXBRIDGE_EXPORT, or, where that says something else, build the library again"
            ) from error
        for other in exports.values():
            if (other.signatures, other.parameters) != (about.signatures, about.parameters):
                raise ImportError(
                    f"{self.path}: {name} has one signature on {about.platform} and another on "
                    f"{other.platform}: {_said(about)} and {_said(other)}"
                )
        if about.vmap_method and about.vmap_method not in vmap_methods:
            raise ImportError(
                f"{self.path}: {name} says .vmap({about.vmap_method!r}); expected one of "
                f"{', '.join(vmap_methods)}"
            )
        if about.vmap_method and about.flags & _elementwise:
            raise ImportError(
                f"{self.path}: {name} says .vmap() and .elementwise(), which says how to batch; drop one"
            )
        chosen = {
            "elementwise": bool(about.flags & _elementwise),
            "has_side_effect": True if about.flags & _side_effect else None,
            "vmap_method": about.vmap_method or None,
            "inout": signatures[0].in_place or None,
        }
        if not (chosen["vmap_method"] or chosen["elementwise"]):
            chosen["vmap_method"] = options["vmap_method"]
        callee = _LibraryCallee(self, name, exports, signatures, results, chosen)
        callee.register()

        def declared(*operands: Any, **attributes: Any) -> Any:
            given = attributes.pop("result_shape_dtypes", None)
            types = callee.types(operands, attributes, given)
            visible = len(signatures[0].results)
            return one_or_all([jax.ShapeDtypeStruct(s, d) for s, d in types[:visible]])

        return NativeFunction(callee, signatures, declared, doc)

    def __getattr__(self, name: str) -> NativeFunction:
        functions: dict[str, NativeFunction] = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"{self!r} exports no function {name!r}; it has {list(functions)}")

    def __getitem__(self, name: str) -> NativeFunction:
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __repr__(self) -> str:
        return f"<jaxbridge.Library {self.path}>"


# By (name, content): the loader gives one file once, and its handlers have one name.
_opened: dict[tuple[str, str], Sequence[Any]] = {}
_opened_paths: set[str] = set()
# What was in the files that the loader has from us, by device and inode. They are never closed; the
# loader maps them, so that what is written into one is in its functions.
_mapped: dict[tuple[int, int], str] = {}
_opening = threading.Lock()


def load(
    path: str | os.PathLike[str],
    *,
    results: Mapping[str, Any] | None = None,
    vmap_method: str | None = None,
) -> Library:
    """The functions of a shared library that was built with <jaxbridge/jaxbridge.hpp>.

    XLA calls them without Python. A library that was built again is loaded again: new traces get the
    new functions, and programs that exist keep theirs. It is never closed.

    Args:
        path: of the library.
        results: for functions of which the library exports no rule: the `result_shape_dtypes` of each
            by its name, as `call` takes it. A call can give it, too: `f(x, result_shape_dtypes=...)`.
        vmap_method: for functions that name none: as `call` takes it.

    Returns:
        An object whose attributes are the functions, each a `Function`.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: it cannot be opened, is no library of jaxbridge functions, says things of itself
            that cannot be, or was overwritten while it was open.
        ValueError: `vmap_method` is none.
    """
    if vmap_method is not None and vmap_method not in vmap_methods:
        raise ValueError(
            f"load: vmap_method is {vmap_method!r}; expected one of {', '.join(vmap_methods)}"
        )
    file = os.path.realpath(os.fsdecode(path))
    try:
        file.encode()
    except UnicodeEncodeError as error:
        raise ImportError(f"{file!r}: the path is not in UTF-8") from error
    with open(file, "rb") as f:
        state = os.fstat(f.fileno())
        content = hashlib.file_digest(f, "sha256").hexdigest()
    name = os.path.basename(file).split(".")[0].removeprefix("lib")
    with _opening:
        if _mapped.get((state.st_dev, state.st_ino), content) != content:
            raise ImportError(
                f"{file}: it was overwritten while this process has it open, and the functions that were "
                f"loaded from it can end the process now, when they are called and at exit: start a new "
                f"one. Put a new file in the place of a library, as linkers, mv and install do; cp and "
                f"copyfile write into the file that is there"
            )
        exports = _opened.get((name, content))
        if exports is None:
            exports = _open(file, content, state)
            _opened[name, content] = exports
    return Library(file, name, content, exports, results=results, vmap_method=vmap_method)


def _open(file: str, content: str, state: os.stat_result) -> Sequence[Any]:
    opened = _to_open(file, content)
    try:
        exports: Sequence[Any] = _core.open_library(opened)
    except ValueError as error:
        if _is_mapped(file):
            _remember(file, content, state)
        raise ImportError(f"{file}: {error}") from error
    if opened == file:
        _remember(file, content, state)
        if _version(os.stat(file)) != _version(state):
            raise ImportError(
                f"{file}: it was written while it was loaded; load it again when it is complete"
            )
    return exports


def _remember(file: str, content: str, state: os.stat_result) -> None:
    _opened_paths.add(file)
    _mapped.setdefault((state.st_dev, state.st_ino), content)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _is_mapped(file: str) -> bool:
    """Whether the loader has it, whoever opened it: as the kernel names it, with " (deleted)" behind
    the name of a file that is another one now.
    """
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        return any(line.endswith(f" {file}\n") for line in maps)


def _to_open(file: str, content: str) -> str:
    """The path for the loader, which knows files by their place: a library that was built again, in
    the place of one that is open, is opened as a copy.
    """
    if file not in _opened_paths and not _is_mapped(f"{file} (deleted)"):
        return file
    copies = tempfile.mkdtemp(prefix="jaxbridge-")
    _copies.append(copies)
    copy = os.path.join(copies, f"{content[:16]}-{os.path.basename(file)}")
    shutil.copyfile(file, copy)
    return copy


class _Copies(list[str]):
    def __del__(self) -> None:
        for directory in self:
            shutil.rmtree(directory, ignore_errors=True)


_copies = _Copies()
