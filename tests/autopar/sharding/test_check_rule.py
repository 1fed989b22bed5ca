"""check_rule finds out whether a rule is true by running it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.errors import RuleError
from autopar.sharding.check_rule import check_rule
from autopar.sharding.registry import UserRules, register_rule


@torch.library.custom_op("autopar_test::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Each row by its own scale, minus the row's mean."""
    return (x - x.mean(-1, keepdim=True)) * scale[:, None]


@scaled_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


X, SCALE = torch.arange(24.0).reshape(4, 6), torch.arange(4.0)


def rules(text: str) -> UserRules:
    own = UserRules()
    register_rule("autopar_test::scaled_rows", text, user_rules=own)
    return own


def test_a_true_rule_is_returned() -> None:
    held = check_rule("autopar_test::scaled_rows", X, SCALE, user_rules=rules("r _, r -> r _"))
    assert len(held) == 2


def test_a_wrong_rule_is_caught_with_its_error() -> None:
    with pytest.raises(RuleError, match=r"'S1, R -> S1'.*is wrong: .* off by"):
        check_rule("autopar_test::scaled_rows", X, SCALE, user_rules=rules("r c, r -> r c"))


def test_a_rule_that_cannot_run_is_caught() -> None:
    with pytest.raises(RuleError, match="cannot run on 2 ranks"):
        check_rule("autopar_test::scaled_rows", X, SCALE, user_rules=rules("r _, _ -> r _"))


def test_a_rule_of_another_rank_is_caught() -> None:
    with pytest.raises(RuleError, match="has 3 dims"):
        check_rule("autopar_test::scaled_rows", X, SCALE, user_rules=rules("b r c, r -> b r c"))


def test_samples_too_small_to_cut_are_refused() -> None:
    with pytest.raises(RuleError, match=r"no rule of .* can be tried on 8 ranks"):
        check_rule("autopar_test::scaled_rows", X, SCALE, ranks=8, user_rules=rules("r _, r -> r _"))


def test_the_public_names_teach_and_check_an_op() -> None:
    autopar.register_rule("autopar_test::scaled_rows", "r _, r -> r _")
    assert autopar.check_rule("autopar_test::scaled_rows", X, SCALE, ranks=4)


def test_built_in_rules_can_be_checked_too() -> None:
    assert len(check_rule(torch.ops.aten.mm, torch.randn(4, 6), torch.randn(6, 8))) == 4


@torch.library.custom_op("autopar_test::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    """An op whose author forgot to say what shapes it gives."""
    return x.clone()


def test_an_op_without_a_form_for_fake_tensors_is_refused_with_what_to_do() -> None:
    with pytest.raises(RuleError, match="does not run on fake tensors") as refusal:
        check_rule("autopar_test::without_fake", X)
    assert "register_fake" in str(refusal.value)
