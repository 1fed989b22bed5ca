"""The simulator: small walks by hand, and what holds for any walk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.simulator import Kind, StepOps, TimedOp, in_issue_order, on_every_rank, simulate
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


OVERLAPPED = in_issue_order(
    [("mm", 2.0, "compute", ()), ("sum", 3.0, "communication", (0,)), ("mm2", 2.0, "compute", ())]
)


@pytest.mark.parametrize(("overlap", "step_s"), [(1.0, 5.0), (0.5, 5.5), (0.0, 7.0)])
def test_compute_slows_down_while_its_rank_communicates(overlap: float, step_s: float) -> None:
    run = simulate(OVERLAPPED, overlap=overlap)
    assert run.step_s == pytest.approx(step_s)
    assert run.communication_s[0] == pytest.approx(3.0)


@given(walks(), st.sampled_from([0.0, 0.3, 0.9]))
def test_less_overlap_never_makes_a_step_longer_than_its_sum(ops: list[TimedOp], overlap: float) -> None:
    slow, fast = simulate(ops, overlap=overlap).step_s, simulate(ops).step_s
    assert slow <= sum(op.seconds for op in ops) + 1e-9
    on_one_rank = {op.rank for op in ops} == {0}
    assert not on_one_rank or slow >= fast - 1e-9


def test_members_of_a_group_end_together_when_one_shares_its_link() -> None:
    ops = [
        TimedOp("sum", 2.0, "communication", 0, "tp", group="sum", link="a"),
        TimedOp("sum", 2.0, "communication", 1, "tp", group="sum", link="b"),
        TimedOp("other", 2.0, "communication", 1, "dp", link="b"),
    ]
    assert simulate(ops).ends_s.tolist() == [4.0, 4.0, 4.0]


@st.composite
def one_rank(draw: st.DrawFn) -> tuple[TimedOp, ...]:
    """What a rank of a (2, 2) mesh runs: compute, and collectives that it issues in order and waits for."""
    ops: list[TimedOp] = []
    for index in range(draw(st.integers(1, 8))):
        axis = draw(st.integers(-1, 1))
        last = next((item for item in reversed(range(index)) if ops[item].axis < 0), None)
        waited = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        after = tuple({*waited, *(() if last is None else (last,))})
        kind: Kind = "compute" if axis < 0 else "communication"
        stream, link = (kind, "") if axis < 0 else (f"axis {axis}", "inside")
        ops.append(TimedOp(f"op{index}", draw(st.floats(0.1, 5)), kind, 0, stream, after, "", link, axis))
    return tuple(ops)


@given(one_rank(), st.lists(st.floats(0.2, 1), min_size=4, max_size=4), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_slowest_rank_decides_the_step(ops: tuple[TimedOp, ...], speeds: list[float], overlap: float) -> None:
    step = StepOps(ops, (2, 2), tuple(speeds), overlap)
    every = simulate(on_every_rank(ops, (2, 2)), rank_speeds=speeds, overlap=overlap)
    assert step.step_s == pytest.approx(every.step_s, rel=1e-6)
    assert set(step.simulate().compute_s) == ({0, 1, 2, 3} if len(set(speeds)) > 1 else {0})


def test_speeds_that_cannot_be_are_refused() -> None:
    step = StepOps(OVERLAPPED, (2,))
    with pytest.raises(SimulationError, match="3 rank speeds for 2 ranks"):
        step.simulate((1.0, 1.0, 1.0))
    with pytest.raises(SimulationError, match="not above 0"):
        step.simulate((1.0, 0.0))
    with pytest.raises(SimulationError, match="overlap"):
        simulate(OVERLAPPED, overlap=1.5)


def test_a_circle_of_waits_is_an_error_that_names_an_op() -> None:
    with pytest.raises(SimulationError, match="waits forever"):
        simulate([TimedOp("a", 1.0, after=(1,)), TimedOp("b", 1.0, stream="other", after=(0,))])
    with pytest.raises(SimulationError, match="not there"):
        simulate([TimedOp("a", 1.0, after=(4,))])


def test_the_chrome_trace_holds_every_op_once(tmp_path: Path) -> None:
    ops = in_issue_order([("mm", 2e-6, "compute", ()), ("sum", 1e-6, "communication", (0,))])
    simulate(ops).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("mm", 0.0, 2.0),
        ("sum", 2.0, pytest.approx(1.0)),
    ]
