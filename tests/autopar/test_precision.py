"""`precision=`: the distributed program computes what the policy computes on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.capture.precision import Precision
from autopar.capture.program import InputKind, OutputKind
from autopar.capture.trace import capture
from autopar.errors import ConstraintError, UnsupportedOptionError
from tests.gloo import run_on_ranks


class Block(nn.Module):
    """A residual layer of a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Repeated layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randn(8, 16)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("search", ["ilp", "ddp", "fsdp"])
def test_a_plan_is_verified_against_the_same_policy(search: str, precision: str) -> None:
    report = autopar.verify(Model(), (2, 2), example_inputs=batch(), search=search, precision=precision)
    assert report.ok, report.table
    assert "same policy" in report.reference


def test_a_pipeline_is_verified_against_the_same_policy() -> None:
    mesh = autopar.Mesh((2, 2), ("pp", "dp"))
    report = autopar.verify(Model(), mesh, example_inputs=batch(), microbatches=2, precision="bf16")
    assert report.ok, report.table


def test_casts_are_ops_of_the_graph_and_its_edges_stay_wide() -> None:
    program = capture(Model(), batch(), {}, precision=Precision(torch.bfloat16))
    values = program.named_inputs(InputKind.PARAMETER).values()
    assert {node.meta["val"].dtype for node in values} == {torch.float32}
    kinds = {output.kind: node.meta["val"].dtype for output, node in zip(program.outputs, program.results, strict=True)}
    assert kinds == {OutputKind.LOSS: torch.float32, OutputKind.GRADIENT: torch.float32}
    products = [node for node in program.graph_module.graph.nodes if "mm" in str(node.target)]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}
    casts = [node for node in program.graph_module.graph.nodes if node.meta["key"].startswith("blocks.1.up/_to_copy")]
    assert len(casts) == 4  # of weight and bias, and of their gradients


def gathered_bytes(search: str, precision: str | None) -> int:
    """Of all that a plan gathers for its weights."""
    plan = autopar.make_plan(Model(), (4,), example_inputs=batch(), search=search, precision=precision)
    moves = [move for entry in plan.entries for move in entry.moves]
    return sum(move.bytes for move in moves if move.collective == "all_gather")


def reduced_bytes(precision: str | None) -> int:
    """Of all gradients that a fully sharded plan reduces."""
    plan = autopar.make_plan(Model(), (4,), example_inputs=batch(), search="fsdp", precision=precision)
    moves = [move for entry in plan.entries for move in entry.moves]
    return sum(move.bytes for move in moves if move.collective == "reduce_scatter")


def test_weights_are_cast_before_they_are_gathered_and_gradients_reduced_before_they_are_cast() -> None:
    assert 0 < 2 * gathered_bytes("fsdp", "bf16") <= gathered_bytes("fsdp", None)
    assert reduced_bytes("bf16") > 0


def test_data_parallelism_sums_every_gradient_once_and_narrow() -> None:
    def moved(precision: str | None) -> int:
        plan = autopar.make_plan(Model(), (2,), example_inputs=batch(), search="ddp", precision=precision)
        moves = [move for entry in plan.entries for move in entry.moves]
        assert {move.collective for move in moves} <= {"all_reduce", "slice"}
        return sum(move.bytes for move in moves if move.bytes > 4)  # without the loss

    assert 2 * moved("bf16") == moved(None) == moved("bf16-wide")


def test_a_tensor_parallel_plan_does_not_gather_the_weights_that_it_casts() -> None:
    def gathered(precision: str | None) -> int:
        plan = autopar.make_plan(Model(), (2, 2), example_inputs=batch(), search="megatron", precision=precision)
        moves = [
            move for entry in plan.entries if "weight" in entry.key or "_to_copy" in entry.key for move in entry.moves
        ]
        return sum(move.bytes for move in moves if move.collective == "all_gather")

    assert gathered(None) == gathered("bf16") == 0


def test_gradients_are_summed_wide_where_the_policy_says_so() -> None:
    assert reduced_bytes("bf16-wide") == reduced_bytes(None) == 2 * reduced_bytes("bf16")
    report = autopar.verify(Model(), (2,), example_inputs=batch(), precision="bf16-wide")
    assert report.ok, report.table


def test_a_plan_that_sums_narrow_is_not_followed_where_the_policy_says_wide() -> None:
    made = autopar.make_plan(Model(), (2,), example_inputs=batch(), search="ddp", precision="bf16")
    with pytest.raises(ConstraintError, match="before they are widened"):
        autopar.make_plan(Model(), (2,), example_inputs=batch(), plan=made, precision="bf16-wide")


@pytest.mark.parametrize("search", ["ddp", "fsdp", "megatron"])
def test_a_hand_plan_sums_wide_where_the_policy_says_so(search: str) -> None:
    report = autopar.verify(Model(), (2, 2), example_inputs=batch(), search=search, precision="bf16-wide")
    assert report.ok, report.table


def test_batch_norms_stay_wide() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4))
    report = autopar.verify(model, (2,), example_inputs=torch.randn(8, 3, 6, 6), precision="bf16")
    assert report.ok, report.table
    assert any("running_mean" in item.name for item in report.comparisons)


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="'fp4' is no policy"):
        autopar.make_plan(Model(), (2,), example_inputs=batch(), precision="fp4")


def inputs_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch; the second one is so large that gradients overflow in half precision."""
    torch.manual_seed(step)
    x, y = batch()
    return (x, y * 1e4) if step == 1 else (x, y)


def scaled_training() -> tuple[list[float], float]:
    """Half precision with a scaled loss, on ranks and on one device: differences of the weights, and of the scale."""
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    policy = Precision(torch.float16)
    mesh = init_device_mesh("cpu", (2,))
    pmodel = autopar.compile(model, mesh, example_inputs=batch(), search="fsdp", precision="fp16")
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.01) for item in (pmodel, alone)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in optimizers]
    for step in range(4):
        given = inputs_of(step)
        losses = [pmodel(*given), policy.run(alone, given, {}, dict(alone.named_parameters()))]
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    scalers[0].scale(pmodel(*inputs_of(4))).backward()
    before, first = next(pmodel.parameters()).full_tensor(), next(pmodel.parameters())
    if mesh.get_rank() == 1 and isinstance(first.grad, DTensor):  # an overflow on one rank alone
        first.grad.to_local()[0] = float("inf")
    scalers[0].step(optimizers[0])
    assert torch.equal(next(pmodel.parameters()).full_tensor(), before), "all ranks skip the step"
    full = {name: item.full_tensor() for name, item in pmodel.named_parameters() if isinstance(item, DTensor)}
    worst = [float((full[name] - item).abs().max()) for name, item in alone.named_parameters()]
    assert scalers[0].get_scale() == 256.0 / 2 * 2, "the second step overflows, the two after it let the scale grow"
    return worst, scalers[0].get_scale() - scalers[1].get_scale()


def test_half_precision_trains_with_a_scaled_loss_as_on_one_device() -> None:
    for worst, difference in run_on_ranks(scaled_training, 2):
        assert difference == 0.0
        assert max(worst) < 1e-3


def test_a_module_that_stands_in_two_places_has_its_gradients_under_a_policy() -> None:
    shared = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(shared, torch.nn.ReLU(), shared)
    report = autopar.verify(model, (2,), example_inputs=torch.randn(8, 8), precision="bf16")
    assert report.ok, report.table
