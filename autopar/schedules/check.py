"""Proves a schedule before it runs: whole, free of deadlock, with matching weight versions, within memory.

`check_schedule` takes in a schedule with its transfers and raises at the first thing that is wrong.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from autopar.errors import ScheduleError
from autopar.schedules.actions import COMPUTE, NONE, RECVS, SENDS, TRANSFERS, Action, Schedule
from autopar.schedules.dependencies import Dependencies, Key, compute_actions, result_of
from autopar.schedules.memory import StageMemory, check_memory
from autopar.schedules.timing import remote_readers
from autopar.schedules.transfers import transfer


def check_schedule(
    schedule: Schedule,
    *,
    memory: StageMemory | Mapping[int, StageMemory] | None = None,
    limits_bytes: Sequence[float] = (),
) -> None:
    """Raise unless the schedule is right; with `memory` and a limit for each rank, also if a limit is exceeded."""
    check_whole(schedule)
    check_transfers(schedule)
    check_progress(schedule)
    check_versions(schedule)
    if memory is not None:
        check_memory(schedule, memory, limits_bytes)


def check_whole(schedule: Schedule) -> None:
    """Every microbatch goes forward and backward through every stage once, on the rank where the stage lives."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            inside = 0 <= action.stage < schedule.stages and NONE <= action.microbatch < schedule.microbatches
            if not inside or schedule.rank_of(action.stage) != rank:
                raise _wrong(schedule, rank, action, "is not of a stage of this rank and a microbatch of the batch")
            if action.kind in COMPUTE:
                counts[action.kind, action.stage, action.microbatch] += 1
    for stage in range(schedule.stages):
        for item in range(schedule.microbatches):
            ran = tuple(counts[kind, stage, item] for kind in COMPUTE)
            if ran not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                said = ", ".join(f"{count} {kind}" for kind, count in zip(COMPUTE, ran, strict=True))
                raise ScheduleError(
                    f"{schedule.name}: stage {stage} runs microbatch {item} by {said}",
                    where=f"rank {schedule.rank_of(stage)}",
                    fix="one forward, and one backward or one of each half of it",
                )


def check_transfers(schedule: Schedule) -> None:
    """Every result that another rank reads is sent once and received once, in one order between any two ranks."""
    links, wanted = Dependencies(schedule.edges), Counter[Action]()
    for actions in schedule.ranks:
        for action in compute_actions(actions):
            for stage in remote_readers(schedule, links, action):
                wanted.update(transfer(action, stage))
    found = Counter(action for actions in schedule.ranks for action in actions if action.kind in TRANSFERS)
    if found != wanted:
        missing, extra = wanted - found, found - wanted
        said = f"lacks {next(iter(missing))}" if missing else f"has {next(iter(extra))} that nobody needs, or twice"
        raise ScheduleError(f"{schedule.name}: {said}", fix="make the transfers by `add_transfers`")
    sent, received = _by_pair(schedule, SENDS), _by_pair(schedule, RECVS)
    for pair, sends in sent.items():
        for nth, (send, recv) in enumerate(zip(sends, received[pair], strict=True)):
            if send != _other_end(recv):
                raise ScheduleError(
                    f"{schedule.name}: transfer {nth} from rank {pair[0]} to rank {pair[1]} is sent as {send}, "
                    f"but received as {recv}",
                    fix="send and receive in one order",
                )


def check_progress(schedule: Schedule) -> None:
    """Run all lists, each transfer waiting where it stands until its other end has come: every rank reaches its end.

    So no laxer way of waiting deadlocks either. Every action finds its inputs computed, or received.
    """
    run = _Run(schedule)
    while run.advance():
        pass
    stuck = [rank for rank, place in enumerate(run.places) if place < len(schedule.ranks[rank])]
    if stuck:
        waits = "; ".join(f"rank {rank} at {schedule.ranks[rank][run.places[rank]]}" for rank in stuck[:4])
        raise ScheduleError(
            f"{schedule.name}: deadlock: {len(stuck)} ranks wait for each other",
            where=waits,
            fix="change the order of sends and recvs, or make them by `add_transfers`",
        )


def check_versions(schedule: Schedule) -> None:
    """Each microbatch meets one version of a stage's weights in its forward and its backward, which is there then."""
    for rank, actions in enumerate(schedule.ranks):
        _Weights(schedule, rank).run(actions)


class _Run:
    """How far each rank has come, and which results it holds."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.links = schedule, Dependencies(schedule.edges)
        self.places = [0] * len(schedule.ranks)
        self.held: list[set[tuple[Key, int]]] = [
            set() for _ in schedule.ranks
        ]  # results, and the stage that reads them

    def advance(self) -> bool:
        """Let every rank go as far as it can; whether any moved."""
        moved = False
        for rank in range(len(self.places)):
            while (action := self._next(rank)) is not None and self._step(rank, action):
                moved = True
        return moved

    def _next(self, rank: int) -> Action | None:
        actions = self.schedule.ranks[rank]
        return actions[self.places[rank]] if self.places[rank] < len(actions) else None

    def _step(self, rank: int, action: Action) -> bool:
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        self.places[rank] += 1
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        for key in self.links.needs(action):
            if (key, action.stage) not in self.held[rank] and (key, key[1]) not in self.held[rank]:
                raise _wrong(
                    self.schedule,
                    rank,
                    action,
                    f"runs before it has the {key[0]} of stage {key[1]}, microbatch {key[2]}",
                )
        self.held[rank].add((result_of(action), action.stage))
        self.places[rank] += 1
        return True

    def _transfer(self, rank: int, action: Action) -> bool:
        other = self.schedule.rank_of(action.peer)
        if self._next(other) != _other_end(action):
            return False
        sender, receiver, send = (rank, other, action) if action.kind in SENDS else (other, rank, _other_end(action))
        key = ("forward" if send.kind == "send_activation" else "gradient", send.stage, send.microbatch)
        if (key, send.stage) not in self.held[sender]:
            raise _wrong(self.schedule, sender, send, "sends what is not computed yet")
        self.held[receiver].add((key, send.peer))
        self.places[rank] += 1
        self.places[other] += 1
        return True


class _Weights:
    """The versions of each stage's weights that a rank holds."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.newest: dict[int, int] = defaultdict(int)
        self.stashed: dict[int, set[int]] = defaultdict(set)
        self.restored: dict[int, int] = {}
        self.met: dict[tuple[int, int], int] = {}  # by stage and microbatch: the version of its forward
        self.gathered: dict[int, int] = defaultdict(int)  # backwards since the last update

    def run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.kind in COMPUTE:
                self._compute(action)
            elif action.kind not in TRANSFERS:
                self._weights(action)
        for stage, versions in self.stashed.items():
            if versions:
                raise ScheduleError(
                    f"{self.schedule.name}: stage {stage} never frees its stashed versions {sorted(versions)}",
                    where=f"rank {self.rank}",
                    fix="end each version's use with a drop_weights",
                )
        for stage, count in self.gathered.items():
            if count and not self.schedule.synchronous:
                raise ScheduleError(
                    f"{self.schedule.name}: stage {stage} ends with {count} gradients that no update applies",
                    where=f"rank {self.rank}",
                    fix="end with an optimizer_step",
                )

    def _compute(self, action: Action) -> None:
        newest = self.newest[action.stage]
        version = self.restored.pop(action.stage, newest)
        if action.version != (NONE if self.schedule.synchronous else version):
            raise self._wrong(action, f"would run with version {version}")
        first = self.met.setdefault((action.stage, action.microbatch), version)
        if version != first:
            raise self._wrong(action, f"runs with version {version}, but its forward ran with version {first}")
        if action.kind in ("backward", "backward_weight"):
            self.gathered[action.stage] += 1

    def _weights(self, action: Action) -> None:
        stage, version, newest = action.stage, action.version, self.newest[action.stage]
        if self.schedule.synchronous:
            raise self._wrong(action, "is in a synchronous schedule, whose weights stay as they are")
        if action.kind == "optimizer_step":
            if version != newest + 1 or self.gathered[stage] != self.schedule.update_every:
                raise self._wrong(action, f"follows {self.gathered[stage]} gradients and version {newest}")
            self.newest[stage], self.gathered[stage] = version, 0
        elif action.kind == "stash_weights":
            if version != newest or version in self.stashed[stage]:
                raise self._wrong(
                    action, f"the newest version is {newest}, and {sorted(self.stashed[stage])} are stashed"
                )
            self.stashed[stage].add(version)
        elif version not in self.stashed[stage]:
            raise self._wrong(action, f"only versions {sorted(self.stashed[stage])} are stashed")
        elif action.kind == "drop_weights":
            self.stashed[stage].remove(version)
        else:
            self.restored[stage] = version

    def _wrong(self, action: Action, what: str) -> ScheduleError:
        return _wrong(self.schedule, self.rank, action, what)


def _by_pair(schedule: Schedule, kinds: Sequence[str]) -> dict[tuple[int, int], list[Action]]:
    """By sending and receiving rank: the transfers of these kinds in the order of one of the two."""
    pairs: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind in kinds:
                other = schedule.rank_of(action.peer)
                pairs[(rank, other) if kinds is SENDS else (other, rank)].append(action)
    return pairs


def _other_end(action: Action) -> Action:
    """The send of a recv, the recv of a send."""
    ends = dict(zip(SENDS + RECVS, RECVS + SENDS, strict=True))
    kind = next(end for name, end in ends.items() if name == action.kind)
    return Action(kind, action.peer, action.microbatch, peer=action.stage)


def _wrong(schedule: Schedule, rank: int, action: Action, what: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {action}: {what}", where=f"rank {rank}", fix="generate the schedule anew")
