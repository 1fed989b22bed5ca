"""Loops over the tokens of each expert compute what they compute on one device, and become one op, however routed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.program import Program
from autopar.capture.trace import capture, tensor_leaves
from autopar.verification import compare, eager_values, traced_values
from tests.autopar.capture.rows import loops
from tests.autopar.capture.rows.loops import EXPERTS, LOOPS, ONE_OP, Loop
from tests.gloo import run_on_ranks

ROUTINGS: dict[str, dict[str, int]] = {"any": {}, "all to one": {"favourite": 2}, "none to one": {"never": 1}}


def tokens(seed: int = 0) -> Tensor:
    found = torch.randn(2, 8, loops.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return found if seed else -found


def op_counts(program: Program) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph_module.graph.nodes)


def assert_same(model: nn.Module, x: Tensor) -> Program:
    program = capture(model, (x,), {})
    expected = eager_values(model, program, (x,), {})
    report = compare(traced_values(model, program, tensor_leaves((x,), {}), seed=0), expected, reference="eager")
    assert report.ok, report.table
    return program


def title(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kind", "expert"), LOOPS, ids=title)
def test_a_loop_computes_what_it_computes_on_one_device(
    kind: type[Loop], expert: type[nn.Module], routing: str
) -> None:
    for seed in (0, 1):  # of Overlapping, one goes into its last branch, the other does not
        assert_same(kind(expert).route(**ROUTINGS[routing]), tokens(seed))


def test_both_ways_of_the_branch_that_the_input_decides_are_met() -> None:
    sums = [float(tokens(seed).reshape(-1, loops.WIDTH)[:, 0].sum()) for seed in (0, 1)]
    assert min(sums) < 0 < max(sums)


@pytest.mark.parametrize(("kind", "expert"), ONE_OP, ids=title)
def test_experts_of_a_known_form_become_one_op(kind: type[Loop], expert: type[nn.Module]) -> None:
    program = assert_same(kind(expert), tokens())
    found = op_counts(program)
    assert found["autopar.experts.default"] == found["autopar.experts_backward.default"] == 1
    assert not found["aten.gelu.default"] and not found["aten.silu.default"] and not program.notes
    node = next(node for node in program.graph_module.graph.nodes if "autopar.experts." in str(node.target))
    assert node.args[3].meta["val"].shape[0] == EXPERTS
    if kind is not loops.Flat:  # there each choice has a row of its own
        assert node.args[1].meta["val"].shape == (16, loops.CHOICES)


def test_two_layers_that_are_added_to_one_tensor_are_two_ops() -> None:
    class Twice(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.others = nn.ModuleList(loops.Gated() for _ in range(EXPERTS)).double()

        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for e in range(EXPERTS):
                token, slot = torch.where(chosen == e)
                for experts in (self.experts, self.others):
                    out.index_add_(0, token, experts[e](x[token]) * scores[token, slot, None])
            return out

    assert op_counts(assert_same(Twice(), tokens()))["autopar.experts.default"] == 2


@pytest.mark.parametrize("kind", [loops.Mixtral, loops.Masked, loops.Columns, loops.Positions], ids=title)
def test_choices_may_repeat_and_name_no_expert(kind: type[Loop]) -> None:
    others = 0 if kind is loops.Mixtral else 2  # one_hot takes none

    class Hashed(kind):  # type: ignore[misc, valid-type]  # any of them
        def forward(self, x: Tensor) -> Tensor:
            tokens = x.reshape(-1, x.shape[-1])
            chosen = (tokens[:, :3] * 7).floor().long().remainder(EXPERTS + others)
            scores = self.router(tokens)[:, :3].sigmoid()
            out: Tensor = x + self.mixed(tokens, scores, chosen).reshape(x.shape)
            return out

    program = assert_same(Hashed(), tokens())
    graph = program.graph_module.graph
    first = next(node for node in graph.nodes if str(node.target) == "autopar.experts.default")
    assert kind is not loops.Mixtral or first.args[1].meta["val"].shape == (16, 3)


def test_experts_with_and_without_scores_and_with_numbers_are_one_layer() -> None:
    class Uneven(Loop):
        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(chosen == e)
                rows = expert(x[token])
                if e:
                    rows = rows * scores[token, slot, None]
                if e > 1:
                    rows *= 0.5
                out.index_add_(0, token, rows)
            return out

    found = op_counts(assert_same(Uneven(), tokens()))
    assert found["autopar.experts.default"] == 1


@pytest.mark.parametrize("part", ["tokens", "up", "activation", "down", "product", "all"])
def test_parts_of_an_expert_without_gradients_get_none(part: str) -> None:
    class Stopping(Loop):
        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            out, x = torch.zeros_like(x), x * scores.sum()
            for e in range(EXPERTS):
                token, slot = torch.where(chosen == e)
                made, expert = torch.zeros(()), self.experts[e]
                assert isinstance(expert, loops.FeedForward)
                for name, step in (
                    ("tokens", lambda _: x[token]),  # noqa: B023
                    ("up", expert.up),
                    ("activation", torch.tanh),
                    ("down", expert.down),
                    ("product", lambda rows: rows * scores[token, slot, None]),  # noqa: B023
                ):
                    with torch.set_grad_enabled(e % 2 == 0 or part not in (name, "all")):
                        made = step(made)
                out.index_add_(0, token, made)
            return out

    assert_same(Stopping(), tokens())


def test_choices_reach_the_op_as_the_router_made_them() -> None:
    """Then the planner knows how many there are, and the counts of the experts are those of the model's."""
    for kind in (loops.Mixtral, loops.Hits):
        graph = capture(kind(), (tokens(),), {}).graph_module.graph
        node = next(node for node in graph.nodes if "autopar.experts." in str(node.target))
        assert "final.index_add_(0, top_x, current" in node.meta["where"]  # not where the result is read
        index = node.args[1]
        while index.target is torch.ops.aten.permute.default:
            index = index.args[0]
        assert index.args[0].target is torch.ops.aten.topk.default


def test_weights_that_are_slices_of_one_parameter_are_not_copied() -> None:
    class Stacked(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, loops.HIDDEN, loops.WIDTH, dtype=torch.float64))
            self.down = nn.Parameter(torch.randn(EXPERTS, loops.HIDDEN, loops.WIDTH, dtype=torch.float64))

        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for e in range(EXPERTS):
                token, slot = torch.where(chosen == e)
                rows = (x[token] @ self.up[e].T).relu() @ self.down[e]
                out.index_add_(0, token, rows * scores[token, slot, None])
            return out

    found = op_counts(assert_same(Stacked(), tokens()))
    assert found["autopar.experts.default"] == 1 and not found["aten.stack.default"]


def test_other_experts_are_computed_on_all_tokens_and_the_plan_says_so() -> None:
    plan = autopar.make_plan(loops.Mixtral(loops.Normalized), (2,), example_inputs=tokens())
    (note,) = plan.notes
    assert "idx, top_x = torch.where(expert_mask[expert_idx])" in note and "of all rows 4 times" in note
    assert "note: loops.py" in str(plan)


def test_a_pipeline_says_so_too_and_once_more_when_its_plan_is_followed() -> None:
    model = nn.Sequential(nn.Linear(loops.WIDTH, loops.WIDTH), loops.Mixtral(loops.Normalized)).double()
    plan = autopar.make_plan(model, (2, 1), example_inputs=tokens(), stages=2, microbatches=1, schedule="1f1b")
    (note,) = plan.notes
    assert "of all rows 4 times" in note and "note: loops.py" in str(plan)
    assert autopar.make_plan(model, (2, 1), example_inputs=tokens(), plan=plan).notes == plan.notes


def test_a_split_by_counts_is_one_product_in_groups() -> None:
    class Products(loops.Sorted):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(loops.WIDTH, loops.WIDTH, bias=False) for _ in range(EXPERTS))
            self.double()

    program = assert_same(Products(), tokens())
    assert op_counts(program)["autopar.grouped_mm.default"] == 1 and not program.notes
    assert capture(loops.Sorted(), (tokens(),), {}).notes


def test_rows_that_are_not_selected_cannot_spoil_a_gradient() -> None:
    class Roots(Loop):
        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            mask = x > 0.1
            for divisor in (1.0, 2.0):
                out[mask] += (x[mask] / divisor).sqrt() + x[mask].log() + 1 / x[mask]
            return out + sum(weight.sum() * 0 for weight in self.experts.parameters())

    assert_same(Roots(), tokens().clamp(min=0))


def test_random_numbers_of_experts_are_drawn_for_every_row() -> None:
    class Dropping(loops.FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    report = autopar.verify(loops.Mixtral(Dropping), (2,), example_inputs=tokens())
    assert report.ok, report.table
    assert op_counts(assert_same(loops.Mixtral(Dropping).eval(), tokens()))["autopar.experts.default"] == 1


def test_a_loop_may_be_computed_again_in_the_backward() -> None:
    class Again(loops.Mixtral):
        def mixed(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().mixed, x, scores, chosen, use_reentrant=False)
            return found

    class EachAgain(loops.FeedForward):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return found

    for model in (Again(), Again(loops.Normalized), loops.Hits(EachAgain)):
        assert_same(model, tokens())


def test_a_loop_under_autocast_computes_in_its_precision() -> None:
    class Mixed(loops.Mixtral):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    program = assert_same(Mixed(loops.Gated).float(), tokens().float())
    node = next(node for node in program.graph_module.graph.nodes if "autopar.experts." in str(node.target))
    assert node.args[3].meta["val"].dtype is torch.bfloat16


@pytest.mark.parametrize("kind", [loops.Mixtral, loops.Masked, loops.Flat], ids=title)
def test_a_loop_is_distributed_like_a_layer_of_experts(kind: type[Loop]) -> None:
    for layout in ("S0,A", "A,I"):
        report = autopar.verify(
            kind(loops.Gated), (2, 2), example_inputs=tokens(), constraints={"*/autopar.experts*": layout}
        )
        assert report.ok, report.table
    for search in ("ilp", "megatron"):
        report = autopar.verify(kind(loops.Normalized), (2, 2), example_inputs=tokens(), search=search)
        assert report.ok, report.table


def load_on_two_ranks() -> list[list[int]]:
    model = loops.Hits(loops.Gated).route(never=1)
    pmodel = autopar.compile(
        model, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), example_inputs=tokens()
    )
    pmodel(tokens())
    found: list[list[int]] = pmodel.expert_load.matrix.tolist()
    return found


def test_tokens_of_a_loop_are_counted_by_expert() -> None:
    (load,) = run_on_ranks(load_on_two_ranks, 2)[0]
    assert sum(load) == 2 * 16 and load[1] == 0 and len(load) == EXPERTS


def on_two_ranks() -> dict[str, float]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    found = {}
    forced = {"*/autopar.experts*": "A"}
    for expert, constraints in ((loops.Gated, forced), (loops.Normalized, {})):
        model = loops.Hits(expert)
        report = autopar.verify(model, mesh, example_inputs=tokens(), constraints=constraints)
        found[expert.__name__] = report.worst_relative_error
    return found


def test_on_two_real_ranks_tokens_of_a_loop_go_to_their_experts() -> None:
    for found in run_on_ranks(on_two_ranks, 2):
        assert set(found) == {"Gated", "Normalized"} and max(found.values()) < 1e-10
