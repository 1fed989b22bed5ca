"""Seconds of every op and of every collective, on the mesh that is planned for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from autopar.cost_models.collectives import collective_price, collective_seconds
from autopar.cost_models.compute import (
    Mask,
    attention_price,
    attention_work,
    convolution_price,
    host_copy_price,
    host_copy_seconds,
    host_step_price,
    kernel_price,
    matmul_price,
    memory_bound_price,
    memory_bound_seconds,
    optimizer_step_price,
)
from autopar.cost_models.formula import Priced, total
from autopar.cost_models.hardware import AxisLinks, Device, axis_links, convolution_kind, dtype_bytes
from autopar.errors import UnpricedError
from autopar.mesh import Mesh
from autopar.ops.dispatch import expected_copies
from autopar.planner.optimizer_state import Optimizer
from autopar.sharding.layout import REPLICATE, Layout, local_shape
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.reshard import reshard_steps
from autopar.sharding.rule import Dispatch
from autopar.sharding.strategies import Strategy, local_bytes
from autopar.sharding.windows import Halo, halo_rows

Seconds = npt.NDArray[np.float64]
Shapes = list[tuple[int, ...]]

EXPERTS_BACKWARD = "autopar.experts_backward.default"
COUNT_BYTES = 8  # of an int64: how many rows a rank sends another
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "transpose.int", "t.default", "permute.default",
        "expand.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "select.int",
        "slice.Tensor", "split.Tensor", "split_with_sizes.default", "chunk.default", "unbind.int", "alias.default",
        "detach.default", "as_strided.default", "narrow.default", "diagonal.default", "unfold.default",
        "view_as_real.default", "view_as_complex.default", "real.default", "imag.default", "movedim.int",
    )
)  # fmt: skip
"""Ops that return a view of their input: no kernel runs, no byte moves, so they take no time on the device."""


@dataclass(frozen=True)
class Prices:
    """Prices on one mesh, of a rank that computes at `speed`, a fraction of the device's own, for one of a step's
    `microbatches`: of what happens once a step it bears its share.

    Every op not named below has the price that was measured for it, or is memory-bound: it reads its inputs and writes
    its outputs.
    """

    mesh: Mesh
    speed: float = 1.0
    microbatches: int = 1
    form_traits: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # kept by `StrategyPrices`

    @cached_property
    def device(self) -> Device:
        return self.mesh.profile.device.at_speed(self.speed)

    @cached_property
    def axes(self) -> tuple[AxisLinks, ...]:
        return axis_links(self.mesh.profile, self.mesh.shape)

    def collective(self, kind: str, bytes_: float, axis: int) -> float:
        """Seconds of one step of a move over `axis`; `bytes_` as in `collective_seconds`.

        A "slice" copies one rank's part, a "copy" all of `bytes_`.
        """
        if self.mesh.shape[axis] == 1:
            return 0.0
        key = kind, bytes_, axis
        if key not in self._collectives:
            self._collectives[key] = self._collective(*key)
        return self._collectives[key]

    @cached_property
    def _collectives(self) -> dict[tuple[str, float, int], float]:
        """What was asked for so far: few sizes, asked for again and again."""
        return {}

    def _collective(self, kind: str, bytes_: float, axis: int) -> float:
        if kind in ("slice", "copy"):
            return self.copy(bytes_ / self.mesh.shape[axis] if kind == "slice" else bytes_)
        return float(collective_seconds(kind, bytes_, self.axes[axis]))

    def collective_prices(self, kind: str, bytes_: float, axis: int) -> list[Priced]:
        """What `collective` adds up."""
        if self.mesh.shape[axis] == 1:
            return []
        if kind in ("slice", "copy"):
            return [self.copy_price(bytes_ / self.mesh.shape[axis] if kind == "slice" else bytes_)]
        price = collective_price(kind, bytes_, self.axes[axis])
        return [] if price is None else [price]

    def op(self, call: OpCall, strategies: Sequence[Strategy]) -> Seconds:
        """Seconds of one op under each strategy, on the largest shard, called as it stands."""
        value = total(self.op_prices(call, strategies))
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (len(strategies),)).copy()

    def op_prices(self, call: OpCall, strategies: Sequence[Strategy]) -> list[Priced]:
        """What `op` adds up."""
        return [] if call.name in VIEWS else self._prices(call, *self._local_shapes(call, strategies))

    def moved_bytes(self, call: OpCall, strategies: Sequence[Strategy]) -> Seconds:
        """Bytes that one op reads and writes under each strategy, on the largest shard."""
        moved = _moved_bytes(call, *self._local_shapes(call, strategies))
        return np.broadcast_to(moved, (len(strategies),)).astype(np.float64)

    def _local_shapes(
        self, call: OpCall, strategies: Sequence[Strategy]
    ) -> tuple[list[Shapes | None], list[Shapes | None]]:
        inputs = [self._shapes(call.inputs, list(map(met_inputs, strategies)), index)
                  for index in range(len(call.inputs))]  # fmt: skip
        outputs = [self._shapes(call.outputs, [strategy.outputs for strategy in strategies], index)
                   for index in range(len(call.outputs))]  # fmt: skip
        return inputs, outputs

    def local_op(self, call: OpCall) -> float:
        """Seconds of one op of an emitted graph: a call whose shapes are those of one rank's shards.

        An emitted backward of experts that has nothing of its forward computes the first products anew.
        """
        if call.name in VIEWS:
            return 0.0
        inputs: list[Shapes | None] = [[spec.shape] for spec in call.inputs]
        outputs = [None if spec is None else [spec.shape] for spec in call.outputs]
        own = float(np.asarray(total(self._prices(call, inputs, outputs))).reshape(-1)[0])
        return own + self._first_products(call, inputs) if call.name == EXPERTS_BACKWARD else own

    def experts_again(self, call: OpCall, strategy: Strategy) -> float:
        """Seconds that the backward of a layer of experts takes longer if it reads nothing of its forward: the first
        products once more, and tokens that travel once more with their choices and scores."""
        seconds = self._first_products(call, self._local_shapes(call, [strategy])[0])
        for axis, rule in enumerate(strategy.rules):
            if rule.dispatch is not None:
                again = sum(call.inputs[place].nbytes for place in rule.dispatch.tensors[1:])
                row_bytes = rule.dispatch.row_bytes + again // max(1, call.inputs[0].shape[0])
                _, more, _ = self._sent(call, strategy, axis, replace(rule.dispatch, row_bytes=row_bytes))
                _, less, _ = self._sent(call, strategy, axis, rule.dispatch)
                seconds += self.collective("all_to_all", more, axis) - self.collective("all_to_all", less, axis)
        return seconds

    def _first_products(self, call: OpCall, inputs: list[Shapes | None]) -> float:
        name = str(_dtype(call)).removeprefix("torch.")
        prices = _experts(1, up_products=1, down_products=0)(self.device, name, call, inputs, [], None)
        return float(np.asarray(total(prices)).reshape(-1)[0])

    def kernel(self, moved_bytes: float) -> float:
        """Seconds of a kernel that reads and writes `moved_bytes` in all."""
        return float(memory_bound_seconds(self.device, moved_bytes))

    def copy(self, bytes_: float) -> float:
        """Seconds to copy a tensor in device memory."""
        return self.kernel(2.0 * bytes_)

    def host_copy(self, bytes_: float) -> float:
        """Seconds to copy a tensor to the host, or back: each direction has the link to itself."""
        return float(host_copy_seconds(self.device, bytes_))

    def copy_price(self, bytes_: float) -> Priced:
        """What `copy` gives the value of."""
        return replace(memory_bound_price(self.device, 2.0 * bytes_), label="copy")

    def _shapes(
        self, specs: Sequence[TensorSpec | None], layouts: Sequence[Sequence[Any]], index: int
    ) -> Shapes | None:
        spec = specs[index]
        if spec is None:
            return None
        return [local_shape(spec.shape, per_strategy[index], self.mesh.shape) for per_strategy in layouts]

    def _prices(self, call: OpCall, inputs: list[Shapes | None], outputs: list[Shapes | None]) -> list[Priced]:
        moved, dtype = _moved_bytes(call, inputs, outputs), _dtype(call)
        name = str(dtype).removeprefix("torch.")
        work = _WORK.get(call.name)
        if work is None or not dtype.is_floating_point:
            return [kernel_price(self.device, kernel_class(call), moved, name)]
        try:
            return work(self.device, name, call, inputs, outputs, moved)
        except UnpricedError as error:
            raise UnpricedError(f"{call.name}: {error.what}", where=error.where, fix=error.fix) from error

    def internal(self, call: OpCall, strategy: Strategy) -> float:
        """Seconds of the collectives inside a strategy's local forms."""
        return sum(
            times * self.collective(kind, bytes_, axis) for kind, bytes_, axis, times in self._inside(call, strategy)
        )

    def internal_prices(self, call: OpCall, strategy: Strategy) -> list[Priced]:
        """What `internal` adds up."""
        return [
            replace(price, times=times * price.times)
            for kind, bytes_, axis, times in self._inside(call, strategy)
            for price in self.collective_prices(kind, bytes_, axis)
        ]

    def _inside(self, call: OpCall, strategy: Strategy) -> list[tuple[str, float, int, int]]:
        """(kind, bytes, mesh axis, how many) of the collectives inside a strategy's local forms."""
        found: list[tuple[str, float, int, int]] = []
        for axis, rule in enumerate(strategy.rules):
            if rule.internal_bytes:
                found.append(("all_reduce", self._local_share(call, strategy, axis, rule.internal_bytes), axis, 1))
            if rule.halo is not None:
                found.append(("send", self._halo_bytes(call, strategy, axis, rule.halo), axis, rule.halo.rounds))
            if rule.ring is not None:
                pairs = ((call.inputs[index], strategy.inputs[index]) for index in rule.ring.tensors)
                sent = sum(local_bytes(spec, layout, self.mesh.shape) for spec, layout in pairs)
                found.append(("send", sent, axis, rule.ring.rounds * (self.mesh.shape[axis] - 1)))
            if rule.dispatch is not None:
                found += [("all_to_all", size, axis, 1) for size in self._sent(call, strategy, axis, rule.dispatch)]
        return [item for item in found if item[1] or item[0] != "send"]

    def _sent(self, call: OpCall, strategy: Strategy, axis: int, dispatch: Dispatch) -> tuple[float, float, float]:
        """Bytes of three all-to-alls: how many rows, the rows, the results; choices spread evenly over the ranks."""
        ranks = self.mesh.shape[axis]
        first = dispatch.tensors[0]
        rows = local_shape(call.inputs[first].shape, strategy.inputs[first], self.mesh.shape)[0]
        copies = rows * expected_copies(dispatch.choices, ranks)
        return COUNT_BYTES * ranks, copies * dispatch.row_bytes, copies * dispatch.returned_bytes

    def _halo_bytes(self, call: OpCall, strategy: Strategy, axis: int, halo: Halo) -> float:
        """What the rank in the middle receives of a neighbour, over one link."""
        rows = halo_rows(halo.window, self.mesh.shape[axis])
        spec, layout = call.inputs[halo.tensor], strategy.inputs[halo.tensor]
        others = tuple(1 if index == axis else ranks for index, ranks in enumerate(self.mesh.shape))
        share = local_bytes(spec, layout, others) / max(1, spec.nbytes)
        return rows * halo.row_bytes * share

    def _local_share(self, call: OpCall, strategy: Strategy, axis: int, bytes_: int) -> float:
        """The part of `bytes_` that one group along `axis` holds: other axes cut it as they cut the first output."""
        spec = call.outputs[0]
        if spec is None:
            return float(bytes_)
        others = tuple(1 if index == axis else ranks for index, ranks in enumerate(self.mesh.shape))
        return bytes_ * local_bytes(spec, strategy.outputs[0], others) / max(1, spec.nbytes)

    def optimizer(self, optimizer: Optimizer, spec: TensorSpec, layout: Layout) -> float:
        """Seconds of the optimizer's step for a parameter: on the part that a rank updates, and to gather the parts."""
        return float(total(self.optimizer_prices(optimizer, spec, layout)))

    def hosted_optimizer(self, optimizer: Optimizer, spec: TensorSpec, layout: Layout) -> float:
        """Seconds of the step of a parameter that lies on the host, where its state is too; parts that replicas have
        stepped are gathered on their devices."""
        cut = optimizer.layout(spec, layout, self.mesh.shape)
        own, held = (float(local_bytes(spec, item, self.mesh.shape)) for item in (cut, layout))
        state = float(optimizer.all_bytes(spec, layout, self.mesh.shape))
        seconds = float(host_step_price(self.device, own, own, state).value)
        gathers = self._gather_prices(optimizer, spec, layout)
        return seconds + (float(total(gathers)) + self.host_copy(own) + self.host_copy(held) if gathers else 0.0)

    def hosted_sum(self, bytes_: float) -> float:
        """Seconds that a microbatch bears of adding up gradients on the host: all but the first add theirs."""
        added = 1 - 1 / self.microbatches
        return added * float(host_step_price(self.device, bytes_, bytes_, 0.0).value) if added else 0.0

    def optimizer_prices(self, optimizer: Optimizer, spec: TensorSpec, layout: Layout) -> list[Priced]:
        """What `optimizer` adds up."""
        cut = optimizer.layout(spec, layout, self.mesh.shape)
        own = float(local_bytes(spec, cut, self.mesh.shape))
        state = float(optimizer.all_bytes(spec, layout, self.mesh.shape))
        away = float(optimizer.host_bytes(spec, layout, self.mesh.shape))
        found = [replace(optimizer_step_price(self.device, own, own, state), label="optimizer step")]
        if away:  # both ways at once: while the state of one parameter goes, that of another comes
            found.append(host_copy_price(self.device, away))
        return found + self._gather_prices(optimizer, spec, layout)

    def _gather_prices(self, optimizer: Optimizer, spec: TensorSpec, layout: Layout) -> list[Priced]:
        """Of gathering the parts of a parameter that its replicas have stepped."""
        cut = optimizer.layout(spec, layout, self.mesh.shape)
        steps = reshard_steps(spec, cut, layout, self.mesh.shape, self.collective) if cut != layout else ()
        found: list[Priced] = []
        for step in steps:
            found += self.move_prices(step.collective or "slice", step.bytes, step.axis, step.copied_bytes)
        return found

    def move_prices(self, kind: str, bytes_: float, axis: int, copied: float) -> list[Priced]:
        """Of one step of a move and of what it copies on the way."""
        own = self.collective_prices(kind, bytes_, axis)
        return own + self.collective_prices("copy", copied, axis) if copied else own


def kernel_class(call: OpCall) -> str:
    """The name under which a device has the measured cost of an op: without its overload, apart where it matters.

    What matters: whether a sum runs along rows or over them, and whether what is cloned lies in memory as its copy.
    """
    name = ".".join(call.name.split(".")[:2])
    first = call.inputs[0] if call.inputs else None
    if name == "aten.sum" and first is not None:
        dims = call.argument(1, "dim", None) or tuple(range(len(first.shape)))
        return name if any(dim in (-1, len(first.shape) - 1) for dim in dims) else "aten.sum of rows"
    if name == "aten.clone" and first is not None and call.outputs[0] is not None:
        return name if first.stride == call.outputs[0].stride else "aten.clone of a transpose"
    return name


def met_inputs(strategy: Strategy) -> tuple[Layout, ...]:
    """The layouts of what a rank works on: what goes around a ring is met whole, if never held whole; of what is
    dispatched, a rank meets as much as if it met the whole and worked on its experts alone."""
    layouts = list(strategy.inputs)
    for axis, rule in enumerate(strategy.rules):
        met = rule.ring or rule.dispatch
        for index in met.tensors if met is not None else ():
            layouts[index] = (*layouts[index][:axis], REPLICATE, *layouts[index][axis + 1 :])
    return tuple(layouts)


def _moved_bytes(call: OpCall, inputs: list[Shapes | None], outputs: list[Shapes | None]) -> Seconds:
    specs = zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
    counts = (
        _counts(shapes) * spec.dtype.itemsize for spec, shapes in specs if spec is not None and shapes is not None
    )
    return sum(counts, start=np.zeros(1))


def _dtype(call: OpCall) -> torch.dtype:
    floating = [spec.dtype for spec in (*call.inputs, *call.outputs) if spec and spec.dtype.is_floating_point]
    specs = [spec for spec in (*call.inputs, *call.outputs) if spec is not None]
    return floating[0] if floating else (specs[0].dtype if specs else torch.float32)


def _counts(shapes: Shapes) -> Seconds:
    return np.array([math.prod(shape) for shape in shapes], dtype=np.float64)


def _dims(shapes: Shapes | None) -> Seconds:
    assert shapes is not None
    return np.array(shapes, dtype=np.float64).reshape(len(shapes), -1).T


Work = Callable[[Device, str, OpCall, list[Any], list[Any], Any], list[Priced]]


def _matmul(first: int) -> Work:
    """Price of a product whose left matrix is tensor input `first`; leading dims of the output are a batch."""

    def work(device: Device, dtype: str, _: OpCall, inputs: list[Any], outputs: list[Any], __: Any) -> list[Priced]:
        left, right = _dims(inputs[first]), _dims(inputs[first + 1])
        batch = left[0] if len(left) > 2 else 1.0
        return [matmul_price(device, dtype, batch, left[-2], right[-1], left[-1])]

    return work


def _convolution(passes: int, image: int, weight: int) -> Work:
    """Price of a convolution: `passes` times the forward's flops; `image` is the input that the filters slide over."""

    def work(
        device: Device, dtype: str, call: OpCall, inputs: list[Any], outputs: list[Any], moved: Any
    ) -> list[Priced]:
        transposed = bool(call.argument(6 if passes == 1 else 7, "transposed", False))
        gradient = outputs[0] if passes == 1 else inputs[0]
        spatial = inputs[image] if transposed else gradient
        filters = _dims(inputs[weight])
        per_position = np.prod(filters, axis=0) / filters[0]
        direction = "forward" if passes == 1 else "backward"
        window = math.prod(call.inputs[weight].shape[2:])
        kind = convolution_kind(direction, call.argument(7 + passes, "groups", 1), window)
        return [convolution_price(device, dtype, 2.0 * passes * _counts(spatial) * per_position, moved, kind)]

    return work


def _attention(direction: Any) -> Work:
    def work(device: Device, dtype: str, call: OpCall, inputs: list[Any], _: list[Any], __: Any) -> list[Priced]:
        start = 0 if direction == "forward" else 1
        query, key = _dims(inputs[start]), _dims(inputs[start + 1])
        batch = np.prod(query[:-3], axis=0) if len(query) > 3 else 1.0
        sizes = (batch, query[-3], query[-2], key[-2], query[-1])
        whole = bool(
            np.all(query[-2] == key[-2])
        )  # else the queries are some of a sequence, under any part of the mask
        mask: Mask = "causal" if whole and _is_causal(call) else "none"
        causal = device.causal_fraction
        flops, moved = attention_work(
            dtype, *sizes, direction=direction, key_value_heads=key[-3], mask=mask, causal_fraction=causal
        )
        return [attention_price(device, dtype, flops, moved, direction)]

    return work


def _is_causal(call: OpCall) -> bool:
    """Of `autopar.attention` and its backward: the first flag among their arguments."""
    return next((value for value in call.args if isinstance(value, bool)), False)


def _experts(first: int, up_products: int, down_products: int) -> Work:
    """Price of a layer of experts whose arguments begin at `first`, its choices spread evenly over the experts."""

    def work(device: Device, dtype: str, call: OpCall, inputs: list[Any], _: list[Any], __: Any) -> list[Priced]:
        down_at = first + 4 + (call.args[first + 4] is not None)  # a bias between the two is a tensor too
        up, down, index = (_dims(inputs[place]) for place in (first + 3, down_at, first + 1))
        rows = np.maximum(1.0, index[0] * index[1] / call.inputs[first + 3].shape[0])
        # Rows are brought to their experts and back, and each product's output is read and written by the activation.
        row_elements = 4.0 * up[3] + 2.0 * (up[1] * up[2] + down[2])
        moved = up_products * up[0] * rows * row_elements * dtype_bytes(dtype)
        return [
            replace(matmul_price(device, dtype, up[0], rows, up[1] * up[2], up[3]), times=up_products),
            replace(matmul_price(device, dtype, up[0], rows, down[1], down[2]), times=down_products),
            memory_bound_price(device, moved, dtype),
        ]

    return work


def _groups(device: Device, dtype: str, call: OpCall, inputs: list[Any], outputs: list[Any], _: Any) -> list[Priced]:
    """Price of products in groups of equal numbers of rows."""
    rows, right, out = _dims(inputs[0]), _dims(inputs[1]), _dims(outputs[0])
    if len(right) == 2:  # an outer product: the rows are summed over
        per_group = np.maximum(1.0, rows[0] / call.inputs[2].shape[0])
        return [matmul_price(device, dtype, out[0], out[1], out[2], per_group)]
    per_group = np.maximum(1.0, rows[0] / call.inputs[1].shape[0])
    return [matmul_price(device, dtype, right[0], per_group, right[2], right[1])]


_WORK: dict[str, Work] = {
    "autopar.experts.default": _experts(0, up_products=1, down_products=1),
    "autopar.experts_keeping.default": _experts(0, up_products=1, down_products=1),
    EXPERTS_BACKWARD: _experts(1, up_products=2, down_products=2),  # as planned: with what the forward keeps
    "autopar.experts_backward_kept.default": _experts(1, up_products=2, down_products=2),
    "autopar.grouped_mm.default": _groups,
    "autopar.grouped_outer.default": _groups,
    "aten.mm.default": _matmul(0),
    "aten.bmm.default": _matmul(0),
    "aten.addmm.default": _matmul(1),
    "aten.baddbmm.default": _matmul(1),
    "aten.convolution.default": _convolution(1, 0, 1),
    "aten.convolution_backward.default": _convolution(2, 1, 2),
    "autopar.attention.default": _attention("forward"),
    "autopar.attention_backward.default": _attention("backward"),
}
