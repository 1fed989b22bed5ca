"""The planned memory of a pipeline is an upper bound of what its ranks hold, and a close one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.arguments import call_arguments, make_options
from autopar.capture.trace import capture
from autopar.compiler import pipeline_step
from autopar.mesh import Mesh
from autopar.planner.pipeline import plan_pipeline
from autopar.planner.pipeline_request import PipelineRequest
from autopar.runtime.pipeline.virtual_run import run_virtual_pipeline
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS

SLACK = 1.03  # 1.027 was found, where the batch does not divide: every microbatch is planned as the largest
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v", "auto")


class Layers(nn.Module):
    """Eight layers, a connection over all of them, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(8)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        value = first = self.layers[0](x).tanh()
        for layer in self.layers[1:]:
            value = layer(value).tanh()
        loss: Tensor = (value + first - target).square().mean()
        return loss


def layers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Layers(), (torch.randn(16, 24), torch.randn(16, 24))


def planned_and_measured(name: str, mesh: Mesh, search: str, request: PipelineRequest) -> list[tuple[int, int]]:
    """(planned, measured) bytes of each pipeline rank."""
    if name == "layers":
        model, inputs = layers()
    else:
        model, inputs = MODELS[name]() if name in MODELS else make_plain(name)
    args, kwargs = call_arguments(inputs)
    program = capture(model, args, kwargs, device="cpu")
    pipeline = plan_pipeline(program, mesh, make_options(search, None, None, (), None), request)
    run = run_virtual_pipeline(model, pipeline_step(pipeline), args, kwargs, seed=0)
    inner = mesh.size // mesh.shape[0]
    measured = [max(run.peak_bytes[rank * inner : (rank + 1) * inner]) for rank in range(mesh.shape[0])]
    assert pipeline.plan.peak_bytes == max(pipeline.rank_peaks)
    return list(zip(pipeline.rank_peaks, measured, strict=True))


def check(pairs: list[tuple[int, int]]) -> None:
    for planned, measured in pairs:
        assert measured <= planned <= SLACK * measured, (planned, measured)


@pytest.mark.parametrize("microbatches", [2, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_holds_more_than_was_planned(schedule: str, microbatches: int) -> None:
    stages = 4 if schedule in ("interleaved", "zb-v") else 2
    request = PipelineRequest(stages, schedule, microbatches)
    check(planned_and_measured("layers", Mesh((2,), ("pp",), hardware="cpu"), "ddp", request))


@pytest.mark.parametrize(
    ("name", "shape", "search", "request_"),
    [
        ("llama", (2, 2), "fsdp", PipelineRequest(2, "zb-h1", 2)),
        ("unet", (2,), "ddp", PipelineRequest(2, "zb-h2", 4)),
        ("unet", (4,), "ddp", PipelineRequest(4, "gpipe", 1)),  # a reduced loss in the storage of all elements'
        ("unet", (2,), "ddp", PipelineRequest(4, "zb-v", 2)),  # skip connections within a rank
        ("unet", (2, 2), "ddp", PipelineRequest(2, "gpipe", 1)),
        ("vit", (2,), "ddp", PipelineRequest(4, "zb-v", 8)),  # what arrives dies within the forward
        ("bert", (2,), "ddp", PipelineRequest(4, "zb-v", 8)),
        ("t5", (2,), "ddp", PipelineRequest(4, "zb-v", 2)),
        ("t5", (2,), "ddp", PipelineRequest(4, "interleaved", 8)),
        ("gpt2", (2,), "ddp", PipelineRequest(4, "zb-v", 8)),  # tied weights on two stages of one rank
        ("gpt2", (2, 2), "megatron", PipelineRequest(2, "1f1b", 2)),
        ("mlp", (2,), "ddp", PipelineRequest(2, "gpipe", 3)),
        ("mlp", (2, 2), "ddp", PipelineRequest(2, "1f1b", 2)),  # the loss is computed outside, of all outputs
    ],
)
def test_the_bound_holds_for_whole_models(
    name: str, shape: tuple[int, ...], search: str, request_: PipelineRequest
) -> None:
    mesh = Mesh(shape, ("pp", "inner")[: len(shape)], hardware="cpu")
    check(planned_and_measured(name, mesh, search, request_))
