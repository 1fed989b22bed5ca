"""A model named in a shell: `package.module:factory` or `hf:CONFIG`, and a mesh named there: `2x4`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.export import ExportedProgram

from autopar.errors import AutoparError, MeshError, ModelSourceError
from autopar.hugging_face import PREFIX, load_hugging_face
from autopar.source import raising_line

ExampleInputs = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]

_SOURCE = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_SOURCE_FIX = (
    "write package.module:factory; the factory returns a model, or (model, example_inputs); or write hf:CONFIG"
)
_MESH = re.compile(r"[1-9]\d*(x[1-9]\d*)*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a factory returned: a model, and the inputs to plan it with if it gave any."""

    name: str  # as it was written, `package.module:factory`
    model: torch.nn.Module | ExportedProgram
    example_inputs: ExampleInputs | None = None

    def require_inputs(self) -> ExampleInputs:
        """The example inputs; an error that says how to give them if there are none."""
        if self.example_inputs is None:
            raise ModelSourceError(
                f"{self.name} returns a model without example inputs",
                fix="return (model, example_inputs): a tensor, a tuple of inputs, or a dict of keyword inputs",
            )
        return self.example_inputs


def load_model(text: str) -> ModelSource:
    """Import `package.module:factory`, call the factory, and check what it returns; or make `hf:CONFIG`.

    The factory runs under the caller's default device: inside `torch.device("meta")` it allocates nothing.
    """
    try:
        made = load_hugging_face(text) if text.startswith(PREFIX) else load_factory(text)()
    except AutoparError:
        raise
    except Exception as problem:  # a user's factory, or transformers on a user's configuration, may raise anything
        raise _failed(f"{text} failed", problem) from problem
    return _checked(text, made)


def load_factory(text: str) -> Callable[[], object]:
    """The function that `package.module:factory` names, which can be called without arguments."""
    match = _SOURCE.fullmatch(text)
    if match is None:
        raise ModelSourceError(f"{text!r} does not name a model", fix=_SOURCE_FIX)
    factory: object = _import(match["module"])
    for name in match["attribute"].split("."):
        factory = _attribute(factory, name)
    if isinstance(factory, torch.nn.Module):
        raise ModelSourceError(f"{text} is a model, not a function that makes one", fix=_SOURCE_FIX)
    if not callable(factory):
        raise ModelSourceError(f"{text} is of type {type(factory).__name__}: it cannot be called", fix=_SOURCE_FIX)
    needed = _required_parameters(factory)
    if needed:
        raise ModelSourceError(
            f"{text} cannot be called without arguments: it needs {', '.join(needed)}",
            fix="name a function that takes none, or give its parameters defaults",
        )
    return factory


def parse_mesh_shape(text: str) -> tuple[int, ...]:
    """Ranks per axis of a mesh as it is written in a shell.

    >>> parse_mesh_shape("2x4")
    (2, 4)
    """
    if _MESH.fullmatch(text) is None:
        raise MeshError(f"{text!r} is not a mesh shape", fix="write ranks per axis with x between: 8, 2x4 or 2x2x2")
    return tuple(int(size) for size in text.split("x"))


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        missing = problem.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _failed(f"module {name} cannot be imported", problem) from problem
        raise ModelSourceError(
            f"there is no module {missing}",
            fix="run from the folder that holds it, or install its package",
        ) from None
    except Exception as problem:  # so may a user's module
        raise _failed(f"module {name} cannot be imported", problem) from problem


def _attribute(owner: object, name: str) -> object:
    if hasattr(owner, name):
        return getattr(owner, name)
    label = owner.__name__ if isinstance(owner, ModuleType | type) else type(owner).__name__
    choices = [found for found in vars(owner) if callable(getattr(owner, found)) and not found.startswith("_")]
    near = difflib.get_close_matches(name, choices, n=3)
    fix = f"did you mean {' or '.join(near)}?" if near else _SOURCE_FIX
    raise ModelSourceError(f"{label} has no {name}", fix=fix)


def _required_parameters(factory: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable of C code may have no signature: calling it will tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.kind not in optional
    ]


def _checked(text: str, made: object) -> ModelSource:
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module | ExportedProgram):
        raise ModelSourceError(f"{text} returned a value of type {type(model).__name__}, not a model", fix=_SOURCE_FIX)
    if inputs is not None and not isinstance(inputs, torch.Tensor | tuple | Mapping):
        raise ModelSourceError(
            f"{text} returned example inputs of type {type(inputs).__name__}",
            fix="give a tensor, a tuple of positional inputs, or a dict of keyword inputs",
        )
    return ModelSource(text, model, inputs)


def _failed(what: str, problem: Exception) -> ModelSourceError:
    where, why = raising_line(problem.__traceback__), str(problem)
    if isinstance(problem, SyntaxError):  # the file was never entered: its traceback ends in the import machinery
        where, why = f"{Path(problem.filename or '<source>').name}:{problem.lineno}", problem.msg
    return ModelSourceError(f"{what}: {type(problem).__name__}: {why}", where=where)
