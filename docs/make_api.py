"""Writes docs/api.md from the docstrings of what is public: `python -m docs.make_api`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import autopar

PAGE = Path(__file__).with_name("api.md")
ROOT = PAGE.parents[1]
WIDTH = 100
HEAD = """# API reference

Made from the docstrings by `python -m docs.make_api`; a test holds it to them, and runs the examples in them.

What `autopar.__all__` lists is public and keeps its meaning; everything else may change without notice. Options are
keyword-only. `example_inputs` is a tensor, a tuple of positional inputs, or a dict of keyword inputs. A mesh is an
`autopar.Mesh`, a `DeviceMesh`, or a tuple of sizes.

A model whose loss is computed outside returns outputs, not a loss. `verify` and `run_virtual` then drive the backward
with 1 for a scalar output and with the cosine of each element's place in any other: gradients that differ from element
to element, so that outputs whose sum is constant, as those of a softmax, are checked too.
"""


def page() -> str:
    """The whole page: functions, classes, then the public modules."""
    values = {name: getattr(autopar, name) for name in autopar.__all__ if not name.startswith("__")}
    members = {name: value for name, value in values.items() if not inspect.ismodule(value)}
    functions = {name: value for name, value in members.items() if not inspect.isclass(value)}
    classes = {name: value for name, value in members.items() if inspect.isclass(value)}
    parts = [HEAD, _index(values), "`autopar.__version__` is the version, also written into every plan.\n"]
    for name, value in (*functions.items(), *classes.items()):
        parts += _member(f"autopar.{name}", value, "##")
    for name, value in values.items():
        if inspect.ismodule(value):
            parts += _module(f"autopar.{name}", value)
    return "\n".join(parts)


def _index(values: dict[str, Any]) -> str:
    rows = [
        f"| [`autopar.{name}`](#{_anchor(f'autopar.{name}')}) | {_first_line(value)} |"
        for name, value in values.items()
    ]
    return "\n".join(["| name | what it is |", "| --- | --- |", *rows, ""])


def _anchor(name: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w-]", "", name.lower())


def _first_line(value: Any) -> str:
    text = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0].replace("\n", " ")  # its own, not a base's
    return text.replace("|", "\\|")


def _member(name: str, value: Any, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    yield _signature(name.rpartition(".")[2], value)
    yield f"{_body(value)}\n"
    if inspect.isclass(value) and not issubclass(value, Exception):
        yield from _methods(value)
    yield f"[{_source(value)}](../{_source(value)})\n"


def _methods(kind: type) -> Iterator[str]:
    """What the class and its bases in autopar define themselves and is public; inherited from others: not."""
    rows = []
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("autopar."):
            continue
        member = vars(owner)[name]
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        text = _first_line(plain)
        if inspect.isfunction(plain):
            rows.append(f"- `.{name}{_arguments(plain)}`{': ' if text else ''}{text}")
        elif type(plain).__name__ in ("property", "cached_property"):
            rows.append(f"- `.{name}`{': ' if text else ''}{text}")
    if rows:
        yield "\n".join(rows) + "\n"


class _Bare:
    """Prints as its text, where a signature would quote it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """Annotations as they are written in the source; defaults without a text of their own as `...`."""
    parameters = []
    for item in signature.parameters.values():
        if isinstance(item.annotation, str):
            item = item.replace(annotation=_Bare(item.annotation))
        if " at 0x" in repr(item.default) or repr(item.default).startswith("<"):
            item = item.replace(default=item.empty if item.default is item.empty else _Bare("..."))
        parameters.append(item)
    given = signature.return_annotation
    return signature.replace(parameters=parameters, return_annotation=_Bare(given) if isinstance(given, str) else given)


def _arguments(function: Any) -> str:
    signature = _plain(inspect.signature(function))
    kept = [item for item in signature.parameters.values() if item.name not in ("self", "cls")]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


def _signature(name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""
    try:
        signature = _plain(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    line = f"{name}{signature}"
    if len(line) > WIDTH:
        line = _broken(name, signature)
    return f"```text\n{line}\n```\n"


def _broken(name: str, signature: inspect.Signature) -> str:
    """One parameter a line."""
    lines, star = [], False
    for item in signature.parameters.values():
        if item.kind is item.KEYWORD_ONLY and not star:
            lines.append("    *,")
            star = True
        star = star or item.kind is item.VAR_POSITIONAL
        lines.append(f"    {item},")
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    return "\n".join([f"{name}(", *lines, f"){result}"])


def _body(value: Any) -> str:
    """The docstring, its examples as code."""
    parts = inspect.cleandoc(value.__doc__ or "").split("\n\n")
    return "\n\n".join(f"```python\n{part}\n\n```" if part.startswith(">>> ") else part for part in parts)


def _source(value: Any) -> str:
    file = Path(inspect.getsourcefile(value) or "").resolve()
    return file.relative_to(ROOT).as_posix()


def _module(name: str, module: ModuleType) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield f"{_body(module)}\n"
    listed = getattr(module, "__all__", None) or [key for key, it in vars(module).items() if inspect.isclass(it)]
    values = {key: getattr(module, key) for key in listed}
    if all(inspect.isclass(value) and issubclass(value, Exception) for value in values.values()):
        rows = [f"| `{key}` | {_bases(value)} | {_first_line(value)} |" for key, value in values.items()]
        yield "\n".join(["| class | is a | raised when |", "| --- | --- | --- |", *rows, ""])
        return
    for key, value in values.items():
        if inspect.ismodule(value):
            yield f"### `{name}.{key}`\n\n{_first_line(value)}\n"
        elif callable(value):
            yield from _member(f"{name}.{key}", value, "###")


def _bases(value: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in value.__bases__)


if __name__ == "__main__":
    PAGE.write_text(page())
