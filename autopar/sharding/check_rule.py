"""check_rule(): does an op, run on shards as its rules say, give what it gives on the whole?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, RuleError
from autopar.sharding.execution import call_in, can_run, run_sharded, trace_op, worst_error
from autopar.sharding.layout import format_placement
from autopar.sharding.op_call import op_name
from autopar.sharding.registry import USER_RULES, UserRules, resolve_op, rules_of
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy


def check_rule(
    op: str | Callable[..., Any], *sample_args: Any, ranks: int = 2, user_rules: UserRules = USER_RULES, **kwargs: Any
) -> tuple[Rule, ...]:
    """Run every rule of `op` on shards of the sample arguments, on `ranks` virtual ranks, and compare.

    Returns the rules that held; those that the sample's sizes do not allow are left out. RuleError names the first rule
    that is wrong and by how much, or says that the sample could try none.

    >>> import torch
    >>> [describe(rule) for rule in check_rule("aten::relu", torch.randn(4, 6))]
    ['R -> R', 'S0 -> S0', 'S1 -> S1']
    """
    target = resolve_op(op)
    gm = _traced(target, sample_args, kwargs)
    call = call_in(gm)
    tensors = [leaf for leaf in pytree.tree_leaves((sample_args, kwargs)) if isinstance(leaf, torch.Tensor)]
    expected = as_outputs(target(*sample_args, **kwargs))
    rules = [rule for rule in rules_of(call, user_rules) if can_run(call, Strategy((rule,)), (ranks,))]
    if len(rules) < 2:
        raise RuleError(
            f"no rule of {call.name} but the replicated one can be tried on {ranks} ranks",
            fix=f"give sample tensors whose dims divide by {ranks}",
        )
    for rule in rules:
        _check(gm, rule, ranks, tensors, expected)
    return tuple(rules)


def _traced(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """The graph of the call. Raises RuleError where the op does not say what shapes it gives."""
    try:
        return trace_op(target, args, kwargs)
    except RuntimeError as error:  # NotImplementedError is one
        raise RuleError(
            f"{op_name(target)} does not run on fake tensors: {str(error).strip().partition(chr(10))[0]}",
            fix="give the op a form for fake tensors, with its register_fake, that tells the shapes of its results",
        ) from error


def as_outputs(value: Any) -> tuple[torch.Tensor | None, ...]:
    """The flat outputs of an op; None for what is no tensor."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)
    return tuple(leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves)


def describe(rule: Rule) -> str:
    """`S0, R -> P`, with the local form where there is one."""
    inputs, outputs = (", ".join(map(format_placement, side)) for side in (rule.inputs, rule.outputs))
    return f"{inputs} -> {outputs}" + (f" ({rule.form})" if rule.form else "")


def tolerance_of(outputs: Sequence[torch.Tensor | None]) -> float:
    """What reordered sums may change: 4e-10 in float64, 7e-5 in float32."""
    floats = [out.dtype for out in outputs if out is not None and (out.is_floating_point() or out.is_complex())]
    return max((float(torch.finfo(dtype).eps) ** 0.6 for dtype in floats), default=0.0)


def _check(
    gm: fx.GraphModule,
    rule: Rule,
    ranks: int,
    tensors: Sequence[torch.Tensor],
    expected: tuple[torch.Tensor | None, ...],
) -> None:
    name = f"rule {describe(rule)!r} of {call_in(gm).name}"
    try:
        actual = run_sharded(gm, Strategy((rule,)), (ranks,), tensors)
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AutoparError) as error:
        # what ops raise on shards that do not fit; AssertionError: replicas of the result differ
        raise RuleError(f"{name} cannot run on {ranks} ranks: {error}") from error
    off_by = worst_error(actual, expected)
    if off_by > tolerance_of(expected):
        raise RuleError(
            f"{name} is wrong: recombined from {ranks} ranks, the result is off by {off_by:.3g} relative",
            fix="a dim that the op sums, sorts, normalizes or reorders is not a plain letter on both sides",
        )
