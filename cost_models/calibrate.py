"""Measures the machine it runs on and writes a hardware profile with the residuals of the fit.

Alone it measures one device; launched by torchrun, every rank measures at the same time, as in training, and the
collectives of the world are measured too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
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
    OverlapSample,
    Sample,
    ViewSample,
    axis_residuals,
    device_residuals,
    fit_axis,
    fit_device,
    fit_overlap,
)
from autopar.cost_models.hardware import (
    AxisLinks,
    HardwareProfile,
    axis_links,
    convolution_kind,
    load_profile,
    profile_for_device_name,
)
from autopar.cost_models.kernel_table import KERNELS, ROWS, Shapes, bound_kernel
from autopar.cost_models.measuring import Effort, Report, World, usual_seconds, usual_seconds_together

MATMULS = ((64, 64, 64), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 1024, 256), (2048, 256, 512),
           (32, 512, 2048), (1024, 64, 1024))  # fmt: skip
LARGE_MATMULS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 16384, 2048))
MOVED_ELEMENTS = (2**8, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22)  # of a float32 addition: three times the bytes
ATTENTIONS = (
    (1, 4, 128, 32),
    (8, 3, 65, 64),
    (4, 4, 128, 64),
    (4, 8, 256, 32),
    (2, 8, 512, 64),
)  # batch, heads, length, head_dim
CONVOLUTIONS = (
    (4, 16, 32, 32, 3, 1),
    (8, 64, 64, 16, 3, 1),
    (2, 128, 128, 16, 3, 1),
    (8, 64, 256, 16, 1, 1),
    (2, 3, 32, 64, 3, 1),
    (8, 64, 64, 32, 3, 64),
    (4, 64, 64, 16, 7, 64),
)
"""Batch, channels in, channels out, side, side of the filters, groups."""
MESSAGE_BYTES = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_DTYPES = ("float32", "float64", "bfloat16", "float16")
ROUNDS = 40
USUAL_S = 60.0
COMPUTE_SHARE, COLLECTIVES_SHARE = 0.4, 0.3  # of the time; the rest is for what collectives hide
VIEWS_REPEATS = 25
WORK_SIZE, OVERLAP_REPEATS, BURST, WINDOWS = 384, 12, 4, (1, 2, 4, 8)
OVERLAPPED = (("all_reduce", 2**12), ("all_reduce", 2**17), ("all_gather", 2**17))
LEAST_S = 1e-5
SMALL_BYTES, SMALL_REPEATS = 2**21, 8  # messages of this size and more: once a round


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
        timed = measure_collectives(world, Effort(ROUNDS, COLLECTIVES_SHARE * most_s), report)
        if world.device.type == "cpu":  # the processors that carry messages are those that compute
            share = 1 - COMPUTE_SHARE - COLLECTIVES_SHARE
            overlap, after_s = fit_overlap(measure_overlap(world, Effort(ROUNDS, share * most_s), report))
            profile = replace(profile, overlap=overlap, overlap_after_s=after_s)
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
    seconds = usual_seconds([case.call for case in cases], world, effort, _round_of("computation", report))
    timed = [case.sample(spent) for case, spent in zip(cases, seconds, strict=True)]
    return ComputeSamples.of(timed)


def measure_collectives(world: World, effort: Effort, report: Report) -> tuple[CollectiveSample, ...]:
    """Time every collective that the backend has, over the whole world: what it adds to the work of all ranks.

    Several in a row, each behind some work, as in a step: ranks come to them some time apart, and the one that waits
    has to be woken up. All that is part of the price.
    """
    cases = [(case, size) for kind in COLLECTIVES for size in MESSAGE_BYTES if (case := _collective(world, kind, size))]
    counts = [SMALL_REPEATS if size < SMALL_BYTES else 1 for _, size in cases]
    work = _work(world)
    chains = [partial(_behind_work, work, case.call, count) for (case, _), count in zip(cases, counts, strict=True)]
    calls = [partial(_behind_work, work, _nothing, SMALL_REPEATS), *chains]
    worked_s, *spent = usual_seconds_together(calls, world, effort, _round_of("collectives", report))
    samples = (
        case.sample(max(LEAST_S, seconds / count - worked_s / SMALL_REPEATS))
        for (case, _), count, seconds in zip(cases, counts, spent, strict=True)
    )
    return tuple(item for item in samples if isinstance(item, CollectiveSample))


def measure_overlap(world: World, effort: Effort, report: Report) -> OverlapSample:
    """What computation hides of collectives on processors that do both, by how much of it passes until they are waited
    for: a thread that carries messages is woken up, and then waits for its turn."""
    work, starts = _work(world), [_starts(world, size)[kind] for kind, size in OVERLAPPED]
    calls = [partial(_behind_work, work, _nothing, OVERLAP_REPEATS)]
    calls += [partial(_behind_work, work, partial(_waited, start), OVERLAP_REPEATS) for start in starts]
    calls += [partial(_waited_late, work, start, OVERLAP_REPEATS) for start in starts]
    for window in WINDOWS:
        calls.append(partial(_behind_work, work, _nothing, OVERLAP_REPEATS * window))
        calls += [partial(_waited_soon, work, start, window) for start in starts]
    spent = np.array(usual_seconds_together(calls, world, effort, _round_of("overlap", report)))
    count = len(starts)
    added_s = spent[1 : 1 + count].sum() - count * spent[0]
    late_s = spent[1 + count : 1 + 2 * count].sum() - count * spent[0]
    soon = spent[1 + 2 * count :].reshape(len(WINDOWS), 1 + count)
    soon_s = soon[:, 1:].sum(axis=1) - count * soon[:, 0]
    windows_s = soon[:, 0] / OVERLAP_REPEATS
    return OverlapSample(float(added_s), float(late_s), tuple(zip(windows_s.tolist(), soon_s.tolist(), strict=True)))


def _nothing() -> None:
    pass


def _behind_work(work: Callable[[], object], call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()
        call()


def _waited_late(work: Callable[[], object], start: Callable[[], torch.Tensor], count: int) -> None:
    """As the sums of gradients are: some at a time, waited for at the end."""
    started = []
    for _ in range(count // BURST):
        started += [start() for _ in range(BURST)]
        _behind_work(work, _nothing, BURST)
    for item in started:
        torch.ops._c10d_functional.wait_tensor(item)


def _waited_soon(work: Callable[[], object], start: Callable[[], torch.Tensor], window: int) -> None:
    """As parameters are gathered: one at a time, waited for after some work."""
    for _ in range(OVERLAP_REPEATS):
        started = start()
        _behind_work(work, _nothing, window)
        torch.ops._c10d_functional.wait_tensor(started)


def _work(world: World) -> Callable[[], object]:
    """What a rank computes before each collective."""
    left, right = (torch.rand(WORK_SIZE, WORK_SIZE, device=world.device) for _ in range(2))
    return lambda: torch.relu(torch.mm(left, right))


def measurement_names(world: World) -> Sequence[str]:
    """The names that `report` will be told, in order: for a progress bar."""
    measured = ["computation", *(["collectives"] if world.ranks > 1 else [])]
    if world.ranks > 1 and world.device.type == "cpu":
        measured.append("overlap")
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
    for filtered in CONVOLUTIONS:
        yield from _convolution(world, dtype, filtered)
    if on_cpu:
        yield _views(world)
        yield from (case for name in KERNELS for rows in ROWS if (case := _kernel(world, name, rows)))
    else:
        yield _host_copy(world, 2**26)


def _move(world: World, elements: int) -> Case:
    one, other = (torch.ones(elements, device=world.device) for _ in range(2))
    return Case(lambda: torch.add(one, other), lambda seconds: MoveSample(12 * elements, seconds))


def _views(world: World) -> Case:
    """Views of every usual kind, called as an emitted graph calls them."""
    value, views = torch.ones(4, 6, 8, device=world.device), torch.ops.aten

    def call() -> None:
        for _ in range(VIEWS_REPEATS):
            views.view.default(value, [24, 8])
            views.permute.default(value, [1, 0, 2])
            views.unsqueeze.default(value, 0)
            views.slice.Tensor(value, 0, 1, 3)

    return Case(call, lambda seconds: ViewSample(seconds / (4 * VIEWS_REPEATS)))


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
    """Heads lie in memory as projections leave them. autopar's op where it is imported, else PyTorch's."""
    batch, heads, length, head_dim = sizes
    flat = (torch.randn(batch, length, heads, head_dim, device=world.device).to(DTYPES[name]) for _ in range(3))
    query, key, value = (item.transpose(1, 2).requires_grad_() for item in flat)
    causal, own = mask == "causal", getattr(torch.ops.autopar, "attention", None)
    how = (None, None, 0.0, causal, None, 0, [0] * 4, [batch, heads, length, length])

    def forward() -> torch.Tensor:
        if own is not None:
            return cast(torch.Tensor, own.default(query, key, value, *how)[0])
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

    yield Case(torch.no_grad()(forward), lambda seconds: AttentionSample(name, "forward", sizes, seconds, mask))
    output = forward()
    ones = torch.ones_like(output)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(output, (query, key, value), ones, retain_graph=True)

    yield Case(backward, lambda seconds: AttentionSample(name, "backward", sizes, seconds, mask))


def _convolution(world: World, name: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    batch, inner, outer, side, filter_side, groups = sizes
    image = torch.randn(batch, inner, side, side, device=world.device).to(DTYPES[name])
    weight = torch.randn(outer, inner // groups, filter_side, filter_side, device=world.device).to(DTYPES[name])
    how = (None, [1, 1], [filter_side // 2] * 2, [1, 1], False, [0, 0], groups)
    output = torch.ops.aten.convolution.default(image, weight, *how)
    flops = 2.0 * output.numel() * weight[0].numel()
    moved = sum(item.nbytes for item in (image, weight, output))
    kinds = [convolution_kind(direction, groups, filter_side**2) for direction in ("forward", "backward")]

    def backward() -> tuple[torch.Tensor, ...]:
        grads: tuple[torch.Tensor, ...] = torch.ops.aten.convolution_backward.default(
            output, image, weight, *how, [True, True, False]
        )
        return grads

    yield Case(
        lambda: torch.ops.aten.convolution.default(image, weight, *how),
        lambda seconds: ConvolutionSample(name, flops, moved, seconds, kinds[0]),
    )
    both = moved + image.nbytes + weight.nbytes
    yield Case(backward, lambda seconds: ConvolutionSample(name, 2 * flops, both, seconds, kinds[1]))


def _collective(world: World, kind: str, size: int) -> Case | None:
    """One collective, or None if the backend does not have it."""
    elements = _elements(world, size)
    whole, other = (torch.ones(elements, device=world.device) for _ in range(2))
    call = partial(_exchange, world, whole, other) if kind == "send" else partial(_waited, _starts(world, size)[kind])
    try:
        call()
    except (RuntimeError, ValueError):  # the backend's, on every rank alike, before anything is sent
        return None
    return Case(call, lambda seconds: CollectiveSample(kind, 4 * elements, seconds))


def _elements(world: World, size: int) -> int:
    """Of float32 in about `size` bytes: as many for each rank."""
    return max(world.ranks, size // 4 // world.ranks * world.ranks)


def _starts(world: World, size: int) -> Mapping[str, Callable[[], torch.Tensor]]:
    """By kind, what starts a collective of `size` bytes as an emitted graph does."""
    assert world.group is not None
    ops, name, elements = torch.ops._c10d_functional, world.group.group_name, _elements(world, size)
    whole = torch.ones(elements, device=world.device)
    part = torch.ones(elements // world.ranks, device=world.device)
    splits = [elements // world.ranks] * world.ranks
    return {
        "all_reduce": lambda: ops.all_reduce_(whole, "sum", name),  # in place: its copy has a price of its own
        "all_gather": lambda: ops.all_gather_into_tensor(part, world.ranks, name),
        "reduce_scatter": lambda: ops.reduce_scatter_tensor(whole, "sum", world.ranks, name),
        "all_to_all": lambda: ops.all_to_all_single(whole, splits, splits, name),
        "broadcast": lambda: ops.broadcast_(whole, 0, name),
    }


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
