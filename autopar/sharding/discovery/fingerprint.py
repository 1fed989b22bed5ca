"""What identifies the implementation of an op, so that what was found out about one is not believed of another."""

from __future__ import annotations

import builtins
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from autopar.torch_compat import CustomOpDef, overload_of, python_kernels, registrations

BUILT_IN_NAMESPACES = ("aten", "prims", "autopar")  # come with PyTorch or with autopar, whose versions are in the key
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device, torch.memory_format)
_LIBRARY_FOLDERS = ("site-packages", "dist-packages")


class _Opaque(Exception):
    """Something that the op may use cannot be identified."""


def fingerprint(op: torch._ops.OpOverload) -> str | None:
    """A hash of the Python code of an op and of all that it refers to; None where that cannot be known.

    "built in" for ops of PyTorch. Ops of compiled libraries, and functions that hold objects, have none.
    """
    if op.namespace in BUILT_IN_NAMESPACES:
        return "built in"
    functions = kernels(op)
    if not functions:
        return None
    digest = _Digest()
    try:
        for device, function in functions:
            digest.add(device, function)
    except _Opaque:
        return None
    return digest.text


def kernels(op: torch._ops.OpOverload) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """(device, or "any", and function) of an op made by `torch.library.custom_op`; none of any other op."""
    found = {device: inspect.unwrap(function) for device, function in python_kernels(op).items()}
    return tuple((device, found[device]) for device in sorted(found))


def identity(op: torch._ops.OpOverload) -> object:
    """What is equal only for the same implementation, in this process."""
    if op.namespace in BUILT_IN_NAMESPACES:
        return "built in"
    return tuple(function for _, function in kernels(op)), registrations(op)


def is_in_python(op: torch._ops.OpOverload) -> bool:
    """Whether every kernel of an op was registered from Python: such code checks what it indexes."""
    if kernels(op):
        return True
    lines = registrations(op).splitlines()
    places = [line.partition("registered at ")[2] for line in lines if "registered at " in line]
    return bool(places) and all(place.startswith("<") or ".py:" in place for place in places)


class _Digest:
    """A hash over functions and what they refer to, each function once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(repr(sys.version_info[:3]).encode())
        self._seen: set[int] = set()

    @property
    def text(self) -> str:
        return self._hash.hexdigest()[:24]

    def add(self, name: str, value: Any) -> None:
        self._hash.update(f"{name}={type(value).__name__}:".encode())
        if isinstance(value, _PLAIN):
            self._hash.update(repr(value).encode())
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.add("item", item)
        elif isinstance(value, frozenset):
            self._hash.update(repr(sorted(map(repr, value))).encode())
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        definition = overload_of(value) if isinstance(value, CustomOpDef) else value
        if isinstance(definition, torch._ops.OpOverloadPacket):
            definition = definition.default
        if isinstance(definition, torch._ops.OpOverload):
            known = fingerprint(definition)
            if known is None:
                raise _Opaque
            self._hash.update(f"{definition}{known}".encode())
        elif isinstance(value, (types.BuiltinFunctionType, type(torch.relu), type(torch.Tensor.add))):
            self._hash.update(value.__qualname__.encode())
        elif isinstance(value, (types.FunctionType, type)):
            self._function_or_class(value)
        else:
            raise _Opaque

    def _function_or_class(self, value: Any) -> None:
        module = sys.modules.get(value.__module__)
        self._hash.update(f"{value.__module__}.{value.__qualname__}".encode())
        if module is None:
            raise _Opaque
        if _is_library(module):
            self._module(module)
        elif isinstance(value, type):
            self._file(module)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._function(value)

    def _function(self, function: types.FunctionType) -> None:
        self.add("code", function.__code__)
        self.add("defaults", function.__defaults__)
        self.add("keywords", sorted((function.__kwdefaults__ or {}).items()))
        for cell in function.__closure__ or ():
            try:
                self.add("cell", cell.cell_contents)
            except ValueError as error:  # not set yet
                raise _Opaque from error
        for name in sorted(set(_names(function.__code__))):
            if name in function.__globals__:
                self.add(name, function.__globals__[name])

    def _code(self, code: types.CodeType) -> None:
        self.add("instructions", code.co_code)
        self.add("names", (code.co_names, code.co_varnames, code.co_freevars))
        self.add("constants", code.co_consts)

    def _module(self, module: types.ModuleType) -> None:
        if _is_library(module):
            root = sys.modules.get(module.__name__.partition(".")[0], module)
            self._hash.update(f"{module.__name__} {getattr(root, '__version__', '')}".encode())
        else:
            self._file(module)

    def _file(self, module: types.ModuleType) -> None:
        try:
            self._hash.update(Path(str(module.__file__)).read_bytes())
        except (OSError, AttributeError) as error:
            raise _Opaque from error


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a code looks up, in itself and in the functions it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(module: types.ModuleType) -> bool:
    """Whether a module is installed, or part of Python: its version stands for its code."""
    root = module.__name__.partition(".")[0]
    if (root in sys.stdlib_module_names and root != "__main__") or module is builtins:
        return True
    return any(folder in str(getattr(module, "__file__", "")) for folder in _LIBRARY_FOLDERS)
