"""Every promised model through every schedule: how far loss and gradients are from the single device.

    python -m benchmarks.pipelines [--models gpt2,llama] [--gloo] [--write-docs]

All ranks run in this process; with `--gloo` each is a process (`benchmarks.pipelines_on_gloo`). Each line of the table
is one model; its figure is the worst relative error over stages, schedules and microbatches. Refusals are counted, with
the reason. Memory: planned bytes of the fullest rank over measured ones, the least and the most.
"""

from __future__ import annotations

import argparse
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import autopar
from autopar.errors import AutoparError
from autopar.zoo.plain import make_plain
from benchmarks import pipelines_on_gloo
from benchmarks.tables import ROOT, write_table
from tests.autopar.models import MODELS

PAGE = ROOT / "docs/pipelines.md"
MICROBATCHES = (1, 2, 4, 8)
MESHES = {
    "2 stages": autopar.Mesh((2,), ("pp",), hardware="cpu"),
    "4 stages": autopar.Mesh((4,), ("pp",), hardware="cpu"),
    "2 stages x data 2": autopar.Mesh((2, 2), ("pp", "dp"), hardware="cpu"),
    "2 stages x tensor 2": autopar.Mesh((2, 2), ("pp", "tp"), hardware="cpu"),
}
SEARCHES = {"2 stages x tensor 2": "megatron"}
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "zb-v")
TWICE = ("interleaved", "zb-v")  # two stages on a rank


@dataclass
class Line:
    """What became of one model."""

    name: str
    verified: int = 0
    worst: float = 0.0
    memory: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        refusals = "; ".join(f"{count} x {why}" for why, count in self.refused.items()) or "none"
        return (
            f"| {self.name} | {self.verified} | {len(self.wrong)} | {self.worst:.1e} | {self._memory()} | {refusals} |"
        )

    def _memory(self) -> str:
        return f"{min(self.memory):.3f} to {max(self.memory):.3f}" if self.memory else ""


def cases() -> Iterator[tuple[str, str, int]]:
    """(mesh, schedule, microbatches): all of them on two stages, one schedule in turn on the others."""
    for count in MICROBATCHES:
        yield from (("2 stages", schedule, count) for schedule in SCHEDULES)
    for mesh in MESHES:
        for number, count in enumerate(MICROBATCHES):
            if mesh != "2 stages":
                yield mesh, SCHEDULES[number % 3], count


def run(name: str, make: Callable[[], Any]) -> Line:
    line = Line(name)
    for mesh, schedule, count in cases():
        model, inputs = make()
        ranks = MESHES[mesh].shape[0]
        stages = 2 * ranks if schedule in TWICE else ranks
        search = SEARCHES.get(mesh, "ddp")
        try:
            report = autopar.verify(
                model, MESHES[mesh], example_inputs=inputs, search=search, stages=stages, schedule=schedule,
                microbatches=count,
            )  # fmt: skip
        except AutoparError as error:
            why = re.sub(r"[0-9.]+", "n", f"{type(error).__name__}: {error.what}")[:90]
            line.refused[why] = line.refused.get(why, 0) + 1
            continue
        line.verified += 1
        assert report.plan is not None
        line.memory.append(report.plan.peak_bytes / report.peak_bytes)
        line.worst = max(line.worst, report.worst_relative_error)
        if not report.ok:
            line.wrong.append(f"{mesh} {schedule} {count}: {report}")
    return line


def run_on_gloo(models: list[str], *, write_docs: bool) -> None:
    """All cases on processes, mesh by mesh."""
    every = [case for mesh in pipelines_on_gloo.MESHES for case in pipelines_on_gloo.on_processes(mesh, models)]
    lines = pipelines_on_gloo.table(every, models)
    print(*lines, *(case for case in every if not case.ok), sep="\n")
    if write_docs:
        said = f"{platform.machine()}, gloo processes on one machine, {datetime.now(UTC):%Y-%m-%d}."
        write_table(PAGE, "pipelines on gloo", [said, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="gpt2,llama,t5,vit,resnet,unet")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/pipelines.md")
    parser.add_argument("--gloo", action="store_true", help="on real processes")
    chosen = parser.parse_args()
    if chosen.gloo:
        run_on_gloo(chosen.models.split(","), write_docs=chosen.write_docs)
        return
    lines = [
        "| model | verified | wrong | worst relative error | planned over measured memory | refused |",
        f"|{' --- |' * 6}",
    ]
    started = time.monotonic()
    for name in chosen.models.split(","):
        line = run(name, MODELS.get(name, lambda name=name: make_plain(name)))
        lines.append(line.text())
        print(line.text(), f"{time.monotonic() - started:.0f} s", *line.wrong, sep="\n", flush=True)
    if chosen.write_docs:
        said = f"{platform.machine()}, one process, {datetime.now(UTC):%Y-%m-%d}."
        write_table(PAGE, "pipeline parity", [said, "", *lines])


if __name__ == "__main__":
    main()
