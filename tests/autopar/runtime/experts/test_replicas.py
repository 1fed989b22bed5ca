"""Hot experts with copies on further ranks: training, checkpoints and optimizers go on as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.errors import AutoparError, ExpertPlacementError, MemoryLimitError
from autopar.passes.expert_places import ExpertPlaces
from autopar.runtime.experts.load import shared_load
from autopar.runtime.experts.rebalance import Movable, decide, imbalance_of, read_decision
from tests.autopar.runtime.experts.test_rebalance import BY_TOKENS, Model, Pair, adam, batch, pair, resumed
from tests.gloo import run_on_ranks

COPIES = ("index_select", "sum_copies")


def copies_in(found: Pair) -> list[int]:
    """How often the graphs fetch weights of experts, and add up gradients of their copies."""
    graphs = (found.pmodel.forward_graph, found.pmodel.backward_graph)
    targets = [str(node.target) for gm in graphs if gm is not None for node in gm.graph.nodes]
    return [sum(name in target for target in targets) for name in COPIES]


def accumulate(found: Pair) -> None:
    """Two batches, one step."""
    for optimizer in found.optimizers:
        optimizer.zero_grad()
    with found.pmodel.no_sync():
        found.pmodel(*batch(20)).backward()
    found.pmodel(*batch(21)).backward()
    for step in (20, 21):
        found.twin(*batch(step)).backward()
    for optimizer in found.optimizers:
        optimizer.step()


def train_with_replicas() -> dict[str, Any]:
    found = pair((2,), "A", (adam, adam))
    found.train(range(3))
    first = found.pmodel.rebalance(replicas=12)
    again = found.pmodel.rebalance(replicas=12)
    gaps, graphs = [found.gap()], [copies_in(found)]
    loads = dict(found.pmodel.expert_load.imbalance)
    found.train(range(3, 5))
    accumulate(found)
    gaps.append(found.gap())
    x, point = batch(6)
    with torch.no_grad():
        other = [float(module(x[:8], point)) for module in (found.pmodel, found.twin)]
    found.pmodel.reset_expert_load()
    found.train(range(5, 7))
    second = found.pmodel.rebalance(replicas=16)
    found.train(range(7, 9))
    gaps += [found.gap(), *resumed(found)]
    last = found.pmodel.rebalance()
    graphs.append(copies_in(found))
    found.train(range(10, 12))
    gaps += [found.gap(), found.worst, other[0] / other[1] - 1]
    return {"reports": (first, again, second, last), "gaps": gaps, "graphs": graphs, "loads": loads}


def test_training_with_replicas_goes_on_as_on_one_device() -> None:
    results = run_on_ranks(train_with_replicas, 2)
    for found in results:
        assert max(map(abs, found["gaps"])) < 1e-9, found
        first, again, _, last = found["reports"]
        assert str(first) == str(results[0]["reports"][0])
        assert [report.copies for report in found["reports"]] == [8, 8, 16, 0]
        assert again.moved_bytes == 0 and again.copy_bytes == first.copy_bytes and min(first.copy_bytes) > 0
        assert "8 copies of experts: up to" in str(first) and last.copy_bytes == (0, 0)
        for layer, groups in first.after.items():
            assert [len(group) for group in groups] == [6, 6]
            assert first.imbalance_after[layer] < first.imbalance_before[layer]
            assert found["loads"][layer] == pytest.approx(first.imbalance_after[layer], abs=0.05)
        assert found["graphs"][0] == [8, 4] and found["graphs"][1] == [0, 0]  # of two layers, two weights each


def message_of(module: autopar.ParallelModule, replicas: int) -> str:
    try:
        module.rebalance(replicas=replicas)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals() -> dict[str, Any]:
    found = pair((2,), "A", (adam, adam))
    messages = {str(count): message_of(found.pmodel, count) for count in (4, 9)}
    found.train(range(2))
    limit = found.pmodel.plan.peak_bytes + 100
    tight = autopar.compile(
        Model(), found.pmodel.mesh, example_inputs=batch(0), constraints=BY_TOKENS, memory_limit_bytes=limit
    )
    tight(*batch(0)).backward()
    before = tight.expert_load.holders
    messages["memory"] = message_of(tight, 16)
    assert tight.expert_load.holders == before and tight.rebalance().moved_experts > 0
    whole = autopar.compile(
        Model(), found.pmodel.mesh, example_inputs=batch(0), constraints={"*/autopar.experts*": "R"}
    )
    messages["whole"] = message_of(whole, 16)
    return messages


def test_replicas_that_cannot_be_are_refused() -> None:
    for found in run_on_ranks(refusals, 2):
        assert found["4"].startswith(ExpertPlacementError.__name__) and "4 replicas are fewer than the 8" in found["4"]
        assert "9 replicas do not divide over 2 devices" in found["9"]
        assert found["memory"].startswith(MemoryLimitError.__name__) and "copies of experts take" in found["memory"]
        assert "every rank holds all of its experts" in found["whole"]


def test_a_layer_gets_copies_only_where_they_help_and_loses_them_when_others_are_asked_for() -> None:
    groups, copied = ((0, 1), (2, 3)), ((0, 1, 2), (0, 2, 3))
    plain, placed = (ExpertPlaces((0, 1, 2, 3), computed, (0,)) for computed in (groups, copied))
    items = [Movable((name,), load, places) for name, load, places in (
        ("hot", (9.0, 1.0, 1.0, 1.0), plain), ("even", (5.0, 5.0, 5.0, 5.0), plain), ("was hot", (4.0,) * 4, placed),
    )]  # fmt: skip
    decided = read_decision(decide(items, lambda load, _: [(copied, groups)] * len(load), 6), items)
    assert [it.computed for it in decided] == [copied, groups, copied]
    assert [it.has_copies for it in decided] == [True, False, True]
    without = read_decision(decide(items, lambda load, _: [(groups, groups)] * len(load), None), items)
    assert [it.computed for it in without] == [groups] * 3
    assert imbalance_of((9.0, 1.0, 1.0, 1.0), copied) == 1.0


def test_choices_of_an_expert_are_dealt_out_to_its_slots() -> None:
    assert shared_load([7, 2, 1, 0], ((0, 1, 2), (0, 2, 3))) == [4 + 2 + 1, 3]
    assert shared_load([5, 1], ((0, 0), (0, 1))) == [4, 2]
