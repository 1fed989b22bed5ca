"""How ops of the namespace `autopar` are declared: a schema, one kernel for every device, a fake kernel, a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_library: Callable[[str, str], torch.library.Library] = torch.library.Library
LIBRARY = _library("autopar", "FRAGMENT")
_define: Callable[[str], object] = LIBRARY.define
_implement: Callable[[str, Callable[..., Any], str], object] = LIBRARY.impl
Function = TypeVar("Function", bound=Callable[..., Any])


def op(schema: str) -> Callable[[Function], Function]:
    """Declare `name(arguments) -> results`; the decorated function is the kernel, which autograd does not see."""

    def register(kernel: Function) -> Function:
        _define(schema)
        _implement(schema.partition("(")[0], kernel, "CompositeExplicitAutograd")
        return kernel

    return register


def fake_of(*names: str) -> Callable[[Function], Function]:
    """The decorated function gives empty results of the right shape, dtype and strides."""

    def register(fake: Function) -> Function:
        for name in names:
            torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
        return fake

    return register


def differentiate(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make an op differentiable: `save(ctx, inputs, output)`, then `backward(ctx, *gradients)`."""
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=save, lib=LIBRARY)
