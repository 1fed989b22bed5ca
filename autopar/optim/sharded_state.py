"""ZeRO stages 1 and 2 for any optimizer: ranks that hold the same parameter divide its optimizer state among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from autopar.errors import UnsupportedOptionError
from autopar.optim.closure_step import ClosureStep
from autopar.optim.cut import Cut, cut_of, gradient_of, local_of
from autopar.sharding.dtensors import host_copy
from autopar.sharding.layout import REPLICATE, Layout, chunk, local_shape, shard_dim
from autopar.torch_compat import run_load_hooks


def state_layout(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int]) -> Layout:
    """The layout of the state of a parameter: as its own, with the axes that replicate it cut too, where they can be.

    Each such axis cuts the first dim that is long enough and that no later axis cuts: a rank's part is then a block of
    the shard it holds.
    """
    result = list(layout)
    for axis, placement in enumerate(layout):
        later = {shard_dim(item) for item in layout[axis + 1 :]}
        if placement != REPLICATE or mesh_shape[axis] == 1:
            continue
        held = local_shape(shape, tuple(result), mesh_shape)
        dims = [dim for dim, size in enumerate(held) if size >= mesh_shape[axis] and dim not in later]
        if dims:
            result[axis] = Shard(dims[0])
    return tuple(result)


STAGES = (1, 2)


class ShardedState(ClosureStep):
    """Steps an optimizer on shards of replicated parameters, then gathers them: ZeRO stages 1 and 2.

    `ShardedState(pmodel.parameters(), torch.optim.AdamW, lr=3e-4)`; to count its state when planning, give
    `optimizer=functools.partial(ShardedState, optimizer=torch.optim.AdamW)`. Each rank keeps the state of a part of
    every parameter that it holds in common with others, updates that part in place, and receives the other parts: the
    bytes of an all-gather for state divided by the number of replicas. Parameters that are cut over every axis, or are
    no DTensors, are stepped as they are. With `stage=2` a plan leaves each rank the gradient of its part alone: sums
    over ranks are scattered, not given to all. What the optimizer computes per element, and what `autopar.optim`
    computes per row or block, stays what it is on one device.

    Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    SC 2020, section 5.1.
    """

    def __init__(self, params: ParamsT, optimizer: Callable[..., Optimizer], *, stage: int = 1, **options: Any) -> None:
        """`optimizer`: a class or factory, called with parameters (or groups of them) and the options.

        `stage`: of ZeRO, 1 or 2. It tells a planner how gradients are to lie; any are stepped.
        """
        if stage not in STAGES:
            raise UnsupportedOptionError(
                f"stage={stage!r} of ZeRO is not the optimizer's to choose",
                fix="give 1 or 2; stage 3 is a plan that stores parameters in shards, as search='fsdp'",
            )
        self.stage = stage
        super().__init__(params, {})
        self._layouts: dict[Tensor, Layout] = {}
        self._parts: dict[Tensor, Tensor] = {}
        groups = [{**group, "params": [self._part(item) for item in group["params"]]} for group in self.param_groups]
        self.inner = optimizer(groups, **options)
        self.defaults = self.inner.defaults
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step these parameters too."""
        super().add_param_group(param_group)
        if "inner" in self.__dict__:
            group = self.param_groups[-1]
            self.inner.add_param_group({**group, "params": [self._part(item) for item in group["params"]]})
            self._share()

    def _step(self) -> None:
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
            for index, parameter in enumerate(ours["params"]):
                theirs["params"][index] = self._refreshed(parameter)
        self.inner.step()
        for parameter, part in self._parts.items():
            if part is not parameter and part.grad is not None:
                local_of(parameter).copy_(cut_of(parameter).part(part.detach()))
                part.grad = None
        self._share()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this optimizer, or of the one inside, has saved."""
        self.inner.load_state_dict(state_dict)
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            ours.update({name: value for name, value in theirs.items() if name != "params"})
        self._share()
        run_load_hooks(self)

    def _share(self) -> None:
        """Show the inner optimizer's options and state as this one's, by the parameters that were given."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            for name, value in theirs.items():
                ours.setdefault(name, value)
        for parameter, part in self._parts.items():
            if part in self.inner.state:
                self.state[parameter] = self.inner.state[part]

    def _refreshed(self, parameter: Tensor) -> Tensor:
        """The part of a parameter, with its gradient; made anew, with its state, if the parameter was laid out anew, or
        lies elsewhere: on the host, or back on the device."""
        if isinstance(parameter, DTensor) and not self._is_current(parameter):
            before = self._parts[parameter]
            part = self._part(parameter)
            state = self.inner.state.pop(before, None)
            if state is not None:
                self.inner.state[part] = {name: _moved(value, part) for name, value in state.items()}
        part = self._parts[parameter]
        if part is not parameter:
            part.grad = None
            if parameter.grad is not None:
                part.grad = _own_gradient(parameter, cut_of(part))
        return part

    def _is_current(self, parameter: DTensor) -> bool:
        """Whether the part that was made of a parameter is a view of what that holds now."""
        held, part = local_of(parameter).untyped_storage(), local_of(self._parts[parameter]).untyped_storage()
        return self._layouts[parameter] == tuple(parameter.placements) and held.data_ptr() == part.data_ptr()

    def _part(self, parameter: Tensor) -> Tensor:
        """What the inner optimizer steps: a view of this rank's part of the shard that it holds, or the parameter."""
        self._parts[parameter] = parameter
        if isinstance(parameter, DTensor):
            cut = cut_of(parameter)
            self._layouts[parameter] = cut.layout
            layout = state_layout(cut.shape, cut.layout, tuple(parameter.device_mesh.shape))
            if layout != cut.layout:
                fine = Cut(cut.shape, cut.mesh, layout)
                part = fine.whole(_narrowed(local_of(parameter).detach(), cut, fine))
                self._parts[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
        return self._parts[parameter]


def _own_gradient(parameter: Tensor, fine: Cut) -> Tensor:
    """The gradient of a rank's part of a parameter, which each rank may hold alone, or all of them in full."""
    gradient, cut = parameter.grad, cut_of(parameter)
    if isinstance(gradient, DTensor) and tuple(gradient.placements) == fine.layout:
        return gradient.detach()
    return fine.whole(_narrowed(gradient_of(parameter, cut), cut, fine))


def _narrowed(held: Tensor, cut: Cut, fine: Cut) -> Tensor:
    """The block of a shard that a finer cut leaves to this rank, as a view."""
    assert cut.mesh is not None
    coordinates = cast("tuple[int, ...]", tuple(cut.mesh.get_coordinate() or ()))
    for axis, (before, after) in enumerate(zip(cut.layout, fine.layout, strict=True)):
        dim = shard_dim(after)
        if before != after and dim is not None:
            held = held.narrow(dim, *chunk(held.shape[dim], cut.mesh.size(axis), coordinates[axis]))
    return held


def _moved(value: Any, part: Tensor) -> Any:
    """A state tensor as long as the parameter, in the part's layout, and on the host if that lies there; others are
    brought there by their optimizer, as what lies on the host of a part on the device is."""
    if not isinstance(value, DTensor) or not isinstance(part, DTensor) or value.shape != part.shape:
        return value
    if local_of(part).device.type != part.device_mesh.device_type:
        there = cut_of(part)
        return there.whole(host_copy(there.part(value)))
    if value.to_local().device.type != value.device_mesh.device_type:
        return value
    return value.redistribute(part.device_mesh, part.placements)
