"""Recorded runs: the same numbers as unrecorded ones, times of every module and action, loads of experts; reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import RecordingError
from autopar.nn import BalancedGate, Experts, MixtureOfExperts, TopKGate
from autopar.plan_details import Bar
from autopar.recording import MESSAGE_KINDS, PREDICTED, Recording, Span
from autopar.report.gantt import bubble_of, measured_bars, planned_bars, predicted_spans, text_gantt
from autopar.report.measured import by_module, draw_held, measured_text, totals
from autopar.report.page import report_page
from autopar.runtime.recorder import Notes, merged
from tests.gloo import run_on_ranks

STEPS, WIDTH = 4, 16
BATCH_BYTES = 8 * WIDTH * 4


class Mixed(nn.Module):
    """Two layers of experts, and a loss; `forward(x)`."""

    def __init__(self, gate: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureOfExperts(gate(WIDTH, 4), Experts(4, WIDTH, 2 * WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            moved, auxiliary = layer(x)
            x = x + moved + auxiliary
        return x.square().mean()


GATES: dict[str, Callable[[int, int], nn.Module]] = {"experts": TopKGate, "even experts": BalancedGate}


class Deep(nn.Module):
    """Four linear layers, and a loss; `forward(x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def losses_of(pmodel: autopar.ParallelModule) -> list[float]:
    optimizer = torch.optim.SGD(pmodel.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = pmodel(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(kinds: list[str], folder: str) -> dict[str, tuple[list[float], list[float]]]:
    """On each rank: losses without and with a recorder; plans and recordings are saved by the first."""
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, tuple[list[float], list[float]]] = {}
    for kind in kinds:
        options: dict[str, Any] = {"stages": 2, "microbatches": 4, "schedule": "1f1b"} if kind == "pipeline" else {}
        options |= {"constraints": {"*/autopar.experts*": "A"}} if kind in GATES else {"search": "ddp"}
        pmodels: list[Any] = []
        for _ in range(2):
            torch.manual_seed(0)
            model = Mixed(GATES[kind]) if kind in GATES else Deep()
            made = autopar.compile(model, mesh, example_inputs=torch.ones(8, WIDTH), hardware="cpu", **options)
            pmodels.append(made)
        plain = losses_of(pmodels[0])
        with pmodels[1].record() as recorder:
            recorded = losses_of(pmodels[1])
        found[kind] = plain, recorded
        if torch.distributed.get_rank() == 0:
            pmodels[1].plan.save(f"{folder}/{kind}-plan.json")
            recorder.recording.save(f"{folder}/{kind}.json")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("recorded")
    for found in run_on_ranks(run, 2, ["data", *GATES, "pipeline"], str(where)):
        for plain, recorded in found.values():
            assert plain == recorded
    return where


def loaded(folder: Path, kind: str) -> tuple[autopar.Plan, Recording]:
    return autopar.Plan.load(folder / f"{kind}-plan.json"), Recording.load(folder / f"{kind}.json")


def test_every_second_step_runs_op_by_op_and_the_others_tell_the_time_of_a_step(folder: Path) -> None:
    _, recording = loaded(folder, "data")
    assert [seconds is None for seconds in recording.step_s] == [False, True, False, True]
    assert recording.timed_steps == (1, 3)
    assert recording.typical_s > 0
    assert {span.rank for span in recording.spans} == {0, 1}
    assert {span.phase for span in recording.spans} == {"forward", "backward"}
    for span in recording.spans:
        assert 0 <= span.start_s <= span.end_s


def test_collectives_are_measured_from_their_issue_to_the_end_of_their_wait(folder: Path) -> None:
    _, recording = loaded(folder, "data")
    of_step = [span for span in recording.of_last_step() if span.rank == 0]
    waits = [span for span in of_step if span.kind == "wait"]
    collectives = [span for span in of_step if span.kind == "collective"]
    assert len(waits) == len(collectives) > 0
    ends = {span.end_s for span in waits}
    assert all(span.end_s in ends and span.seconds > 0 for span in collectives)


def test_modules_have_their_measured_time_beside_the_predicted_one(folder: Path) -> None:
    plan, recording = loaded(folder, "data")
    lines = {line.name: line for line in by_module(plan, recording)}
    assert "layers.[1-3]" in lines and lines["layers.[1-3]"].copies == 3, list(lines)
    own = recording.by_module()
    assert sum(line.measured for line in lines.values()) == pytest.approx(
        sum(sum(kinds.values()) for kinds in own.values())
    )
    text = measured_text(plan, recording)
    assert "layers.[1-3]  x3" in text and "4 steps recorded on cpu" in text
    assert totals(plan, recording)[0].predicted == plan.step_s


def test_a_step_counts_from_the_first_rank_of_a_clock_to_begin_it() -> None:
    def notes(clock: str, *begins: float) -> Notes:
        return Notes(clock, begins, tuple(Span("op", "compute", 0.5, 1.0, step=step) for step in range(len(begins))))

    spans = merged([notes("here", 10.0, 20.25), notes("here", 10.25, 20.0), notes("there", 3.0, 4.0)])
    assert [span.start_s for span in spans] == [0.5, 0.75, 0.75, 0.5, 0.5, 0.5]
    assert all(span.seconds == 0.5 for span in spans)


def test_a_pipelines_actions_are_measured_in_every_step_and_drawn_beside_the_simulated_ones(folder: Path) -> None:
    plan, recording = loaded(folder, "pipeline")
    assert [seconds is None for seconds in recording.step_s] == [False, True, False, True]
    assert recording.timed_steps == (0, 1, 2, 3)
    assert {span.step for span in recording.of_last_step()} == {2}  # the last that nothing slowed
    foreseen, measured = planned_bars(plan), measured_bars(recording)
    names = [sorted((bar.kind, bar.rank, bar.stage, bar.microbatch) for bar in bars) for bars in (foreseen, measured)]
    assert names[0] == names[1] and len(names[0]) == 16
    assert plan.pipeline is not None
    assert bubble_of(foreseen) == pytest.approx(plan.pipeline.bubble, abs=1e-6)
    order = {(bar.kind, bar.rank, bar.microbatch): bar for bar in measured}
    for item in range(4):  # the clocks of two ranks are one: nothing is received before it is computed
        assert order["forward", 0, item].end_s <= order["forward", 1, item].end_s
        assert order["backward", 1, item].start_s <= order["backward", 0, item].start_s
    page = report_page(plan, recording)
    assert "what each rank computes over time, predicted" in page and "measured: bubble" in page


def test_a_pipelines_messages_are_waited_for_in_its_trace_beside_what_was_predicted(folder: Path) -> None:
    plan, recording = loaded(folder, "pipeline")
    kinds = {kind: [it for it in recording.of_last_step() if it.kind == kind] for kind in MESSAGE_KINDS}
    assert {kind: (len(own), {it.rank for it in own}) for kind, own in kinds.items()} == {
        "send_activation": (4, {0}), "recv_activation": (4, {1}), "send_gradient": (4, {1}), "recv_gradient": (4, {0}),
    }  # fmt: skip
    forwards = {it.microbatch: it for it in recording.of_last_step() if it.kind == "forward" and it.rank == 1}
    for wait in kinds["recv_activation"]:  # a wait ends before its reader begins
        assert wait.end_s <= forwards[wait.microbatch].start_s and wait.phase == "forward"
    trace = recording.chrome_trace(predicted=predicted_spans(plan))["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {f"rank {rank}, {what}" for rank in (0, 1) for what in ("measured", "predicted")}
    assert sum(event["pid"] >= PREDICTED and event["ph"] == "X" for event in trace) == 16
    text = measured_text(plan, recording)
    assert "bubble" in text and "waiting for messages" in text
    without = replace(recording, spans=tuple(it for it in recording.spans if it.kind not in MESSAGE_KINDS))
    assert "waiting for messages" not in measured_text(plan, without)
    first, second = (line for line in text.splitlines() if line.startswith("rank "))
    assert first.split()[2].startswith("F")  # a bar that is too short has no number
    assert second.split()[2].lstrip(".").startswith("F")


def test_a_bar_too_short_for_its_number_has_none_rather_than_a_part_of_it() -> None:
    bars = [Bar("forward", 0, 0, item, float(item), item + 1.0) for item in range(9, 12)]
    assert text_gantt(bars, width=6) == "rank 0   F9F-F-"
    assert text_gantt(bars, width=9) == "rank 0   F9-F10F11"


@pytest.mark.parametrize("kind", ["data", "even experts", "pipeline"])
def test_the_memory_that_was_held_is_recorded_and_is_at_most_the_promised(folder: Path, kind: str) -> None:
    """A plan promises what experts keep of choices that are spread evenly over them."""
    plan, recording = loaded(folder, kind)
    assert recording.peak is not None and recording.peak.phase in ("forward", "backward")
    beside = BATCH_BYTES // 2 + 8 * sum(map(len, recording.expert_load.values())) + 8  # the batch whole; counts; a seed
    assert plan.peak_bytes - BATCH_BYTES <= recording.peak.held_bytes <= plan.peak_bytes + beside
    (line,) = [line for line in totals(plan, recording) if line.name.startswith("memory")]
    assert (line.predicted, line.measured) == (plan.peak_bytes, recording.peak.held_bytes)
    assert "memory of the fullest rank" in measured_text(plan, recording)
    for line in draw_held(plan, recording).axes[0].lines:
        if line.get_label() in ("measured", "predicted"):  # over all of the step, forward beside forward
            places, held = line.get_data()
            assert (places[0], places[-1]) == (0, 1 if kind == "pipeline" else 2)
            assert places[-2] < places[-1] and held[-2] == held[-1] > 0
    assert "memory, measured and predicted" in report_page(plan, recording)
    counters = [event for event in recording.chrome_trace()["traceEvents"] if event["ph"] == "C"]
    assert max(event["args"]["bytes"] for event in counters) == recording.peak.held_bytes


def test_a_recording_without_memory_is_read(folder: Path, tmp_path: Path) -> None:
    plan, recording = loaded(folder, "data")
    data = json.loads((folder / "data.json").read_text())
    data["spans"] = [span[:-1] for span in data["spans"]]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = Recording.load(tmp_path / "old.json")
    assert len(old.spans) == len(recording.spans) and old.peak is None
    assert "memory of" not in measured_text(plan, old) and "measured and predicted" not in report_page(plan, old)


def test_loads_of_experts_are_those_of_the_recorded_steps(folder: Path) -> None:
    plan, recording = loaded(folder, "experts")
    assert list(recording.expert_load) == ["layers.0.experts", "layers.1.experts"]
    for layer, load in recording.expert_load.items():
        assert sum(load) == STEPS * 8 * 2  # tokens by step, each with two experts
        assert len(recording.group_load[layer]) == 2
        assert sum(recording.group_load[layer]) == sum(load)
    assert "Load of the experts" in report_page(plan, recording)
    _, even = loaded(folder, "even experts")
    assert [set(load) for load in even.expert_load.values()] == [{STEPS * 8 // 4}] * 2


def test_a_recording_of_another_plan_is_refused(folder: Path) -> None:
    plan, _ = loaded(folder, "data")
    _, other = loaded(folder, "pipeline")
    with pytest.raises(RecordingError, match="this is plan"):
        report_page(plan, other)


def test_the_trace_has_every_span_on_its_rank(folder: Path, tmp_path: Path) -> None:
    _, recording = loaded(folder, "pipeline")
    events = [event for event in recording.chrome_trace()["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(recording.spans)
    assert events[0]["name"] == "forward 0.0"
    for rank in (0, 1):  # steps follow one another
        own = [(event["args"]["step"], event["ts"]) for event in events if event["pid"] == rank]
        assert own == sorted(own)


@cache
def sample() -> Recording:
    return Recording("abc", (2,), "cpu", (0.1, None), (), {"moe": (3, 5)}, {"moe": (3, 5)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"autopar recording"', '"something else"'),
        ("[0.1, null]", "[true, null]"),
        ("[0.1, null]", "[1e999, null]"),
        ("[3, 5]", "[3, -5]"),
        ('"group_load"', '"group_lead"'),
        ('"spans": []', '"spans": [["a", "b"]]'),
        ('"spans": []', '"spans": [["a", "nap", 0, 1, 0, 0, "", "", -1, -1]]'),
        ("{", "["),
        ('"cpu"', "7"),
    ],
)
def test_a_broken_recording_is_refused(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "run.json"
    sample().save(path)
    assert Recording.load(path) == sample()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(RecordingError, match="not a readable recording"):
        Recording.load(path)
