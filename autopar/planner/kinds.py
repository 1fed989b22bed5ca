"""Kinds: repeated layers found in the module paths of the graph, so that identical ones share their decisions.

Two siblings `layers.3` and `layers.7` are of one kind when the ops below them, forward and backward, agree one by one
in name, arguments and shapes, but for the keys of their random numbers, and hold at least two weights (a single
repeated linear is no layer). Their nodes get one class each; since the search sums the costs of all members, folding
restricts the plan but never misprices it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.sharding.op_call import OpCall

MIN_WEIGHTS = 2
_WEIGHTED = ("mm", "addmm", "bmm", "baddbmm", "convolution")


class Kinds:
    """Canonical module paths: `of("layers.7.mlp")` is `layers.3.mlp` if layers 3 to 7 are of one kind."""

    def __init__(self, ops: Sequence[tuple[str, str, OpCall]]) -> None:
        """`ops`: (module path, key, call) of every op in program order."""
        below: dict[str, list[tuple[str, str, OpCall]]] = defaultdict(list)
        for module, key, call in ops:
            for end in _digit_ends(module):
                below[module[:end]].append((module[end:], key.partition("/")[2], _without_key(call)))
        self._below: Mapping[str, list[tuple[str, str, OpCall]]] = below
        self._canonical: dict[str, str] = {"": ""}
        self._first: dict[object, str] = {}

    def of(self, module: str) -> str:
        """The path of the first module of the same kind."""
        found = self._canonical.get(module)
        if found is None:
            parent, _, last = module.rpartition(".")
            prefix = self.of(parent)
            path = f"{prefix}.{last}" if prefix else last
            found = self._representative(module, prefix, path) if last.isdigit() else path
            self._canonical[module] = found
        return found

    def _representative(self, module: str, prefix: str, path: str) -> str:
        ops = self._below.get(module, [])
        weights = sum(call.name.split(".")[1] in _WEIGHTED for _, key, call in ops if ".backward" not in key)
        if weights < MIN_WEIGHTS:
            return path
        return self._first.setdefault((prefix, tuple(ops)), path)

    @cached_property
    def count(self) -> int:
        """How many modules stand for others."""
        return len(set(self._canonical.values()))


def _without_key(call: OpCall) -> OpCall:
    """The call without the key by which a random op of autopar draws numbers of its own: it decides no layout."""
    schema = getattr(call.target, "_schema", None)
    arguments = schema.arguments if call.name.startswith("autopar.") and schema else []
    if not any(argument.name == "key" and str(argument.type) == "int" for argument in arguments):
        return call
    names = [argument.name for argument in arguments]
    args = tuple(0 if name == "key" else value for name, value in zip(names, call.args, strict=False))
    kwargs = tuple((name, 0 if name == "key" else value) for name, value in call.kwargs)
    return replace(call, args=args, kwargs=kwargs)


def _digit_ends(module: str) -> list[int]:
    """Where each dotted prefix that ends in a number ends."""
    ends, position = [], 0
    for part in module.split("."):
        position += len(part)
        if part.isdigit():
            ends.append(position)
        position += 1
    return ends


def owner(name: str) -> tuple[str, str]:
    """(module path, own name) of a parameter or buffer."""
    module, _, last = name.rpartition(".")
    return module, last
