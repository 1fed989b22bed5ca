"""Measurements in, hardware numbers out: fits the constants of a device and its links to timed samples.

The prices themselves are the model that is fitted, so a fitted profile and its residuals speak of the same formulas.
Every fit minimizes soft absolute errors of log(predicted / measured): each sample counts the same, outliers little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.compute import (
    Direction,
    Mask,
    attention_seconds,
    convolution_seconds,
    host_copy_seconds,
    kernel_price,
    matmul_seconds,
    memory_bound_seconds,
)
from autopar.cost_models.hardware import AxisLinks, Device, KernelCost, MatmulCurve

_PULL = 0.03  # a weak pull to the start, for what no sample decides
_SOFT = 0.2  # errors of log(predicted / measured) beyond this count less
_CACHE_START_BYTES = 4e6
MOST_SHARE = 50.0  # of a link's rate that a collective is taken to reach: one that adds nothing says no more
HEADROOM = 1.05  # a fitted peak lies this far above the best rate measured, so that efficiencies stay below 1


@dataclass(frozen=True, slots=True)
class MatmulSample:
    """A timed matrix product."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MoveSample:
    """A timed memory-bound op, or a copy to the host."""

    moved_bytes: int
    seconds: float
    to_host: bool = False


@dataclass(frozen=True, slots=True)
class ViewSample:
    """A timed op that runs no kernel."""

    seconds: float


@dataclass(frozen=True, slots=True)
class KernelSample:
    """A timed op, by its name in `Device.kernels`."""

    op: str
    moved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AttentionSample:
    """A timed attention in one direction: (batch, heads, length, head_dim)."""

    dtype: str
    direction: Direction
    sizes: tuple[int, int, int, int]
    seconds: float
    mask: Mask = "causal"


@dataclass(frozen=True, slots=True)
class ConvolutionSample:
    """A timed convolution."""

    dtype: str
    flops: float
    moved_bytes: int
    seconds: float
    kind: str = "forward"


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """A timed collective over the whole of one axis."""

    kind: str
    bytes_: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OverlapSample:
    """What collectives add to the seconds of computation: where each is waited for at once; where all are at the end;
    where each is after so much computation: (seconds of it, what they add)."""

    waited_at_once_s: float
    waited_late_s: float
    waited_after: tuple[tuple[float, float], ...]


Sample: TypeAlias = (
    MatmulSample | MoveSample | ViewSample | KernelSample | AttentionSample | ConvolutionSample | CollectiveSample
)


@dataclass(frozen=True, slots=True)
class ComputeSamples:
    """Everything measured on one device."""

    matmuls: tuple[MatmulSample, ...]
    moves: tuple[MoveSample, ...]
    attentions: tuple[AttentionSample, ...] = ()
    convolutions: tuple[ConvolutionSample, ...] = ()
    host_copies: tuple[MoveSample, ...] = ()
    kernels: tuple[KernelSample, ...] = ()
    views: tuple[ViewSample, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> ComputeSamples:
        """Samples of all kinds, sorted."""
        return cls(
            tuple(item for item in samples if isinstance(item, MatmulSample)),
            tuple(item for item in samples if isinstance(item, MoveSample) and not item.to_host),
            tuple(item for item in samples if isinstance(item, AttentionSample)),
            tuple(item for item in samples if isinstance(item, ConvolutionSample)),
            tuple(item for item in samples if isinstance(item, MoveSample) and item.to_host),
            tuple(item for item in samples if isinstance(item, KernelSample)),
            tuple(item for item in samples if isinstance(item, ViewSample)),
        )


def fit_device(base: Device, samples: ComputeSamples) -> Device:
    """The device with every constant that the samples speak of; dtypes without a sample lose their price."""
    device = _fit_moves(base, samples.moves)
    dtypes = sorted({sample.dtype for sample in samples.matmuls})
    found = {dtype: _fit_matmul(device, dtype, samples.matmuls) for dtype in dtypes}
    device = replace(
        device,
        peak_flops={dtype: peak for dtype, (peak, _) in found.items()},
        matmul={dtype: curve for dtype, (_, curve) in found.items()},
    )
    for direction in ("forward", "backward"):
        mine = [item for item in samples.attentions if item.direction == direction and item.mask == "none"]
        device = _fit_share(device, f"attention_{direction}_efficiency", mine, _attention_price)
    causal = [item for item in samples.attentions if item.mask == "causal"]
    device = _fit_share(device, "causal_fraction", causal, _attention_price, least=0.5)
    device = _fit_convolutions(device, samples.convolutions)
    names = sorted({item.op for item in samples.kernels})
    device = replace(device, kernels={name: _fit_kernel(device, name, samples.kernels) for name in names})
    if samples.views:
        device = replace(device, view_s=float(np.mean([item.seconds for item in samples.views])))
    if samples.host_copies:
        rate = float(np.median([item.moved_bytes / item.seconds for item in samples.host_copies]))
        device = replace(device, host_bytes_per_s=rate)
    return device


def fit_axis(axis: AxisLinks, samples: Sequence[CollectiveSample]) -> AxisLinks:
    """The axis with the latency, the rates and the protocols' start that the samples show.

    The link between nodes is fitted if the axis crosses nodes, else the link inside.
    """
    if not samples:
        return axis

    def moved(logs: npt.NDArray[np.float64]) -> AxisLinks:
        latency, rate, start, *shares = (float(value) for value in np.exp(logs))
        link = axis.inter if axis.nodes > 1 else axis.intra
        fitted = replace(
            link,
            latency_s=link.latency_s * latency,
            bytes_per_s=link.bytes_per_s * rate,
            point_to_point_fraction=min(1.0, link.point_to_point_fraction * shares[0]),
            all_to_all_fraction=min(MOST_SHARE, shares[1]),
            all_gather_fraction=min(MOST_SHARE, shares[2]),
            reduce_scatter_fraction=min(MOST_SHARE, shares[3]),
            broadcast_fraction=min(MOST_SHARE, shares[4]),
        )
        protocols = tuple(replace(item, base_s=item.base_s * start) for item in axis.protocols)
        if axis.nodes > 1:
            return replace(axis, protocols=protocols, inter=fitted)
        return replace(axis, protocols=protocols, intra=fitted)

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        tried = moved(logs)
        fits = [_log_ratio(collective_seconds(item.kind, item.bytes_, tried), item.seconds) for item in samples]
        return [*fits, *(_PULL * logs)]

    return moved(_least(errors, 8))


def fit_overlap(sample: OverlapSample) -> tuple[float, float]:
    """(The share of collectives that computation hides where there is enough of it, the seconds of computation after
    which half of that is hidden)."""
    if sample.waited_at_once_s <= 0:
        return 0.0, 0.0

    def hidden(added_s: float) -> float:
        return min(1.0, max(0.0, 1 - added_s / sample.waited_at_once_s))

    overlap = hidden(sample.waited_late_s)
    before_s, before = 0.0, 0.0
    for window_s, added_s in sample.waited_after:
        share = hidden(added_s)
        if share >= overlap / 2:
            return overlap, before_s + (window_s - before_s) * (overlap / 2 - before) / max(share - before, 1e-9)
        before_s, before = window_s, share
    return overlap, before_s


def device_residuals(device: Device, samples: ComputeSamples) -> dict[str, float]:
    """Median |predicted / measured - 1| of each kind of op."""
    ratios: dict[str, list[float]] = {}
    for item in samples.matmuls:
        price = matmul_seconds(device, item.dtype, 1, item.m, item.n, item.k)
        ratios.setdefault(f"matmul {item.dtype}", []).append(float(price) / item.seconds)
    for move in samples.moves:
        ratios.setdefault("memory-bound", []).append(
            float(memory_bound_seconds(device, move.moved_bytes)) / move.seconds
        )
    for kernel in samples.kernels:
        price = kernel_price(device, kernel.op, kernel.moved_bytes).value
        ratios.setdefault("single ops", []).append(float(price) / kernel.seconds)
    for attention in samples.attentions:
        price = _attention_price(device, attention)
        ratios.setdefault(f"attention {attention.direction}", []).append(price / attention.seconds)
    for convolution in samples.convolutions:
        price = _convolution_price(device, convolution)
        ratios.setdefault("convolution", []).append(price / convolution.seconds)
    for copy in samples.host_copies:
        ratios.setdefault("host copy", []).append(float(host_copy_seconds(device, copy.moved_bytes)) / copy.seconds)
    return {name: _median_error(values) for name, values in ratios.items()}


def axis_residuals(axis: AxisLinks, samples: Sequence[CollectiveSample]) -> dict[str, float]:
    """Median |predicted / measured - 1| of each kind of collective."""
    ratios: dict[str, list[float]] = {}
    for item in samples:
        ratios.setdefault(item.kind, []).append(float(collective_seconds(item.kind, item.bytes_, axis)) / item.seconds)
    return {name: _median_error(values) for name, values in ratios.items()}


def _fit_moves(device: Device, samples: Sequence[MoveSample]) -> Device:
    def moved(logs: npt.NDArray[np.float64]) -> Device:
        rate, launch, cache, cache_rate = (float(value) for value in np.exp(logs))
        memory_bytes_per_s = device.memory_bytes_per_s * rate
        return replace(
            device,
            memory_bytes_per_s=memory_bytes_per_s,
            launch_s=max(1e-9, device.launch_s * launch),
            cache_bytes=_CACHE_START_BYTES * cache,
            cache_bytes_per_s=memory_bytes_per_s * device.memory_efficiency * max(1.0, 2 * cache_rate),
        )

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        tried = moved(logs)
        fits = [_log_ratio(memory_bound_seconds(tried, item.moved_bytes), item.seconds) for item in samples]
        return [*fits, *(_PULL * logs)]

    return moved(_least(errors, 4)) if samples else device


def _fit_kernel(device: Device, op: str, samples: Sequence[KernelSample]) -> KernelCost:
    """The launch and the rate of one op."""
    mine = [item for item in samples if item.op == op]
    least, most = min(mine, key=lambda item: item.moved_bytes), max(mine, key=lambda item: item.moved_bytes)
    start = KernelCost(max(1e-9, least.seconds), most.moved_bytes / most.seconds)

    def moved(logs: npt.NDArray[np.float64]) -> KernelCost:
        launch, rate = (float(value) for value in np.exp(logs))
        return KernelCost(start.launch_s * launch, start.bytes_per_s * rate)

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        tried = replace(device, kernels={op: moved(logs)})
        fits = [_log_ratio(kernel_price(tried, op, item.moved_bytes).value, item.seconds) for item in mine]
        return [*fits, *(_PULL * logs)]

    return moved(_least(errors, 2))


def _fit_matmul(device: Device, dtype: str, samples: Sequence[MatmulSample]) -> tuple[float, MatmulCurve]:
    """The peak and the curve of one dtype; the peak is the label's unless the device is measured above it."""
    mine = [item for item in samples if item.dtype == dtype]
    best = max(2 * item.m * item.n * item.k / item.seconds for item in mine)
    label = device.peak_flops.get(dtype, 0.0)
    peak = HEADROOM * best if device.name == "cpu" or label < best else label
    tile = device.matmul[dtype].tile if dtype in device.matmul else 1
    start = MatmulCurve(min(1.0, best / peak), 1e-6, tile)

    def moved(logs: npt.NDArray[np.float64]) -> MatmulCurve:
        efficiency, ramp = start.efficiency * float(np.exp(logs[0])), start.ramp_s * float(np.exp(logs[1]))
        return replace(start, efficiency=min(1.0, max(1e-4, efficiency)), ramp_s=ramp)

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        tried = replace(
            device,
            peak_flops={**device.peak_flops, dtype: peak},
            matmul={**device.matmul, dtype: moved(logs)},
        )
        return [_log_ratio(matmul_seconds(tried, dtype, 1, item.m, item.n, item.k), item.seconds) for item in mine]

    return peak, moved(_least(errors, 2))


def _fit_share(
    device: Device, field: str, samples: Sequence[Any], price: Callable[[Device, Any], float], *, least: float = 1e-4
) -> Device:
    """Fit one fraction, at least `least`, to samples of one op."""
    from scipy.optimize import minimize_scalar  # slow to import, and for calibration alone

    known = [item for item in samples if item.dtype in device.peak_flops]
    if not known:
        return device

    def moved(log: float) -> Device:
        changed: dict[str, Any] = {field: math.exp(log)}
        return replace(device, **changed)

    def errors(log: float) -> float:
        ratios = np.array([_log_ratio(price(moved(log), item), item.seconds) for item in known]) / _SOFT
        return float(np.sum(np.sqrt(1 + ratios**2)))

    return moved(float(minimize_scalar(errors, bounds=(math.log(least), 0.0), method="bounded").x))


def _attention_price(device: Device, item: AttentionSample) -> float:
    batch, heads, length, head_dim = item.sizes
    return float(
        attention_seconds(
            device, item.dtype, batch, heads, length, length, head_dim, direction=item.direction, mask=item.mask
        )
    )


def _convolution_price(device: Device, item: ConvolutionSample) -> float:
    return float(convolution_seconds(device, item.dtype, item.flops, item.moved_bytes, item.kind))


def _fit_convolutions(device: Device, samples: Sequence[ConvolutionSample]) -> Device:
    """The efficiency of those that are most efficient, and the share of it that each kind reaches."""
    found = {}
    for kind in sorted({item.kind for item in samples}):
        mine = [replace(item, kind="") for item in samples if item.kind == kind]
        found[kind] = _fit_share(device, "convolution_efficiency", mine, _convolution_price).convolution_efficiency
    if not found:
        return device
    best = max(found.values())
    return replace(
        device, convolution_efficiency=best, convolution_shares={kind: it / best for kind, it in found.items()}
    )


def _least(errors: Callable[[npt.NDArray[np.float64]], Sequence[float]], count: int) -> npt.NDArray[np.float64]:
    from scipy.optimize import least_squares

    found = least_squares(lambda logs: np.array(errors(logs)), np.zeros(count), loss="soft_l1", f_scale=_SOFT,
                          bounds=(-12, 12), diff_step=1e-3)  # fmt: skip
    return np.asarray(found.x, dtype=np.float64)


def _log_ratio(predicted: Any, measured: float) -> float:
    return math.log(float(predicted) / measured)


def _median_error(ratios: Sequence[float]) -> float:
    return float(np.median([abs(ratio - 1) for ratio in ratios]))
