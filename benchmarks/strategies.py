"""Seconds to make every strategy of an 8B Llama's joint graph on meshes of two and three axes, on one core.

    python benchmarks/strategies.py [--write-docs]

CPU seconds of one thread, the least of three runs, after capture and without prices: the rules of every op, their
products over the axes, and which of them divide. Calls that are equal share theirs (folding), so that the work follows
the number of distinct calls; without folding each op's are made anew.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parent.parent))
from autopar.capture.trace import capture
from autopar.sharding.assignment import is_getitem
from autopar.sharding.op_call import OpCall, call_of
from autopar.sharding.registry import rules_of
from autopar.sharding.strategies import strategies_of
from benchmarks.planning import make

MESHES = ((32, 8), (4, 8, 8), (2, 16, 8))
DOCS = Path(__file__).parent.parent / "docs" / "planning_speed.md"
MARK = "## Strategies"


def folded(nodes: list[fx.Node], mesh_shape: tuple[int, ...]) -> int:
    """All strategies of all nodes, made once for equal calls; how many there are."""
    known: dict[OpCall, int] = {}
    count = 0
    for node in nodes:
        call = call_of(node)
        if call not in known:
            known[call] = len(strategies_of(call, rules_of(call), mesh_shape))
        count += known[call]
    return count


def one_by_one(nodes: list[fx.Node], mesh_shape: tuple[int, ...]) -> int:
    """The same, made anew for each node."""
    calls = map(call_of, nodes)
    return sum(len(strategies_of(call, rules_of(call), mesh_shape)) for call in calls)


def least_seconds(
    run: Callable[[list[fx.Node], tuple[int, ...]], int], nodes: list[fx.Node], shape: tuple[int, ...], times: int
) -> tuple[float, int]:
    """(CPU seconds, what it returned)."""
    seconds, count = [], 0
    for _ in range(times):
        started = time.process_time()
        count = run(nodes, shape)
        seconds.append(time.process_time() - started)
    return min(seconds), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write-docs", action="store_true")
    write_docs = parser.parse_args().write_docs
    torch.set_num_threads(1)
    model, inputs = make("llama-8b")
    graph = capture(model, (), inputs).graph_module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_getitem(node)]
    distinct = len(set(map(call_of, nodes)))
    lines = ["| mesh | nodes | distinct calls | strategies | folded, CPU s | one by one, CPU s |", "| --- " * 6 + "|"]
    for shape in MESHES:
        seconds, count = least_seconds(folded, nodes, shape, 3)
        alone = f"{least_seconds(one_by_one, nodes, shape, 1)[0]:.1f}" if len(shape) == 2 else "-"  # a minute on three
        cells = ["x".join(map(str, shape)), len(graph.nodes), distinct, f"{count:,}", f"{seconds:.2f}", alone]
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
    if write_docs:
        machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
        head = f"By `benchmarks/strategies.py`, {date.today()}, one core of a shared {machine}:"
        text = DOCS.read_text(encoding="utf-8").partition(MARK)[0].rstrip()
        parts = (text, MARK, f"{head}\nevery strategy of the 8B Llama's joint graph.", "\n".join(lines))
        DOCS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
