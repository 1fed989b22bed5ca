"""Rules that nobody wrote, found by running ops on shards: what is found, and what must not be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from autopar.sharding.discovery.book import Bench, Discovery, RuleBook, bench_for
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.execution import call_in, trace_op
from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import UserRules, register_rule
from autopar.sharding.rule import Rule, replicate_rule
from tests.autopar.sharding import discovery_ops as ops

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> OpCall:
    return call_in(trace_op(target, args, kwargs))


def discovered(target: Any, *args: Any, **kwargs: Any) -> Finding:
    return Discovery(memory={})(call(target, *args, **kwargs))


def texts(target: Any, *args: Any, **kwargs: Any) -> set[str]:
    return set(discovered(target, *args, **kwargs).texts)


def real(*size: int) -> Tensor:
    return torch.randn(size)


def test_an_elementwise_op_may_be_cut_in_every_dim_and_is_no_sum() -> None:
    assert texts(ops.gated_op, real(8, 64, 32), real(8, 64, 32)) == {
        "S0, S0 -> S0", "S1, S1 -> S1", "S2, S2 -> S2", "P, R -> P",
    }  # fmt: skip


def test_a_dim_of_size_one_is_broadcast_and_never_cut() -> None:
    assert texts(ops.gated_op, real(8, 64), real(8, 1)) == {"S0, S0 -> S0", "S1, R -> S1", "P, R -> P"}


def test_attention_may_be_cut_in_batch_heads_and_queries_but_not_in_keys() -> None:
    found = texts(ops.attention_op, real(2, 12, 40, 16), real(2, 12, 40, 16), real(2, 12, 40, 16))
    assert found == {"S0, S0, S0 -> S0", "S1, S1, S1 -> S1", "S2, R, R -> S2", "R, R, S3 -> S3", "R, R, P -> P"}


def test_a_cut_whose_shapes_the_fake_does_not_foretell_is_left_out() -> None:
    found = texts(ops.careless_attention_op, real(2, 12, 40, 16), real(2, 12, 40, 16), real(2, 12, 40, 16))
    assert found == {"S0, S0, S0 -> S0", "S1, S1, S1 -> S1", "S2, R, R -> S2", "R, R, P -> P"}


def test_a_bias_keeps_a_product_from_being_cut_along_what_it_sums() -> None:
    found = texts(ops.projection_op, real(8, 40, 16), real(64, 16), real(64))
    assert {"S0, R, R -> S0", "S1, R, R -> S1", "R, S0, S0 -> S2", "P, R, P -> P"} <= found
    assert not any(rule.startswith("S2") for rule in found)


def test_what_an_index_picks_from_stays_whole() -> None:
    found = texts(ops.lookup_op, real(1000, 64), torch.randint(0, 1000, (8, 16)))
    assert found == {"R, S0 -> S0", "R, S1 -> S1", "S1, R -> S2", "P, R -> P"}


def test_a_number_that_names_a_size_keeps_that_size_from_being_made_small() -> None:
    finding = discovered(ops.by_heads_op, real(8, 40, 96), 12)
    assert set(finding.texts) == {"S0 -> S0", "S1 -> S1"}
    assert not finding.is_general


def test_each_output_has_a_placement_of_its_own() -> None:
    assert texts(ops.statistics_op, real(8, 64)) == {"S0 -> P, P(max)", "S1 -> S0, S0"}


def test_square_matrices_are_told_apart_by_where_they_are_cut() -> None:
    found = texts(aten.mm.default, real(32, 32), real(32, 32))
    assert found == {"S0, R -> S0", "R, S1 -> S1", "S1, S0 -> P", "P, R -> P", "R, P -> P"}


def test_a_dim_that_need_not_divide_is_found_to_be_so() -> None:
    assert not any(rule.even for rule in discovered(ops.gated_op, real(8, 64), real(8, 64)).rules)


@pytest.mark.parametrize("trap", ops.TRAPS, ids=str)
def test_what_depends_on_the_whole_of_a_dim_is_never_cut_there(trap: Any) -> None:
    finding = discovered(trap, real(200, 24), *ops.TRAPS[trap])
    assert not [rule for rule in finding.texts if rule.startswith("S0")]
    assert not any(rule.endswith("P") for rule in finding.texts)


@pytest.mark.parametrize("op", ops.RANDOM, ids=str)
def test_an_op_that_gives_two_results_for_the_same_inputs_is_random(op: Any) -> None:
    finding = discovered(op, real(8, 24))
    assert finding.is_random and not finding.rules


def test_random_states_are_as_before() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    for op in ops.RANDOM:
        discovered(op, real(8, 24).zero_())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


def test_an_op_that_writes_into_its_inputs_behind_its_schema_has_no_rules() -> None:
    library = torch.library.Library("discovery_test_python", "FRAGMENT")
    try:
        library.define("writes(Tensor x) -> Tensor")
        library.impl("writes", lambda x: x.mul_(2).relu(), "CompositeExplicitAutograd")
        library.impl("writes", torch.empty_like, "Meta")
        finding = discovered(torch.ops.discovery_test_python.writes.default, real(8, 24))
        assert (finding.rules, finding.why) == ((), "it writes into its inputs")
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("target", "args", "why"),
    [
        (aten.as_strided.default, (real(8, 24), (4, 24), (24, 1)), "it gives a view"),
        (aten.bernoulli.p, (real(8, 24), 0.5), "it is random"),
        (aten.arange.default, (24,), "it does not take and give tensors"),
        (aten.pdist.default, (real(0, 24),), "its tensors are empty"),
        (torch.ops.aten.resize_.default, (real(8, 24), (4, 24)), "it writes into its inputs"),
    ],
)  # fmt: skip
def test_ops_that_cannot_be_cut_are_not_run(target: Any, args: tuple[Any, ...], why: str) -> None:
    assert discovered(target, *args) == Finding((), why)


def test_results_in_a_dtype_that_pytorch_cannot_add_are_not_claimed() -> None:
    assert not discovered(aten.hash_tensor.default, real(8, 24)).rules


def test_internal_kernels_that_trust_their_callers_are_not_given_other_sizes() -> None:
    weights = call(torch.ops.aten._weight_norm_interface.default, real(4, 6), real(4, 1))
    pairs = call(torch.ops.aten._pdist_backward.default, real(6), real(4, 3), 2.0, real(6))
    for made in (weights, pairs):  # both corrupt the heap, where sizes do not fit together
        assert "trusts its caller" in str(bench_for(made, "cpu"))
    assert bench_for(call(torch.ops.aten.mm.default, real(4, 6), real(6, 4)), "cpu") == Bench("cpu", is_checked=True)


def test_sizes_among_the_arguments_that_are_those_of_the_whole_rule_a_cut_out() -> None:
    found = texts(aten.slice_scatter.default, real(24, 64), real(12, 64), 0, 0, 12)
    assert found == {"S1, S1 -> S1", "P, P -> P"}
    rows = torch.randint(0, 100, (8, 16))
    found = texts(ops.rows_added_op, real(8, 16, 32), rows, 100)
    assert found == {"S0, S0 -> P", "S1, S1 -> P", "S2, R -> S1", "P, R -> P"}


def test_low_precision_is_tried_in_double_and_in_its_own() -> None:
    half = torch.bfloat16
    found = texts(aten.mm.default, real(8, 64).to(half), real(64, 32).to(half))
    assert found == {"S0, R -> S0", "R, S1 -> S1", "S1, S0 -> P", "P, R -> P", "R, P -> P"}


def test_a_result_that_is_always_the_same_fits_everything_and_proves_nothing() -> None:
    library = torch.library.Library("discovery_test_flag", "FRAGMENT")
    try:
        library.define("overflow(Tensor x) -> Tensor")
        library.impl("overflow", lambda x: (x.abs() > 1e30).any(), "CompositeExplicitAutograd")
        library.impl("overflow", lambda x: x.new_empty((), dtype=torch.bool), "Meta")
        assert not discovered(torch.ops.discovery_test_flag.overflow.default, real(8, 24)).rules
    finally:
        library._destroy()


def test_discovery_finds_the_same_rules_every_time() -> None:
    made = call(aten.mm.default, real(8, 64), real(64, 32))
    assert Discovery(memory={})(made) == Discovery(memory={})(made)


def test_written_rules_go_before_discovered_ones_and_the_replicated_one_before_all() -> None:
    own = UserRules()
    register_rule(ops.gated_op, "r _, r _ -> r _", user_rules=own)
    made = call(ops.gated_op, real(8, 64), real(8, 64))
    book = RuleBook(Discovery(memory={}), own)
    assert book.rules_of(made) == (replicate_rule(made), Rule((Shard(0), Shard(0)), (Shard(0),)))
    assert not book.findings


def test_a_book_without_discovery_replicates() -> None:
    made = call(ops.gated_op, real(8, 64), real(8, 64))
    assert RuleBook().rules_of(made) == (replicate_rule(made),)
