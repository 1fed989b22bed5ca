"""Constraints: pins of parameters, ops and inputs by name pattern, checked against the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.errors import ConstraintError, PlanFormatError
from autopar.folding import name_matches
from autopar.passes.packings import PACKED
from autopar.planner.build import PlanningProblem
from autopar.planner.decisions import Decision
from autopar.planner.hosting import Hosting
from autopar.planner.kept_experts import is_backward
from autopar.planner.residency import HOSTED
from autopar.planner.saved_forms import SavedForms
from autopar.planner.saved_values import late_decisions
from autopar.sharding.layout import Layout, format_layout, parse_layout
from autopar.sharding.rules.experts import ALL_TO_ALL, INSIDE
from autopar.sharding.strategies import Strategy

RESIDENCIES = ("keep", "recompute", *PACKED)


@dataclass(frozen=True, slots=True)
class _Way:
    """What a word for a layer of experts demands along its axis: the form of the rule, and the layout of the result."""

    form: str
    layout: str
    does: str


_WAYS = {
    "A": _Way(ALL_TO_ALL, "S0", "send its tokens by all-to-all"),
    "I": _Way(INSIDE, "P", "be cut inside of every expert"),
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Everything whose name matches `pattern` (shell style) has `layout`: a parameter's, an input's, an op's output.

    In place of a layout, a residency says how the backward gets the values of ops of the forward: `keep`, `recompute`,
    `offload`, `compress` or, with loss, `compress-bf16`, `compress-fp8` or `compress-int8`. Of a layer
    of experts, `A` in place of `S0` says that tokens go to their experts by all-to-all along that axis, and `I` in
    place of `P` that every expert is cut inside, along its hidden dim.

    >>> Constraint("*.mlp.*.weight", "R,S0").layout
    'R,S0'
    """

    pattern: str
    layout: str

    @property
    def is_residency(self) -> bool:
        return self.layout in RESIDENCIES

    @property
    def ways(self) -> Mapping[str, tuple[int, ...]]:
        """By word, the axes along which a layer of experts is to go that way."""
        words = [word.strip() for word in self.layout.split(",")]
        axes = {way: tuple(axis for axis, word in enumerate(words) if word == way) for way in _WAYS}
        return {way: found for way, found in axes.items() if found}


def as_constraints(
    constraints: Mapping[str, str] | Sequence[Constraint | tuple[str, str]],
) -> tuple[Constraint, ...]:
    """Constraints from a dict `{pattern: layout}`, from pairs, or as they are."""
    items = constraints.items() if isinstance(constraints, Mapping) else constraints
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ConstraintError(f"constraints are a {type(constraints).__name__}", fix=_FORM)
    return tuple(_as_constraint(item) for item in items)


_FORM = 'write {name pattern: layout}, as {"*.wte.weight": "R,S0"}'


def _as_constraint(item: Any) -> Constraint:
    if isinstance(item, Constraint):
        item = item.pattern, item.layout
    if not isinstance(item, tuple) or len(item) != 2 or not all(isinstance(part, str) for part in item):
        raise ConstraintError(f"{item!r} is no constraint", fix=_FORM)
    return Constraint(*item)


def apply_constraints(
    planning: PlanningProblem,
    constraints: tuple[Constraint, ...],
    parameter_layouts: Mapping[str, Layout] | None,
    boundary_layouts: Mapping[str, Layout] = MappingProxyType({}),
) -> PlanningProblem:
    """The problem with only the pinned strategies allowed. Raises ConstraintError for a pin that nothing can meet.

    `boundary_layouts`: by the keys of decisions, of what other pipeline stages send or expect.
    """
    allowed: dict[int, npt.NDArray[np.bool_]] = {}
    for constraint in constraints:
        if constraint.is_residency:
            continue
        layout = _layout(constraint, len(planning.mesh_shape))
        matched = _matching(planning, constraint.pattern)
        for index in matched:
            mask = _mask(planning.decisions[index], layout, constraint.ways)
            allowed[index] = allowed.get(index, np.ones(len(mask), dtype=bool)) & mask
            if not allowed[index].any():
                raise ConstraintError(
                    f"two constraints disagree about {planning.decisions[index].key}", fix="remove one of them"
                )
    for index, decision in enumerate(planning.decisions):
        if decision.kind == "parameter" and parameter_layouts and decision.name in parameter_layouts:
            allowed[index] = _mask(decision, parameter_layouts[decision.name])
        if decision.key in boundary_layouts:
            allowed[index] = _mask(decision, boundary_layouts[decision.key])
    return pinned(planning, allowed) if allowed else planning


def pinned(planning: PlanningProblem, allowed: Mapping[int, npt.NDArray[np.bool_]]) -> PlanningProblem:
    """The problem with only some strategies allowed of the decisions named."""
    problem = replace(planning.restricted(allowed), groups=_regrouped(planning, allowed))
    return replace(planning, problem=problem)


def pinned_decisions(planning: PlanningProblem, constraints: tuple[Constraint, ...]) -> tuple[int, ...]:
    """The decisions whose layouts constraints name."""
    layouts = [item for item in constraints if not item.is_residency]
    return tuple(sorted({index for item in layouts for index in _matching(planning, item.pattern)}))


def residency_pins(planning: PlanningProblem, constraints: tuple[Constraint, ...], hosting: Hosting) -> dict[int, str]:
    """The residencies of pinned ops of the forward and parameters. Raises ConstraintError where none matches, or where
    none of those that match can be packed so, or lie on the host: the others are left as they are."""
    pins: dict[int, str] = {}
    late = late_decisions(planning.decisions) if any(item.is_residency for item in constraints) else []
    forms = SavedForms(planning.decisions)
    for constraint in constraints:
        if not constraint.is_residency:
            continue
        kinds = {index: planning.decisions[index].kind for index in _matching(planning, constraint.pattern)}
        matched = [
            index
            for index, kind in kinds.items()
            if kind == "parameter" or (kind == "op" and not late[index]) or is_backward(planning.decisions[index])
        ]
        why = "no op of the forward and no parameter"
        if constraint.layout in PACKED:
            hosts = constraint.layout == HOSTED
            reasons = {
                index: hosting.why_not(index)
                if hosts and kind == "parameter"
                else forms.why_not(index, constraint.layout)
                for index, kind in kinds.items()
            }
            matched = [index for index, reason in reasons.items() if not reason]
            why = reasons[min(reasons)] if reasons else why
        if not matched:
            raise ConstraintError(
                f"the constraint {constraint.pattern!r}: nothing to {constraint.layout}: {why}",
                fix="use `module/op#0` as the plan prints them",
            )
        for index in matched:
            if pins.setdefault(index, constraint.layout) != constraint.layout:
                raise ConstraintError(
                    f"two constraints disagree about {planning.decisions[index].key}", fix="remove one of them"
                )
    return pins


def _layout(constraint: Constraint, axes: int) -> Layout:
    try:
        words = (word.strip() for word in constraint.layout.split(","))
        words = (_WAYS[word].layout if word in _WAYS else word for word in words)
        return parse_layout(",".join(words), axes)
    except PlanFormatError as error:
        raise ConstraintError(f"the constraint {constraint.pattern!r}: {error.what}", fix=error.fix or _FORM) from error


def _matching(planning: PlanningProblem, pattern: str) -> list[int]:
    found = [
        index
        for index, decision in enumerate(planning.decisions)
        if decision.kind in ("parameter", "input", "op")
        and (name_matches(decision.key, pattern) or name_matches(decision.name, pattern))
    ]
    if not found:
        raise ConstraintError(
            f"the constraint {pattern!r} matches no parameter, input or op",
            fix="use the names of model.named_parameters() (the first, of a tied weight), `input:0`, or `module/op#0` "
            "as the plan prints them",
        )
    return found


def _mask(
    decision: Decision, layout: Layout, ways: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> npt.NDArray[np.bool_]:
    """Which strategies give the layout, and go the ways of layers of experts along the axes of each."""
    mask = np.array([_output(strategy) == layout for strategy in decision.strategies])
    for word, axes in ways.items():
        if not mask.any():
            break
        mask &= [set(axes) <= set(strategy.axes_with(_WAYS[word].form)) for strategy in decision.strategies]
        if not mask.any():
            raise ConstraintError(
                f"{decision.key} cannot {_WAYS[word].does} along axes {list(axes)} of the mesh",
                where=decision.where,
                fix="pin a layer of experts whose tokens and experts can be cut along these axes",
            )
    if not mask.any():
        known = sorted({format_layout(_output(strategy)) for strategy in decision.strategies})
        raise ConstraintError(
            f"{decision.key} cannot have the layout {format_layout(layout)}",
            where=decision.where,
            fix=f"its rules and its shape {_shape(decision)} on this mesh allow: {'  '.join(known)}",
        )
    return mask


def _output(strategy: Strategy) -> Layout:
    return strategy.outputs[0]


def _shape(decision: Decision) -> tuple[int, ...]:
    return decision.specs[0].shape if decision.specs[0] else ()


def _regrouped(planning: PlanningProblem, allowed: Mapping[int, npt.NDArray[np.bool_]]) -> tuple[int, ...]:
    """Pinned members of a kind, and the gradients of pinned parameters, leave their class: a pin binds no sibling."""
    groups = planning.problem.groups
    assert groups is not None
    fresh = count(max(groups) + 1)
    ids: dict[tuple[int, bytes], int] = {}
    masks = {index: mask.tobytes() for index, mask in allowed.items()}
    pinned = {planning.decisions[index].name: masks[index] for index in allowed}
    for index, decision in enumerate(planning.decisions):
        if decision.kind == "gradient" and decision.name in pinned:
            masks[index] = pinned[decision.name]
    return tuple(
        ids.setdefault((group, masks[index]), next(fresh)) if index in masks else group
        for index, group in enumerate(groups)
    )
