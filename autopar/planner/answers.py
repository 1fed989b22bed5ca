"""Why a decision is as it is, in plain words: what sharding would cost, what binds, why a value is recomputed."""

from __future__ import annotations

import math

from torch.distributed.tensor import Shard

from autopar.folding import name_matches
from autopar.plan import Plan
from autopar.plan_questions import Alternative, Explanation
from autopar.planner.decisions import Decision
from autopar.planner.make import Planner
from autopar.report.figures import bytes_text, seconds_text, signed

TIGHT = 0.9  # of the limit: memory binds from here on


def answers(plan: Plan, found: Explanation, decision: Decision, planner: Planner) -> tuple[str, ...]:
    """The questions that people ask of such a decision, answered."""
    said = [
        _pins(decision, planner),
        _against(plan, found),
        *_recomputed(plan, found),
        _experts(plan, decision, found, planner),
        _memory(plan),
    ]
    return tuple(text for text in said if text)


def _pins(decision: Decision, planner: Planner) -> str:
    pins = [
        item for item in planner.options.constraints
        if name_matches(decision.key, item.pattern) or name_matches(decision.name, item.pattern)
    ]  # fmt: skip
    return "pinned by you: " + ", ".join(f"{item.pattern} = {item.layout}" for item in pins) if pins else ""


def _is_sharded(layout: str) -> bool:
    return "S" in layout


def _against(plan: Plan, found: Explanation) -> str:
    """Why not sharded, or why sharded: against the cheapest of the other sort."""
    chosen = next((item for item in found.alternatives if item.is_chosen), None)
    if chosen is None:
        return ""
    sharded = _is_sharded(chosen.layout)
    others = [item for item in found.alternatives if _is_sharded(item.layout) != sharded]
    question = "why sharded" if sharded else "why not sharded"
    if not others:
        if sharded:
            return f"{question}: there is no other way that its rules and its readers' allow"
        reasons = "; ".join(dict.fromkeys(item.why for item in found.ruled_out)) or "its rules allow no shards"
        return f"{question}: {reasons}"
    other = others[0]
    if other.cost <= chosen.cost:
        return (
            f"{question}: {other.layout} costs the same or less by the search's prices; the plan was chosen by its "
            "simulated step, or for its memory"
        )
    return f"{question}: at its best, {other.layout} {_difference(other, chosen)}"


def _difference(other: Alternative, chosen: Alternative) -> str:
    more_s = other.cost - chosen.cost
    parts = [f"{name} {signed(seconds_text, value)}" for name, value in
             (("ops", other.ops_s), ("moves", other.moves_s)) if abs(value) > 0.005 * more_s]  # fmt: skip
    memory = f"; memory {signed(bytes_text, other.peak_bytes)}" if other.peak_bytes else ""
    return f"takes {seconds_text(more_s)} more a step ({', '.join(parts)}{memory}), the rest chosen anew for it"


def _recomputed(plan: Plan, found: Explanation) -> list[str]:
    if found.entry.residency != "recompute" or found.entry.kind != "op":
        return []
    held = found.members * found.entry.bytes
    return [
        f"why recomputed: kept, it would hold {bytes_text(held)} from the forward to the backward, and the limit of "
        f"{bytes_text(plan.memory_limit_bytes or 0)} is spent up to {bytes_text(plan.peak_bytes)}; computing it again "
        f"takes {seconds_text(found.members * found.entry.seconds)}; "
        f'plan.what_if(pin={{"{found.entry.key}": "keep"}}) tells what keeping it would cost'
    ]


def _experts(plan: Plan, decision: Decision, found: Explanation, planner: Planner) -> str:
    """Which experts a rank has, of the weights of a layer of experts that are cut by experts."""
    axes = [axis for axis, placement in enumerate(found.entry.outputs[0]) if placement == Shard(0)]
    spec = decision.specs[0]
    if decision.kind != "parameter" or not axes or spec is None:
        return ""
    decisions = planner.planning.decisions
    readers = [item for item in decisions if any(decisions[it.decision] is decision for it in item.sources)]
    names = {item.call.name for item in readers if item.call is not None}
    if not any("experts" in name for name in names):
        return ""
    ranks, count = math.prod(plan.mesh_shape[axis] for axis in axes), spec.shape[0]
    names_of = " x ".join(plan.axis_names[axis] for axis in axes)
    return (
        f"why these experts there: {count} experts lie over {ranks} ranks of {names_of} in the order of the model, at "
        f"most {-(-count // ranks)} on a rank, and loads are taken to be even; pmodel.rebalance() places them by "
        "pmodel.expert_load, and search.place_experts(...).why(layer, expert) tells why each is where it is"
    )


def _memory(plan: Plan) -> str:
    """Whether memory binds, and when."""
    limit, timeline = plan.memory_limit_bytes, plan.details.timeline if plan.details else None
    if not limit:
        return ""
    share = f"{bytes_text(plan.peak_bytes)} of {bytes_text(limit)}"
    if plan.peak_bytes < TIGHT * limit and not plan.recompute_s:
        return f"memory does not bind: the peak is {share}"
    at = f" {timeline.peak_text}" if timeline is not None else ""
    return f"memory binds: the peak is {share}{at}"
