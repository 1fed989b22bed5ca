"""Train a small GPT on real text with four local processes, beside the same model in one process.

    python examples/quickstart.py [--ranks 4] [--steps 40]

It starts its own ranks, prints the plan that was chosen, and compares the two loss curves step by step.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 64, 64, 4, 2


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each behind a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """A byte-level language model; `forward(ids, labels)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of a text that every Python installation ships."""
    import pydoc_data.topics

    text = torch.frombuffer(bytearray(Path(pydoc_data.topics.__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - CONTEXT - 1, (steps, BATCH), generator=generator)
    windows = text[starts[..., None] + torch.arange(CONTEXT + 1)]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def train(model: nn.Module, steps: int, label: str, console: Console) -> list[float]:
    """The loop that a user already has; it does not know whether the model is distributed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids, labels in track(batches(steps), label, console=console):
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT()


def run_rank(rank: int, ranks: int, port: int, steps: int, curve: list[float]) -> None:
    """One process: join the group, compile, train; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks // 2, 2) if ranks % 2 == 0 else (ranks,))
    pmodel = autopar.compile(make_model(), mesh, example_inputs=batches(1)[0], optimizer=torch.optim.AdamW)
    console = Console(quiet=rank != 0)
    console.print(str(pmodel.plan), markup=False, highlight=False)
    losses = train(pmodel, steps, f"{ranks} processes", console)
    if rank == 0:
        curve.extend(losses)
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    alone = train(make_model(), chosen.steps, "1 process", console)
    with mp.Manager() as manager:
        curve = manager.list()
        mp.spawn(run_rank, (chosen.ranks, free_port(), chosen.steps, curve), nprocs=chosen.ranks)
        together = list(curve)
    table = Table("step", "1 process", f"{chosen.ranks} processes", "difference", title="loss")
    for step in range(0, chosen.steps, max(1, chosen.steps // 10)):
        table.add_row(
            str(step), f"{alone[step]:.6f}", f"{together[step]:.6f}", f"{abs(alone[step] - together[step]):.1e}"
        )
    console.print(table)
    worst = max(abs(one - many) / one for one, many in zip(alone, together, strict=True))
    console.print(f"largest relative difference over {chosen.steps} steps: {worst:.1e}")
    if worst > 1e-5:
        raise SystemExit("the curves differ by more than 1e-5")


if __name__ == "__main__":
    main()
