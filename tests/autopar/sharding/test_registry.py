"""Where rules come from: the tables, the tag, the user."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar.errors import RuleError
from autopar.sharding.execution import call_in, trace_op
from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import UserRules, has_rule, overload_name, register_rule, resolve_op, rules_of
from autopar.sharding.rule import Rule, replicate_rule

aten = torch.ops.aten
R, P = Replicate(), Partial()


def call(target: object, *args: object, **kwargs: object) -> OpCall:
    return call_in(trace_op(target, args, kwargs))


def test_the_replicated_rule_comes_first_and_none_comes_twice() -> None:
    for made in (call(aten.mm.default, torch.ones(4, 6), torch.ones(6, 8)), call(aten.relu.default, torch.ones(4, 6))):
        rules = rules_of(made)
        assert rules[0] == replicate_rule(made)
        assert len(set(rules)) == len(rules)


def test_a_product_may_be_cut_in_rows_columns_and_along_what_it_sums() -> None:
    rules = rules_of(call(aten.mm.default, torch.ones(4, 6), torch.ones(6, 8)))
    assert {(rule.inputs, rule.outputs) for rule in rules[1:]} == {
        ((Shard(0), R), (Shard(0),)),
        ((R, Shard(1)), (Shard(1),)),
        ((Shard(1), Shard(0)), (P,)),
    }


def test_an_op_that_nobody_knows_is_replicated_and_has_no_rule() -> None:
    made = call(aten._pdist_forward.default, torch.ones(4, 4), 2.0)
    assert rules_of(made) == (replicate_rule(made),)
    assert not has_rule(made)


def test_a_random_op_is_never_taken_for_elementwise() -> None:
    made = call(aten.bernoulli.p, torch.ones(4, 6), 0.5)
    assert rules_of(made) == (replicate_rule(made),)
    assert not has_rule(made)


def test_an_elementwise_op_needs_no_entry_in_a_table() -> None:
    made = call(aten.special_bessel_j0.default, torch.ones(4, 6))
    assert has_rule(made)
    assert [rule.outputs for rule in rules_of(made)] == [(R,), (Shard(0),), (Shard(1),)]


def test_tensors_without_elements_are_not_cut() -> None:
    made = call(aten.relu.default, torch.ones(4, 0))
    assert rules_of(made) == (replicate_rule(made),)


def test_a_vocabulary_that_is_sharded_costs_two_numbers_per_row() -> None:
    made = call(aten._log_softmax.default, torch.ones(6, 50), 1, False)
    (rule,) = [rule for rule in rules_of(made) if rule.inputs == (Shard(1),)]
    assert rule.form == "normalized"
    assert rule.internal_bytes == 2 * 6 * 4


def test_a_users_rule_goes_before_the_built_in_one() -> None:
    own = UserRules()
    register_rule("aten::relu", "N c -> N c", user_rules=own)
    made = call(aten.relu.default, torch.ones(4, 6))
    assert [rule.outputs for rule in rules_of(made, own)] == [(R,), (Shard(1),)]
    assert len(rules_of(made)) == 3


def test_a_users_rule_may_be_a_function_of_the_call() -> None:
    own = UserRules()
    register_rule(aten.relu, lambda made: [Rule((Shard(0),), (Shard(0),), even=True)], user_rules=own)
    made = call(aten.relu.default, torch.ones(4, 6))
    assert rules_of(made, own) == (replicate_rule(made), Rule((Shard(0),), (Shard(0),), even=True))


@pytest.mark.parametrize("rule", ["a b", "a -> b -> c", ""])
def test_a_line_without_one_arrow_is_refused_when_it_is_registered(rule: str) -> None:
    with pytest.raises(RuleError, match="needs one '->'"):
        register_rule("mylib::op", rule, user_rules=UserRules())


def test_a_rule_with_the_wrong_number_of_tensors_names_the_op() -> None:
    own = UserRules()
    register_rule("aten::relu", lambda made: [Rule((R, R), (R,))], user_rules=own)
    with pytest.raises(RuleError, match=r"aten.relu.default places 2 inputs"):
        rules_of(call(aten.relu.default, torch.ones(4)), own)


def test_an_op_is_named_by_its_text_its_packet_or_its_overload() -> None:
    assert overload_name("aten::relu") == overload_name(aten.relu) == overload_name(aten.relu.default)
    assert overload_name("aten::add.Tensor") == "aten.add.Tensor"
    assert resolve_op("aten::add.Tensor") is aten.add.Tensor
    with pytest.raises(RuleError, match="there is no op 'mylib::absent'"):
        resolve_op("mylib::absent")
