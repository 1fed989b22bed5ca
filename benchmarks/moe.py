"""Step time of an emitted expert-parallel layer beside a layer written by hand: `python -m benchmarks.moe`.

Two gloo ranks, one thread each. Both layers have the same weights and tokens and run by turns; a step is the forward
and the backward, its gradients compared once. By hand: `all_to_all_single` of the chosen tokens with splits known at
run time, the experts in a loop over the rank's own; with and without `torch.utils.checkpoint` around the experts, since
a plan may recompute, too. Prints the table of docs/moe.md: the least time of a step, since other load on the machine
only adds to it, and the least processor time of both ranks.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.nn import Experts
from autopar.nn.routing import Routing
from autopar.torch_compat import apply_function, run_ranks

RANKS, CHOICES = 2, 2


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of all ranks, numbers per token, hidden numbers per expert, experts."""

    tokens: int
    width: int
    hidden: int
    experts: int


SIZES = (Size(2048, 256, 512, 8), Size(4096, 512, 1024, 8), Size(2048, 512, 1024, 32))


class Layer(nn.Module):
    """A dense layer, a router and experts: the model that is compiled."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.dense = nn.Linear(size.width, size.width, bias=False)
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = Experts(size.experts, size.width, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        weights, index = self.router(x).softmax(-1).topk(CHOICES, -1)
        zero = x.new_zeros(())
        out: Tensor = self.experts(x, Routing(index, weights, zero, zero, x.shape[0]))
        return out.square().mean()


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks, by `sent`; their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, coming: list[int], sent: list[int]) -> Tensor:
        ctx.splits = coming, sent
        received = rows.new_empty((sum(coming), rows.shape[1]))
        dist.all_to_all_single(received, rows.contiguous(), coming, sent)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        coming, sent = ctx.splits
        back = grad.new_empty((sum(sent), grad.shape[1]))
        dist.all_to_all_single(back, grad.contiguous(), sent, coming)
        return back, None, None


class ByHand(nn.Module):
    """The same layer for one rank: its own experts, its own tokens."""

    def __init__(self, layer: Layer, rank: int, *, recomputes: bool) -> None:
        super().__init__()
        own = layer.experts.num_experts // RANKS
        mine = slice(rank * own, (rank + 1) * own)
        self.dense = nn.Parameter(layer.dense.weight.detach().clone())
        self.router = nn.Parameter(layer.router.weight.detach().clone())
        self.gate_up = nn.Parameter(layer.experts.gate_up_proj.detach()[mine].clone())
        self.down = nn.Parameter(layer.experts.down_proj.detach()[mine].clone())
        self.experts, self.own, self.recomputes = layer.experts.num_experts, own, recomputes

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the loss."""
        x = F.linear(x, self.dense)
        weights, index = F.linear(x, self.router).softmax(-1).topk(CHOICES, -1)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(RANKS, -1).sum(1).tolist()
        theirs = theirs.view(RANKS, -1)
        token = order // CHOICES
        received = apply_function(_AllToAll, x[token], theirs.sum(1).tolist(), sent)
        expert = torch.arange(self.own).repeat(RANKS).repeat_interleave(theirs.flatten())
        by_expert = expert.argsort(stable=True)
        sizes = theirs.sum(0).tolist()
        rows = received[by_expert]
        out = (
            checkpoint(self._compute, rows, sizes, use_reentrant=False)
            if self.recomputes
            else self._compute(rows, sizes)
        )
        home = torch.empty_like(out).index_copy(0, by_expert, out)
        back = apply_function(_AllToAll, home, sent, theirs.sum(1).tolist())
        mixed = torch.zeros_like(x).index_add(0, token, back * weights.flatten()[order, None])
        return mixed.square().sum() / (RANKS * x.numel())

    def _compute(self, rows: Tensor, sizes: list[int]) -> Tensor:
        outputs = []
        for part, first, second in zip(rows.split(sizes), self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = F.linear(part, first).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, second))
        return torch.cat(outputs)

    def step(self, x: Tensor) -> None:
        """Forward and backward; the loss and the gradients of what every rank has are summed over the ranks."""
        self.zero_grad()
        loss = self(x)
        loss.backward()
        dist.all_reduce(loss.detach())
        for parameter in (self.router, self.dense):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)


def compare(size: Size, mesh: DeviceMesh, repeats: int) -> tuple[Tensor, float]:
    """(least seconds and processor seconds of a step: emitted, by hand, by hand with recomputation, float64 [3, 2];
    the largest relative error of a gradient)."""
    torch.manual_seed(0)
    layer, x = Layer(size), torch.randn(size.tokens, size.width)
    rank = dist.get_rank()
    hands = [ByHand(layer, rank, recomputes=recomputes) for recomputes in (False, True)]
    part = x.chunk(RANKS)[rank]
    constraints = {"experts.gate_up_proj": "S0", "experts.down_proj": "S0", "*/autopar.experts*": "A"}
    pmodel = autopar.compile(layer, mesh, example_inputs=x, constraints=constraints)

    def emitted() -> None:
        pmodel.zero_grad()
        pmodel(x).backward()

    steps: list[Callable[[], None]] = [emitted, *(lambda hand=hand: hand.step(part) for hand in hands)]
    times: list[list[Tensor]] = [[] for _ in steps]
    for turn in range(repeats + 1):
        for step, found in zip(steps, times, strict=True):
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            step()
            spent = torch.tensor([time.perf_counter() - start, time.process_time() - start_cpu], dtype=torch.float64)
            dist.all_reduce(spent)
            if turn:
                found.append(spent / torch.tensor([RANKS, 1]))
    return torch.stack([torch.stack(found).min(0).values for found in times]), _error(pmodel, hands[0])


def _error(pmodel: nn.Module, hand: ByHand) -> float:
    grads = {name: parameter.grad for name, parameter in pmodel.named_parameters()}
    pairs = [
        ("dense.weight", hand.dense),
        ("router.weight", hand.router),
        ("experts.gate_up_proj", hand.gate_up),
        ("experts.down_proj", hand.down),
    ]
    worst = 0.0
    for name, parameter in pairs:
        grad, expected = grads[name], parameter.grad
        assert isinstance(grad, DTensor) and expected is not None
        mine = grad.full_tensor()
        if mine.shape != expected.shape:
            mine = mine.chunk(RANKS)[dist.get_rank()]
        worst = max(worst, float((mine - expected).abs().max() / expected.abs().max()))
    return worst


def run(rank: int, store: str, repeats: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    lines = []
    for size in SIZES:
        found, error = compare(size, mesh, repeats)
        name = f"{size.tokens} tokens of {size.width}, {size.experts} experts of {size.hidden}"
        cells = [f"{wall * 1e3:.0f} ({cpu * 1e3:.0f})" for wall, cpu in found.tolist()]
        ratios = [f"{wall:.2f} ({cpu:.2f})" for wall, cpu in (found[0] / found[1:]).tolist()]
        lines.append(f"| {name} | {' | '.join(cells)} | {' | '.join(ratios)} | {error:.0e} |")
    if rank == 0:
        print(
            f"torch {torch.__version__} on {platform.machine()}, {RANKS} gloo ranks of one thread, {dt.date.today()}\n"
        )
        print("Milliseconds of a step, in parentheses of processor time of both ranks.\n")
        print("| layer | emitted | by hand | by hand, recomputing | ratio | ratio, recomputing | gradients differ by |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        print("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(run, RANKS, f"{folder}/store", parser.parse_args().repeats)


if __name__ == "__main__":
    main()
