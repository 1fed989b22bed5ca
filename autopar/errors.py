"""Every error that autopar raises: what happened, where (the user's line), what to do.

One class per kind of failure. `AutoparError` is the base of them all, so that a caller can catch the family.
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base class: prints as `what`, then `at where`, then `fix: ...`."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where:
            lines.append(f"  at {where}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))


class ProblemFormatError(AutoparError):
    """A search problem's file or arrays are not of the exchange format."""


class InfeasibleProblemError(AutoparError):
    """A search problem has no feasible choice: the message names the interval of time that cannot fit."""


class UnknownStrategyError(AutoparError):
    """No search strategy is registered under that name."""


class HardwareProfileError(AutoparError):
    """A hardware profile cannot be read, or lacks a number that a price needs."""


class UnpricedError(AutoparError):
    """An op, collective or device has no price: never priced at zero, never guessed."""


class PlanFormatError(AutoparError):
    """A plan's file or text is not of the plan format."""


class RecordingError(AutoparError):
    """A recorded run cannot be read, or is of another plan."""


class RuleError(AutoparError):
    """A sharding rule is malformed, or does not hold for the op it is given for."""


class CaptureError(AutoparError):
    """The model could not be traced."""


class DataDependentError(CaptureError):
    """The program's control flow, or the shape of a tensor, depends on the values of its inputs."""


class MutatedInputError(CaptureError):
    """The model writes into a tensor that the caller passed in, or into a parameter."""


class NoParametersError(CaptureError):
    """The model has nothing to shard and nothing to train."""


class UnsupportedRandomError(CaptureError):
    """A random function whose values would depend on how its result is sharded."""


class MeshError(AutoparError):
    """A mesh has a shape or names that cannot be used, or is larger than the world."""


class PlanError(AutoparError):
    """A plan does not fit the model, the mesh or the rules."""


class MemoryLimitError(AutoparError):
    """No plan fits the memory limit: the message says by how much, and what dominates."""


class ConstraintError(AutoparError):
    """A constraint cannot be read, matches nothing, or neither the rules nor the plan allow it."""


class ModelSourceError(AutoparError):
    """`package.module:factory` names no function that makes a model."""


class FileWriteError(AutoparError, OSError):
    """A file cannot be written where it was asked for."""


class UsageError(AutoparError):
    """A command of the shell was written wrongly."""


class UnknownGroupError(AutoparError):
    """A collective names a process group that does not exist here."""


class CollectiveMismatchError(AutoparError):
    """Ranks of a group disagree in order, sizes or arguments of their collectives: a real run would hang."""


class RanksDisagreeError(AutoparError):
    """Ranks were called with different inputs, in different modes, or hold different plans. Raised on every rank."""


class RankFailedError(AutoparError):
    """Another rank raised an error in a step that all ranks take together."""


class InputError(AutoparError):
    """An input of the call cannot be used: an unknown type, a foreign mesh, a partial sum."""


class NotDivisibleError(InputError, PlanError):
    """A dim of an input that the plan cuts does not divide by the ranks."""


class NotDifferentiableError(AutoparError):
    """A gradient arrived at an output through which the captured program has no backward."""


class NotPlannedError(AutoparError):
    """A plan or a graph was asked for before the first call made it."""


class UninitializedError(AutoparError):
    """Parameters of a model on the meta device have no values yet."""


class StateDictError(AutoparError):
    """A value of a state dict does not fit the parameter or buffer of that name."""


class UnsupportedModuleCallError(AutoparError):
    """Something that an `nn.Module` offers and a distributed module cannot do."""


class UnsupportedOptionError(AutoparError):
    """An option of the public interface that this version does not carry out, or cannot read."""


class UnreachableLayoutError(AutoparError):
    """No collectives lead from one layout to another: a full value cannot be made partial again."""


class SimulationError(AutoparError):
    """Timed ops cannot all run: they wait for each other in a circle, or for an op that is not there."""


class TooWideError(AutoparError):
    """A search strategy cannot hold its tables for a problem in memory."""


class OmittedOutputError(AutoparError, AttributeError):
    """A part of the model's result that the distributed program does not carry over was used."""


class ExpertPlacementError(AutoparError):
    """Expert loads, a mesh, slots and a current placement that do not fit together."""


class ScheduleError(AutoparError):
    """A pipeline schedule that cannot be made for these stages, or whose actions do not run as they must."""


class MicrobatchError(AutoparError):
    """The batch cannot be cut into microbatches: by its size, or because an op needs all of it at once."""
