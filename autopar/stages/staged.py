"""A program in microbatches and stages, whole: what a pipeline plans for and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor.placement_types import Placement

from autopar.capture.program import OutputKind, Program
from autopar.stages.assign import anatomy, assign_stages
from autopar.stages.microbatch import Microbatches
from autopar.stages.stage_programs import StagedProgram, StageProgram, stage_programs


@dataclass(frozen=True)
class Staged:
    """A program in microbatches and stages. `variants`: the stages of each distinct microbatch; `variant_of`: which
    one each microbatch is."""

    microbatches: Microbatches
    cuts: tuple[int, ...]
    variants: tuple[StagedProgram, ...]
    variant_of: tuple[int, ...]

    @property
    def program(self) -> Program:
        """The program of the whole batch."""
        return self.microbatches.whole

    @property
    def first(self) -> StagedProgram:
        """The stages of the first microbatch, the largest: what is planned for."""
        return self.variants[0]

    @property
    def stages(self) -> tuple[StageProgram, ...]:
        return self.first.stages

    @cached_property
    def over_time(self) -> dict[tuple[OutputKind, str], Placement]:
        """How each output of the program comes out of the microbatches: joined, added up, or the same in all."""
        pairs = zip(self.program.outputs, self.microbatches.outputs, strict=True)
        return {(output.kind, output.name): placement for output, placement in pairs}

    @cached_property
    def has_loss(self) -> bool:
        """Whether the backward starts from one scalar that the program computes; else the caller computes the loss, of
        the outputs of all microbatches."""
        differentiable = [output for output in self.program.outputs if output.differentiable]
        return len(differentiable) == 1 and differentiable[0].kind is OutputKind.LOSS

    @cached_property
    def given(self) -> tuple[tuple[OutputKind, str], ...]:
        """The outputs that every rank gets if no other is asked for: the loss, or all where there is none."""
        keys = [(output.kind, output.name) for output in self.program.outputs]
        losses = tuple(key for key in keys if key[0] is OutputKind.LOSS)
        return losses or tuple(key for key in keys if key[0] is OutputKind.OUTPUT)

    @cached_property
    def shared_gradients(self) -> dict[str, tuple[int, ...]]:
        """By parameter that is trained and that several stages hold, those stages: its gradient is a sum over them."""
        trained = {output.name for output in self.program.outputs if output.kind is OutputKind.GRADIENT}
        return {name: stages for name, stages in self.first.shared.items() if name in trained}

    @cached_property
    def homes(self) -> dict[tuple[OutputKind, str], tuple[int, ...]]:
        """The stages that make each output of the program, or a part of it."""
        found: dict[tuple[OutputKind, str], tuple[int, ...]] = {}
        for stage in self.stages:
            for output in stage.program.outputs:
                key = output.kind, output.name
                found[key] = (*found.get(key, ()), stage.index)
        return found


def stage_program(microbatches: Microbatches, cuts: Sequence[int]) -> Staged:
    """Cut every distinct microbatch at the same places."""
    distinct = list({id(piece): piece for piece in microbatches.pieces}.values())
    variants = tuple(stage_programs(assign_stages(anatomy(piece), cuts)) for piece in distinct)
    numbers = {id(piece): number for number, piece in enumerate(distinct)}
    names = [[node.name for stage in it.stages for node in stage.program.graph_module.graph.nodes] for it in variants]
    assert all(other == names[0] for other in names), "microbatches differ in more than sizes and places"
    return Staged(microbatches, tuple(cuts), variants, tuple(numbers[id(piece)] for piece in microbatches.pieces))
