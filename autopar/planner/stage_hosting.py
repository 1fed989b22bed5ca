"""Parameters of pipeline stages on the host: which may lie there, and what each rank's host holds.

Every action that reads such a parameter copies it to the device and lets go of the copy at its end. Its gradient goes
to the host with each microbatch and is added up there; that of a parameter that stages share is added up on the device,
summed over the stages, and goes to the host at the end of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

from autopar.capture.program import InputKind, Program
from autopar.errors import PlanError
from autopar.folding import name_matches
from autopar.planner.make import Options, Planned
from autopar.planner.measure import hosted_state
from autopar.planner.residency import HOSTED, Residency
from autopar.schedules.actions import Schedule
from autopar.sharding.strategies import local_bytes
from autopar.stages.staged import Staged


def kept_on_devices(staged: Staged) -> dict[str, str]:
    """By name, why a parameter of a pipeline does not lie on the host; those that may are left out."""
    pieces = staged.microbatches
    if not pieces.independent or pieces.accumulated:
        return {}
    names = (item.name for item in staged.program.inputs if item.kind is InputKind.PARAMETER)
    return dict.fromkeys(names, "an asynchronous schedule updates it while microbatches are under way")


def hosted_names(planned: Planned) -> frozenset[str]:
    """The parameters of a stage that lie on the host."""
    hosted = planned.assignment.hosted
    return frozenset(item.name for item in planned.planner.program.inputs if item.node in hosted)


def refuse_two_places(staged: Staged, planned: Sequence[Planned]) -> None:
    """Raise PlanError where a parameter that stages share lies on the host for some of them alone."""
    for name, stages in staged.first.shared.items():
        programs = {stage: staged.stages[stage].program for stage in stages}
        holders = [stage for stage, own in programs.items() if name in own.named_inputs(InputKind.PARAMETER)]
        there = [stage for stage in holders if name in hosted_names(planned[stage])]
        if there and len(there) < len(holders):
            raise PlanError(
                f"{name!r} lies on the host in stage {there[0]}, and not in all of the stages that share it",
                fix="give it the residency 'offload' in all of them, or in none",
            )


class Hosted(Enum):
    """The parameters that a search counts on the host: those that are pinned there; or all that may be, of which the
    plans of the stages put as many there as they need; or all of them, needed or not."""

    PINNED = auto()
    ANY = auto()
    ALL = auto()


def hosted_parameters(program: Program, options: Options, which: Hosted) -> frozenset[str]:
    """The names of the parameters that lie on the host, or may; some of them stages may turn out to share."""
    pins = [item for item in options.constraints if item.layout in ("keep", HOSTED)]
    found = set[str]()
    for name, node in program.named_inputs(InputKind.PARAMETER).items():
        words = {item.layout for item in pins if name_matches(name, item.pattern)}
        if node.meta["val"].dim() and (HOSTED in words or (which is not Hosted.PINNED and not words)):
            found.add(name)
    return frozenset(found)


def rank_host_memory(schedule: Schedule, planned: Sequence[Planned], held: Sequence[int]) -> dict[str, int]:
    """What the rank whose host holds most has there, in bytes by kind: an upper bound.

    `held`: microbatches in flight of each stage, all of whose offloaded values are there at once. Where there are
    several microbatches, the gradients of one are there beside the sums.
    """
    ranks = range(len(schedule.ranks))
    trained = frozenset(output.name for item in planned for output in item.planner.program.gradients)
    stages = [[(planned[it], held[it]) for it in schedule.stages_of(rank)] for rank in ranks]
    found = [_host_memory(own, trained, is_one=schedule.microbatches == 1) for own in stages]
    return {kind: bytes_ for kind, bytes_ in max(found, key=lambda it: sum(it.values())).items() if bytes_}


def _host_memory(stages: Sequence[tuple[Planned, int]], trained: frozenset[str], *, is_one: bool) -> Mapping[str, int]:
    """Of one rank, where its host holds most: while microbatches run, or when all sums of gradients are there.

    `is_one`: whether there is one microbatch alone.
    """
    found, beside, saved = Counter[str](), 0, 0
    shared: dict[str, tuple[int, int]] = {}  # of all stages of the rank there is one
    for item, in_flight in stages:
        timeline = item.best.measured.timeline
        most: dict[str, int] = {kind: max(values) for kind, values in timeline.host_by_kind.items()}
        found.update({**item.plan.host_memory, **most, "saved": 0})
        saved += max(1, in_flight) * most.get("saved", 0)
        beside = max(beside, 0 if is_one else most.get("gradient", 0))
        for index, bytes_, state in _staying(item):
            found.subtract({"parameter": bytes_, "optimizer_state": _counted_state(item, index)})
            shared[item.planning.decisions[index].name] = bytes_, state
    sent = sum(bytes_ for name, (bytes_, _) in shared.items() if name in trained)
    state = sum(state for name, (_, state) in shared.items() if name in trained)
    found.update({"parameter": sum(bytes_ for bytes_, _ in shared.values()), "optimizer_state": state})
    found.update({"gradient": sent} if sent > beside + saved else {"gradient": beside, "saved": saved})
    return found


def _staying(planned: Planned) -> Iterator[tuple[int, int, int]]:
    """The decisions about parameters on the host that other stages have, too: with their bytes, and those of the
    optimizer's state, which a stage that gives no gradient of one does not count."""
    optimizer, shape = planned.planner.options.optimizer, planned.planning.mesh_shape
    for index, (decision, pick) in enumerate(zip(planned.planning.decisions, planned.choice, strict=True)):
        if decision.kind == "parameter" and decision.node in planned.assignment.staying:
            spec, layout = decision.specs[0], decision.strategies[pick].outputs[0]
            assert spec is not None
            yield index, local_bytes(spec, layout, shape), optimizer.all_bytes(spec, layout, shape)


def _counted_state(planned: Planned, index: int) -> int:
    return hosted_state(planned.planning, planned.choice, Residency(hosted=frozenset({index})))
