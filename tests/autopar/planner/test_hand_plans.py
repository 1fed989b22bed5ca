"""The hand plans are what their names say, in collectives and layouts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.sharding.layout import format_layout
from tests.autopar.models import MODELS


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def planned(search: str, mesh_shape: tuple[int, ...]) -> autopar.Plan:
    return autopar.make_plan(block(), autopar.Mesh(mesh_shape), example_inputs=torch.randn(8, 16), search=search)


def layouts(plan: autopar.Plan) -> dict[str, str]:
    return {entry.key: format_layout(entry.outputs[0]) for entry in plan.entries if entry.kind == "parameter"}


def collectives(plan: autopar.Plan) -> Counter[tuple[str, int]]:
    return Counter(
        (move.collective, move.axis) for entry in plan.entries for move in entry.moves if move.collective != "slice"
    )


def test_ddp_replicates_parameters_and_only_sums_gradients() -> None:
    plan = planned("ddp", (4,))
    assert set(layouts(plan).values()) == {"R"}
    assert {kind for kind, _ in collectives(plan)} <= {"all_reduce", "all_gather"}
    gradients = [move for entry in plan.entries if entry.kind == "parameter" for move in entry.moves]
    assert {move.collective for move in gradients} == {"all_reduce"}


def test_fsdp_stores_shards_gathers_them_and_scatters_gradients() -> None:
    plan = planned("fsdp", (4,))
    assert set(layouts(plan).values()) == {"S0"}
    gradients = [move for entry in plan.entries if entry.kind == "parameter" for move in entry.moves]
    assert {move.collective for move in gradients} == {"reduce_scatter"}
    assert collectives(plan)["all_gather", 0] >= 4


def test_megatron_cuts_the_first_weight_by_columns_and_the_second_by_rows() -> None:
    plan = planned("megatron", (2, 2))
    found = layouts(plan)
    assert found["1.weight"] == "R,S0"
    assert found["3.weight"] == "R,S1"
    forward = [entry for entry in plan.entries if entry.kind == "op" and ".backward" not in entry.key]
    tensor_parallel = [
        move for entry in forward for move in entry.moves if move.axis == 1 and move.collective != "slice"
    ]
    assert [move.collective for move in tensor_parallel] == ["all_reduce"]


def test_a_batch_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="a batch of 6 does not divide over 4 ranks"):
        autopar.make_plan(block(), autopar.Mesh((4,)), example_inputs=torch.randn(6, 16), search="ddp")


def test_zero2_keeps_for_the_backward_what_fsdp_gathers_again() -> None:
    zero2, fsdp = planned("zero2", (4,)), planned("fsdp", (4,))
    assert layouts(zero2) == layouts(fsdp) and zero2.hash != fsdp.hash
    assert zero2.step_s < fsdp.step_s and zero2.peak_bytes > fsdp.peak_bytes
    kept = {entry.key for entry in zero2.entries if entry.kind == "parameter" and entry.residency == "keep"}
    assert kept == {"0.weight", "0.bias"}  # both phases read these themselves; of the others the backward reads views
    assert {entry.key for entry in fsdp.entries if entry.residency == "recompute"} == {"1/t#0", "3/t#0"}
    for plan in (zero2, fsdp):
        again = autopar.Plan.from_json(plan.to_json())
        report = autopar.verify(block(), (4,), example_inputs=torch.randn(8, 16), plan=again)
        assert report.ok, report.table


class Recurrent(nn.Module):
    """A recurrence, which cuts the batch alone, between layers that can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.cell, self.down = nn.Linear(16, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.cell(self.up(x))[0])


def test_megatron_leaves_whole_what_an_op_cannot_take_cut() -> None:
    x = torch.randn(8, 5, 16)
    plan = autopar.make_plan(Recurrent(), autopar.Mesh((2, 2)), example_inputs=x, search="megatron")
    found = layouts(plan)
    assert found["cell.weight_hh_l0"] == "R,R"
    assert all("S" in found[f"{name}.weight"] for name in ("up", "down"))
    report = autopar.verify(Recurrent(), autopar.Mesh((2, 2)), example_inputs=x, plan=plan)
    assert report.ok, report.table


@pytest.mark.parametrize("search", ["ddp", "fsdp"])
def test_the_batch_stays_cut_over_every_axis_behind_sums_over_it(search: str) -> None:
    """A batch norm's statistics are summed; what it normalizes stays: convolutions sum nothing, in whatever dtype."""
    model, inputs = MODELS["resnet"]()
    plan = autopar.make_plan(model, (2, 2), example_inputs=inputs, search=search)
    found = {
        format_layout(entry.outputs[0])
        for entry in plan.entries
        if "/convolution#" in entry.key or "batch_norm_apply#" in entry.key
    }
    assert found == {"S0,S0"}
    assert autopar.verify(model, (2, 2), example_inputs=inputs, search=search, precision="bf16").ok
