"""Adam and AdamW whose two moments are kept in 8 bits per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from autopar.errors import UnsupportedOptionError
from autopar.optim.blocks import Blocks, dequantized, quantized
from autopar.optim.closure_step import ClosureStep
from autopar.optim.cut import Cut, Statistic, cut_of, gradient_of, local_of, reduce_in_place, state_part

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name of the state: whether it is signed
SMALL = 4096  # elements; what is smaller keeps its moments in 32 bits, as in the published implementation


def scales_name(moment: str) -> str:
    """The state that holds the scales of a moment's blocks."""
    return f"{moment}_scales"


class Adam8bit(ClosureStep):
    """Adam with block-wise quantized moments: a byte for each, and a scale for every 2048 elements.

    Moments are dequantized, updated and used in float32, then quantized again. Blocks are those of the full tensor:
    where a shard does not consist of whole blocks their maxima go over the ranks (a float per block), so that every
    layout of shards and replicas gives, bit by bit, what one device computes. Parameters of fewer than `SMALL`
    elements keep 32-bit moments.

    Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
    Leaves out: percentile clipping, and the stable embedding layer, which is a change of the model.
    """

    decoupled: ClassVar[bool] = False
    """Whether weight decay shrinks the weights (AdamW) rather than add to the gradient."""
    usual_decay: ClassVar[float] = 0.0
    """The weight decay where none is given."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        """The arguments of `torch.optim.Adam`, or AdamW; `weight_decay` None: the default of that one."""
        weight_decay = self.usual_decay if weight_decay is None else weight_decay
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UnsupportedOptionError(
                f"{type(self).__name__} with lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}",
                fix="give lr, eps and weight_decay of at least 0, and betas from 0 to below 1",
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _step(self) -> None:
        for parameter, group in self._with_gradients():
            self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        moments = self._moments(parameter)
        weight, gradient = local_of(parameter), gradient_of(parameter, moments.cut).float()
        step = float(moments.state["step"])
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        if decay and self.decoupled:
            weight.mul_(1 - rate * decay)
        elif decay:
            gradient = gradient + weight.float() * decay
        mean, square = moments.read("exp_avg"), moments.read("exp_avg_sq")
        # products and sums apart: each is rounded on its own, alike for every element wherever it lies
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient.square() * (1 - beta2))
        spread = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        weight.copy_(weight.float() - mean / spread * (rate / (1 - beta1**step)))
        moments.write({"exp_avg": mean, "exp_avg_sq": square})

    def _moments(self, parameter: Tensor) -> _Moments:
        state, cut = self.state[parameter], cut_of(parameter)
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, (item, dtype) in moment_cuts(cut).items():
                state[name] = item.zeros(local_of(parameter), dtype)
            if is_quantized(cut):
                codes = [quantized(torch.zeros(1), torch.zeros(1), signed=signed) for signed in MOMENTS.values()]
                for name, zero in zip(MOMENTS, codes, strict=True):
                    local_of(state[name]).fill_(int(zero))
        state["step"] += 1
        return _Moments(state, cut)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's, but codes stay bytes, and scales stay in 32 bits."""
        super().load_state_dict(state_dict)
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        for parameter, key in (
            pair for ours, given in groups for pair in zip(ours["params"], given["params"], strict=True)
        ):
            for name, value in state_dict["state"].get(key, {}).items():
                if name != "step" and isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(device=parameter.device).clone()


class AdamW8bit(Adam8bit):
    """`Adam8bit` whose weight decay shrinks the weights, as that of `torch.optim.AdamW`."""

    decoupled = True
    usual_decay = 1e-2


def is_quantized(cut: Cut) -> bool:
    """Whether a parameter's moments are kept in 8 bits."""
    return torch.Size(cut.shape).numel() >= SMALL


def moment_cuts(cut: Cut) -> dict[str, tuple[Cut, torch.dtype]]:
    """The state of a parameter by name: how it is cut, and its dtype."""
    if not is_quantized(cut):
        return dict.fromkeys(MOMENTS, (cut, torch.float32))
    scales = Blocks(cut).scales_cut
    codes = dict.fromkeys(MOMENTS, (cut, torch.uint8))
    return codes | {scales_name(name): (scales, torch.float32) for name in MOMENTS}


@dataclass(frozen=True)
class _Moments:
    """The two moments of one parameter, read as float32 and written as they are kept."""

    state: dict[str, Any]
    cut: Cut

    def _part(self, name: str) -> Tensor:
        return state_part(self.state, name, moment_cuts(self.cut)[name][0])

    def _members(self) -> Tensor:
        return Blocks(self.cut).members(self._part("exp_avg").device)

    def read(self, name: str) -> Tensor:
        """A fresh tensor with the moment of this rank's shard."""
        part = self._part(name)
        if not is_quantized(self.cut):
            return part.clone()
        scales = self._part(scales_name(name))[self._members()].view(part.shape)
        return dequantized(part, scales, signed=MOMENTS[name])

    def write(self, moments: dict[str, Tensor]) -> None:
        """Keep the moments; the maxima of blocks that ranks share go over the mesh."""
        if not is_quantized(self.cut):
            for name, value in moments.items():
                self._part(name).copy_(value)
            return
        blocks, members = Blocks(self.cut), self._members()
        scales = {name: blocks.maxima(value, members) for name, value in moments.items()}
        if not blocks.align:
            axes = self.cut.axes_cutting(range(len(self.cut.shape)))
            shared = [Statistic(value, self.cut, axes) for value in scales.values()]
            reduce_in_place(shared, dist.ReduceOp.MAX)
        for name, value in moments.items():
            self._part(scales_name(name)).copy_(scales[name])
            codes = quantized(value, scales[name][members].view(value.shape), signed=MOMENTS[name])
            self._part(name).copy_(codes)
