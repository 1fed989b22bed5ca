"""SM3: Adagrad whose accumulators are one number per row, column, ... instead of one per element."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from autopar.errors import UnsupportedOptionError
from autopar.optim.closure_step import ClosureStep
from autopar.optim.cut import Cut, Statistic, cut_of, gradient_of, local_of, reduce_in_place, state_part


class SM3(ClosureStep):
    """Memory-efficient adaptive optimization with a cover of rows and columns.

    For an element i of a tensor, ν(i) = min over its dims of the accumulator of its slice, plus g(i)²; the step is
    lr · g/√ν, with momentum the moving average of g/√ν; each slice then keeps its largest ν. Tensors of one dim or
    none have an accumulator per element, which is Adagrad. 0/0 is 0. State: the sum of the dims, and with momentum a
    copy of the parameter.

    On a DTensor the accumulator of a dim is cut as that dim is, and maxima go over the ranks that cut the others, in
    one all-reduce for all parameters: bit by bit what one device computes, in every layout of shards and replicas.

    Source: Anil, Gupta, Koren and Singer, "Memory-Efficient Adaptive Optimization", NeurIPS 2019, algorithm SM3-II.
    """

    def __init__(self, params: ParamsT, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        """`weight_decay`: added to the gradient, as L2 regularization."""
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise UnsupportedOptionError(
                f"SM3 with lr={lr}, momentum={momentum}, weight_decay={weight_decay}",
                fix="give lr and weight_decay of at least 0, and a momentum from 0 to below 1",
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _step(self) -> None:
        maxima: list[Statistic] = []
        for parameter, group in self._with_gradients():
            maxima += self._update(parameter, group)
        reduce_in_place(maxima, dist.ReduceOp.MAX)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> list[Statistic]:
        """Step one parameter; its accumulators hold the maxima of this rank's shard, to be reduced."""
        cut, state = cut_of(parameter), self.state[parameter]
        cuts = accumulator_cuts(cut)
        if not state:
            self._start(parameter, cut, cuts, group)
        weight, gradient = local_of(parameter), gradient_of(parameter, cut)
        if group["weight_decay"]:
            gradient = gradient + weight * group["weight_decay"]
        accumulators = [state_part(state, f"accumulator_{dim}", item) for dim, item in enumerate(cuts)]
        nu = accumulators[0].expand(weight.shape)
        for accumulator in accumulators[1:]:
            nu = torch.minimum(nu, accumulator)
        nu = nu + gradient * gradient
        update = torch.where(nu > 0, gradient / nu.sqrt(), torch.zeros_like(nu))
        if group["momentum"]:
            average = state_part(state, "momentum", cut)
            # products and sums apart: each is rounded on its own, alike for every element wherever it lies
            average.mul_(group["momentum"]).add_(update * (1 - group["momentum"]))
            update = average
        weight.sub_(update * group["lr"])
        return _slice_maxima(nu, accumulators, cut, cuts)

    def _start(self, parameter: Tensor, cut: Cut, cuts: list[Cut], group: dict[str, Any]) -> None:
        state = self.state[parameter]
        for dim, item in enumerate(cuts):
            state[f"accumulator_{dim}"] = item.zeros(local_of(parameter))
        if group["momentum"]:
            state["momentum"] = cut.zeros(local_of(parameter))


def accumulator_cuts(cut: Cut) -> list[Cut]:
    """The cuts of a parameter's accumulators: one per dim, as long as that dim; one per element below two dims."""
    dims = len(cut.shape)
    if dims < 2:
        return [cut]
    shapes = [[size if other == dim else 1 for other, size in enumerate(cut.shape)] for dim in range(dims)]
    return [cut.kept((dim,), shape) for dim, shape in enumerate(shapes)]


def _slice_maxima(nu: Tensor, accumulators: list[Tensor], cut: Cut, cuts: list[Cut]) -> list[Statistic]:
    """Write the largest ν of each slice of this shard; what of them is to be reduced over which axes."""
    if nu.dim() < 2:
        accumulators[0].copy_(nu)
        return []
    found = []
    for dim, (accumulator, item) in enumerate(zip(accumulators, cuts, strict=True)):
        others = [other for other in range(nu.dim()) if other != dim]
        if nu.numel():
            accumulator.copy_(nu.amax(others, keepdim=True))
        else:
            accumulator.zero_()  # ν is never negative: an empty shard changes no maximum
        found.append(Statistic(accumulator, item, cut.axes_cutting(others)))
    return found
