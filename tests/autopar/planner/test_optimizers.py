"""The state that an optimizer is said to keep is what it keeps: measured after a step, on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import UnsupportedOptionError
from autopar.optim import SM3, Adafactor, Adam8bit, HostState, ShardedState
from autopar.planner.optimizers import optimizer_of
from autopar.sharding.layout import parse_layout
from autopar.sharding.op_call import TensorSpec
from tests.gloo import run_on_ranks

FACTORIES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adafactor": Adafactor,
    "SM3": SM3,
    "Adam8bit": Adam8bit,
    "AdamW on the host": partial(HostState, optimizer=torch.optim.AdamW),
    "sharded AdamW on the host": partial(ShardedState, optimizer=partial(HostState, optimizer=torch.optim.AdamW)),
    "sharded AdamW": partial(ShardedState, optimizer=torch.optim.AdamW),
    "sharded Adam8bit": partial(ShardedState, optimizer=Adam8bit),
}
CASES = [
    ((64, 30), "S0,R"),
    ((64, 30), "R,S1"),
    ((64, 30), "R,R"),
    ((256, 128), "S0,S0"),
    ((256, 128), "R,S1"),
    ((256, 128), "R,S0"),
    ((7,), "S0,R"),
    ((), "R,R"),
    ((6, 5, 3, 3), "S1,R"),
]


def held_bytes(dtype: torch.dtype) -> dict[tuple[str, int], int]:
    """By optimizer and case, the bytes of state, step counts left out, that this rank holds after a step."""
    mesh, found = init_device_mesh("cpu", (2, 2)), {}
    for name, factory in FACTORIES.items():
        for index, (shape, layout) in enumerate(CASES):
            value = distribute_tensor(torch.ones(shape, dtype=dtype), mesh, parse_layout(layout, 2))
            parameter = torch.nn.Parameter(value)
            optimizer = factory([parameter])
            parameter.grad = value.clone()
            optimizer.step()
            state: dict[str, Any] = optimizer.state[parameter]
            kept = [item for key, item in state.items() if isinstance(item, torch.Tensor) and key != "step"]
            found[name, index] = sum(
                item.to_local().nbytes if isinstance(item, DTensor) else item.nbytes for item in kept
            )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_that_is_counted_is_what_the_fullest_rank_holds(dtype: torch.dtype) -> None:
    ranks = run_on_ranks(held_bytes, 4, dtype)
    for name, factory in FACTORIES.items():
        optimizer = optimizer_of(factory)
        for index, (shape, layout) in enumerate(CASES):
            place = TensorSpec(shape, dtype), parse_layout(layout, 2), (2, 2)
            counted = optimizer.bytes(*place) + optimizer.host_bytes(*place)
            assert optimizer.host_bytes(*place) == (counted if "on the host" in name and shape else 0)
            assert counted == max(held[name, index] for held in ranks), f"{name}: {shape} in {layout}"


def test_an_optimizer_of_torch_and_ours_of_the_same_name_are_counted_alike() -> None:
    assert optimizer_of(torch.optim.Adafactor) == optimizer_of(Adafactor)


def test_what_is_no_optimizer_is_refused() -> None:
    no_optimizer: Any = torch.nn.Linear
    with pytest.raises(UnsupportedOptionError, match="makes no optimizer"):
        optimizer_of(no_optimizer)
