"""The law: plans may differ in cost, never in result. All ranks run in this process, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.passes.packings import EXACT
from autopar.planner.build import build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.prices import Prices
from autopar.planner.residency import Residency
from autopar.planner.saved_forms import SavedForms
from autopar.runtime.virtual_run import run_virtual_step
from autopar.verification import Values, compare, traced_values
from tests.autopar.random_programs import BATCH, LAYERS, SEQUENCE, RandomModel, random_choice


def random_packing(forms: SavedForms, recomputed: frozenset[int], chance: random.Random) -> frozenset[tuple[int, str]]:
    """Some values that are not recomputed on the host or compressed, in so far as what is recomputed allows it."""
    words = {index: chance.choice(["", *EXACT]) for index in range(len(forms.decisions)) if index not in recomputed}
    packed = {(index, word) for index, word in words.items() if word and not forms.why_not(index, word)}
    try:
        forms.check(Residency(recomputed, packed=frozenset(packed)))
    except PlanError:
        packed = {(index, word) for index, word in packed if forms.is_whole(index, word)}
    return frozenset(packed)


def check(names: list[str], residual: bool, tied: bool, mesh_shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    model = RandomModel(names, residual, tied).double()
    args = tuple(torch.randint(16, (2, BATCH, SEQUENCE)))
    program = capture(model, args, {})
    prices = Prices(Mesh(mesh_shape, hardware="cpu"))
    decisions = DecisionList(program, prices, NO_OPTIMIZER).build()
    planning = build_problem(program, decisions, prices, usage_limit=None)
    chance = random.Random(seed)
    choice = random_choice(planning, chance)
    flipped = [(index, item.kind) for index, item in enumerate(decisions) if chance.random() < 0.5]
    recomputed, once = (frozenset(index for index, kind in flipped if kind == it) for it in ("op", "parameter"))
    packed = random_packing(SavedForms(decisions), recomputed, chance)
    residency = Residency(recomputed, once, packed)
    run = run_virtual_step(model, program, planning.assignment(choice, residency), mesh_shape, args, {}, seed=3)
    expected = traced_values(model, program, tensor_leaves(args, {}), 3)
    report = compare(Values(run.outputs, run.gradients, run.buffers), expected, reference="one device")
    assert report.ok, report.table


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3),
    residual=st.booleans(),
    tied=st.booleans(),
    mesh_shape=st.sampled_from([(2,), (4,), (2, 2), (3,)]),
    seed=st.integers(0, 10_000),
)
def test_every_valid_plan_computes_what_the_model_computes(
    names: list[str], residual: bool, tied: bool, mesh_shape: tuple[int, ...], seed: int
) -> None:
    check(names, residual, tied, mesh_shape, seed)


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_each_kind_of_layer_under_a_random_plan(name: str) -> None:
    check([name], residual=True, tied=False, mesh_shape=(2, 2), seed=len(name))
