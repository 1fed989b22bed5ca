"""Explanations: formulas add up to the prices that were used; alternatives cost what a fresh solve says."""

from __future__ import annotations

import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api import make_plan
from autopar.arguments import make_options
from autopar.capture.trace import capture
from autopar.cost_models.compute import MATMUL
from autopar.planner.bounds import without_limit
from autopar.planner.make import Planner
from autopar.planner.reconsider import Session
from autopar.search import solve

PLANS = ("ddp", "fsdp", "megatron", "ilp")
MESH = autopar.Mesh((2, 2), ("dp", "tp"), hardware="h100")


class Attention(nn.Module):
    """A local form (the sharded norm), products, an attention and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(512, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(self.norm(x).flatten(0, 1) @ self.table.weight.t(), ids.flatten())


class Perceptron(nn.Module):
    """Three layers alike, and a last one whose bias is too short to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)) for _ in range(3))
        self.head = nn.Linear(256, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x).pow(2).mean()


MODELS: dict[str, tuple[type[nn.Module], torch.Tensor]] = {
    "attention": (Attention, torch.arange(256).reshape(8, 32)),
    "perceptron": (Perceptron, torch.ones(512, 256)),
}


@cache
def plan(search: str = "ilp", model: str = "attention") -> autopar.Plan:
    torch.manual_seed(0)
    kind, inputs = MODELS[model]
    return make_plan(kind(), MESH, example_inputs=inputs, search=search, optimizer=torch.optim.AdamW)


def session(of: autopar.Plan) -> Session:
    assert isinstance(of.planning, Session)
    return of.planning


@pytest.mark.parametrize("search", PLANS)
def test_the_formulas_of_every_decision_add_up_to_its_price(search: str) -> None:
    asked = session(plan(search))
    for decision, pick in zip(asked.planner.planning.decisions, asked.best.choice, strict=True):
        seconds, _ = asked.formulas.of(decision, pick)
        total = math.fsum(float(price.value) for price in seconds)
        assert total == pytest.approx(float(decision.seconds[pick]), rel=1e-9, abs=1e-15), decision.key


@pytest.mark.parametrize("search", PLANS)
def test_the_formulas_of_every_move_add_up_to_its_price(search: str) -> None:
    formulas = session(plan(search)).formulas
    moves = [move for entry in plan(search).entries for move in entry.moves]
    for move in moves:
        assert sum(float(price.value) for price in formulas.of_move(move)) == pytest.approx(move.seconds, rel=1e-9)
    assert moves or search == "ilp"  # on so small a model it replicates


def test_the_formulas_of_memory_are_the_bytes_held() -> None:
    asked = session(plan("fsdp"))
    for decision, pick in zip(asked.planner.planning.decisions, asked.best.choice, strict=True):
        if decision.key == "qkv.weight":
            _, memory = asked.formulas.of(decision, pick)
            (entry,) = plan("fsdp").matching("qkv.weight")
            assert sum(float(price.value) for price in memory) == 4 * entry.bytes  # itself, its gradient, two of AdamW


def test_an_explanation_has_the_formula_its_numbers_and_the_users_line() -> None:
    text = plan("megatron").explain("qkv/addmm#0")
    assert f"matmul = {MATMUL.expression}" in text
    assert "k = 64" in text
    assert "test_explain.py" in text
    weight = plan("megatron").explain("qkv.weight")
    assert "its gradient: all_reduce over axis dp" in weight
    assert "optimizer step: memory-bound op" in weight


def pairs() -> list[tuple[str, str]]:
    """A few (model, name), the same each time; `benchmarks/questions.py` takes twenty, and larger models."""
    chosen = random.Random(7)
    found = []
    for model in MODELS:
        keys = [entry.key for entry in plan("ilp", model).entries if entry.kind in ("parameter", "op", "input")]
        found += [(model, key) for key in chosen.sample(keys, 2)]
    return found


def test_the_cost_of_an_alternative_is_that_of_a_fresh_solve_with_that_pin() -> None:
    """From the model on, without what the plan knows; also of the layout that was chosen."""
    random_choice = random.Random(3)
    checked = 0
    for model, key in pairs():
        ((explained,),) = (plan("ilp", model).explanations(key),)
        known = explained.alternatives
        assert known and sum(item.is_chosen for item in known) == 1
        for item in {known[0], random_choice.choice(known)}:
            assert item.cost == pytest.approx(fresh_cost(model, {key: item.layout}), rel=1e-9), (key, item.layout)
            checked += 1
    assert checked >= 6


@cache
def program(model: str) -> Any:
    kind, inputs = MODELS[model]
    return capture(kind(), (inputs,), {}, device="cpu")


def fresh_cost(model: str, pins: dict[str, str]) -> float:
    planner = Planner(program(model), MESH, make_options("ilp", None, torch.optim.AdamW, pins))
    return solve(without_limit(planner.planning.problem), time_limit_s=20).cost


def test_the_best_alternative_is_the_plan_and_no_other_is_better() -> None:
    (found,) = plan("ilp", "perceptron").explanations("layers.1.0.weight")
    assert found.alternatives[0].is_chosen
    assert found.alternatives[0].more_s == pytest.approx(0, abs=1e-12)
    assert all(item.more_s >= -1e-12 for item in found.alternatives)


def test_layouts_that_cannot_be_are_told_with_the_reason() -> None:
    (bias,) = make_plan(Perceptron(), (4,), example_inputs=torch.ones(512, 256)).explanations("head.bias")
    assert [(item.layout, item.why) for item in bias.ruled_out] == [("S0", "dim 0 of 3 leaves some of 4 ranks nothing")]
    assert any(answer.startswith("why not sharded: dim 0 of 3") for answer in bias.answers)
    assert bias.entry.bytes == 3 * 4  # a plan lists it not, as there is nothing to decide


def test_memory_that_binds_is_named_with_the_moment_and_recomputation_is_answered() -> None:
    model, batch = Perceptron(), torch.ones(4096, 256)
    roomy = make_plan(model, (1,), example_inputs=batch)
    assert "memory does not bind" in roomy.explain("head/addmm#0")
    tight = make_plan(model, (1,), example_inputs=batch, memory_limit_bytes=int(0.9 * roomy.peak_bytes))
    again = next(entry.key for entry in tight.entries if entry.residency == "recompute" and entry.bytes > 1e6)
    text = tight.explain(again)
    assert "why recomputed: kept, it would hold" in text
    assert "memory binds: the peak is" in text and "runs (op " in text


def test_an_explanation_as_json_has_what_the_text_has() -> None:
    (found,) = plan("ilp", "perceptron").explanations("head.bias")
    data = found.to_json()
    assert data["decision"]["layouts"] == found.entry.words
    assert [item["layout"] for item in data["alternatives"]] == [item.layout for item in found.alternatives]


def test_too_many_names_are_told_without_alternatives() -> None:
    assert "name fewer" in plan().explain("*")


def test_a_loaded_plan_tells_what_was_chosen_and_what_it_needs_for_more(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    text = loaded.explain("qkv.weight")
    assert text.splitlines()[:2] == plan().explain("qkv.weight").splitlines()[:2]
    assert "they need the model" in text
    kind, inputs = MODELS["attention"]
    followed = make_plan(kind(), MESH, example_inputs=inputs, plan=loaded, optimizer=torch.optim.AdamW)
    assert "everything else chosen anew" in followed.explain("qkv.weight")
