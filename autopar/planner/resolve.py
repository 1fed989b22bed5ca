"""A saved or edited plan against a program: every decision found again by its key, checked against the rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.errors import PlanError
from autopar.passes.packings import PACKED
from autopar.plan import Plan
from autopar.plan_entries import PlanEntry
from autopar.planner.build import PlanningProblem
from autopar.planner.decisions import Decision
from autopar.planner.hosting import Hosting
from autopar.planner.kept_experts import is_backward
from autopar.planner.program_hash import program_hash
from autopar.planner.residency import HOSTED, Residency
from autopar.planner.saved_forms import SavedForms
from autopar.planner.saved_values import SavedValues, late_decisions
from autopar.report.figures import bytes_text, seconds_text
from autopar.sharding.layout import Layout, format_layout
from autopar.sharding.strategies import Strategy, local_bytes


def residency_of(decisions: Sequence[Decision], plan: Plan, hosting: Hosting) -> Residency:
    """What becomes of values under a plan. Raises PlanError where an op's value, or a parameter, cannot be had so."""
    kept = {entry.key for entry in plan.entries if entry.residency == "keep" and entry.kind == "parameter"}
    once = frozenset(index for index, item in enumerate(decisions) if item.kind == "parameter" and item.key in kept)
    wanted = {entry.key for entry in plan.entries if entry.residency == "recompute" and entry.kind == "op"}
    packed, hosted = _packed(decisions, plan), _hosted(decisions, plan, hosting)
    if not wanted:
        return _checked(decisions, Residency(frozenset(), once, packed, hosted))
    late = late_decisions(decisions)
    found = {index for index, decision in enumerate(decisions) if decision.key in wanted}
    for index in sorted(found):
        is_early = decisions[index].kind == "op" and not late[index]
        if not is_early and not is_backward(decisions[index]):
            raise PlanError(f"{decisions[index].key} cannot be recomputed", fix="name an op of the forward")
    return _checked(decisions, Residency(SavedValues(decisions).closed(found), once, packed, hosted))


def _packed(decisions: Sequence[Decision], plan: Plan) -> frozenset[tuple[int, str]]:
    ops = [entry for entry in plan.entries if entry.kind != "parameter"]
    words = {entry.key: entry.residency for entry in ops if entry.residency in PACKED}
    found = ((index, decision.key) for index, decision in enumerate(decisions) if decision.key in words)
    return frozenset((index, words[key]) for index, key in found)


def _hosted(decisions: Sequence[Decision], plan: Plan, hosting: Hosting) -> frozenset[int]:
    words = {entry.key: entry.residency for entry in plan.entries if entry.kind == "parameter"}
    found = set[int]()
    for index, decision in enumerate(decisions):
        word = words.get(decision.key, "") if decision.kind == "parameter" else ""
        why = hosting.why_not(index) if word == HOSTED else "it is a parameter" if word in PACKED else ""
        if why:
            raise PlanError(f"{decision.key} cannot have the residency {word!r}: {why}", fix="plan again")
        if word == HOSTED:
            found.add(index)
    return frozenset(found)


def _checked(decisions: Sequence[Decision], residency: Residency) -> Residency:
    if residency.packed:
        SavedForms(decisions).check(residency)
    return residency


def resolve(
    planning: PlanningProblem, plan: Plan, boundary: Mapping[str, Layout] = MappingProxyType({})
) -> tuple[int, ...]:
    """The choice that `plan` makes. Raises PlanError for another model or mesh, or a layout no rule allows.

    `boundary`: by key, how values leave for other pipeline stages, as those stages' plans have it.
    """
    if plan.mesh_shape != planning.mesh_shape:
        raise PlanError(
            f"the plan is for a mesh of {plan.mesh_shape}, this mesh is {planning.mesh_shape}",
            fix="plan again for this mesh",
        )
    if plan.model_hash != program_hash(planning.program) and not _has_the_same_ops(planning, plan):
        raise PlanError(
            f"the plan is of another program ({plan.model_hash}, here {program_hash(planning.program)})",
            fix="plan again: the model, the shapes of its inputs or train/eval mode differ",
        )
    entries = {entry.key: entry for entry in plan.entries}
    by_name: dict[str, int] = {}
    choice = []
    for decision in planning.decisions:
        pick = 0
        if decision.key in boundary:
            pick = _with_output(decision, boundary[decision.key])
        elif decision.kind == "gradient":
            pick = by_name.get(decision.name, 0)
        elif decision.key in entries:
            pick = _find(decision, entries[decision.key])
        elif len(decision.strategies) > 1 and decision.kind != "result":
            raise PlanError(f"the plan does not decide {decision.key}", where=decision.where, fix="plan again")
        if decision.kind == "parameter":
            by_name[decision.name] = pick
        choice.append(pick)
        _check_parameter(decision, decision.strategies[pick], entries.get(decision.key), planning.mesh_shape)
    unknown = entries.keys() - {decision.key for decision in planning.decisions}
    if unknown:
        raise PlanError(f"the plan decides {sorted(unknown)[0]}, which this program does not have", fix="plan again")
    return tuple(choice)


def _check_parameter(
    decision: Decision, strategy: Strategy, entry: PlanEntry | None, mesh_shape: Sequence[int]
) -> None:
    """Raise PlanError for a parameter of another size: the plan is of another model, whatever its inputs.

    An edited plan has no sizes; it is priced and checked like one made by hand.
    """
    if decision.kind != "parameter" or entry is None or not entry.bytes or decision.specs[0] is None:
        return
    held = local_bytes(decision.specs[0], strategy.outputs[0], mesh_shape)
    if entry.bytes != held:
        raise PlanError(
            f"{decision.key} holds {held} bytes on a rank, in the plan {entry.bytes}",
            fix="plan again: the plan is of another model",
        )


def _has_the_same_ops(planning: PlanningProblem, plan: Plan) -> bool:
    """Whether a plan was made for the same program, but for the shapes of its tensors."""
    ours = {decision.key for decision in planning.decisions if decision.kind == "op"}
    return ours == {entry.key for entry in plan.entries if entry.kind == "op"}


def what_was_recomputed(given: Plan, fresh: Plan) -> tuple[str, ...]:
    """Why the numbers of a plan that is followed are not those of its file, and both; nothing if they are."""
    reasons = ["its decisions were edited"] if not given.step_s else []
    if given.model_hash != fresh.model_hash:
        reasons.append("it was made for other shapes of inputs")
    reasons += [
        f"it was priced for {name} {before}, this is {after}"
        for name, before, after in (
            ("hardware", given.hardware, fresh.hardware),
            ("optimizer", given.optimizer, fresh.optimizer),
            ("autopar", given.version, fresh.version),
        )
        if before != after
    ]  # fmt: skip
    same = math.isclose(given.step_s, fresh.step_s, rel_tol=1e-9) and given.peak_bytes == fresh.peak_bytes
    if same and not reasons:
        return ()
    numbers = ""
    if given.step_s:
        numbers = (
            f": step {seconds_text(given.step_s)} in the plan, {seconds_text(fresh.step_s)} now; peak memory "
            f"{bytes_text(given.peak_bytes)} in the plan, {bytes_text(fresh.peak_bytes)} now"
        )
    why = ", ".join(reasons) or "its numbers are not those of these prices"
    return (f"time, memory and costs were computed again, since {why}{numbers}",)


def _with_output(decision: Decision, layout: Layout) -> int:
    for index, strategy in enumerate(decision.strategies):
        if strategy.outputs[0] == layout:
            return index
    raise PlanError(f"{decision.key} cannot leave as {format_layout(layout)}", fix="plan again")


def _find(decision: Decision, entry: PlanEntry) -> int:
    for index, strategy in enumerate(decision.strategies):
        inputs = strategy.inputs if decision.kind == "op" else ()
        if strategy.outputs == entry.outputs and inputs == entry.inputs:
            return index
    options = sorted({_describe(decision, strategy) for strategy in decision.strategies})
    shown = "; ".join(options[:12]) + ("; ..." if len(options) > 12 else "")
    wanted = " ".join(map(format_layout, (*entry.inputs, *entry.outputs)))
    raise PlanError(
        f"{decision.key} cannot be laid out as {wanted}", where=decision.where, fix=f"its rules allow: {shown}"
    )


def _describe(decision: Decision, strategy: Strategy) -> str:
    outputs = " ".join(map(format_layout, strategy.outputs))
    return f"{' '.join(map(format_layout, strategy.inputs))} -> {outputs}" if decision.kind == "op" else outputs
