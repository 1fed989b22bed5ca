"""Models with ops that nobody wrote a rule for: discovered, planned, run, listed; or refused with the user's line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.capture.trace import capture
from autopar.errors import DataDependentError, PlanFormatError, RuleError, UnsupportedRandomError
from autopar.mesh import Mesh
from autopar.planner.build import build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.prices import Prices
from autopar.runtime.virtual_run import run_virtual_step
from autopar.sharding.discovery.book import Discovery, RuleBook
from autopar.verification import Values, compare, eager_values
from tests.autopar.random_programs import random_choice
from tests.autopar.sharding import discovery_ops as ops
from tests.gloo import run_on_ranks

MESHES = [(2,), (4,), (2, 2)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing that an earlier test found."""
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Block(nn.Module):
    """A linear layer, and an op of a library with a backward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ops.discovery_test.smooth_gate(self.linear(x), self.scale)


class Clip(torch.autograd.Function):
    """Identity with a backward that no rule of autograd would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0].clamp(-0.1, 0.1) * (x > 0)


class Attention(nn.Module):
    """Heads, through an op that autograd cannot see into."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        mixed = torch.ops.discovery_test.attention(q.detach(), k.detach(), v.detach())
        return self.outputs(mixed.transpose(1, 2).flatten(-2) + v.transpose(1, 2).flatten(-2))


class Distances(nn.Module):
    """Ops of PyTorch without a rule: one that can be cut (searchsorted), one that cannot (the median of everything)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, self.points.expand(x.shape[0], 8, 16))
        bins = torch.searchsorted(torch.linspace(0, 8, 16), near.detach())
        return near * bins * (near.detach() > near.detach().median())


class Wrapped(nn.Module):
    def __init__(self, *layers: nn.Module, function: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers, self.function = nn.Sequential(*layers), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return (self.function(y) if self.function else y).square().mean()


def batch() -> Tensor:
    return torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "custom op": lambda: Wrapped(Block(16), Block(16)),
    "attention": lambda: Wrapped(Attention()),
    "autograd function": lambda: Wrapped(nn.Linear(16, 16), function=Clip.apply),
    "ops of PyTorch": lambda: Wrapped(nn.Linear(16, 16), Distances()),
}


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_ops_without_rules_computes_the_same(name: str, mesh_shape: tuple[int, ...]) -> None:
    report = autopar.verify(MODELS[name](), mesh_shape, example_inputs=batch())
    assert report.ok, report.table


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["custom op", "attention", "ops of PyTorch"])
def test_every_way_to_cut_a_discovered_op_computes_the_same(name: str, mesh_shape: tuple[int, ...]) -> None:
    model = MODELS[name]().double()
    program = capture(model, (batch().double(),), {})
    prices = Prices(Mesh(mesh_shape, hardware="cpu"))
    decisions = DecisionList(program, prices, NO_OPTIMIZER, RuleBook(Discovery())).build()
    planning = build_problem(program, decisions, prices, usage_limit=None)
    expected = eager_values(model, program, (batch().double(),), {})
    picked: dict[str, set[int]] = {}
    for seed in range(4):
        choice = random_choice(planning, random.Random(seed))
        run = run_virtual_step(model, program, planning.assignment(choice), mesh_shape, (batch().double(),), {}, seed=0)
        report = compare(Values(run.outputs, run.gradients, run.buffers), expected, reference="eager")
        assert report.ok, report.table
        for decision, pick in zip(decisions, choice, strict=True):
            if "discovery_test" in decision.key or "searchsorted" in decision.key:
                picked.setdefault(decision.key, set()).add(pick)
    assert picked and all(picks - {0} for picks in picked.values()), picked


def test_the_plan_lists_what_was_discovered_and_what_is_replicated(tmp_path: Path) -> None:
    plan = autopar.make_plan(Wrapped(Block(16), Block(16), Distances()), (2,), example_inputs=batch())
    forward = next(item for item in plan.discovered if "smooth_gate.default" in item.op)
    assert forward.uses == 2 and {"S0, R -> S0", "S2, S0 -> S2"} <= set(forward.rules)
    backward = next(item for item in plan.discovered if "smooth_gate_backward" in item.op)
    assert "S0, S0, R -> S0, P" in backward.rules
    (median,) = plan.replicated
    assert median.op == "aten.median.default" and "near.detach().median()" in median.where and median.why
    text = str(plan)
    assert "discovered rules: " in text and "discovery_test.smooth_gate.default (2 uses: " in text
    assert "replicated: aten.median.default (1 use" in text
    plan.save(tmp_path / "p.json")
    assert autopar.Plan.load(tmp_path / "p.json").without_rule == plan.without_rule


def test_a_plan_of_before_discovery_is_read_and_a_broken_list_is_refused() -> None:
    data = autopar.make_plan(Wrapped(Block(16)), (2,), example_inputs=batch()).to_json()
    assert autopar.Plan.from_json({**data}).without_rule
    old = {name: value for name, value in data.items() if name != "without_rule"}
    assert autopar.Plan.from_json(old).without_rule == ()
    item = data["without_rule"][0]
    for broken in (None, {}, [3], [item | {"uses": -1}], [item | {"rules": [1]}], [item | {"op": None}]):
        with pytest.raises(PlanFormatError):
            autopar.Plan.from_json(data | {"without_rule": broken})


def test_a_pin_may_ask_for_a_discovered_rule() -> None:
    pins = {"*discovery_test.smooth_gate#0": "S2"}
    plan = autopar.make_plan(Wrapped(Block(16)), (2,), example_inputs=batch(), constraints=pins)
    assert autopar.verify(Wrapped(Block(16)), (2,), example_inputs=batch(), plan=plan).ok


def test_on_one_rank_nothing_is_looked_for(own_cache: Path) -> None:
    assert not autopar.make_plan(Wrapped(Block(16)), (1,), example_inputs=batch()).without_rule
    assert not own_cache.exists()


@pytest.mark.parametrize("op", ops.RANDOM, ids=str)
def test_a_random_op_of_a_library_is_refused_with_the_users_line(op: Any) -> None:
    model = Wrapped(nn.Linear(16, 16), function=lambda x: x * op(x.detach()))
    with pytest.raises(UnsupportedRandomError, match="gives two results") as caught:
        autopar.make_plan(model, (2,), example_inputs=batch())
    assert "x * op(x.detach())" in caught.value.where


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero().sum() * x,
        lambda x: x.masked_select(x > 0),
        lambda x: torch.unique(x).sum() * x,
        lambda x: x[x > 0],
        lambda x: torch.ops.discovery_test.values_above(x.detach()).sum() * x,
    ],
    ids=["nonzero", "masked_select", "unique", "boolean index", "custom op"],
)
def test_a_shape_that_depends_on_data_is_refused_with_the_users_line(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DataDependentError, match=r"shape of .* depends on data") as caught:
        autopar.make_plan(Wrapped(nn.Linear(16, 16), function=function), (2,), example_inputs=batch())
    assert "test_ops_without_rules.py" in caught.value.where and "lambda x:" in caught.value.where
    assert caught.value.fix


@torch.library.custom_op("discovery_test::head_scores", mutates_args=())
def head_scores(q: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, positions, width) each."""
    return q.softmax(-1) * k


@head_scores.register_fake
def _(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty_like(q)


def test_a_registered_rule_is_used_in_place_of_discovery_and_checked_by_running_it(own_cache: Path) -> None:
    samples = [torch.randn(4, 4, 4, 4) for _ in range(2)]
    autopar.register_rule("discovery_test::head_scores", "b h s d, b h s d -> b h s d")
    with pytest.raises(RuleError, match=r"'S3, S3 -> S3'.* is wrong"):
        autopar.check_rule("discovery_test::head_scores", *samples)
    autopar.register_rule(head_scores, lambda call: autopar_rules(call))
    assert len(autopar.check_rule(head_scores, *samples)) == 2
    autopar.register_rule("discovery_test::head_scores", "b h s _, b h s _ -> b h s _")
    assert len(autopar.check_rule("discovery_test::head_scores", *samples)) == 4
    model = Wrapped(nn.Linear(16, 16), function=lambda x: x * head_scores(x.detach()[None], x.detach()[None])[0])
    assert not autopar.make_plan(model, (2,), example_inputs=batch()).without_rule
    assert not own_cache.exists()
    assert autopar.verify(model, (2, 2), example_inputs=batch()).ok


def autopar_rules(call: Any) -> list[Any]:
    from torch.distributed.tensor import Shard

    from autopar.sharding.rule import Rule

    return [Rule((Shard(1), Shard(1)), (Shard(1),))]


def train_on_ranks(folder: str) -> tuple[str, list[str], float]:
    """Every rank with a cache of its own: only the first of them discovers."""
    import os

    own = Path(folder) / f"rank{torch.distributed.get_rank()}"
    os.environ["AUTOPAR_CACHE_DIR"] = str(own)
    torch.manual_seed(0)
    model = Wrapped(Block(16), Block(16))
    mesh = init_device_mesh("cpu", (2,))
    report = autopar.verify(model, mesh, example_inputs=batch(), constraints={"*discovery_test.smooth_gate#0": "S2"})
    pmodel = autopar.compile(model, mesh, example_inputs=batch())
    pmodel(batch()).backward()
    assert report.ok, report.table
    return pmodel.plan.hash, sorted(path.name for path in own.rglob("*.json")), report.worst_relative_error


def test_the_first_rank_discovers_for_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(train_on_ranks, 2, str(tmp_path))
    assert first[0] == second[0]
    assert any("smooth_gate" in name for name in first[1]) and not second[1]
