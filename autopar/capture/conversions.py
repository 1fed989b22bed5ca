"""Modules that the forward converts: `self.head = self.head.to(torch.float32)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.source import calling_line, describe


@contextmanager
def conversions_that_change_nothing(model: nn.Module) -> Iterator[None]:
    """Let the model's modules be converted in the forward to what they are: nothing is done, as on one device.

    While a program is traced its parameters are fake tensors that PyTorch's own conversion cannot put in place. One
    that would change a tensor writes into the model's state: CaptureError.
    """
    modules = list(model.modules())
    for module in modules:
        module.__dict__["_apply"] = _unchanged(module)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("_apply", None)


def _unchanged(module: nn.Module) -> Callable[..., nn.Module]:
    def apply(convert: Callable[[Tensor], Any], *, recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        with torch.no_grad():
            changed = [tensor for tensor in tensors if convert(tensor) is not tensor]
        if changed:
            line = calling_line()
            raise CaptureError(
                f"the forward converts {type(module).__name__}, which changes the dtype or device of its parameters",
                where=describe(*line) if line else "",
                fix="convert the model before it is compiled, or cast the values: F.linear(x, weight.float())",
            )
        return module

    return apply
