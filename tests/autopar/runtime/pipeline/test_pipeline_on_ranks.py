"""Pipelines on gloo processes: the user's loop trains as on one device, with data and tensor parallel inside stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import OmittedOutputError, RankFailedError, UninitializedError, UnsupportedOptionError
from autopar.runtime.pipeline.module import PipelineModule
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS
from tests.gloo import run_on_ranks

Case = tuple[str, str, str, int]  # model, search, schedule, microbatches


def train(cases: list[Case], shape: tuple[int, ...], names: tuple[str, ...]) -> list[tuple[Case, float, float]]:
    """Per case, the largest distances of losses and of parameters from the single device's, over three steps."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    for case in cases:
        name, search, schedule, microbatches = case
        model, inputs = MODELS[name]() if name in MODELS else make_plain(name)
        stages = 2 * shape[0] if schedule in ("interleaved", "zb-v") else None
        pmodel = autopar.compile(
            model,
            mesh,
            example_inputs=inputs,
            search=search,
            schedule=schedule,
            stages=stages,
            microbatches=microbatches,
        )
        found.append((case, *_distances(model, pmodel, inputs)))
    return found


def _distances(model: Any, pmodel: Any, inputs: Any) -> tuple[float, float]:
    optimizers = [torch.optim.AdamW(it.parameters(), lr=1e-3) for it in (model, pmodel)]
    worst = 0.0
    for _ in range(3):
        losses = []
        for it, optimizer in zip((model, pmodel), optimizers, strict=True):
            output = it(**inputs) if isinstance(inputs, dict) else it(*inputs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        worst = max(worst, abs(losses[0] - losses[1]) / abs(losses[0]))
    own = dict(model.named_parameters())
    gaps = [(held.full_tensor() - own[name]).abs().max().item() for name, held in pmodel.named_parameters()]
    return worst, max(gaps)


def check(found: list[list[tuple[Case, float, float]]]) -> None:
    for rank in found:
        for case, loss, parameter in rank:
            assert loss < 2e-5, (case, loss)
            assert parameter < 3.1e-3, (case, parameter)  # three steps of AdamW, where gradients are rounding alone


def test_two_ranks_train_as_one_device() -> None:
    cases = [("gpt2", "ddp", "1f1b", 4), ("llama", "ddp", "zb-h1", 2), ("llama", "ddp", "interleaved", 2)]
    check(run_on_ranks(train, 2, cases, (2,), ("pp",)))


def test_convolutions_on_two_ranks_train_as_one_device() -> None:
    """Connections that skip stages; batch norm, of one microbatch."""
    cases = [("unet", "ddp", "1f1b", 4), ("unet", "ddp", "zb-v", 2), ("resnet", "ddp", "gpipe", 1)]
    check(run_on_ranks(train, 2, cases, (2,), ("pp",)))


def test_two_stages_of_two_ranks_train_as_one_device() -> None:
    """GPT-2: its first stage gives the tied embedding no gradient."""
    cases = [("llama", "megatron", "1f1b", 4), ("unet", "ddp", "1f1b", 2), ("gpt2", "ddp", "zb-h1", 2)]
    check(run_on_ranks(train, 4, cases, (2, 2), ("pp", "inner")))


@pytest.mark.slow
def test_four_stages_train_as_one_device() -> None:
    check(run_on_ranks(train, 4, [("t5", "ddp", "1f1b", 8), ("vit", "ddp", "zb-h2", 4)], (4,), ("pp",)))


def use() -> dict[str, Any]:
    """What a pipeline gives in evaluation, of outputs beside the loss, to other sizes, and to an outside loss."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    found: dict[str, Any] = {}
    model, inputs = MODELS["llama"]()
    assert isinstance(inputs, dict)
    pmodel = autopar.compile(model, mesh, example_inputs=inputs, search="ddp", microbatches=4)
    assert isinstance(pmodel, PipelineModule)
    found["names"] = [name for name, _ in pmodel.named_parameters()]
    try:
        pmodel(**inputs).logits.sum()
    except OmittedOutputError as error:
        found["error"] = str(error)
    with pmodel.outputs_everywhere():
        found["logits"] = float((pmodel(**inputs).logits - model(**inputs).logits).detach().abs().max())
    pmodel.eval(), model.eval()
    with torch.no_grad(), pmodel.outputs_everywhere():
        few = {name: value[:2] for name, value in inputs.items()}
        ours, theirs = pmodel(**few), model(**few)
        found["few"] = max(float((ours.logits - theirs.logits).abs().max()), float((ours.loss - theirs.loss).abs()))
    mlp, (x,) = MODELS["mlp"]()
    outside = autopar.compile(mlp, mesh, example_inputs=(x,), search="ddp", schedule="gpipe", microbatches=4)
    (outside(x).square().mean() * 3).backward()
    (mlp(x).square().mean() * 3).backward()
    assert isinstance(outside, PipelineModule)
    own = {name: item.grad for name, item in mlp.named_parameters()}
    gradients = outside.full_gradients()
    found["outside"] = max(float((gradients[name] - own[name]).abs().max()) for name in own)
    full = {name: value.clone() for name, value in mlp.state_dict().items()}
    outside.load_state_dict({name: value + 1 for name, value in full.items()})
    found["loaded"] = all(
        torch.equal(value.full_tensor(), full[name] + 1) for name, value in outside.named_parameters()
    )
    return found


def test_evaluation_outputs_an_outside_loss_and_a_full_state_dict() -> None:
    first, second = run_on_ranks(use, 2)
    assert set(first["names"]).isdisjoint(second["names"])
    for found in (first, second):
        assert "outputs_everywhere" in found["error"]
        assert found["logits"] < 1e-5 and found["few"] < 1e-5 and found["outside"] < 1e-6
        assert found["loaded"]


def clipped() -> list[tuple[float, float]]:
    """(the norm of all gradients, the largest gap after clipping), with tied parameters, from ours and the original."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, inputs = MODELS["gpt2"]()
    pmodel = autopar.compile(model, mesh, example_inputs=inputs, search="ddp", microbatches=2)
    pmodel(**inputs).loss.backward()
    model(**inputs).loss.backward()
    norms = float(autopar.clip_grad_norm_(pmodel, 0.1)), float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    own = {name: item.grad for name, item in model.named_parameters()}
    assert isinstance(pmodel, PipelineModule)
    gaps = [float((value - own[name]).abs().max()) for name, value in pmodel.full_gradients().items()]
    return [(abs(norms[0] - norms[1]) / norms[1], max(gaps))]


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    for ((norm, gap),) in run_on_ranks(clipped, 2):
        assert norm < 1e-5 and gap < 1e-6


def checkpointed(folder: str) -> list[bool]:
    """Whether each parameter of this rank comes back from a checkpoint that other stages wrote too."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model, inputs = MODELS["llama"]()
    for microbatches in (2, 4):
        pmodel = autopar.compile(model, mesh, example_inputs=inputs, search="ddp", microbatches=microbatches)
        if microbatches == 2:
            dcp.save({"model": pmodel.state_dict()}, checkpoint_id=folder)
            continue
        for parameter in pmodel.parameters():
            parameter.data.zero_()
        state = pmodel.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        pmodel.load_state_dict(state)
    own = dict(model.named_parameters())
    return [torch.equal(value.full_tensor(), own[name]) for name, value in pmodel.named_parameters()]


@pytest.mark.slow
def test_checkpoints_hold_the_parameters_of_all_stages(tmp_path: Path) -> None:
    found = run_on_ranks(checkpointed, 2, str(tmp_path))
    assert all(found[0]) and all(found[1])
    assert sum(map(len, found)) == len(list(MODELS["llama"]()[0].parameters()))


class Scaled(torch.nn.Module):
    """Layers that know how to begin, and a factor that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.above(self.below(x).relu()) * self.scale).mean()


def load_what_is_missing() -> float:
    """The distance between the replicas of a stage, on ranks whose generators were seeded apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(torch.distributed.get_rank())
    with torch.device("meta"):
        model = Scaled()
    batch = torch.ones(4, 4)
    pmodel = autopar.compile(model, mesh, example_inputs=(batch,), search="ddp", microbatches=2)
    assert isinstance(pmodel, PipelineModule)
    own = dict(pmodel.named_parameters())
    weights = torch.cat([own[name].to_local().detach().flatten() for name in own if name != "scale"])
    copy = weights.clone()
    torch.distributed.broadcast(copy, group=pmodel.stage_mesh.get_group(), group_src=0)
    with pytest.raises(UninitializedError if "scale" in own else RankFailedError, match="1 tensors"):
        pmodel(batch)
    torch.manual_seed(1)
    loaded = Scaled()
    pmodel.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(pmodel(batch), loaded(batch))
    assert not pmodel.expert_load.layers  # none of the layers is one of experts
    with pytest.raises(UnsupportedOptionError, match="there is no layer of experts"):
        pmodel.rebalance()
    return float((weights - copy).abs().max())


def test_a_meta_model_begins_alike_on_all_ranks_and_loads_what_no_module_initialises() -> None:
    assert run_on_ranks(load_what_is_missing, 4) == [0.0] * 4
