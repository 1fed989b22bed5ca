"""Every gate, distributed in every way, against the single device: `python -m benchmarks.moe_parity`.

Layers of experts in float64, every gate of `autopar.nn` with and without capacity, routing of all tokens to one
expert, experts that do not divide over the ranks; expert parallel beside data, tensor and pipeline parallel, on 8 and
16 virtual ranks and on 4 gloo processes. Prints the table of docs/moe.md: the worst relative error of the loss, of all
gradients (the router's and the experts' among them) and of all counts. `--only` keeps the rows with a word in the name,
`--ways` the columns that begin so.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.nn import (
    BalancedGate,
    ExpertChoiceGate,
    Experts,
    FeedForward,
    Gate,
    GroupLimit,
    GShardGate,
    MixtureOfExperts,
    NoisyTopKGate,
    SigmoidGate,
    SwitchGate,
    TopKGate,
)
from autopar.torch_compat import run_ranks
from autopar.verification import Report
from benchmarks.tables import line
from tests.autopar.nn.routings import constant_router

WIDTH, HIDDEN, BATCH, GLOO_RANKS = 16, 8, 32, 4


GATES: dict[str, Callable[[], Gate]] = {
    "top-k": lambda: TopKGate(WIDTH, 8, 2, z_weight=1e-3),
    "top-k, capacity 0.7": lambda: TopKGate(WIDTH, 8, 2, capacity_factor=0.7, normalize="all"),
    "noisy top-k": lambda: NoisyTopKGate(WIDTH, 8, 2),
    "GShard, capacity": lambda: GShardGate(WIDTH, 8, groups=2),
    "Switch, capacity": lambda: SwitchGate(WIDTH, 8),
    "Switch": lambda: SwitchGate(WIDTH, 8, capacity_factor=None),
    "expert choice": lambda: ExpertChoiceGate(WIDTH, 8),
    "balanced": lambda: BalancedGate(WIDTH, 8),
    "sigmoid, groups, shared expert": lambda: SigmoidGate(WIDTH, 8, 2, group_limit=GroupLimit(4, 2)),
    "all tokens to one expert": lambda: constant_router(TopKGate(WIDTH, 8, 1), [0.0, 0, 0, 9, 0, 0, 0, 0]),
    "all to one, capacity 1.25": lambda: constant_router(
        TopKGate(WIDTH, 8, 1, capacity_factor=1.25), [0.0, 0, 0, 9, 0, 0, 0, 0]
    ),
    "10 experts": lambda: TopKGate(WIDTH, 10, 2),
    "3 experts": lambda: TopKGate(WIDTH, 3, 2),
}


class Model(nn.Module):
    """Blocks of a dense layer and a mixture of experts, whose tokens all have 1 as their first number."""

    def __init__(self, make: Callable[[], Gate], blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(blocks))
        self.mixtures = nn.ModuleList(_mixture(make()) for _ in range(blocks))
        with torch.no_grad():
            for norm in self.norms:
                norm.get_parameter("weight")[0], norm.get_parameter("bias")[0] = 0, 1
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for dense, norm, mixture in zip(self.dense, self.norms, self.mixtures, strict=True):
            routed, aux_loss = mixture(norm(x + dense(x).tanh()))
            x, loss = x + routed, loss + aux_loss
        return loss + x.square().mean()


def _mixture(gate: Gate) -> MixtureOfExperts:
    shared = FeedForward(WIDTH, HIDDEN) if isinstance(gate, SigmoidGate) else None
    return MixtureOfExperts(gate, Experts(gate.num_experts, WIDTH, HIDDEN), shared)


@dataclass(frozen=True)
class Way:
    """A mesh, and how experts lie on it, but for a pipeline. A: tokens by all-to-all; I: every expert cut inside."""

    name: str
    mesh: tuple[int, ...]
    layout: str
    stages: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        pipeline = {} if self.stages is None else {"stages": self.stages, "microbatches": 1, "schedule": "1f1b"}
        return {"constraints": {"*/autopar.experts*": self.layout}, **pipeline}


VIRTUAL = (
    Way("8: dp 2, ep 4", (2, 4), "S0,A"),
    Way("8: ep 4, tp 2", (4, 2), "A,I"),
    Way("8: pp 2, ep 4", (2, 4), "A", 2),
    Way("16: dp 4, ep 4", (4, 4), "S0,A"),
    Way("16: ep 8, tp 2", (8, 2), "A,I"),
    Way("16: pp 2, ep 8", (2, 8), "A", 2),
)
GLOO = (
    Way("gloo 4: dp 2, ep 2", (2, 2), "S0,A"),
    Way("gloo 4: ep 2, tp 2", (2, 2), "A,I"),
    Way("gloo 4: pp 2, ep 2", (2, 2), "A", 2),
)


def outcome(way: Way, gate: str, mesh: Any) -> str:
    """The worst relative error, in parentheses how many tensors were compared; what failed is named."""
    model = Model(GATES[gate], way.stages or 1)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        report = autopar.verify(model, mesh, example_inputs=x, **way.options)
    except AutoparError as error:
        return f"{type(error).__name__}: {error.what}"
    _check_complete(report, model)
    mark = "" if report.ok else " FAILED"
    return f"{report.worst_relative_error:.0e} ({len(report.comparisons)}){mark}"


def _check_complete(report: Report, model: nn.Module) -> None:
    """Every parameter that the single device gives a gradient was compared."""
    compared = {item.name for item in report.comparisons if item.kind == "gradient"}
    missing = {name for name, item in model.named_parameters() if item.requires_grad} - compared
    assert not missing, f"no gradient of {missing}"


def chosen(only: str) -> Iterator[str]:
    return (name for name in GATES if only in name)


def run_gloo(rank: int, folder: str, only: str) -> None:
    """All gates on the processes; the first writes the cells to a file, a line each."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", GLOO_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=GLOO_RANKS)
    for gate in chosen(only):
        for way in GLOO:
            cell = outcome(way, gate, init_device_mesh("cpu", way.mesh))
            if rank == 0:
                with open(f"{folder}/cells", "a") as file:
                    file.write(f"{gate}\t{way.name}\t{cell}\n")
    dist.destroy_process_group()


def on_gloo(only: str) -> dict[tuple[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run_gloo, GLOO_RANKS, folder, only)
        with open(f"{folder}/cells") as file:
            rows = [row.rstrip("\n").split("\t") for row in file]
    return {(gate, way): cell for gate, way, cell in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="a word in the names of the rows")
    parser.add_argument("--ways", default="", help="how the names of the columns begin: 8, 16 or gloo")
    arguments = parser.parse_args()
    only = arguments.only
    ways = [way for way in (*VIRTUAL, *GLOO) if way.name.startswith(arguments.ways)]
    cells = on_gloo(only) if any(way in GLOO for way in ways) else {}
    print(f"torch {torch.__version__} on {platform.machine()}, {dt.date.today()}\n")
    print(line(["gate", *(way.name for way in ways)]))
    print(line(["---"] * (1 + len(ways))))
    for gate in chosen(only):
        cells |= {(gate, way.name): outcome(way, gate, way.mesh) for way in ways if way in VIRTUAL}
        print(line([gate, *(cells[gate, way.name] for way in ways)]), flush=True)


if __name__ == "__main__":
    main()
