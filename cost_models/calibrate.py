"""Measures the machine it runs on and writes a hardware profile with the residuals of the fit.

The only module of the cost models that imports torch. Alone it measures one device; launched by torchrun, every rank
measures at the same time, as in training, and the collectives of the world are measured too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from autopar.cost_models.collectives import COLLECTIVES
from autopar.cost_models.fitting import (
    AttentionSample,
    CollectiveSample,
    ComputeSamples,
    ConvolutionSample,
    MatmulSample,
    MoveSample,
    axis_residuals,
    device_residuals,
    fit_axis,
    fit_device,
)
from autopar.cost_models.hardware import AxisLinks, HardwareProfile, axis_links, load_profile, profile_for_device_name

Report = Callable[[str], None]  # told the name of each measurement before it runs

MATMULS = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 1024, 256), (2048, 256, 512),
           (32, 512, 2048), (1024, 64, 1024))  # fmt: skip
LARGE_MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 16384, 2048))
MOVED_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)  # of a float32 addition: three times the bytes
ATTENTIONS = ((1, 4, 128, 32), (4, 8, 256, 32), (2, 8, 512, 64))  # batch, heads, length, head_dim
CONVOLUTIONS = ((4, 16, 32, 32), (8, 32, 64, 16))  # batch, channels in, channels out, side; 3 by 3
MESSAGE_BYTES = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
LEAST_S, MOST_RUNS = 0.05, 200  # each measurement runs at least this long, or this often
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class World:
    """Where this rank runs."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    ranks_per_node: int = 1


@contextmanager
def launched_world() -> Iterator[World]:
    """The world that torchrun launched, or one rank alone; leaves it as it was."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_torchelastic_launched():
        yield World(torch.device(kind))
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        local = hosts[: dist.get_rank()].count(hosts[dist.get_rank()])
        if kind == "cuda":
            torch.cuda.set_device(local)
        here = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        yield World(here, dist.get_rank(), len(hosts), max(hosts.count(host) for host in set(hosts)))
    finally:
        dist.destroy_process_group()


def calibrate(world: World, *, base: HardwareProfile | None = None, report: Report = lambda _: None) -> HardwareProfile:
    """A profile of this machine: `base` with everything replaced that could be measured. The same on every rank."""
    start = base or base_profile(world.device)
    samples = measure_compute(world, report)
    device = replace(fit_device(start.device, samples), memory_bytes=_memory_bytes(world), source=_source(world))
    residuals = device_residuals(device, samples)
    profile = replace(start, name=f"{device.name}-measured", device=device, source=_source(world))
    if world.ranks > 1:
        profile = replace(profile, ranks_per_node=world.ranks_per_node)
        axis = axis_links(profile, (world.ranks,))[0]
        timed = measure_collectives(world, report)
        profile, fitted = _with_axis(profile, fit_axis(axis, timed), world)
        residuals |= axis_residuals(fitted, timed)
    return replace(profile, residuals=residuals)


def base_profile(device: torch.device) -> HardwareProfile:
    """The shipped profile nearest to a device: by its name, else `h100` for an unknown GPU."""
    if device.type == "cpu":
        return load_profile("cpu")
    return profile_for_device_name(torch.cuda.get_device_name(device)) or load_profile("h100")


def measure_compute(world: World, report: Report) -> ComputeSamples:
    """Time matrix products, copies, attention and convolutions on this rank; every rank runs at once."""
    report("memory-bound ops")
    moves = tuple(_move(world, elements) for elements in MOVED_ELEMENTS)
    matmuls = []
    names = CPU_DTYPES if world.device.type == "cpu" else tuple(DTYPES)
    shapes = MATMULS if world.device.type == "cpu" else (*MATMULS, *LARGE_MATMULS)
    for name in names:
        report(f"matmul {name}")
        few = shapes if name == names[0] or world.device.type != "cpu" else shapes[:2]
        matmuls += [_matmul(world, name, shape) for shape in few]
    report("attention")
    dtype = names[0] if world.device.type == "cpu" else "bfloat16"
    attentions = tuple(item for sizes in ATTENTIONS for item in _attention(world, dtype, sizes))
    report("convolution")
    convolutions = tuple(_convolution(world, dtype, sizes) for sizes in CONVOLUTIONS)
    copies = (_host_copy(world, 2**26),) if world.device.type == "cuda" else ()
    return ComputeSamples(tuple(matmuls), moves, attentions, convolutions, copies)


def measure_collectives(world: World, report: Report) -> tuple[CollectiveSample, ...]:
    """Time every collective that the backend has, over the whole world; the slowest rank's time counts."""
    samples = []
    for kind in COLLECTIVES:
        report(kind)
        samples += [item for size in MESSAGE_BYTES if (item := _collective(world, kind, size)) is not None]
    return tuple(samples)


def typical_seconds(call: Callable[[], object], world: World) -> float:
    """Lower-quartile time of a call, after a warm-up, averaged over ranks: what else runs only adds time."""
    for _ in range(2):
        call()
    _wait(world)
    once = _timed(call, world)
    runs = max(5, min(MOST_RUNS, int(LEAST_S / max(once, 1e-7))))
    runs = int(_over_ranks(world, runs, dist.ReduceOp.MIN))  # collectives need the same count on every rank
    quartile_s = float(np.quantile([_timed(call, world) for _ in range(runs)], 0.25))
    return _over_ranks(world, quartile_s, dist.ReduceOp.SUM) / world.ranks


def _timed(call: Callable[[], object], world: World) -> float:
    start = time.perf_counter()
    call()
    _wait(world)
    return time.perf_counter() - start


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _over_ranks(world: World, value: float, how: Any) -> float:
    if world.ranks == 1:
        return value
    cell = torch.tensor([value], dtype=torch.float64, device=world.device)
    dist.all_reduce(cell, how)
    return float(cell.item())


def _move(world: World, elements: int) -> MoveSample:
    one, other, out = (torch.ones(elements, device=world.device) for _ in range(3))
    return MoveSample(12 * elements, typical_seconds(lambda: torch.add(one, other, out=out), world))


def _host_copy(world: World, moved_bytes: int) -> MoveSample:
    here = torch.ones(moved_bytes, dtype=torch.uint8, device=world.device)
    there = torch.empty(moved_bytes, dtype=torch.uint8, pin_memory=True)
    return MoveSample(moved_bytes, typical_seconds(lambda: there.copy_(here, non_blocking=True), world))


def _matmul(world: World, name: str, shape: tuple[int, int, int]) -> MatmulSample:
    m, n, k = shape
    left = torch.randn(m, k, device=world.device).to(DTYPES[name])
    right = torch.randn(k, n, device=world.device).to(DTYPES[name])
    out = torch.empty(m, n, dtype=DTYPES[name], device=world.device)
    return MatmulSample(name, m, n, k, typical_seconds(lambda: torch.mm(left, right, out=out), world))


def _attention(world: World, name: str, sizes: tuple[int, int, int, int]) -> Iterator[AttentionSample]:
    query, key, value = (torch.randn(sizes, device=world.device).to(DTYPES[name]).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    forward_s = typical_seconds(forward, world)
    yield AttentionSample(name, "forward", sizes, forward_s)
    output = forward()
    ones = torch.ones_like(output)
    backward_s = typical_seconds(
        lambda: torch.autograd.grad(output, (query, key, value), ones, retain_graph=True), world
    )
    yield AttentionSample(name, "backward", sizes, backward_s)


def _convolution(world: World, name: str, sizes: tuple[int, int, int, int]) -> ConvolutionSample:
    batch, inner, outer, side = sizes
    image = torch.randn(batch, inner, side, side, device=world.device).to(DTYPES[name])
    weight = torch.randn(outer, inner, 3, 3, device=world.device).to(DTYPES[name])
    flops = 2.0 * batch * inner * outer * side * side * 9
    moved = (image.numel() * (1 + outer / inner) + weight.numel()) * image.element_size()
    seconds = typical_seconds(lambda: functional.conv2d(image, weight, padding=1), world)
    return ConvolutionSample(name, flops, int(moved), seconds)


def _collective(world: World, kind: str, size: int) -> CollectiveSample | None:
    """One timed collective, or None if the backend does not have it."""
    elements = max(world.ranks, size // 4 // world.ranks * world.ranks)
    whole = torch.ones(elements, device=world.device)
    part = torch.ones(elements // world.ranks, device=world.device)
    other = torch.ones_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": lambda: _exchange(world, whole, other),
    }
    try:
        seconds = typical_seconds(calls[kind], world)
    except (RuntimeError, NotImplementedError, ValueError):  # raised on every rank alike, before anything is sent
        return None
    return CollectiveSample(kind, 4 * elements, seconds)


def _exchange(world: World, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before, as pipeline neighbours do."""
    onward = dist.P2POp(dist.isend, sent, (world.rank + 1) % world.ranks)
    back = dist.P2POp(dist.irecv, received, (world.rank - 1) % world.ranks)
    for work in dist.batch_isend_irecv([onward, back]):
        work.wait()


def _with_axis(profile: HardwareProfile, axis: AxisLinks, world: World) -> tuple[HardwareProfile, AxisLinks]:
    """The profile with an axis that was fitted over the whole world."""
    where = f"{world.ranks} ranks, {axis.nodes} nodes, python -m autopar calibrate"
    if axis.nodes > 1:
        link = replace(axis.inter, source=where)
        return replace(profile, inter=link, protocols=axis.protocols), axis
    return replace(profile, intra=replace(axis.intra, source=where), protocols=axis.protocols), axis


def _memory_bytes(world: World) -> int:
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.ranks_per_node


def _source(world: World) -> str:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    threads = f", {torch.get_num_threads()} threads a rank" if world.device.type == "cpu" else ""
    day = time.strftime("%Y-%m-%d")
    return f"python -m autopar calibrate, {name}, {world.ranks} ranks{threads}, torch {torch.__version__}, {day}"


def measurement_names(world: World) -> Sequence[str]:
    """The names that `report` will be told, in order: for a progress bar."""
    dtypes = CPU_DTYPES if world.device.type == "cpu" else tuple(DTYPES)
    compute = ["memory-bound ops", *(f"matmul {name}" for name in dtypes), "attention", "convolution"]
    return compute + (list(COLLECTIVES) if world.ranks > 1 else [])
