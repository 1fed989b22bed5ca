"""Measures the machine it runs on and writes a hardware profile with the residuals of the fit.

Alone it measures one device; launched by torchrun, every rank measures at the same time, as in training, and the
collectives of the world are measured too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional

from autopar.cost_models.collectives import COLLECTIVES
from autopar.cost_models.compute import Mask
from autopar.cost_models.fitting import (
    AttentionSample,
    CollectiveSample,
    ComputeSamples,
    ConvolutionSample,
    KernelSample,
    MatmulSample,
    MoveSample,
    Sample,
    axis_residuals,
    device_residuals,
    fit_axis,
    fit_device,
    fit_overlap,
)
from autopar.cost_models.hardware import AxisLinks, HardwareProfile, axis_links, load_profile, profile_for_device_name
from autopar.cost_models.kernel_table import KERNELS, ROWS, Shapes, bound_kernel
from autopar.cost_models.measuring import Effort, Report, World, least_seconds, least_seconds_together

MATMULS = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 1024, 256), (2048, 256, 512),
           (32, 512, 2048), (1024, 64, 1024))  # fmt: skip
LARGE_MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 16384, 2048))
MOVED_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)  # of a float32 addition: three times the bytes
ATTENTIONS = ((1, 4, 128, 32), (4, 4, 128, 64), (4, 8, 256, 32), (2, 8, 512, 64))  # batch, heads, length, head_dim
CONVOLUTIONS = ((4, 16, 32, 32), (8, 32, 64, 16))  # batch, channels in, channels out, side; 3 by 3
MESSAGE_BYTES = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_DTYPES = ("float32", "float64", "bfloat16", "float16")
ROUNDS = 40
USUAL_S = 60.0
COMPUTE_SHARE = 0.6  # of the time, for computation; the rest is for collectives
SMALL_BYTES, SMALL_REPEATS = 2**20, 3  # messages of this size and more: once a round


@dataclass(frozen=True, slots=True)
class Case:
    """A call to time, and the sample of its seconds."""

    call: Callable[[], object]
    sample: Callable[[float], Sample]


def calibrate(
    world: World,
    *,
    base: HardwareProfile | None = None,
    most_s: float = USUAL_S,
    report: Report = lambda _: None,
) -> HardwareProfile:
    """A profile of this machine: `base` with everything replaced that could be measured. The same on every rank.

    After `most_s` seconds no other round of measurements begins.
    """
    start = base or base_profile(world.device)
    samples = measure_compute(world, Effort(ROUNDS, COMPUTE_SHARE * most_s), report)
    device = replace(fit_device(start.device, samples), memory_bytes=_memory_bytes(world), source=_source(world))
    residuals = device_residuals(device, samples)
    profile = replace(start, name=f"{device.name}-measured", device=device, source=_source(world))
    if world.ranks > 1:
        profile = replace(profile, ranks_per_node=world.ranks_per_node)
        axis = axis_links(profile, (world.ranks,))[0]
        timed = measure_collectives(world, Effort(ROUNDS, (1 - COMPUTE_SHARE) * most_s), report)
        if world.device.type == "cpu":  # the processors that carry messages are those that compute
            profile = replace(profile, overlap=fit_overlap(timed))
        profile, fitted = _with_axis(profile, fit_axis(axis, timed), world)
        residuals |= axis_residuals(fitted, timed)
    return replace(profile, residuals=residuals)


def base_profile(device: torch.device) -> HardwareProfile:
    """The shipped profile nearest to a device: by its name, else `h100` for an unknown GPU."""
    if device.type == "cpu":
        return load_profile("cpu")
    return profile_for_device_name(torch.cuda.get_device_name(device)) or load_profile("h100")


def measure_compute(world: World, effort: Effort, report: Report) -> ComputeSamples:
    """Time matrix products, copies, attention, convolutions and, on a CPU, single ops; every rank runs at once.

    On a GPU the time of a single op is mostly that of its launch and of the wait for it, so there the ops of one kernel
    keep the price of what they move.
    """
    cases = list(_compute_cases(world))
    seconds = least_seconds([case.call for case in cases], world, effort, _round_of("computation", report))
    timed = [case.sample(spent) for case, spent in zip(cases, seconds, strict=True)]
    return ComputeSamples.of(timed)


def measure_collectives(world: World, effort: Effort, report: Report) -> tuple[CollectiveSample, ...]:
    """Time every collective that the backend has, over the whole world; the slowest rank's time counts."""
    cases = [(case, size) for kind in COLLECTIVES for size in MESSAGE_BYTES if (case := _collective(world, kind, size))]
    order = [index for index, (_, size) in enumerate(cases) for _ in range(SMALL_REPEATS if size < SMALL_BYTES else 1)]
    calls = [cases[index][0].call for index in order]
    seconds = least_seconds_together(calls, world, effort, _round_of("collectives", report))
    found: dict[int, list[tuple[float, float]]] = {}
    for index, spent in zip(order, seconds, strict=True):
        found.setdefault(index, []).append(spent)
    samples = (cases[index][0].sample(min(spent for spent, _ in found[index])) for index in found)
    timed = tuple(item for item in samples if isinstance(item, CollectiveSample))
    worked = [min(worked for _, worked in found[index]) for index in found]
    return tuple(replace(item, processor_s=spent) for item, spent in zip(timed, worked, strict=True))


def measurement_names(world: World) -> Sequence[str]:
    """The names that `report` will be told, in order: for a progress bar."""
    measured = ("computation", "collectives") if world.ranks > 1 else ("computation",)
    return [_round_name(what, number) for what in measured for number in range(ROUNDS)]


def _round_of(what: str, report: Report) -> Callable[[int], None]:
    return lambda number: report(_round_name(what, number))


def _round_name(what: str, number: int) -> str:
    return f"{what}, round {number + 1} of {ROUNDS}"


def _compute_cases(world: World) -> Iterator[Case]:
    on_cpu = world.device.type == "cpu"
    yield from (_move(world, elements) for elements in MOVED_ELEMENTS)
    names = CPU_DTYPES if on_cpu else tuple(DTYPES)
    shapes = MATMULS if on_cpu else (*MATMULS, *LARGE_MATMULS)
    for name in names:
        few = shapes if name == names[0] or not on_cpu else shapes[:2]
        yield from (_matmul(world, name, shape) for shape in few)
    dtype = names[0] if on_cpu else "bfloat16"
    for sizes in ATTENTIONS:
        yield from _attention(world, dtype, sizes, "causal")
        yield from _attention(world, dtype, sizes, "none")
    yield from (_convolution(world, dtype, sizes) for sizes in CONVOLUTIONS)
    if on_cpu:
        yield from (case for name in KERNELS for rows in ROWS if (case := _kernel(world, name, rows)))
    else:
        yield _host_copy(world, 2**26)


def _move(world: World, elements: int) -> Case:
    one, other = (torch.ones(elements, device=world.device) for _ in range(2))
    return Case(lambda: torch.add(one, other), lambda seconds: MoveSample(12 * elements, seconds))


def _kernel(world: World, name: str, rows: int) -> Case | None:
    kernel = bound_kernel(name, Shapes(rows, world.device))
    if kernel is None:
        return None
    return Case(kernel.call, lambda seconds: KernelSample(name, kernel.moved_bytes, seconds))


def _host_copy(world: World, moved_bytes: int) -> Case:
    here = torch.ones(moved_bytes, dtype=torch.uint8, device=world.device)
    there = torch.empty(moved_bytes, dtype=torch.uint8, pin_memory=True)
    call = lambda: there.copy_(here, non_blocking=True)  # noqa: E731
    return Case(call, lambda seconds: MoveSample(moved_bytes, seconds, to_host=True))


def _matmul(world: World, name: str, shape: tuple[int, int, int]) -> Case:
    m, n, k = shape
    left = torch.randn(m, k, device=world.device).to(DTYPES[name])
    right = torch.randn(k, n, device=world.device).to(DTYPES[name])
    return Case(lambda: torch.mm(left, right), lambda seconds: MatmulSample(name, m, n, k, seconds))


def _attention(world: World, name: str, sizes: tuple[int, int, int, int], mask: Mask) -> Iterator[Case]:
    query, key, value = (torch.randn(sizes, device=world.device).to(DTYPES[name]).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=mask == "causal")

    yield Case(forward, lambda seconds: AttentionSample(name, "forward", sizes, seconds, mask))
    output = forward()
    ones = torch.ones_like(output)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, (query, key, value), ones, retain_graph=True)

    yield Case(backward, lambda seconds: AttentionSample(name, "backward", sizes, seconds, mask))


def _convolution(world: World, name: str, sizes: tuple[int, int, int, int]) -> Case:
    batch, inner, outer, side = sizes
    image = torch.randn(batch, inner, side, side, device=world.device).to(DTYPES[name])
    weight = torch.randn(outer, inner, 3, 3, device=world.device).to(DTYPES[name])
    flops = 2.0 * batch * inner * outer * side * side * 9
    moved = int((image.numel() * (1 + outer / inner) + weight.numel()) * image.element_size())
    call = lambda: functional.conv2d(image, weight, padding=1)  # noqa: E731
    return Case(call, lambda seconds: ConvolutionSample(name, flops, moved, seconds))


def _collective(world: World, kind: str, size: int) -> Case | None:
    """One collective, or None if the backend does not have it."""
    elements = max(world.ranks, size // 4 // world.ranks * world.ranks)
    whole = torch.ones(elements, device=world.device)
    part = torch.ones(elements // world.ranks, device=world.device)
    other = torch.ones_like(whole)
    assert dist.group.WORLD is not None
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    splits = [elements // world.ranks] * world.ranks
    starts: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: ops.all_reduce_(whole, "sum", name),  # in place: its copy has a price of its own
        "all_gather": lambda: ops.all_gather_into_tensor(part, world.ranks, name),
        "reduce_scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", world.ranks, name),
        "all_to_all": lambda: ops.all_to_all_single(whole, splits, splits, name),
        "broadcast": lambda: ops.broadcast_(whole, 0, name),
    }
    calls: dict[str, Callable[[], object]] = {kind: partial(_waited, start) for kind, start in starts.items()}
    calls["send"] = lambda: _exchange(world, whole, other)
    try:
        calls[kind]()
    except (RuntimeError, ValueError):  # the backend's, on every rank alike, before anything is sent
        return None
    return Case(calls[kind], lambda seconds: CollectiveSample(kind, 4 * elements, seconds))


def _waited(start: Callable[[], torch.Tensor]) -> object:
    return torch.ops._c10d_functional.wait_tensor(start())


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
