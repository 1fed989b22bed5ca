"""What a plan is asked after it was made: what else there was, and what the plan would be under other circumstances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.capture.program import Program
from autopar.errors import PlanError
from autopar.folding import name_matches
from autopar.mesh import Mesh, as_mesh
from autopar.plan import Plan
from autopar.plan_entries import PlanEntry
from autopar.plan_questions import Change, Explanation
from autopar.planner.alternatives import Alternatives
from autopar.planner.answers import answers
from autopar.planner.bounds import without_limit
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import Constraint, as_constraints, pinned_decisions
from autopar.planner.decisions import Decision
from autopar.planner.formulas import Formulas
from autopar.planner.make import Planned, Planner
from autopar.planner.measure import output_bytes
from autopar.planner.pipeline_plan import PlannedPipeline
from autopar.planner.residency import Residency
from autopar.search import FORBIDDEN, Problem, evaluate, peak_usage

MAX_NAMES = 4  # folded names whose alternatives are solved for in one explanation
ROOM = 0.8  # of the limit: what is foreseen to need more is emitted and measured
AS_BEFORE = "as before"
FORESEEN = "time and memory are foreseen from those of the plan that was asked; plan.emitted() measures them"

Recapture = Callable[[int], Program]
"""The program for another batch."""


def with_questions(planned: Planned, recapture: Recapture) -> Plan:
    """The plan with what it needs to answer questions."""
    return replace(planned.plan, planning=Session(planned.planner, planned.best, recapture))


def with_stage_questions(planned: PlannedPipeline) -> Plan:
    """The plan of a pipeline, whose stages' plans answer for themselves."""
    stages = zip(planned.plan.stages, planned.stages, strict=True)
    answering = tuple(replace(stage, plan=with_questions(own, _no_other_batch)) for stage, own in stages)
    return replace(planned.plan, stages=answering)


def _no_other_batch(size: int) -> Program:
    raise PlanError(
        f"a stage cannot be planned for a batch of {size} alone", fix="plan again with example_inputs of that size"
    )


@dataclass(frozen=True)
class Session:
    """Where one plan comes from: the planner, its decisions and problem, and the choice that was made."""

    planner: Planner
    best: Candidate
    recapture: Recapture
    formulas: Formulas = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "formulas", Formulas(self.planner.prices, self.planner.options.optimizer))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copied or sent plan is without its model."""
        return type(None), ()

    @cached_property
    def recomputation(self) -> Problem:
        """What becomes of values under the plan's layouts, as a search problem without a limit."""
        return self.planner.recomputation(self.best)

    @cached_property
    def alternatives(self) -> Alternatives:
        """Solves for what else there was; memory aside."""
        return Alternatives(self.planner, self.best.choice)

    def explanations(self, plan: Plan, pattern: str, names: dict[str, list[str]]) -> tuple[Explanation, ...]:
        """One for each folded name, then for each parameter and input that can lie in one way only."""
        entries = {entry.key: entry for entry in plan.entries}
        forced = [
            _forced_entry(decision, self.planner.mesh.shape)
            for decision in self.planner.planning.decisions
            if decision.kind in ("parameter", "input") and decision.key not in entries
            and name_matches(decision.key, pattern)
        ]  # fmt: skip
        entries |= {entry.key: entry for entry in forced}
        names = names | {entry.key: [entry.key] for entry in forced}
        solve = len(names) <= MAX_NAMES
        return tuple(self._explained(plan, name, entries[keys[0]], keys, solve=solve) for name, keys in names.items())

    def _explained(self, plan: Plan, name: str, entry: PlanEntry, keys: list[str], *, solve: bool) -> Explanation:
        place = {decision.key: index for index, decision in enumerate(self.planner.planning.decisions)}
        members = [place[key] for key in keys]
        decision = self.planner.planning.decisions[members[0]]
        own, memory = self.formulas.of(decision, self.best.choice[members[0]])
        found = Explanation(
            name,
            entry,
            len(keys),
            formulas=tuple(price.explain() for price in own),
            move_formulas=tuple(price.explain() for move in entry.moves for price in self.formulas.of_move(move)),
            memory_formulas=tuple(price.explain() for price in memory),
        )
        if not solve:
            missing = f"what else there was is solved for if at most {MAX_NAMES} names match: name fewer"
            return replace(found, missing=missing)
        known, unsolved = self.alternatives.of(members)
        found = replace(found, alternatives=known, unsolved=unsolved, ruled_out=self.alternatives.ruled_out(members[0]))
        return replace(found, answers=answers(plan, found, decision, self.planner))

    def what_if(self, plan: Plan, change: Change) -> Plan:
        """The plan under a change: foreseen where only layouts are pinned and memory is ample, else emitted."""
        pins = as_constraints(change.pin)
        if change.mesh is not None or change.hardware is not None or change.batch is not None:
            return self._elsewhere(change, pins)
        planner = self.planner.again(pins, change.memory_limit_bytes)
        changed = pinned_decisions(self.planner.planning, pins)
        if planner.options.search != "ilp":
            return with_questions(planner.run(), self.recapture)
        if change.memory_limit_bytes is None and changed and self._is_roomy(plan, pins):
            foreseen = self._foreseen(plan, planner, planner.solved_again(self.best.choice, changed))
            if foreseen.peak_bytes <= ROOM * planner.limit:
                return foreseen
            planner.candidates = []
        return with_questions(planner.run_from(self.best.choice, changed), self.recapture)

    def _is_roomy(self, plan: Plan, pins: tuple[Constraint, ...]) -> bool:
        """Whether nothing is recomputed, or asked to be."""
        pinned = any(pin.is_residency for pin in (*pins, *self.planner.options.constraints))
        usual = self.best.residency == Residency(gathered_once=self.best.residency.gathered_once)
        return not pinned and usual and plan.peak_bytes <= self.planner.limit

    def _foreseen(self, plan: Plan, planner: Planner, fresh: Candidate) -> Plan:
        """The plan of a choice that is not emitted: it differs from the known plan's as the search says."""
        before, after = (peak_usage(planner.planning.problem, item.choice) for item in (self.best, fresh))
        step_s = plan.step_s + fresh.foreseen_s - self.best.foreseen_s
        peak_bytes = int(max(plan.peak_bytes + after - before, plan.peak_bytes * after / max(1.0, before)))
        session = Session(planner, fresh, self.recapture)
        return replace(planner.foreseen(fresh, step_s, peak_bytes, FORESEEN), planning=session)

    def emitted(self, plan: Plan) -> Plan:
        """The same decisions, emitted and measured."""
        fresh = self.planner.again((), None)
        best = replace(self.best)
        if best.peak_bytes > fresh.limit:
            return with_questions(fresh.run_from(self.best.choice, ()), self.recapture)
        fresh.candidates = [best]
        return with_questions(fresh.planned(best), self.recapture)

    def _elsewhere(self, change: Change, pins: tuple[Constraint, ...]) -> Plan:
        """Another mesh, hardware or batch: new decisions, but the choice of before is among the candidates."""
        old = self.planner
        asked = old.mesh if change.mesh is None else change.mesh
        profile = None if isinstance(asked, Mesh) else old.mesh.profile
        mesh = as_mesh(asked, change.hardware or profile)
        options = replace(old.options, constraints=(*old.options.constraints, *pins))
        if change.memory_limit_bytes is not None:
            options = replace(options, memory_limit_bytes=change.memory_limit_bytes)
        program = old.program if change.batch is None else self.recapture(_batch(change.batch))
        planner = Planner(program, mesh, options)
        choice = carried_over(old, self.best, planner)
        if choice is not None and options.search == "ilp":
            planner.add(AS_BEFORE, choice, planner.as_solution(AS_BEFORE, choice))
        return with_questions(planner.run(), self.recapture)


def _forced_entry(decision: Decision, mesh_shape: Sequence[int]) -> PlanEntry:
    """Of a decision with one strategy, which a plan does not list."""
    strategy, seconds = decision.strategies[0], float(decision.seconds[0])
    held, module, where = output_bytes(decision, strategy, mesh_shape), decision.module, decision.where
    return PlanEntry(decision.key, decision.kind, (), strategy.outputs, module, where, seconds, held)


def _batch(size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise PlanError(f"batch={size!r} is no size", fix="give the global batch, as 64")
    return size


def carried_over(old: Planner, best: Candidate, new: Planner) -> tuple[int, ...] | None:
    """The same layouts on another mesh or batch, as a choice; None where some are not there, or do not go together."""
    if best.residency != Residency(gathered_once=best.residency.gathered_once):
        return None
    known = {decision.key: (decision, pick) for decision, pick in zip(old.planning.decisions, best.choice, strict=True)}
    choice = []
    for decision in new.planning.decisions:
        if decision.key not in known:
            return None
        before, pick = known[decision.key]
        wanted = before.strategies[pick]
        same = [index for index, strategy in enumerate(decision.strategies) if strategy.rules == wanted.rules]
        if not same:
            return None
        choice.append(same[0])
    return tuple(choice) if evaluate(without_limit(new.planning.problem), choice) < FORBIDDEN else None
