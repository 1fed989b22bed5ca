"""Parameters of pipeline stages on the host: what the plan promises is measured, on the device and on the host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError
from tests.autopar.planner.test_stage_memory import Layers

HOST = {"*.weight": "offload"}
ADAMW = torch.optim.AdamW
PAIR = autopar.Mesh((2,), ("pp",), hardware="a100")
FOUR = autopar.Mesh((2, 2), ("pp", "dp"), hardware="a100")
WEIGHT = 24 * 24 * 4  # bytes


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 24), torch.randn(16, 24)


def planned(mesh: autopar.Mesh, schedule: str = "1f1b", microbatches: int = 4, **given: Any) -> autopar.Plan:
    stages = 4 if schedule == "interleaved" else 2
    options = {"search": "ddp", "constraints": HOST, **given}
    return autopar.make_plan(
        Layers(), mesh, example_inputs=inputs(), stages=stages, schedule=schedule, microbatches=microbatches, **options
    )


@pytest.mark.parametrize("mesh", [PAIR, FOUR])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_stages_on_the_host_compute_the_same_and_hold_what_is_promised(schedule: str, mesh: autopar.Mesh) -> None:
    plan = planned(mesh, schedule)
    report = autopar.verify(Layers(), mesh, example_inputs=inputs(), plan=plan)
    assert report.ok, report.table
    run = autopar.run_virtual(Layers(), mesh, example_inputs=inputs(), plan=plan)
    assert (max(run.peak_bytes), max(run.host_bytes)) == (plan.peak_bytes, plan.host_bytes)
    assert plan.peak_bytes < 0.5 * planned(mesh, schedule, constraints={}).peak_bytes


@pytest.mark.parametrize("search", ["fsdp", "megatron"])
def test_shards_and_one_microbatch_are_promised_too(search: str) -> None:
    for microbatches in (1, 2):
        plan = planned(FOUR, "zb-h1", microbatches, search=search)
        report = autopar.verify(Layers(), FOUR, example_inputs=inputs(), plan=plan)
        assert report.ok and report.peak_bytes == plan.peak_bytes, report.table


def test_what_the_host_holds_is_told_by_kind() -> None:
    plan = planned(PAIR, optimizer=ADAMW)
    five = max(len(stage.parameters) // 2 for stage in plan.stages)
    sums, of_a_microbatch = five, five
    assert plan.host_memory == {
        "parameter": five * WEIGHT, "gradient": (sums + of_a_microbatch) * WEIGHT, "optimizer_state": 2 * five * WEIGHT
    }  # fmt: skip
    assert plan.host_bytes == sum(plan.host_memory.values())
    text = "57.6 kB on the host (gradient 23 kB, optimizer_state 23 kB, parameter 11.5 kB)"
    assert text in " ".join(str(plan).split())
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.host_memory == plan.host_memory
    followed = autopar.make_plan(Layers(), PAIR, example_inputs=inputs(), optimizer=ADAMW, plan=again)
    assert (followed.hash, followed.host_memory, followed.notes) == (plan.hash, plan.host_memory, ())


def test_copies_cost_time_and_sums_on_the_host_too() -> None:
    hosted, kept = planned(PAIR), planned(PAIR, constraints={})
    assert hosted.step_s > kept.step_s
    alone = planned(PAIR, microbatches=1).stages[0], planned(PAIR, microbatches=1, constraints={}).stages[0]
    of_four = hosted.stages[0], kept.stages[0]
    more = [ours.backward_weight_s - theirs.backward_weight_s for ours, theirs in (of_four, alone)]
    assert more[0] > more[1]  # one microbatch has nothing to add to


class Tied(nn.Module):
    """An embedding that the last layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        value = self.second(self.first(self.embed(x)).tanh()).tanh()
        return torch.logsumexp(nn.functional.linear(value, self.embed.weight), 1).mean()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_stages_share_stays_and_the_rest_goes(microbatches: int) -> None:
    ids = torch.arange(8) % 32
    given: dict[str, Any] = {"example_inputs": ids, "stages": 2, "microbatches": microbatches, "search": "ddp"}
    plan = autopar.make_plan(Tied(), PAIR, constraints=HOST, **given)
    words = {entry.key: entry.residency for entry in plan.every_entry if entry.kind == "parameter"}
    assert words["first.weight"] == "offload" != words.get("embed.weight")
    report = autopar.verify(Tied(), PAIR, example_inputs=ids, plan=plan)
    assert report.ok and report.peak_bytes <= plan.peak_bytes <= 1.03 * report.peak_bytes, report.table
    with pytest.raises(ConstraintError, match="several stages read it"):
        autopar.make_plan(Tied(), PAIR, constraints={"embed.weight": "offload"}, **given)


def test_stages_that_update_while_they_run_keep_their_parameters() -> None:
    with pytest.raises(ConstraintError, match="an asynchronous schedule updates it"):
        planned(PAIR, "pipedream")


def test_accumulated_batches_add_up_on_the_host() -> None:
    plan = planned(PAIR, batch_semantics="accumulated")
    report = autopar.verify(Layers(), PAIR, example_inputs=inputs(), plan=plan)
    assert report.ok and report.peak_bytes <= plan.peak_bytes <= 1.01 * report.peak_bytes, report.table
