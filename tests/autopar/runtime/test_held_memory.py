"""What a recorded step holds: by the allocator of an accelerator, or counted by tensor; the state of optimizers too."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.runtime.held_memory import AllocatorMemory, SteppedOptimizers, held_memory, local_parts


def node_of(target: Callable[..., Any]) -> fx.Node:
    return fx.Graph().call_function(target, ())


def test_storages_are_counted_once_and_until_they_are_freed() -> None:
    standing = torch.zeros(8)
    memory = held_memory("cpu", [standing, standing.view(2, 4)])
    made = torch.zeros(4)
    memory.begin()
    assert memory.after(node_of(operator.add), [made, made[:2]]) == 32 + 16
    del made
    memory.begin()
    assert memory.after(node_of(operator.add), ()) == 32


def test_of_a_program_the_most_at_once_is_counted_with_what_arrived_from_elsewhere() -> None:
    memory = held_memory("cpu", [])
    arrived = torch.zeros(8)
    with memory.of_program():
        arrived = (arrived + 1).sum()
    assert memory.most_bytes() == 32 + 32 + 4
    with memory.of_program():
        del arrived
    assert memory.most_bytes() <= 32 + 4


def test_an_accelerators_allocator_is_asked_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100, 70])
    resets: list[int] = []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: resets.append(1))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: next(peaks))
    memory = held_memory("cuda", [])
    assert isinstance(memory, AllocatorMemory)
    memory.begin()
    assert memory.after(node_of(operator.add), ()) == 100
    with memory.of_program():
        pass
    assert memory.most_bytes() == 70
    assert len(resets) == 2


def test_the_state_of_optimizers_that_stepped_is_known() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    with SteppedOptimizers() as stepped:
        assert stepped.state_of(model.weight) == []
        optimizer.step()
    assert sorted(state.numel() for state in stepped.state_of(model.weight)) == [1, 16, 16]  # a step count, two moments
    optimizer.step()
    assert local_parts([model.weight], "cpu")[0] is model.weight and local_parts([model.weight], "meta") == []
