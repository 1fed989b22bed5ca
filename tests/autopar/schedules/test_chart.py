"""The command `schedule` and its charts show what the simulation says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.cost_models.pipeline import StageTimes
from autopar.schedules.chart import summary, text_chart
from autopar.schedules.generate import Request, generate
from autopar.schedules.memory import StageMemory
from autopar.schedules.timing import simulate_schedule


def test_the_chart_of_1f1b_is_the_one_in_every_paper() -> None:
    times = StageTimes(1, 1, 1)
    schedule = generate("1f1b", Request(2, 2, times=times))
    chart = text_chart(schedule, simulate_schedule(schedule, times))
    assert chart.splitlines() == [
        "rank 0   F0--F1--........B0------....B1------",
        "rank 1   ....F0--B0------F1--B1------........",
    ]
    assert summary(schedule, simulate_schedule(schedule, times), StageMemory(activation_bytes=7)).splitlines() == [
        "1f1b: 2 stages on 2 ranks, 2 microbatches",
        "step 9 s, longest rank 9 s, bubble 33.3 %",
        "in flight by stage: 2 1",
        "peak by rank: 14 7 bytes",
    ]


def test_the_command_checks_and_saves_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "chart.png", tmp_path / "trace.json"
    words = ["schedule", "--name", "zb-v", "--stages", "8", "--microbatches", "8", "--comm", "0.1", "--chart"]
    assert main([*words, "--png", str(picture), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "zb-v: 8 stages on 4 ranks, 8 microbatches" in printed
    assert printed.count("rank ") >= 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"].startswith("forward") for event in events) == 64


def test_the_command_answers_in_json_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["schedule", "--stages", "4", "--microbatches", "8"]
    assert main([*words, "--name", "zb-h2", "--json", "--actions"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["in_flight"] == [7, 7, 7, 7]
    assert answer["longest_rank_s"] == 24
    assert len(answer["actions"]) == 4
    assert main([*words, "--name", "zb-v", "--virtual-stages", "3"]) == 2
    assert main([*words, "--name", "gpipe", "--memory", "4", "--activation-bytes", "1"]) == 2
    assert "4 above its limit" in capsys.readouterr().err
