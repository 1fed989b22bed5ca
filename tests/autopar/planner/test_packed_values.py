"""Values on the host and in fewer bytes: the promise is measured, the choice is the best, a plan says what it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.trace import capture
from autopar.cost_models.hardware import load_profile
from autopar.errors import ConstraintError, PlanError, UnsupportedOptionError
from autopar.passes.packings import EXACT, LOSSY, PACKED
from autopar.plan_entries import RESIDENCIES
from autopar.planner.budget import Budget
from autopar.planner.fit import Fit
from autopar.planner.make import Options, plan_program
from autopar.planner.packed_values import Packing
from autopar.planner.prices import Prices
from autopar.planner.residency import USUAL, Residency


class Pooled(nn.Module):
    """ReLUs that only max-pools read, dropout, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head, self.drop = nn.Linear(8 * 16, 4), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(self.drop(x.flatten(1)))


def pooled() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Pooled(), torch.randn(8, 2, 16, 16)


def planned(word: str, **keywords: Any) -> autopar.Plan:
    model, x = pooled()
    return autopar.make_plan(model, (2,), example_inputs=x, search="ddp", constraints={"*#*": word}, **keywords)


@pytest.mark.parametrize("word", PACKED)
def test_a_forced_residency_computes_the_model_within_its_error_and_its_promise(word: str) -> None:
    model, x = pooled()
    plan = planned(word)
    assert word in {entry.residency for entry in plan.entries}
    report = autopar.verify(model, (2,), example_inputs=x, plan=plan)
    assert report.ok, report.table
    assert word not in EXACT or report.worst_relative_error < 1e-6
    assert report.peak_bytes is not None and report.peak_bytes <= plan.peak_bytes <= 1.01 * report.peak_bytes
    again = autopar.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.hash == plan.hash != planned("keep").hash


def test_the_pool_of_the_host_holds_what_is_offloaded_and_the_device_does_not() -> None:
    model, x = pooled()
    plan, kept = planned("offload"), planned("keep")
    run = autopar.run_virtual(model, (2,), example_inputs=x, plan=plan)
    assert all(bytes_ == plan.host_bytes > 0 for bytes_ in run.host_bytes) and kept.host_bytes == 0
    assert plan.host_memory == {"saved": plan.host_bytes} and not kept.host_memory
    assert plan.memory.get("saved", 0) < kept.memory["saved"] and plan.step_s > kept.step_s


def test_compression_holds_signs_masks_and_small_indices() -> None:
    plan, kept = planned("compress"), planned("keep")
    said = {entry.key for entry in plan.entries if entry.residency == "compress"}
    assert {"/relu#0", "/relu#1", "/max_pool2d_with_indices#0", "drop/autopar.random_mask#0"} <= said
    assert plan.memory.get("saved", 0) < kept.memory["saved"] and plan.peak_bytes <= kept.peak_bytes


def wide(layers: int = 6) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.Tanh())]), torch.randn(
        4096, 64
    )


class Hourglass(nn.Module):
    """Two wide ends, with time between them for copies: what the first one saves is not needed at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(16, 64)
        self.middle = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.middle(torch.tanh(self.first(x)).mean(0, keepdim=True))
        return (self.second(x) + narrow).square().mean()


def fit_of(words: tuple[str, ...], host_bytes_per_s: float) -> Fit:
    profile = load_profile("a100")
    profile = replace(profile, device=replace(profile.device, host_bytes_per_s=host_bytes_per_s))
    program, mesh = capture(Hourglass(), (torch.randn(8192, 16),), {}), autopar.Mesh((1,), hardware=profile)
    plan = plan_program(program, mesh, Options(search="ddp"))
    packing = Packing(plan.planning.decisions, Prices(mesh), words)
    return Fit(plan.planning, plan.choice, Prices(mesh), plan.plan.step_s, {}, Budget(30), packing)


def residencies(fit: Fit) -> Iterator[Residency]:
    """Every combination of keep, recompute and the forms that fit."""
    values = sorted(fit.saved.values)
    options = [("keep", "recompute", *fit.packed.of(index)) for index in values]
    for words in product(*options):
        again = {index for index, word in zip(values, words, strict=True) if word == "recompute"}
        packed = [(index, word) for index, word in zip(values, words, strict=True) if word not in ("keep", "recompute")]
        yield Residency(fit.saved.closed(again), packed=frozenset(packed))


def test_the_choice_is_the_best_of_all_on_small_graphs() -> None:
    fit = fit_of(("offload",), host_bytes_per_s=1e13)
    tried = [fit.measured(residency) for residency in residencies(fit)]
    assert len(tried) >= 27
    kept, used = fit.measured(USUAL), set()
    for limit in sorted({item.measured.peak_bytes for item in tried}):
        best = min(item.seconds for item in tried if item.measured.peak_bytes <= limit)
        found, _ = fit.under(limit, kept)
        assert found is not None and found.seconds <= best * (1 + 1e-9) + 1e-12
        used |= {word for _, word in found.residency.packed}
    assert used == {"offload"}


def test_a_search_offloads_where_the_copies_are_hidden_and_simulates_what_they_cost() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    with torch.device("meta"):
        model, x = Deep(), torch.empty(65536, 2048)
    keywords: dict[str, Any] = {"example_inputs": x, "search": "ddp", "hardware": "a100"}
    roomy = autopar.make_plan(model, (1,), **keywords)
    limit = int(0.75 * roomy.peak_bytes)
    plan = autopar.make_plan(model, (1,), memory_limit_bytes=limit, **keywords)
    assert "offload" in {entry.residency for entry in plan.entries} and plan.host_bytes > 0
    assert plan.peak_bytes <= limit and plan.step_s < 1.02 * roomy.step_s
    recomputing = autopar.make_plan(
        model, (1,), memory_limit_bytes=limit, constraints={"*tanh#*": "recompute"}, **keywords
    )
    assert plan.step_s <= recomputing.step_s


def test_on_a_device_that_is_its_own_host_a_search_offloads_nothing() -> None:
    assert "offload" in Packing.of((), Prices(autopar.Mesh((1,), hardware="a100"))).words
    assert "offload" not in Packing.of((), Prices(autopar.Mesh((1,), hardware="cpu"))).words


def test_precision_is_lost_only_where_it_is_allowed() -> None:
    model, x = wide()
    keywords: dict[str, Any] = {"example_inputs": x, "search": "ddp", "hardware": "cpu"}
    roomy = autopar.make_plan(model, (1,), **keywords)
    limit = int(0.85 * roomy.peak_bytes)
    exact = autopar.make_plan(model, (1,), memory_limit_bytes=limit, **keywords)
    assert not any(entry.residency in LOSSY.values() for entry in exact.entries)
    allowed = autopar.make_plan(model, (1,), memory_limit_bytes=limit, compress="bf16", **keywords)
    assert "compress-bf16" in {entry.residency for entry in allowed.entries} and allowed.peak_bytes <= limit
    report = autopar.verify(model, (1,), example_inputs=x, hardware="cpu", plan=allowed)
    assert report.ok and report.worst_relative_error > 1e-4, report.table
    with pytest.raises(UnsupportedOptionError):
        autopar.make_plan(model, (1,), compress="zip", **keywords)


@pytest.mark.parametrize(
    "key, word, why",
    [
        ("head/mm.backward#0", "offload", "no op of the forward"),
        ("/view#0", "offload", "a view of"),
        ("first/convolution#0", "compress", "no such form"),
    ],
)
def test_what_cannot_be_packed_is_refused(key: str, word: str, why: str) -> None:
    model, x = pooled()
    data = planned("keep").to_json()
    data["residency"] = {key: word}
    with pytest.raises(PlanError, match=why):
        autopar.make_plan(model, (2,), example_inputs=x, plan=autopar.Plan.from_json(data))
    with pytest.raises(ConstraintError):
        autopar.make_plan(model, (2,), example_inputs=x, constraints={key: word})


def test_what_is_recomputed_needs_more_than_signs() -> None:
    model, x = pooled()
    data = planned("keep").to_json()
    data["residency"] = {"/relu#0": "compress", "/max_pool2d_with_indices#0": "recompute"}
    with pytest.raises(PlanError, match="only signs"):
        autopar.make_plan(model, (2,), example_inputs=x, plan=autopar.Plan.from_json(data))


def test_plans_and_passes_use_the_same_words() -> None:
    assert ("keep", "recompute", *PACKED) == RESIDENCIES
