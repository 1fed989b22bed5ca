"""The simulator: small walks by hand, and what holds for any walk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.simulator import Kind, TimedOp, in_issue_order, simulate
from autopar.errors import SimulationError

KINDS: tuple[Kind, ...] = ("compute", "communication")


@st.composite
def walks(draw: st.DrawFn) -> list[TimedOp]:
    ops: list[TimedOp] = []
    for index in range(draw(st.integers(1, 10))):
        after = tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else ()
        kind: Kind = draw(st.sampled_from(KINDS))
        link = draw(st.sampled_from(["", "nic"])) if kind == "communication" else ""
        seconds = draw(st.floats(0, 10))
        ops.append(TimedOp(f"op{index}", seconds, kind, draw(st.integers(0, 1)), kind, after, link=link))
    return ops


@given(walks())
def test_a_step_lies_between_its_longest_chain_and_its_sum(ops: list[TimedOp]) -> None:
    chain = [0.0] * len(ops)
    for index, op in enumerate(ops):
        chain[index] = op.seconds + max((chain[item] for item in op.after), default=0.0)
    step_s = simulate(ops).step_s
    assert max(chain) - 1e-9 <= step_s <= sum(op.seconds for op in ops) + 1e-9


@given(walks())
def test_ops_wait_for_their_inputs_and_streams_are_in_order(ops: list[TimedOp]) -> None:
    run = simulate(ops)
    last: dict[tuple[int, str], float] = {}
    for index, op in enumerate(ops):
        assert run.starts_s[index] >= max((run.ends_s[item] for item in op.after), default=0.0) - 1e-9
        assert run.starts_s[index] >= last.get((op.rank, op.stream), 0.0) - 1e-9
        assert run.ends_s[index] - run.starts_s[index] >= op.seconds - 1e-9
        last[op.rank, op.stream] = run.ends_s[index]


@given(walks())
def test_compute_exposed_communication_and_idle_time_make_up_the_step(ops: list[TimedOp]) -> None:
    run = simulate(ops)
    for rank in run.compute_s:
        total = run.compute_s[rank] + run.exposed_communication_s[rank] + run.idle_s[rank]
        assert total == pytest.approx(run.step_s, abs=1e-6)


def test_communication_hides_behind_compute_that_does_not_wait_for_it() -> None:
    ops = in_issue_order(
        [("mm", 2.0, "compute", ()), ("gather", 3.0, "communication", (0,)), ("mm2", 2.0, "compute", ()),
         ("use", 1.0, "compute", (1,))]
    )  # fmt: skip
    run = simulate(ops)
    assert run.step_s == 6.0
    assert run.exposed_communication_s[0] == 1.0
    assert run.idle_s[0] == 0.0


def test_two_transfers_on_one_link_share_its_rate() -> None:
    ops = [
        TimedOp("a", 2.0, "communication", 0, "tp", link="nic"),
        TimedOp("b", 1.0, "communication", 1, "dp", link="nic"),
        TimedOp("c", 1.0, "communication", 2, "dp", link="other"),
    ]
    run = simulate(ops)
    assert run.ends_s.tolist() == [3.0, 2.0, 1.0]


def test_ranks_of_a_collective_start_together() -> None:
    ops = [
        TimedOp("late", 5.0, rank=0),
        TimedOp("sum", 1.0, "communication", 0, "communication", (0,), group="sum"),
        TimedOp("sum", 1.0, "communication", 1, "communication", group="sum"),
    ]
    run = simulate(ops)
    assert run.starts_s.tolist() == [0.0, 5.0, 5.0]


def test_a_straggler_slows_its_compute_and_whoever_waits_for_it() -> None:
    ops = [
        TimedOp("work", 2.0, rank=0),
        TimedOp("work", 2.0, rank=1),
        TimedOp("sum", 1.0, "communication", 0, "communication", (0,), group="sum"),
        TimedOp("sum", 1.0, "communication", 1, "communication", (1,), group="sum"),
    ]
    assert simulate(ops).step_s == 3.0
    assert simulate(ops, rank_speeds=(1.0, 0.5)).step_s == 5.0


def test_a_circle_of_waits_is_an_error_that_names_an_op() -> None:
    with pytest.raises(SimulationError, match="waits forever"):
        simulate([TimedOp("a", 1.0, after=(1,)), TimedOp("b", 1.0, stream="other", after=(0,))])
    with pytest.raises(SimulationError, match="not there"):
        simulate([TimedOp("a", 1.0, after=(4,))])


def test_the_chrome_trace_holds_every_op_once(tmp_path: Path) -> None:
    ops = in_issue_order([("mm", 2e-6, "compute", ()), ("sum", 1e-6, "communication", (0,))])
    simulate(ops).write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("mm", 0.0, 2.0),
        ("sum", 2.0, pytest.approx(1.0)),
    ]
