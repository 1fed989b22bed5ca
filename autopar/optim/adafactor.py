"""Adafactor of `torch.optim`, with statistics of the whole where parameters are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.optim.closure_step import ClosureStep
from autopar.optim.cut import Cut, Statistic, cut_of, gradient_of, local_of, reduce_in_place, state_part


class Adafactor(ClosureStep, torch.optim.Adafactor):
    """`torch.optim.Adafactor`, the same numbers on sharded parameters.

    Means over rows and columns, and the norms of the parameter and of its update, are those of the full tensor: they
    are summed over the ranks that cut it, for all parameters together, in three rounds. Up to the order of those sums
    it computes on DTensors what it computes on one device. The factors are cut as the dims that they keep; updates are
    computed twice rather than held for all parameters at once.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018; arguments,
    defaults and deviations from the paper are those of `torch.optim.Adafactor`. `foreach` makes no difference here.
    """

    def _step(self) -> None:
        works = [self._work(parameter, group) for parameter, group in self._with_gradients()]
        reduce_in_place([item for work in works for item in work.sums()])
        for work in works:
            work.take_factors()
        reduce_in_place([item for work in works for item in work.row_sums()])
        reduce_in_place([item for work in works for item in work.update_squares()])
        for work in works:
            work.apply()

    def _work(self, parameter: Tensor, group: dict[str, Any]) -> _Work:
        cut, state = cut_of(parameter), self.state[parameter]
        weight = local_of(parameter)
        cuts = factor_cuts(cut)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, item in cuts.items():
                state[name] = item.zeros(weight)
        state["step"] += 1
        gradient = gradient_of(parameter, cut)
        factors = {name: state_part(state, name, item) for name, item in cuts.items()}
        return _Work(cut, weight, -gradient if group["maximize"] else gradient, factors, group, float(state["step"]))


def factor_cuts(cut: Cut) -> dict[str, Cut]:
    """The cuts of a parameter's second moments by their names: two factors over the last dims, or one per element."""
    dims = len(cut.shape)
    if dims < 2:
        return {"variance": cut}
    batch, rows, columns = tuple(range(dims - 2)), dims - 2, dims - 1
    return {
        "row_var": cut.kept((*batch, rows), (*cut.shape[:-1], 1)),
        "col_var": cut.kept((*batch, columns), (*cut.shape[:-2], 1, cut.shape[-1])),
    }


@dataclass
class _Work:
    """The step of one parameter, between the rounds in which statistics are summed over the ranks."""

    cut: Cut
    weight: Tensor
    gradient: Tensor
    factors: dict[str, Tensor]
    group: dict[str, Any]
    step: float

    @property
    def is_factored(self) -> bool:
        return "row_var" in self.factors

    @property
    def everywhere(self) -> tuple[int, ...]:
        """The mesh axes that cut any dim."""
        return self.cut.axes_cutting(range(len(self.cut.shape)))

    @property
    def numel(self) -> int:
        return torch.Size(self.cut.shape).numel()

    def sums(self) -> list[Statistic]:
        """Squares of the parameter, and of the gradient by rows and by columns."""
        self.weight_square = self.weight.square().sum().reshape(1)
        found = [Statistic(self.weight_square, self.cut, self.everywhere)]
        if self.is_factored:
            last = len(self.cut.shape) - 1
            squares = self.gradient.square()
            self.row_square = squares.sum(-1, keepdim=True)
            self.column_square = squares.sum(-2, keepdim=True)
            found.append(Statistic(self.row_square, self.cut, self.cut.axes_cutting((last,))))
            found.append(Statistic(self.column_square, self.cut, self.cut.axes_cutting((last - 1,))))
        return found

    def take_factors(self) -> None:
        """Decay the weights, and let the moving averages take this step's gradient in."""
        lr, decay = float(self.group["lr"]), self.group["weight_decay"]
        norm = float(self.weight_square) ** 0.5
        rate = min(lr, 1 / self.step**0.5)
        self.alpha = max(self.group["eps"][1], norm / self.numel**0.5) * rate
        if decay:
            self.weight.mul_(1 - lr * decay)
        mixed = self.step ** self.group["beta2_decay"]
        if self.is_factored:
            self.factors["row_var"].lerp_(self.row_square.div_(self.cut.shape[-1]), mixed)
            self.factors["col_var"].lerp_(self.column_square.div_(self.cut.shape[-2]), mixed)
        else:
            self.factors["variance"].lerp_(self.gradient.square(), mixed)

    def row_sums(self) -> list[Statistic]:
        """Sums of the row factors over the rows."""
        if not self.is_factored:
            return []
        self.row_sum = self.factors["row_var"].sum(-2, keepdim=True)
        return [Statistic(self.row_sum, self.cut, self.cut.axes_cutting((len(self.cut.shape) - 2,)))]

    def update_squares(self) -> list[Statistic]:
        """The sum of the squares of the update."""
        self.update_square = self._update().square().sum().reshape(1)
        return [Statistic(self.update_square, self.cut, self.everywhere)]

    def apply(self) -> None:
        """Step the parameter."""
        norm = float(self.update_square) ** 0.5
        clip = max(1.0, norm / (self.numel**0.5 * self.group["d"]))
        self.weight.add_(self._update(), alpha=-self.alpha / clip)

    def _update(self) -> Tensor:
        eps = self.group["eps"][0]
        eps = torch.finfo(self.weight.dtype).eps if eps is None else eps
        if self.is_factored:
            mean = (self.row_sum / self.cut.shape[-2]).clamp_(min=eps)
            variance = (self.factors["row_var"] @ self.factors["col_var"]).div_(mean)
        else:
            variance = self.factors["variance"].clone()
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(self.gradient)
