"""Schedules by name: what each admits, and one function that makes any of them, with its transfers.

`auto` makes every synchronous one that the stages and microbatches admit, drops those beyond the memory limit, and
gives the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autopar.cost_models.pipeline import StageTimes
from autopar.errors import MemoryLimitError, ScheduleError
from autopar.schedules.actions import Edge, Schedule, chain
from autopar.schedules.asynchronous import pipedream, pipedream_2bw, pipedream_vertical
from autopar.schedules.list_scheduling import ZeroBubbleMemory, zero_bubble
from autopar.schedules.memory import StageMemory, check_memory
from autopar.schedules.optimal import Limits, shortest
from autopar.schedules.synchronous import gpipe, interleaved, one_forward_one_backward, zb_h1, zb_h2
from autopar.schedules.timing import action_seconds, even_times, longest_rank_seconds, simulate_schedule
from autopar.schedules.transfers import UNIT, add_transfers
from autopar.schedules.v_shape import zb_v

SEARCHED_ACTIONS = 100  # beyond, `auto` does not look for an order by CP-SAT


@dataclass(frozen=True, slots=True)
class Request:
    """What a schedule is made for."""

    stages: int  # all of them, virtual ones included
    microbatches: int
    virtual_stages: int = 1  # of each rank
    update_every: int = 0  # microbatches for each update of pipedream-2bw; 0: as many as ranks
    times: StageTimes | Mapping[int, StageTimes] = UNIT  # of a rank's microbatch, or of each stage
    memory: StageMemory | Mapping[int, StageMemory] = field(default_factory=StageMemory)  # of every stage, or of each
    limits_bytes: Sequence[float] = ()  # one for each rank; none: no limit
    edges: tuple[Edge, ...] = ()  # which stage reads of which; none: each of the one before

    @property
    def ranks(self) -> int:
        """How many ranks share the stages."""
        return self.stages // self.virtual_stages

    @property
    def stage_memory(self) -> Mapping[int, StageMemory]:
        """The memory of each stage."""
        return self.memory if isinstance(self.memory, Mapping) else dict.fromkeys(range(self.stages), self.memory)


@dataclass(frozen=True, slots=True)
class Generator:
    """One named schedule: how it is made, how many stages of a rank it admits, and what it is."""

    make: Callable[[Request], Schedule]
    virtual_stages: range
    about: str


_ONE, _TWO, _SEVERAL, _ANY = range(1, 2), range(2, 3), range(2, 1 << 20), range(1, 1 << 20)

GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": Generator(lambda it: gpipe(it.ranks, it.microbatches), _ONE, "all forwards, then all backwards"),
        "1f1b": Generator(
            lambda it: one_forward_one_backward(it.ranks, it.microbatches), _ONE, "one forward, one backward in turn"
        ),
        "interleaved": Generator(
            lambda it: interleaved(it.ranks, it.microbatches, it.virtual_stages),
            _SEVERAL,
            "1F1B, several stages on a rank",
        ),
        "zb-h1": Generator(
            lambda it: zb_h1(it.ranks, it.microbatches, it.virtual_stages),
            _ANY,
            "weight gradients fill the gaps of 1F1B",
        ),
        "zb-h2": Generator(lambda it: zb_h2(it.ranks, it.microbatches), _ONE, "no bubble, twice the activations"),
        "zb-v": Generator(lambda it: zb_v(it.ranks, it.microbatches), _TWO, "no bubble, two stages on a rank as a V"),
        "auto": Generator(lambda it: _fastest(it), _ANY, "the fastest under the memory limit"),
        "pipedream": Generator(
            lambda it: pipedream(it.ranks, it.microbatches), _ONE, "asynchronous, with weight stashing"
        ),
        "pipedream-vertical": Generator(
            lambda it: pipedream_vertical(it.ranks, it.microbatches), _ONE, "the same, one version at all stages"
        ),
        "pipedream-2bw": Generator(
            lambda it: pipedream_2bw(it.ranks, it.microbatches, it.update_every or it.ranks),
            _ONE,
            "asynchronous, two versions of the weights",
        ),
    }
)


def generate(name: str, request: Request) -> Schedule:
    """The named schedule, with its transfers, for these stages and microbatches; refused where it admits them not."""
    generator = GENERATORS.get(name)
    if generator is None:
        raise ScheduleError(f"there is no schedule {name!r}", fix=f"use one of {', '.join(GENERATORS)}")
    _check_request(name, generator, request)
    return _finished(generator.make(request), request)


def _check_request(name: str, generator: Generator, request: Request) -> None:
    if request.stages < 1 or request.microbatches < 1 or request.virtual_stages < 1:
        raise ScheduleError(
            f"{name}: {request.stages} stages, {request.microbatches} microbatches, "
            f"{request.virtual_stages} virtual stages",
            fix="give at least one of each",
        )
    if request.virtual_stages not in generator.virtual_stages:
        least = generator.virtual_stages.start
        admitted = f"{least}" if len(generator.virtual_stages) == 1 else f"{least} or more"
        raise ScheduleError(
            f"{name} has {admitted} virtual stages on each rank, not {request.virtual_stages}",
            fix=f"virtual_stages={least}, or another schedule",
        )
    if request.stages % request.virtual_stages:
        raise ScheduleError(
            f"{name}: {request.stages} stages do not divide by {request.virtual_stages} virtual stages",
            fix="stages counts all of them: ranks x virtual stages",
        )
    for source, reader in request.edges:
        if not 0 <= source < reader < request.stages:
            raise ScheduleError(f"{name}: no edge from stage {source} to {reader}", fix="edges go to later stages")


def _finished(schedule: Schedule, request: Request) -> Schedule:
    """With the edges asked for, and the transfers along them."""
    linked = replace(schedule, edges=request.edges or chain(schedule.stages))
    return add_transfers(linked, request.times)


def _fastest(request: Request) -> Schedule:
    """The candidate with the shortest longest rank; of equals, the shortest step, then the first."""
    best: tuple[float, float, int] | None = None
    chosen: Schedule | None = None
    for number, candidate in enumerate(_candidates(request)):
        cost = _cost(candidate, request)
        if cost is not None and (best is None or (*cost, number) < best):
            best, chosen = (*cost, number), candidate
    if chosen is None:
        raise MemoryLimitError(
            f"auto: no schedule of {request.stages} stages and {request.microbatches} microbatches fits the memory",
            fix="use more stages, smaller microbatches, or recomputation",
        )
    improved = _searched(chosen, request, best) if best else None
    cost = _cost(improved, request) if improved else None
    return improved if improved and cost and best and cost < best[:2] else chosen


def _candidates(request: Request) -> Iterator[Schedule]:
    for name, generator in GENERATORS.items():
        if name == "auto" or name.startswith("pipedream") or request.virtual_stages not in generator.virtual_stages:
            continue
        try:
            yield replace(generator.make(request), edges=request.edges or chain(request.stages))
        except ScheduleError:
            continue  # it does not admit these microbatches
    if request.virtual_stages == 1:
        yield from _greedy(request)


def _greedy(request: Request) -> Iterator[Schedule]:
    """List scheduling for the times at hand, under the limit, in microbatches, of each rank."""
    if request.edges and request.edges != chain(request.stages):
        return  # it follows a chain
    memory = request.stage_memory
    limits = [float(request.microbatches)] * request.ranks
    for rank, limit in enumerate(request.limits_bytes):
        free = limit - memory[rank].standing_bytes
        if memory[rank].activation_bytes:
            limits[rank] = min(limits[rank], free / memory[rank].activation_bytes)
    if min(limits) < 1:
        return
    times = request.times
    by_rank = [times] * request.ranks if isinstance(times, StageTimes) else [times[i] for i in range(request.ranks)]
    yield zero_bubble(
        request.ranks,
        request.microbatches,
        by_rank,
        [ZeroBubbleMemory(limit, memory[rank].weight_share) for rank, limit in enumerate(limits)],
    )


def _cost(candidate: Schedule, request: Request) -> tuple[float, float] | None:
    """Seconds of the longest rank and of the step; None beyond the memory limit, or for an order that cannot run."""
    if any(len(actions) < 2 * request.microbatches for actions in candidate.ranks):
        return None  # list scheduling found no way
    if request.limits_bytes:
        try:
            check_memory(add_transfers(candidate, request.times), request.stage_memory, request.limits_bytes)
        except MemoryLimitError:
            return None
    simulation = simulate_schedule(candidate, request.times)
    return round(longest_rank_seconds(simulation), 12), round(simulation.step_s, 12)


def _searched(base: Schedule, request: Request, best: tuple[float, float, int]) -> Schedule | None:
    """The order that CP-SAT finds for few actions, unless no rank has a gap to close."""
    times = request.times if isinstance(request.times, Mapping) else even_times(base, request.times)
    work_s = max(sum(action_seconds(action, times) for action in actions) for actions in base.ranks)
    if 3 * request.stages * request.microbatches > SEARCHED_ACTIONS or best[0] <= work_s * (1 + 1e-9):
        return None
    return shortest(base, times, Limits(request.stage_memory, request.limits_bytes))
