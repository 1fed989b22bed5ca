"""Cut a model into stages on two local ranks, train it beside one device, and draw what each rank did when.

python examples/pipeline.py [--ranks 2] [--steps 4] [--schedule 1f1b] [--page pipeline.html]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from local_ranks import compare, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.report.page import report_page

WIDTH = 128


class Deep(nn.Module):
    """Six residual layers; `forward(x, y)` is the loss. No layer is named a stage: the traced program is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(64, WIDTH, generator=random) for _ in range(steps)]
    return [(x, x.roll(1, 1)) for x in inputs]


def make_model() -> Deep:
    torch.manual_seed(0)
    return Deep()


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in batches(steps):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(ranks: int, steps: int, schedule: str) -> tuple[autopar.Plan, list[float], autopar.Recording]:
    """On each rank, which has the parameters of its own stage alone."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    inputs = batches(1)[0]
    pmodel = autopar.compile(make_model(), mesh, example_inputs=inputs, schedule=schedule, microbatches=2 * ranks)
    with pmodel.record() as recorder:
        losses = train(pmodel, steps)
    return pmodel.plan.without_problems(), losses, recorder.recording


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a pipeline on local ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--page", type=Path, default=Path("pipeline.html"))
    chosen = parser.parse_args(arguments)
    plan, together, recording = launch(run, chosen.ranks, chosen.ranks, chosen.steps, chosen.schedule)
    print(plan)
    compare(train(make_model(), chosen.steps), together)
    chosen.page.write_text(report_page(plan, recording), encoding="utf-8")
    print(f"wrote {chosen.page}: the schedule as simulated, and as it was measured")


if __name__ == "__main__":
    main()
