"""The lines of a plan: one decision, what it costs, an op without a rule, how stages run."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding.layout import Layout, format_layout


@dataclass(frozen=True, slots=True)
class MoveCost:
    """One collective (or local slice) that a decision's inputs need before it can run."""

    collective: str
    axis: int
    bytes: int  # of the full tensor over the axis' group
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One decision: the layouts of its inputs and outputs, and what it costs on one rank.

    A gradient has no entry: it takes its parameter's layout.
    """

    key: str  # a parameter's name, `input:0`, or `module/op#occurrence`
    kind: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    module: str = ""
    where: str = ""  # the user's line
    seconds: float = 0.0
    bytes: int = 0  # of its outputs on the largest shard
    moves: tuple[MoveCost, ...] = ()
    residency: str = ""  # of a value that the backward needs: keep or recompute; keep a parameter's gathered copy

    def signature(self) -> tuple[str, ...]:
        """What it decides as text: what two entries must share to be folded into one line."""
        usual = "" if self.kind == "parameter" else "keep"
        again = () if self.residency in ("", usual) else (self.residency,)
        return (self.kind, *layout_texts(self.inputs), "->", *layout_texts(self.outputs), *again)


@dataclass(frozen=True, slots=True)
class OpWithoutRule:
    """An op for which nobody wrote a rule: the rules that were discovered for it, or why it runs replicated."""

    op: str
    uses: int
    rules: tuple[str, ...] = ()  # as `S0, R -> P`
    why: str = ""  # there are none
    where: str = ""  # the user's line of the first use


def layout_texts(layouts: tuple[Layout, ...]) -> list[str]:
    return [format_layout(layout) for layout in layouts]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages of a plan run. `axis`: of the mesh, along which they lie. `bubble`: the share of the step, over
    all ranks, in which none computes, as simulated."""

    axis: int
    schedule: str
    microbatches: int
    virtual_stages: int = 1  # of each rank
    bubble: float = 0.0
