"""The weights of a rank's stages, in the versions that a schedule asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.runtime.pipeline.gathered import Gathered
from autopar.runtime.pipeline.lanes import Value
from autopar.schedules.actions import Action

Current = Callable[[int, str], Value]  # the newest value of a stage's parameter
Update = Callable[[int, Gathered], None]  # apply the gradients of a stage


@dataclass
class Weights:
    """`current`: reads the newest weights. `names`: the parameters of each stage. `update`: the optimizer's step.

    A restored version holds for the next compute action of its stage alone; the worker calls `ran` after each.
    """

    current: Current
    names: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    update: Update | None = None
    versions: dict[int, int] = field(default_factory=dict)  # updates so far, by stage
    stashed: dict[tuple[int, int], dict[str, Value]] = field(default_factory=dict)  # by (stage, version)
    restored: dict[int, int] = field(default_factory=dict)  # by stage, the version that its next action runs with

    def of(self, stage: int, name: str) -> Value:
        """A parameter, as the action that runs now has it."""
        version = self.restored.get(stage)
        return self.current(stage, name) if version is None else self.stashed[stage, version][name]

    def ran(self, stage: int) -> None:
        """A compute action of a stage is done."""
        self.restored.pop(stage, None)

    def act(self, action: Action, gathered: Gathered) -> None:
        """Stash, restore, drop or update."""
        stage, version = action.stage, action.version
        match action.kind:
            case "stash_weights":
                self.stashed[stage, version] = {
                    name: [part.clone() for part in self.current(stage, name)] for name in self.names[stage]
                }
            case "restore_weights":
                self.restored[stage] = version
            case "drop_weights":
                del self.stashed[stage, version]
            case "optimizer_step":
                if self.update is None:
                    raise ScheduleError(f"{action}: nobody owns an optimizer here", fix="use train_step")
                self.update(stage, gathered)
                gathered.clear_gradients(stage)
            case _:
                raise ScheduleError(f"{action}: unknown to the executor")
