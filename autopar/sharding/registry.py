"""From an op call to its rules: the built-in tables, and the rules that users register."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.sharding.op_call import OpCall, op_name
from autopar.sharding.rule import Rule, parse_notation, replicate_rule
from autopar.sharding.rules import TABLES
from autopar.sharding.rules.placing import RuleSource
from autopar.sharding.rules.pointwise import is_pointwise, pointwise
from autopar.torch_compat import CustomOpDef, overload_of

BUILT_IN: MappingProxyType[str, RuleSource] = MappingProxyType(
    dict(chain.from_iterable(table.items() for table in TABLES))
)


class UserRules:
    """The rules that users add; they go before the built-in ones."""

    def __init__(self) -> None:
        self._sources: dict[str, RuleSource] = {}

    def add(self, op: str | Callable[..., Any], source: RuleSource) -> None:
        self._sources[overload_name(op)] = source

    def get(self, name: str) -> RuleSource | None:
        return self._sources.get(name)


USER_RULES = UserRules()  # what `register_rule` writes to


def register_rule(op: str | Callable[..., Any], rule: RuleSource, *, user_rules: UserRules = USER_RULES) -> None:
    """Teach autopar how an op may be sharded.

    `op`: an overload, or a name such as `"mylib::op"` or `"mylib::op.overload"`. `rule`: a line of notation, one term
    per tensor input and output (`"b h s d, b h s d -> b h s d"`), or a function from an `OpCall` to `Rule`s. Check it
    with `check_rule`.

    >>> register_rule("mylib::scale_heads", "b h s d, h -> b h s d")
    """
    if isinstance(rule, str) and rule.count("->") != 1:
        raise RuleError(f"rule {rule!r} needs one '->' between inputs and outputs")
    user_rules.add(op, rule)


def overload_name(op: str | Callable[..., Any]) -> str:
    """`mylib.op.default` of `"mylib::op"`, of `torch.ops.mylib.op`, of an overload or of what `custom_op` made."""
    if isinstance(op, str):
        namespace, _, rest = op.partition("::")
        name = f"{namespace}.{rest}" if rest else namespace
        return name if name.count(".") > 1 else f"{name}.default"
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op_name(op.default)
    return op_name(overload_of(op) if isinstance(op, CustomOpDef) else op)


def resolve_op(op: str | Callable[..., Any]) -> Callable[..., Any]:
    """The overload that a name, a packet of overloads or what `torch.library.custom_op` made stands for."""
    if not isinstance(op, str):
        if isinstance(op, CustomOpDef):
            return overload_of(op)
        return op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    namespace, name, overload = overload_name(op).split(".")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise RuleError(f"there is no op {op!r}", fix="import the module that defines it first") from None
    return found


def rules_of(call: OpCall, user_rules: UserRules = USER_RULES) -> tuple[Rule, ...]:
    """Every rule of a call, without repeats; the all-replicated one comes first, and alone where nothing is known."""
    source = source_of(call, user_rules)
    found = () if source is None or _is_empty(call) else apply_source(source, call)
    return tuple(dict.fromkeys((replicate_rule(call), *found)))


def has_rule(call: OpCall, user_rules: UserRules = USER_RULES) -> bool:
    """Whether somebody wrote a rule for the op; without one it is replicated, or its rule is discovered."""
    return source_of(call, user_rules) is not None


def source_of(call: OpCall, user_rules: UserRules = USER_RULES) -> RuleSource | None:
    """Where a call's rules come from: the user, a built-in table, or the op's tag as elementwise."""
    known = user_rules.get(call.name) or BUILT_IN.get(call.name)
    if known is not None:
        return known
    return pointwise if is_pointwise(call) else None


def apply_source(source: RuleSource, call: OpCall) -> tuple[Rule, ...]:
    """The rules of a source, checked against the number of the call's tensors."""
    rules: Iterable[Rule] = parse_notation(source, call) if isinstance(source, str) else source(call)
    checked = tuple(rules)
    for rule in checked:
        if len(rule.inputs) != len(call.inputs) or len(rule.outputs) != len(call.outputs):
            raise RuleError(
                f"a rule of {call.name} places {len(rule.inputs)} inputs and {len(rule.outputs)} outputs, "
                f"the call has {len(call.inputs)} and {len(call.outputs)}"
            )
    return checked


def _is_empty(call: OpCall) -> bool:
    """Tensors without elements cannot be cut; empty side results of an op in eval mode, read or made, do not count."""
    read = [spec for index, spec in enumerate(call.inputs) if index == 0 or spec.shape != (0,)]
    return any(spec.numel == 0 for spec in (*read, *filter(None, call.outputs[:1])))
