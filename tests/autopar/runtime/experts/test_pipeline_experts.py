"""Experts of a pipeline move, and are copied, within their stages: training goes on as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError, UnsupportedOptionError
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from autopar.runtime.pipeline.module import PipelineModule
from tests.autopar.runtime.experts.test_rebalance import WIDTH, adam, distance, full
from tests.gloo import run_on_ranks

EXPERTS = 8
OPTIONS: dict[str, Any] = {"stages": 2, "batch_semantics": "accumulated", "constraints": {"*/autopar.experts*": "A"}}


class Blocks(nn.Module):
    """A dense layer and two of experts, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH)
        gates = [TopKGate(WIDTH, EXPERTS, 2) for _ in range(2)]
        self.blocks = nn.ModuleList(MixtureOfExperts(gate, Experts(EXPERTS, WIDTH, 12)) for gate in gates)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        for block in self.blocks:
            x = x + block(x)[0]
        return x.square().mean()


def batch(step: int) -> Tensor:
    """Tokens around one point, another one from step 3 on; in step 6 only half of them."""
    point = torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step // 3))
    count = 16 if step == 6 else 32
    return point + torch.randn(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train_and_rebalance(schedule: str, microbatches: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    model = Blocks()
    pmodel = autopar.compile(
        model, mesh, example_inputs=batch(0), schedule=schedule, microbatches=microbatches, **OPTIONS
    )
    assert isinstance(pmodel, PipelineModule)
    twin, gaps = copy.deepcopy(model), list[float]()
    optimizers = adam(pmodel.parameters()), adam(twin.parameters())

    def train(steps: range) -> None:
        for step in steps:
            losses = []
            for module, optimizer in zip((pmodel, twin), optimizers, strict=True):
                optimizer.zero_grad()
                losses.append(module(batch(step)))
                losses[-1].backward()
            own = {name: item.grad for name, item in twin.named_parameters()}
            gaps.extend(distance(value, own[name]) for name, value in pmodel.full_gradients().items())
            for optimizer in optimizers:
                optimizer.step()
            gaps.append(abs(float(losses[0].detach() / losses[1].detach()) - 1))
        expected, state = twin.state_dict(), pmodel.state_dict()
        gaps.extend(distance(full(value), expected[name]) for name, value in state.items() if value is not None)
        single, moments = dict(twin.named_parameters()), optimizers[0].state_dict()["state"]
        for index, (name, _) in enumerate(pmodel.named_parameters()):
            moment = optimizers[1].state[single[name]]["exp_avg"]
            gaps.append(distance(full(moments[index]["exp_avg"]), moment))

    train(range(3))
    counts = pmodel.expert_load.matrix
    reports = [pmodel.rebalance()]
    train(range(3, 5))
    reports.append(pmodel.rebalance(replicas=12))
    pending, _ = pmodel(batch(5)), twin(batch(5))
    train(range(5, 7))
    saved = {name: full(value).clone() for name, value in pmodel.state_dict().items()}
    pmodel.load_state_dict({**twin.state_dict(), **saved})
    reports.append(pmodel.rebalance())
    train(range(7, 9))
    try:
        pending.backward()
    except AutoparError as error:
        message = str(error)
    holders = dict(pmodel.expert_load.holders)
    return {"gaps": gaps, "counts": counts, "reports": reports, "message": message, "holders": holders}


class Tied(Blocks):
    """Both layers have the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].experts = self.blocks[0].experts


def rebalance_tied() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    pmodel = autopar.compile(Tied(), mesh, example_inputs=batch(0), schedule="1f1b", microbatches=1, **OPTIONS)
    pmodel(batch(0)).backward()
    try:
        pmodel.rebalance()
    except UnsupportedOptionError as error:
        return str(error)
    return "nothing was refused"


def test_experts_that_several_stages_share_stay() -> None:
    for message in run_on_ranks(rebalance_tied, 4):
        assert "no layer's experts can be moved" in message and "several stages read its weights" in message


@pytest.mark.parametrize(("schedule", "microbatches"), [("1f1b", 1), ("zb-h1", 2)])
def test_training_goes_on_as_on_one_device_after_experts_of_stages_moved(schedule: str, microbatches: int) -> None:
    results = run_on_ranks(train_and_rebalance, 4, schedule, microbatches)
    for found in results:
        assert max(map(abs, found["gaps"])) < 1e-9, found["gaps"]
        moved, copied, last = found["reports"]
        assert [str(report) for report in found["reports"]] == [str(report) for report in results[0]["reports"]]
        assert found["counts"].sum(1).tolist() == [3 * 32 * 2] * 2
        assert moved.moved_experts > 0 and min(moved.received_bytes) > 0 and set(moved.after) == set(found["holders"])
        assert [report.copies for report in (moved, copied, last)] == [0, 8, 0] and min(copied.copy_bytes) > 0
        for report in (moved, copied):
            assert sum(report.imbalance_after.values()) < sum(report.imbalance_before.values())
        assert "call backward() first" in found["message"]
