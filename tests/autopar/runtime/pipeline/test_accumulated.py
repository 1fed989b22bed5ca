"""Microbatches that are batches by themselves: statistics, loss and buffers are those of gradient accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import cli
from autopar.errors import InputError, MicrobatchError, UnsupportedOptionError
from tests.autopar.models import MODELS
from tests.gloo import run_on_ranks

LINE = autopar.Mesh((2,), ("pp",), hardware="cpu")
SQUARE = autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu")


class Normed(nn.Module):
    """Batch norms, a loss inside."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [part for _ in range(4) for part in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(dropout))]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 6), torch.randint(3, (size,))


def accumulated(model: nn.Module, inputs: tuple[Tensor, Tensor], count: int) -> tuple[float, dict[str, Tensor]]:
    """The usual loop of gradient accumulation, written out."""
    total = 0.0
    for x, labels in zip(*(value.chunk(count) for value in inputs), strict=True):
        loss = model(x, labels)["loss"] / count
        loss.backward()
        total += float(loss.detach())
    return total, {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


@pytest.mark.parametrize(("mesh", "schedule"), [(LINE, "1f1b"), (LINE, "zb-h1"), (LINE, "zb-v"), (SQUARE, "gpipe")])
def test_a_pipeline_computes_what_gradient_accumulation_does(mesh: autopar.Mesh, schedule: str) -> None:
    torch.manual_seed(0)
    model, inputs = Normed(), batch()
    options: dict[str, Any] = {
        "search": "ddp",
        "schedule": schedule,
        "microbatches": 2,
        "batch_semantics": "accumulated",
    }
    run = autopar.run_virtual(model, mesh, example_inputs=inputs, **options)
    loss, gradients = accumulated(model, inputs, 2)
    assert float(run.outputs["loss"]) == pytest.approx(loss, rel=1e-6)
    assert run.outputs["logits"].shape == (8, 3)
    for name, gradient in gradients.items():
        torch.testing.assert_close(run.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    for name, buffer in model.named_buffers():  # of two microbatches, in order
        torch.testing.assert_close(run.buffers[name], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_batch_norm_in_training_is_verified_with_several_microbatches(count: int) -> None:
    model, inputs = MODELS["resnet"]()
    report = autopar.verify(
        model, LINE, example_inputs=inputs, search="ddp", schedule="1f1b", microbatches=count,
        batch_semantics="accumulated",
    )  # fmt: skip
    assert report.ok, report.table
    assert f"{count} microbatches one after another" in report.reference
    assert report.plan is not None and report.peak_bytes is not None and report.plan.peak_bytes >= report.peak_bytes


class Measured(Normed):
    """With a mean over the samples beside the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        return found | {"mean": found["logits"].mean(0)}


class Scored(Normed):
    """With a share of right answers beside the loss, and how many there were."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        right = found["logits"].argmax(-1) == labels
        return found | {"right": right.float().mean(), "samples": right.numel() + right.sum() * 0}


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("mesh", [LINE, SQUARE], ids=["pp", "pp x dp"])
def test_numbers_are_means_of_the_microbatches_with_and_without_gradients(mesh: autopar.Mesh, gradients: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Scored(), batch()
    options: dict[str, Any] = {"search": "ddp", "microbatches": 2, "batch_semantics": "accumulated"}
    with torch.set_grad_enabled(gradients):
        run = autopar.run_virtual(model, mesh, example_inputs=inputs, **options)
    with torch.no_grad():
        parts = [model(*part) for part in zip(*(value.chunk(2) for value in inputs), strict=True)]
    for name in ("loss", "right"):
        expected = sum(float(part[name]) for part in parts) / 2
        assert float(parts[0][name]) != float(parts[1][name])
        assert float(run.outputs[name]) == pytest.approx(expected, rel=1e-6)
    assert int(run.outputs["samples"]) == 4  # a whole number, of the last microbatch
    assert run.outputs["logits"].shape == (8, 3)


def test_an_output_that_is_not_of_samples_is_the_last_microbatchs() -> None:
    report = autopar.verify(
        Measured(), LINE, example_inputs=batch(), search="ddp", microbatches=2, batch_semantics="accumulated"
    )
    assert report.ok, report.table


def test_each_microbatch_draws_numbers_of_its_own() -> None:
    report = autopar.verify(
        Normed(0.5), SQUARE, example_inputs=batch(), search="ddp", microbatches=2, batch_semantics="accumulated"
    )
    assert report.ok, report.table


def test_the_default_refuses_and_names_the_way_out() -> None:
    with pytest.raises(MicrobatchError, match="batch_semantics='accumulated'"):
        autopar.make_plan(Normed(), LINE, example_inputs=batch(), microbatches=2)


def test_what_it_says_is_saved_with_the_plan_and_followed() -> None:
    model, inputs = Normed(), batch()
    plan = autopar.make_plan(model, LINE, example_inputs=inputs, microbatches=2, batch_semantics="accumulated")
    assert plan.pipeline is not None and plan.pipeline.batch_semantics == "accumulated"
    again = autopar.Plan.from_json(plan.to_json())
    assert again.pipeline == plan.pipeline and again.hash == plan.hash
    assert autopar.verify(model, LINE, example_inputs=inputs, plan=again).ok


def made() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Normed(), batch()


def test_a_shell_asks_for_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", f"{__name__}:made", "--mesh", "2", "--stages", "2", "--microbatches", "2", "--hardware", "cpu"]
    assert cli.main(words) == cli.BAD_USAGE
    assert "batch_semantics='accumulated'" in capsys.readouterr().err
    assert cli.main([*words, "--batch-semantics", "accumulated"]) == cli.OK


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


class Shared(nn.Module):
    """One norm at both ends: its statistics would go from stage to stage and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(6), nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[1](self.norm(self.layers[0](x)))) + 1
        return self.norm(self.layers[3](self.layers[2](x))).sigmoid().mean()


def test_what_cannot_be_accumulated_is_refused() -> None:
    x, labels = batch()
    own: dict[str, Any] = {"batch_semantics": "accumulated"}
    with pytest.raises(MicrobatchError, match="does not return its loss"):
        autopar.make_plan(Outside(), LINE, example_inputs=x, microbatches=2, **own)
    with pytest.raises(MicrobatchError, match="is written by stage"):
        autopar.make_plan(Shared(), LINE, example_inputs=x, microbatches=2, **own)
    with pytest.raises(InputError, match="does not divide into 3"):
        autopar.make_plan(Normed(), LINE, example_inputs=(x, labels), microbatches=3, **own)
    with pytest.raises(UnsupportedOptionError, match="give microbatches="):
        autopar.make_plan(Normed(), LINE, example_inputs=(x, labels), **own)
    with pytest.raises(UnsupportedOptionError, match="for pipelines"):
        autopar.make_plan(Normed(), (2,), example_inputs=(x, labels), microbatches=2, **own)
    with pytest.raises(UnsupportedOptionError, match="accumulates nothing"):
        autopar.make_plan(Normed(), LINE, example_inputs=(x, labels), schedule="pipedream", microbatches=2, **own)
    with pytest.raises(UnsupportedOptionError, match="says nothing of microbatches"):
        autopar.make_plan(Normed(), LINE, example_inputs=(x, labels), batch_semantics="summed")


def train() -> list[float]:
    """(gaps of loss, of parameters, of buffers after three steps, of outputs in evaluation) from the usual loop."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model, inputs = Normed(), batch()
    pmodel = autopar.compile(
        model, mesh, example_inputs=inputs, search="ddp", schedule="1f1b", microbatches=4, batch_semantics="accumulated"
    )
    optimizers = [torch.optim.SGD(it.parameters(), lr=0.1) for it in (model, pmodel)]
    losses = []
    for _ in range(3):
        loss, _ = accumulated(model, inputs, 4)
        ours = pmodel(*inputs)["loss"]
        ours.backward()
        losses.append(abs(float(ours.detach()) - loss))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    held = [(value.full_tensor() - own[name]).abs().max().item() for name, value in pmodel.named_parameters()]
    kept = [(getattr(value, "full_tensor", lambda v=value: v)() - buffers[name]).abs().max().item()
            for name, value in pmodel.named_buffers()]  # fmt: skip
    few = tuple(value[:6] for value in inputs)
    with pytest.raises(InputError, match="does not divide into 4"):  # three would be another step
        pmodel(*few)
    model.eval(), pmodel.eval()  # into three microbatches of two
    with torch.no_grad(), pmodel.outputs_everywhere():
        shown = (pmodel(*few)["logits"] - model(*few)["logits"]).abs().max().item()
    return [max(losses), max(held), max(kept), shown]


def test_real_ranks_train_and_evaluate_as_the_loop_does() -> None:
    for gaps in run_on_ranks(train, 2):
        assert max(gaps) < 1e-5, gaps
