"""What a traced forward leaves in the attributes of the user's modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.torch_compat import FakeTensor


@contextmanager
def no_fakes_left(model: nn.Module) -> Iterator[None]:
    """Put back what held a fake tensor: attributes that forward set, lists and dicts that it filled, cached functions.

    Other attributes keep what forward set (a flag that hooks are installed belongs with the hooks).
    """
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    contents = [{name: value.copy() for name, value in held.items() if _is_cache(value)} for held in before]
    try:
        yield
    finally:
        for module, held, copies in zip(modules, before, contents, strict=True):
            _put_back(vars(module), held, copies)
        for function in _cached_functions(modules):
            function.cache_clear()


_CACHED = type(lru_cache(lambda: None))
_DEPTH = 3  # of functions around a cached one, as decorators nest them


def _cached_functions(modules: list[nn.Module]) -> Iterator[Any]:
    """Functions under `functools.lru_cache` that a forward may call: of the modules, of their classes, beside these."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if kind.__module__.split(".")[0] != "torch"}
    files = [sys.modules.get(name) for name in {kind.__module__ for kind in kinds}]
    for holder in (*modules, *kinds, *files):
        for value in list(vars(holder).values()) if holder is not None else []:
            yield from _cached_in(value, _DEPTH)


def _cached_in(value: Any, depth: int) -> Iterator[Any]:
    """`value` if it is a cached function, and those in whose decorator's wrapper it lies."""
    if isinstance(value, _CACHED):
        yield value
    function = getattr(value, "__func__", value)
    for cell in getattr(function, "__closure__", None) or () if depth and isinstance(function, FunctionType) else ():
        with suppress(ValueError):  # a cell that is empty yet
            yield from _cached_in(cell.cell_contents, depth - 1)


def _put_back(attributes: dict[str, Any], held: dict[str, Any], copies: dict[str, Any]) -> None:
    for name, value in list(attributes.items()):
        if not _holds_fake(value):
            continue
        if name in copies and value is held[name]:
            _refill(value, copies[name])
        elif name in held:
            attributes[name] = held[name]
        else:
            del attributes[name]


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content) if isinstance(container, dict) else container.extend(content)


def _is_cache(value: object) -> bool:
    return type(value) in (dict, list)


def _holds_fake(value: object) -> bool:
    if isinstance(value, FakeTensor):
        return True
    return isinstance(value, (dict, list, tuple)) and any(
        isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value)
    )
