"""PipeDream on gloo ranks: the weights are those of one process that makes every update with the same staleness."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import autopar
from autopar.errors import InputError, PlanError, UnsupportedOptionError
from autopar.runtime.pipeline.module import PipelineModule
from tests.autopar.models import MODELS
from tests.gloo import run_on_ranks

STAGES, MICROBATCHES, CALLS = 2, 8, 2


class Regression(nn.Module):
    """Layers and a loss of its own; batch norm, whose statistics are each microbatch's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [item for _ in range(4) for item in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.layers(x) - target).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (4 * MICROBATCHES, 6)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(CALLS)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def versions(schedule: str, item: int, stage: int, update_every: int) -> int:
    """The update after which a stage's weights meet microbatch `item` of a call."""
    if schedule == "pipedream-2bw":
        return max(0, item // update_every - 1)
    return max(0, item - (STAGES - 1 - (stage if schedule == "pipedream" else 0)))


def reference(schedule: str, stage_of: Mapping[str, int], update_every: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of one process: each microbatch on the versions that the papers give it, updates in turn."""
    model = Regression().double().train()
    newest = dict(model.named_parameters())
    optimizers = [sgd([item for name, item in newest.items() if stage_of[name] == stage]) for stage in range(STAGES)]
    losses = []
    for x, target in batches():
        history: list[dict[str, Tensor]] = [{name: item.detach().clone() for name, item in newest.items()}]
        total, gathered = 0.0, dict[str, Tensor]()
        for item, (part, wanted) in enumerate(zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)):
            met = {
                name: history[versions(schedule, item, stage_of[name], update_every)][name].clone().requires_grad_()
                for name in newest
            }
            loss = functional_call(model, met, (part, wanted))
            total += float(loss.detach()) / MICROBATCHES
            gradients = torch.autograd.grad(loss, list(met.values()))
            for name, gradient in zip(met, gradients, strict=True):
                gathered[name] = gathered[name] + gradient if name in gathered else gradient
            if (item + 1) % update_every == 0:
                for name, parameter in newest.items():
                    parameter.grad = gathered[name] / update_every
                for optimizer in optimizers:
                    optimizer.step()
                history.append({name: item.detach().clone() for name, item in newest.items()})
                gathered = {}
        losses.append(total)
    return {**{name: item.detach() for name, item in newest.items()}, **dict(model.named_buffers())}, losses


def train(schedule: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (STAGES,), mesh_dim_names=("pp",))
    pmodel = autopar.compile(
        Regression().double(), mesh, example_inputs=batches()[0], search="ddp", schedule=schedule,
        microbatches=MICROBATCHES, optimizer=sgd,
    )  # fmt: skip
    assert isinstance(pmodel, PipelineModule)
    losses = [float(pmodel.train_step(*batch)) for batch in batches()]
    found: dict[str, Any] = {"losses": losses, "update_every": pmodel.step.schedule.update_every}
    found["parameters"] = {name: item.full_tensor().detach() for name, item in pmodel.named_parameters()}
    found["buffers"] = {name: item.clone() for name, item in pmodel.named_buffers()}
    with torch.no_grad():
        found["evaluated"] = float(pmodel.eval()(*batches()[0]))
    pmodel.train()
    for refused, call in (("call", pmodel), ("size", lambda x, y: pmodel.train_step(x[:8], y[:8]))):
        found[refused] = _error(call)
    return found


def _error(call: Callable[..., Any]) -> str:
    try:
        call(*batches()[0])
    except (InputError, UnsupportedOptionError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
def test_weights_are_those_of_the_same_updates_in_one_process(schedule: str) -> None:
    ranks = run_on_ranks(train, STAGES, schedule)
    stage_of = {name: stage for stage, found in enumerate(ranks) for name in found["parameters"]}
    assert set(stage_of.values()) == {0, 1}
    expected, losses = reference(schedule, stage_of, ranks[0]["update_every"])
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        for name, value in {**found["parameters"], **found["buffers"]}.items():
            torch.testing.assert_close(value, expected[name].to(value.dtype), rtol=1e-6, atol=1e-9)
        assert "train_step" in found["call"] and "example_inputs" in found["size"]
    other = "pipedream" if schedule == "pipedream-vertical" else "pipedream-vertical"
    stale, _ = reference(other, stage_of, 1)
    assert max(float((stale[name] - expected[name]).abs().max()) for name in stage_of) > 1e-4


def test_a_parameter_of_two_stages_is_refused() -> None:
    model, inputs = MODELS["gpt2"]()
    mesh = autopar.Mesh((4,), ("pp",), hardware="cpu")
    with pytest.raises(PlanError, match=r"wte\.weight"):
        autopar.make_plan(copy.deepcopy(model), mesh, example_inputs=inputs, schedule="pipedream", microbatches=4)


def test_an_asynchronous_schedule_has_no_step_to_verify() -> None:
    mesh = autopar.Mesh((2,), ("pp",), hardware="cpu")
    batch = batches()[0]
    with pytest.raises(UnsupportedOptionError, match="train_step"):
        autopar.verify(Regression().double(), mesh, example_inputs=batch, schedule="pipedream", microbatches=4)
    with pytest.raises(UnsupportedOptionError, match="microbatches="):
        autopar.verify(Regression().double(), mesh, example_inputs=batch, schedule="pipedream")
