"""Mixed precision as a policy: which tensors of a model's call are cast, wherever the call is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree


class Reduction(Enum):
    """In which dtype gradients are summed over the ranks."""

    FASTEST = "fastest"  # the dtype of the computation, or the parameter's: whichever the planner prices lower
    WIDE = "wide"  # the parameter's


@dataclass(frozen=True)
class Precision:
    """Compute in `dtype`; parameters, their gradients and the optimizer's state stay as they are (master weights).

    1. Floating-point parameters that are wider than `dtype` are cast to it; those of batch norms are not: their
       statistics and scales are kept in the parameters' own dtype.
    2. Floating-point tensors of the call that are wider are cast too. Buffers are not.
    3. Then the model runs as it is. Results in `dtype` are cast to float32, so that a loss can be scaled.
    4. A gradient comes back through the cast, in the dtype of its parameter.

    Gradients are summed over the ranks before that cast, or after it: as `reduction` says.
    """

    dtype: torch.dtype
    reduction: Reduction = Reduction.FASTEST

    def narrowed(self, value: Tensor) -> Tensor:
        """A tensor of 1. or 2., cast if it is wider."""
        if not value.dtype.is_floating_point or value.dtype.itemsize <= self.dtype.itemsize:
            return value
        return value.to(self.dtype)

    def widened(self, value: Tensor) -> Tensor:
        """A result, in float32 if it is in `dtype`."""
        return value.float() if value.dtype == self.dtype else value

    def narrowed_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, cast."""
        cast: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, self.narrowed, (args, kwargs))
        return cast

    def widened_result(self, result: Any) -> Any:
        """What a call returns, cast."""
        return pytree.tree_map_only(Tensor, self.widened, result)

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: Mapping[str, Tensor]) -> Any:
        """`model(*args, **kwargs)` under the policy, on one device; `state`: its parameters by name, maybe buffers.

        This is the single device that the distributed program is compared with.
        """
        kept = kept_wide(model)
        names = {name for name, _ in model.named_parameters()} - kept
        cast = {name: self.narrowed(value) if name in names else value for name, value in state.items()}
        args, kwargs = self.narrowed_call(args, kwargs)
        return self.widened_result(functional_call(model, cast, args, kwargs))


def kept_wide(model: nn.Module) -> set[str]:
    """The parameters that no policy casts: those of batch norms."""
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
