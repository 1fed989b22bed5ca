"""How much state an optimizer keeps, found by stepping it once on small parameters of every number of dims."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.errors import UnsupportedOptionError
from autopar.optim.adam_8bit import MOMENTS, SMALL, Adam8bit
from autopar.optim.blocks import BLOCK
from autopar.optim.host_state import HostState
from autopar.optim.sharded_state import ShardedState
from autopar.planner.decisions import NO_OPTIMIZER
from autopar.planner.optimizer_state import Optimizer, StateTensor

OptimizerFactory = Callable[..., torch.optim.Optimizer]
PROBE = (3, 5, 7, 2, 11)  # sizes of the dims of the parameters that are stepped: all different
USUAL_DIMS = 2  # every optimizer takes a matrix


def optimizer_of(factory: OptimizerFactory | None) -> Optimizer:
    """The state of an optimizer class or factory (called with a list of parameters).

    Scalars such as step counts are left out, and so is the time of collectives inside its step, but those of
    `ShardedState`. None: no optimizer is counted.
    """
    if factory is None:
        return NO_OPTIMIZER
    try:
        optimizer = _stepped(factory, USUAL_DIMS, torch.float32)[1]
    except (TypeError, AttributeError) as error:
        raise UnsupportedOptionError(
            f"optimizer={factory!r} makes no optimizer of a list of parameters: {error}",
            fix="pass a class or a factory, e.g. lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
        ) from error
    wrappers, stages = [], set[int]()
    inside = optimizer
    while isinstance(inside, (ShardedState, HostState)):
        wrappers.append(type(inside))
        stages |= {inside.stage} if isinstance(inside, ShardedState) else set()
        inside = inside.inner
    large: tuple[StateTensor, ...] = ()
    if isinstance(inside, Adam8bit):
        large = (StateTensor(None, 1), StateTensor((), 4, BLOCK)) * len(MOMENTS)
    return Optimizer(
        name=type(inside).__name__,
        state=tuple(_state_of(factory, dims) for dims in range(len(PROBE) + 1)),
        large=large,
        least_large=SMALL,
        shards_replicas=ShardedState in wrappers,
        scatters_gradients=max(stages, default=0) > 1,
        on_host=HostState in wrappers,
    )


def _stepped(
    factory: OptimizerFactory, dims: int, dtype: torch.dtype
) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A parameter of so many dims, and the optimizer that has stepped it once."""
    parameter = torch.nn.Parameter(torch.zeros(PROBE[:dims], dtype=dtype))
    optimizer = factory([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return parameter, optimizer


def _state_of(factory: OptimizerFactory, dims: int) -> tuple[StateTensor, ...]:
    """What it keeps for a parameter of so many dims; as for a matrix where it takes none such, as Muon does."""
    try:
        parameter, optimizer = _stepped(factory, dims, torch.float32)
        halves, second = _stepped(factory, dims, torch.bfloat16)
    except (ValueError, RuntimeError, IndexError):
        if dims == USUAL_DIMS:
            raise
        kept = _state_of(factory, USUAL_DIMS)
        return tuple(StateTensor(None, item.itemsize) for item in kept)
    state, narrow = optimizer.state[parameter], second.state[halves]
    return tuple(
        StateTensor(_dims_of(value, parameter), _itemsize(value, narrow[name]))
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    )


def _dims_of(value: torch.Tensor, parameter: torch.Tensor) -> tuple[int, ...]:
    """The dims of the parameter that a state tensor has: their sizes tell, since all differ."""
    if value.dim() == parameter.dim():
        return tuple(dim for dim, size in enumerate(value.shape) if size == parameter.shape[dim] != 1)
    return tuple(dim for dim, size in enumerate(parameter.shape) if size in value.shape)


def _itemsize(wide: torch.Tensor, narrow: torch.Tensor) -> int | None:
    """Bytes per element, None where they are the parameter's: float32 and bfloat16 were tried."""
    return None if wide.element_size() != narrow.element_size() else wide.element_size()
