"""Bad input on real ranks: a message on every rank, no rank left waiting, and the ranks can go on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.errors import (
    AutoparError,
    DataDependentError,
    MeshError,
    NoParametersError,
    NotDivisibleError,
    PlanFormatError,
    RankFailedError,
    RanksDisagreeError,
)
from tests.autopar.test_bad_input import Branches, Layer, assert_untouched, batch, snapshot
from tests.gloo import run_on_ranks

TIMEOUT_S = 60.0  # a hang ends here


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def outcome(action: Callable[[], Any]) -> tuple[str, str]:
    """(class, message) of the error that `action` raises."""
    try:
        action()
    except AutoparError as error:
        return type(error).__name__, str(error)
    return "no error", ""


def compile_differently(folder: str) -> dict[str, tuple[str, str]]:
    """On each rank, what compile says when the first rank is given something else than the others."""
    mesh, first = line(), dist.get_rank() == 0
    model = Layer()
    before = snapshot(model)
    plans = [autopar.make_plan(model, (2,), example_inputs=batch(), search=name) for name in ("ddp", "fsdp")]
    broken = Path(folder) / f"rank{dist.get_rank()}.json"
    plans[0].save(broken)
    if not first:
        broken.write_text("{")

    def compiled(**options: Any) -> tuple[str, str]:
        return outcome(lambda: autopar.compile(model, mesh, **{"example_inputs": batch(), **options}))

    found = {
        "search": compiled(search="ddp" if first else "fsdp"),
        "plans": compiled(plan=plans[0] if first else plans[1]),
        "a plan or none": compiled(plan=plans[0] if first else None),
        "limits": compiled(memory_limit_bytes=10**9 if first else 10**8),
        "constraints": compiled(constraints={} if first else {"layer.weight": "R"}),
        "shapes": compiled(example_inputs=batch(8 if first else 4)),
        "now or later": compiled(example_inputs=batch() if first else None),
        "one broken plan": compiled(plan=broken),
        "one bad option": compiled(precision=None if first else "int3"),
        "one bad input": compiled(example_inputs=batch() if first else 3),
        "models": outcome(lambda: autopar.compile(model if first else nn.ReLU(), mesh, example_inputs=batch())),
        "one untraceable": outcome(
            lambda: autopar.compile(model if first else Branches(), mesh, example_inputs=batch())
        ),
        "verify": outcome(
            lambda: autopar.verify(model, mesh, example_inputs=batch(), search="ddp" if first else "fsdp")
        ),
    }
    assert_untouched(model, before)
    assert autopar.verify(model, mesh, example_inputs=batch()).ok
    return found


def test_ranks_that_are_given_different_things_are_all_told_so(tmp_path: Path) -> None:
    first, second = run_on_ranks(compile_differently, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    told = ("search", "plans", "a plan or none", "limits", "constraints", "shapes", "now or later", "models", "verify")
    for case in told:
        for name, message in (first[case], second[case]):
            assert name == RanksDisagreeError.__name__, (case, name, message)
            assert "ranks 0:" in message and "ranks 1:" in message and "fix:" in message
    for case, name in (
        ("one broken plan", PlanFormatError.__name__),
        ("one bad option", "UnsupportedOptionError"),
        ("one bad input", "CaptureError"),
        ("one untraceable", DataDependentError.__name__),
    ):
        assert first[case][0] == RankFailedError.__name__ and f"rank 1 failed with {name}" in first[case][1], case
        assert second[case][0] == name, case


def fail_together() -> list[tuple[str, str]]:
    """What every rank is told when all of them are given the same bad thing."""
    mesh = line()
    model = Branches()
    before = snapshot(model)
    found = [
        outcome(lambda: autopar.compile(model, mesh, example_inputs=batch())),
        outcome(lambda: autopar.compile(model, mesh)(batch())),
        outcome(lambda: autopar.compile(nn.ReLU(), mesh)),
        outcome(lambda: autopar.compile(Layer(), mesh, example_inputs=batch(6), search="ddp")),
        outcome(lambda: autopar.compile(Layer(), mesh, example_inputs=batch(), memory_limit_bytes=50)),
    ]
    assert_untouched(model, before)
    pmodel = autopar.compile(Layer(), mesh, example_inputs=batch(), search="ddp")
    state = {name: item.full_tensor().detach().clone() for name, item in pmodel.named_parameters()}
    found.append(outcome(lambda: pmodel(batch(6))))
    assert all(torch.equal(item.full_tensor(), state[name]) for name, item in pmodel.named_parameters())
    assert pmodel(batch(16)).shape == (16, 4)  # and it goes on
    return found


def test_what_is_wrong_everywhere_has_one_message_on_every_rank() -> None:
    ranks = run_on_ranks(fail_together, 4, timeout_s=TIMEOUT_S)
    assert all(found == ranks[0] for found in ranks)
    expected = [DataDependentError, DataDependentError, NoParametersError, NotDivisibleError]
    assert [name for name, _ in ranks[0][:4]] == [kind.__name__ for kind in expected]
    assert "return y * 2 if y.sum() > 0 else y" in ranks[0][0][1]
    assert ranks[0][4][0] == "MemoryLimitError" and "too much" in ranks[0][4][1]
    assert ranks[0][5][0] == NotDivisibleError.__name__ and "of 6 does not divide" in ranks[0][5][1]


def use_too_large_a_mesh() -> list[tuple[str, str]]:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False, _rank=dist.get_rank())
    model = Layer()
    before = snapshot(model)
    found = [
        outcome(lambda: autopar.compile(model, mesh)),
        outcome(lambda: autopar.verify(model, mesh, example_inputs=batch())),
    ]
    assert_untouched(model, before)
    return found


def test_a_mesh_larger_than_the_world_is_refused_on_every_rank() -> None:
    for found in run_on_ranks(use_too_large_a_mesh, 2, timeout_s=TIMEOUT_S):
        for name, message in found:
            assert name == MeshError.__name__ and "the mesh has 4 ranks, the world has 2" in message
            assert "--nproc-per-node 4" in message


def run_alone() -> None:
    for shape in ((1,), (1, 1)):
        mesh = init_device_mesh("cpu", shape)
        for search in ("ilp", "ddp", "fsdp"):
            model = Layer()
            pmodel = autopar.compile(model, mesh, example_inputs=batch(), search=search)
            pmodel(batch()).sum().backward()
            model(batch()).sum().backward()
            for name, parameter in pmodel.named_parameters():
                torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad)
            for graph in (pmodel.forward_graph, pmodel.backward_graph):
                assert graph is not None and "c10d" not in graph.print_readable(print_output=False)
        assert autopar.verify(Layer(), mesh, example_inputs=batch()).ok


def test_a_world_of_one_rank_works_without_collectives() -> None:
    run_on_ranks(run_alone, 1, timeout_s=TIMEOUT_S)
