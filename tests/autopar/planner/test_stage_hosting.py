"""Parameters of pipeline stages on the host: what the plan promises is measured, on the device and on the host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.arguments import make_options
from autopar.capture.trace import capture
from autopar.cost_models.hardware import load_profile
from autopar.errors import ConstraintError, MemoryLimitError, PlanError
from autopar.planner.pipeline_request import PipelineRequest
from autopar.planner.pipeline_search import PipelineSearch
from autopar.planner.segments import Segments
from tests.autopar.models import MODELS
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


def test_copies_cost_time() -> None:
    slow, fast = (planned(on_host(host_bytes_per_s=rate)) for rate in (1e9, 1e14))
    kept = planned(PAIR, constraints={})
    assert slow.step_s > fast.step_s > kept.step_s
    assert slow.stages[0].forward_s > fast.stages[0].forward_s == pytest.approx(kept.stages[0].forward_s, rel=0.1)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_sums_on_the_host_cost_time_from_the_second_microbatch_on(microbatches: int) -> None:
    slow = planned(on_host(host_step_bytes_per_s=1e9), microbatches=microbatches)
    fast = autopar.make_plan(Layers(), on_host(host_step_bytes_per_s=1e14), example_inputs=inputs(), plan=slow)
    for ours, theirs in zip(slow.stages, fast.stages, strict=True):
        moved = 3 * WEIGHT * sum(name.endswith("weight") for name in ours.parameters)  # two read, one written
        more_s = ours.backward_weight_s - theirs.backward_weight_s
        assert more_s == pytest.approx(moved / 1e9 * (microbatches - 1) / microbatches, rel=1e-3, abs=1e-12)
    assert slow.step_s > fast.step_s  # the step of the optimizer is there in any case


def on_host(**rates: float) -> autopar.Mesh:
    """Two stages on devices whose hosts have these rates."""
    profile = load_profile("a100")
    return autopar.Mesh((2,), ("pp",), hardware=replace(profile, device=replace(profile.device, **rates)))


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
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (2, "zb-h1"), (4, "interleaved"), (4, "zb-v")])
def test_what_stages_share_is_summed_on_the_devices_and_sent_once(
    stages: int, schedule: str, microbatches: int
) -> None:
    if microbatches == 1 and schedule == "interleaved":
        microbatches = 2
    ids, options = torch.arange(8) % 32, {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    given: dict[str, Any] = {"example_inputs": ids, "search": "ddp", **options}
    plan = autopar.make_plan(Tied(), PAIR, constraints=HOST, **given)
    for stage in plan.stages:
        words = {entry.key: entry.residency for entry in stage.plan.entries if entry.kind == "parameter"}
        assert {word for name, word in words.items() if name.endswith("weight")} <= {"offload"}
    report = autopar.verify(Tied(), PAIR, example_inputs=ids, plan=plan)
    assert report.ok and report.peak_bytes <= plan.peak_bytes <= 1.03 * report.peak_bytes, report.table
    run = autopar.run_virtual(Tied(), PAIR, example_inputs=ids, plan=plan)
    assert max(run.host_bytes) <= plan.host_bytes <= 1.1 * max(run.host_bytes)
    alone = autopar.make_plan(Tied(), PAIR, constraints={"embed.weight": "offload"}, optimizer=ADAMW, **given)
    kept = autopar.make_plan(Tied(), PAIR, optimizer=ADAMW, **given)
    embedding = 32 * 16 * 4
    assert alone.host_memory == {"parameter": embedding, "gradient": embedding, "optimizer_state": 2 * embedding}
    assert alone.step_s > kept.step_s
    if schedule != "zb-v":  # whose fullest rank is the other one
        assert kept.peak_bytes - alone.peak_bytes > 2 * embedding  # of three; copies take the rest


def test_what_stages_share_lies_in_one_place() -> None:
    ids = torch.arange(8) % 32
    plan = autopar.make_plan(Tied(), PAIR, constraints=HOST, example_inputs=ids, stages=2, microbatches=2)
    data = plan.to_json()
    del data["pipeline"]["stages"][-1]["plan"]["residency"]["embed.weight"]
    with pytest.raises(PlanError, match="not in all of the stages that share it"):
        autopar.make_plan(Tied(), PAIR, example_inputs=ids, plan=autopar.Plan.from_json(data))
    mixed = {"embed.weight": "keep", "first.weight": "offload"}
    kept = autopar.make_plan(Tied(), PAIR, constraints=mixed, example_inputs=ids, stages=2, microbatches=2)
    assert hosted_in(kept) == {"first.weight"}


def test_a_search_finds_one_place_for_what_stages_share() -> None:
    model, ids = Tied(), torch.arange(8) % 32
    model.embed = nn.Embedding(4096, 16)
    given: dict[str, Any] = {"example_inputs": ids, "stages": 2, "microbatches": 2, "optimizer": ADAMW}
    roomy = autopar.make_plan(model, PAIR, **given)
    limit = int(0.7 * roomy.peak_bytes)
    plan = autopar.make_plan(model, PAIR, memory_limit_bytes=limit, **given)
    assert plan.peak_bytes <= limit and "embed.weight" in hosted_in(plan)
    assert all(entry.residency == "offload" for entry in plan.every_entry if entry.key == "embed.weight")
    assert autopar.verify(model, PAIR, example_inputs=ids, plan=plan, optimizer=ADAMW).ok


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "mlp"])
def test_whole_models_are_promised_too(name: str) -> None:
    model, x = MODELS[name]()
    given: dict[str, Any] = {"batch_semantics": "accumulated"} if name == "resnet" else {}
    given |= {"search": "ddp", "schedule": "zb-h1", "microbatches": 2}
    plan = autopar.make_plan(model, PAIR, example_inputs=x, constraints=HOST, **given)
    report = autopar.verify(model, PAIR, example_inputs=x, plan=plan)
    assert report.ok and report.peak_bytes <= plan.peak_bytes <= 1.03 * report.peak_bytes, report.table
    run = autopar.run_virtual(model, PAIR, example_inputs=x, plan=plan)
    assert hosted_in(plan) and max(run.host_bytes) <= plan.host_bytes <= 1.1 * max(run.host_bytes)


def test_all_microbatches_are_in_flight_where_the_loss_is_computed_outside() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(it for _ in range(4) for it in (nn.Linear(24, 24), nn.Tanh()))), inputs()[0]
    given: dict[str, Any] = {"example_inputs": x, "search": "ddp", "stages": 2, "schedule": "1f1b", "microbatches": 4}
    plan = autopar.make_plan(model, PAIR, constraints={"1/tanh#0": "offload", "7/tanh#0": "offload"}, **given)
    assert [stage.in_flight for stage in plan.stages] == [4, 4]
    run = autopar.run_virtual(model, PAIR, example_inputs=x, plan=plan)
    assert max(run.host_bytes) == plan.host_memory["saved"] == x.nbytes


def test_stages_that_update_while_they_run_keep_their_parameters() -> None:
    with pytest.raises(ConstraintError, match="an asynchronous schedule updates it"):
        planned(PAIR, "pipedream")


class Deep(nn.Module):
    """Eight wide layers and a loss: parameters weigh more than what is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(128, 128) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def limited(mesh: autopar.Mesh, limit: int | None, **given: Any) -> autopar.Plan:
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1))
    options = {"optimizer": ADAMW, "memory_limit_bytes": limit, **given}
    plan = autopar.make_plan(Deep(), mesh, example_inputs=x, **options)
    assert autopar.verify(Deep(), mesh, example_inputs=x, plan=plan, optimizer=ADAMW).ok
    return plan


def hosted_in(plan: autopar.Plan) -> set[str]:
    return {entry.key for entry in plan.every_entry if entry.kind == "parameter" and entry.residency == "offload"}


def test_the_search_puts_parameters_on_the_host_where_nothing_else_fits() -> None:
    roomy = limited(PAIR, None)
    assert not hosted_in(roomy) and not roomy.host_bytes
    found = [limited(PAIR, int(part * roomy.peak_bytes)) for part in (0.7, 0.3)]
    for plan in found:
        assert plan.memory_limit_bytes is not None and plan.peak_bytes <= plan.memory_limit_bytes
    assert 0 < len(hosted_in(found[0])) < len(hosted_in(found[1])) <= 8
    assert roomy.step_s < found[0].step_s < found[1].step_s


def test_what_stages_of_one_rank_hold_too_much_they_free_together() -> None:
    given: dict[str, Any] = {"stages": 4, "microbatches": 4, "schedule": "interleaved"}
    roomy = limited(PAIR, None, **given)
    for part in (0.45, 0.4, 0.35, 0.3):
        assert hosted_in(limited(PAIR, int(part * roomy.peak_bytes), **given))


def test_layouts_of_stages_and_what_lies_on_the_host_are_chosen_together() -> None:
    limit = limited(FOUR, None).peak_bytes // 5
    plan = limited(FOUR, limit)
    assert plan.peak_bytes <= limit and hosted_in(plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_limit_that_pins_meet_is_met_by_the_search(schedule: str) -> None:
    given: dict[str, Any] = {"schedule": schedule, "microbatches": 4, "stages": 4 if schedule == "interleaved" else 2}
    roomy, pinned = limited(PAIR, None, **given), limited(PAIR, None, constraints=HOST, **given)
    for limit in (pinned.peak_bytes, (pinned.peak_bytes + roomy.peak_bytes) // 2):
        plan = limited(PAIR, limit, **given)
        assert plan.peak_bytes <= limit and hosted_in(plan)
        assert roomy.step_s < plan.step_s


def test_what_nothing_makes_fit_is_refused_with_what_was_tried() -> None:
    roomy = limited(PAIR, None)
    with pytest.raises(MemoryLimitError, match="nor with parameters on the host"):
        limited(PAIR, roomy.peak_bytes // 50)
    for given in (
        {"constraints": {"*.weight": "keep", "*.bias": "keep"}},
        {"schedule": "pipedream", "microbatches": 2},
    ):
        with pytest.raises(MemoryLimitError) as refusal:
            limited(PAIR, roomy.peak_bytes // 2, **given)
        assert "on the host" not in refusal.value.what
    with pytest.raises(MemoryLimitError) as refusal:  # its host is itself
        limited(autopar.Mesh((2,), ("pp",), hardware="cpu"), roomy.peak_bytes // 2)
    assert "on the host" not in refusal.value.what


def test_cuts_are_sought_in_the_memory_that_pinned_parameters_leave_free() -> None:
    limit = limited(PAIR, None).peak_bytes // 2
    program = capture(Deep(), (torch.randn(32, 128),), {}, device="cpu")

    def table(constraints: dict[str, str], mesh: autopar.Mesh = PAIR) -> Segments:
        options = make_options("ilp", limit, ADAMW, constraints, None)
        request = PipelineRequest(2, "1f1b", 4)
        search = PipelineSearch(program, mesh, 0, options.of_stages, request, options.rule_book(mesh))
        return search.segments(4)

    kept, pinned = table({}), table(HOST)
    share = kept.fixed_bytes.sum() / (8 * 129)  # of a weight of 128 x 128 and a bias of 128, a row
    assert pinned.fixed_bytes.sum() == pytest.approx(8 * share)
    assert (pinned.forward_s >= kept.forward_s).all() and (pinned.backward_s > kept.backward_s).all()
    assert (pinned.sync_s > kept.sync_s).all()
    assert limited(PAIR, limit, constraints=HOST).peak_bytes <= limit
    eight = autopar.Mesh((2, 2, 2), ("pp", "dp", "tp"), hardware="a100")
    assert (table(HOST, eight).fixed_bytes < table({}, eight).fixed_bytes).all()


def test_accumulated_batches_add_up_on_the_host() -> None:
    plan = planned(PAIR, batch_semantics="accumulated")
    report = autopar.verify(Layers(), PAIR, example_inputs=inputs(), plan=plan)
    assert report.ok and report.peak_bytes <= plan.peak_bytes <= 1.01 * report.peak_bytes, report.table
