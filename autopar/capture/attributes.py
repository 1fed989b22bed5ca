"""What a traced forward leaves in the attributes of the user's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.torch_compat import FakeTensor


@contextmanager
def no_fakes_left(model: nn.Module) -> Iterator[None]:
    """Put back what held a fake tensor: attributes that forward set, lists and dicts that it filled.

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
