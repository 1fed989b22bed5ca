"""What a plan can be asked that needs the model: what else could have been, and at what price."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from autopar.errors import MemoryLimitError, UnsupportedOptionError

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.plan_entries import PlanEntry
    from autopar.search import Problem


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout that a decision could have, everything else chosen anew for it.

    `cost`: the search's objective, seconds, proven; `more_s`: above the best there is. The rest is of the step with it
    against the step with the layout that the plan has: seconds of ops, of moves, bytes at the peak as the search
    foresees it, and other decisions (repeated layers counted once) that change.
    """

    layout: str
    cost: float
    more_s: float
    is_chosen: bool = False
    ops_s: float = 0.0
    moves_s: float = 0.0
    peak_bytes: int = 0
    changes: int = 0


@dataclass(frozen=True, slots=True)
class RuledOut:
    """A layout that a decision cannot have, and why."""

    layout: str
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision, or the same decision of repeated layers."""

    name: str
    entry: PlanEntry
    members: int = 1
    formulas: tuple[str, ...] = ()  # with their numbers; they add up to the entry's seconds
    move_formulas: tuple[str, ...] = ()
    memory_formulas: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()  # the cheapest first
    ruled_out: tuple[RuledOut, ...] = ()
    unsolved: tuple[str, ...] = ()  # allowed layouts that were not solved for
    answers: tuple[str, ...] = ()  # why it is as it is, in plain words
    missing: str = ""  # what would be needed to say more
    stage: int | None = None  # of a pipeline

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        fields = (
            "name", "members", "stage", "formulas", "move_formulas", "memory_formulas", "unsolved", "answers",
            "missing",
        )  # fmt: skip
        plain: dict[str, Any] = {name: getattr(self, name) for name in fields}
        plain["decision"] = {"kind": self.entry.kind, "layouts": self.entry.words, "residency": self.entry.residency}
        plain["costs"] = self.entry.costs.to_json()
        plain["alternatives"] = [asdict(item) for item in self.alternatives]
        plain["ruled_out"] = [asdict(item) for item in self.ruled_out]
        return plain


def check_memory_limit(bytes_: object) -> None:
    """Raise UnsupportedOptionError for what is no number, MemoryLimitError for what nothing fits; None is no limit."""
    if bytes_ is None:
        return
    if isinstance(bytes_, bool) or not isinstance(bytes_, int | float):
        raise UnsupportedOptionError(
            f"memory_limit_bytes={bytes_!r} is not a number", fix="give the bytes per rank, as 16e9"
        )
    if not 0 < bytes_ < float("inf"):
        raise MemoryLimitError(f"no plan fits {bytes_} bytes per rank", fix="give the bytes per rank")


@dataclass(frozen=True, slots=True)
class Change:
    """What to plan again with; None: as before."""

    pin: Any = ()
    memory_limit_bytes: int | None = None
    hardware: Any = None
    mesh: Any = None
    batch: int | None = None


class Planning(Protocol):
    """Where a plan comes from, kept beside it to answer questions."""

    @property
    def recomputation(self) -> Problem:
        """What becomes of values under the plan's layouts, as a search problem without a limit."""
        ...

    def explanations(self, plan: Plan, pattern: str, names: dict[str, list[str]]) -> tuple[Explanation, ...]:
        """Of folded names and the keys that they stand for, and of what matches but leaves nothing to decide."""
        ...

    def what_if(self, plan: Plan, change: Change) -> Plan:
        """The plan under a change."""
        ...

    def emitted(self, plan: Plan) -> Plan:
        """A plan that was only foreseen, emitted and measured."""
        ...


class Cutting(Protocol):
    """Where the cuts of a pipeline come from, kept beside its plan to answer questions."""

    def why_cut(self, stage: int) -> str:
        """Why a stage, from 1 on, begins where it does."""
        ...

    def why_schedule(self) -> str:
        """Why so many microbatches, and this schedule."""
        ...
