"""Step time of a transformer from its parallel sizes alone: the layers' matmuls, attention, traffic and collectives.

A coarse model for whole training runs, where no graph is at hand: it composes the same op and collective prices that
the planner uses. `Software` holds what the framework adds (its passes over activations, its attention kernel, its
overlap); everything else is the hardware profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.compute import attention_seconds, matmul_seconds, memory_bound_seconds
from autopar.cost_models.hardware import AxisLinks, HardwareProfile, axis_links, dtype_bytes

Storage: TypeAlias = Literal["replicated", "zero1", "zero2", "fsdp"]
Recompute: TypeAlias = Literal["none", "selective", "ops", "alternate", "full"]
TensorMode: TypeAlias = Literal["all_reduce", "sequence"]

# Sizes of the tensors that a block's elementwise ops read or write once, over the hidden size: two norms, two
# residual adds and two dropouts or casts on the residual stream; q, k, v, rotary and the attention output inside.
RESIDUAL_TENSORS, INNER_TENSORS = 6, 5
# Bytes of one pass over scores in unfused attention, forward: write and read scores, softmax, dropout with its mask.
UNFUSED_SCORE_BYTES = 13
UNFUSED_SCORE_BYTES_BACKWARD = 16


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """A decoder's sizes. `ffn_matrices` is 2 (GELU) or 3 (gated)."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    key_value_heads: int = 0  # 0: as many as heads
    ffn_matrices: int = 2
    head_tables: int = 1  # vocabulary tables: 1 tied, 2 untied

    @property
    def key_value_hidden(self) -> int:
        """Columns of the key (or value) projection."""
        return self.hidden * (self.key_value_heads or self.heads) // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.key_value_hidden
        return attention + self.ffn_matrices * self.hidden * self.ffn + 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.layer_parameters + self.head_tables * self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class TransformerPlan:
    """Parallel sizes and schedule. Ranks are laid out (pipeline, data, context, tensor), tensor fastest."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    microbatch: int = 1
    microbatches: int = 1  # of one data-parallel rank, per step
    chunks: int = 1  # model chunks of one pipeline rank: above 1 is interleaved
    storage: Storage = "replicated"
    recompute: Recompute = "none"
    tensor_mode: TensorMode = "all_reduce"


@dataclass(frozen=True, slots=True)
class Software:
    """What a framework adds to the arithmetic. Fitted values name their table where they are made."""

    dtype: str = "bfloat16"
    passes: float = 2.0  # times that elementwise ops read or write each of a block's tensors
    matmul_fraction: float = 1.0  # of the profile's matmul rate: clocks under a power cap, layouts, casts
    attention_fraction: float = 1.0  # of the profile's fused attention
    unfused_attention: Literal["fused", "unfused"] = "fused"
    host_s_per_layer: float = 0.0  # the host's time to launch one block's forward; backward takes twice that
    overlap: float = 0.9  # of data-parallel communication, hidden behind compute where there is enough of it
    tensor_overlap: float = 0.0  # of tensor-parallel communication
    head_passes: float = 6.0  # over the logits, in fp32


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where one training step's seconds go, on the rank that decides."""

    compute_s: float
    tensor_communication_s: float
    pipeline_s: float  # bubble and sends
    data_communication_s: float  # exposed
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return (
            self.compute_s
            + self.tensor_communication_s
            + self.pipeline_s
            + self.data_communication_s
            + self.optimizer_s
        )


@dataclass(frozen=True, slots=True)
class _Axes:
    pipeline: AxisLinks
    data: AxisLinks
    context: AxisLinks
    tensor: AxisLinks


@dataclass(frozen=True, slots=True)
class _Block:
    """One block, one microbatch, one rank: forward and backward compute, and exposed collectives in each."""

    forward_s: float
    backward_s: float
    forward_collective_s: float
    backward_collective_s: float

    def scaled(self, times: float) -> _Block:
        return _Block(*(times * item for item in (self.forward_s, self.backward_s, self.forward_collective_s,
                                                  self.backward_collective_s)))  # fmt: skip


def step_time(shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software) -> StepTime:
    """Seconds of one optimizer step of a transformer under a plan."""
    axes = _Axes(*axis_links(profile, (plan.pipeline, plan.data, plan.context, plan.tensor)))
    block = _block(shape, plan, profile, software, axes)
    head_s = _head_seconds(shape, plan, profile, software)
    stage_layers = shape.layers / plan.pipeline
    stage = block.scaled(stage_layers)
    compute_s = stage.forward_s + stage.backward_s
    collective_s = stage.forward_collective_s + stage.backward_collective_s
    gathers_s = _storage_seconds(shape, plan, software, axes.data, compute_s)
    mean_s = compute_s + collective_s + gathers_s + head_s / plan.pipeline
    slowest_s = compute_s + collective_s + gathers_s + _head_excess(plan, block, head_s)
    send_s = _send_seconds(shape, plan, software, axes)
    fill_s = (plan.pipeline - 1) / plan.chunks * mean_s
    imbalance_s = plan.microbatches * max(0.0, slowest_s - mean_s) if plan.pipeline > 1 else 0.0
    return StepTime(
        compute_s=plan.microbatches * (compute_s + head_s / plan.pipeline),
        tensor_communication_s=plan.microbatches * collective_s,
        pipeline_s=fill_s + imbalance_s + send_s,
        data_communication_s=plan.microbatches * gathers_s
        + _gradient_seconds(shape, plan, software, axes.data, compute_s),
        optimizer_s=_optimizer_seconds(shape, plan, profile),
    )


def model_flops(shape: TransformerShape, tokens: float) -> float:
    """Forward and backward flops of a step without recomputation, attention counted in full.

    Source: Narayanan et al., arXiv:2104.04473, section 5.1, less the recomputed forward.
    """
    matmul = 6 * (shape.layers * shape.layer_parameters + shape.vocab * shape.hidden)
    return tokens * (matmul + 12 * shape.layers * shape.hidden * shape.seq)


def _block(
    shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software, axes: _Axes
) -> _Block:
    forward_matmul_s, backward_matmul_s = _matmuls(shape, plan, profile, software)
    forward_attention_s, backward_attention_s = _attention(shape, plan, profile, software)
    traffic_s = _traffic(shape, plan, profile, software)
    forward_s = forward_matmul_s + forward_attention_s + traffic_s
    again = {
        "none": 0.0,
        "selective": forward_attention_s,
        "ops": traffic_s + 0.5 * forward_matmul_s,
        "alternate": 0.5 * forward_s,
        "full": forward_s,
    }[plan.recompute]
    backward_s = backward_matmul_s + backward_attention_s + 2 * traffic_s + again
    forward_s = max(forward_s, software.host_s_per_layer)
    backward_s = max(backward_s, 2 * software.host_s_per_layer)
    tensor_s = _tensor_seconds(shape, plan, software, axes.tensor)
    ring_s = _context_seconds(shape, plan, software, axes.context)
    repeat = 1.0 if plan.recompute == "full" else 0.5 if plan.recompute == "alternate" else 0.0
    return _Block(
        forward_s,
        backward_s,
        tensor_s + max(0.0, ring_s - forward_attention_s),
        (1 + repeat) * tensor_s + max(0.0, 2 * ring_s - backward_attention_s),
    )


def _tokens(shape: TransformerShape, plan: TransformerPlan) -> float:
    return plan.microbatch * shape.seq / plan.context


def _matmuls(
    shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software
) -> tuple[float, float]:
    tokens, ways = _tokens(shape, plan), plan.tensor
    widths = (
        ((shape.hidden + 2 * shape.key_value_hidden) / ways, shape.hidden),
        (shape.hidden, shape.hidden / ways),
        ((shape.ffn_matrices - 1) * shape.ffn / ways, shape.hidden),
        (shape.hidden, shape.ffn / ways),
    )
    device, dtype = profile.device, software.dtype
    forward = sum(float(matmul_seconds(device, dtype, 1, tokens, wide, deep)) for wide, deep in widths)
    inputs = sum(float(matmul_seconds(device, dtype, 1, tokens, deep, wide)) for wide, deep in widths)
    weights = sum(float(matmul_seconds(device, dtype, 1, wide, deep, tokens)) for wide, deep in widths)
    return forward / software.matmul_fraction, (inputs + weights) / software.matmul_fraction


def _attention(
    shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software
) -> tuple[float, float]:
    heads, local = shape.heads / plan.tensor, shape.seq / plan.context
    head_dim = shape.hidden / shape.heads
    device = profile.device
    dtype = "bfloat16" if dtype_bytes(software.dtype) == 1 else software.dtype  # attention is not done in 8 bits
    if software.unfused_attention == "unfused":
        return _unfused_attention(shape, plan, profile, dtype)
    sizes = (plan.microbatch, heads, local, shape.seq, head_dim)
    forward = attention_seconds(device, dtype, *sizes, direction="forward", mask="causal")
    backward = attention_seconds(device, dtype, *sizes, direction="backward", mask="causal")
    return float(forward) / software.attention_fraction, float(backward) / software.attention_fraction


def _unfused_attention(
    shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, dtype: str
) -> tuple[float, float]:
    batch, head_dim = plan.microbatch * shape.heads / plan.tensor, shape.hidden / shape.heads
    device, seq = profile.device, shape.seq
    products = float(matmul_seconds(device, dtype, batch, seq, seq, head_dim))
    products += float(matmul_seconds(device, dtype, batch, seq, head_dim, seq))
    scores = batch * seq * seq
    forward = products + float(memory_bound_seconds(device, UNFUSED_SCORE_BYTES * scores))
    return forward, 2 * products + float(memory_bound_seconds(device, UNFUSED_SCORE_BYTES_BACKWARD * scores))


def _traffic(shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software) -> float:
    sequence_ways = plan.tensor if plan.tensor_mode == "sequence" else 1
    residual = RESIDUAL_TENSORS * shape.hidden / sequence_ways
    inner = (INNER_TENSORS * shape.hidden + shape.ffn_matrices * shape.ffn) / plan.tensor
    element = max(2, dtype_bytes(software.dtype))
    moved = software.passes * element * _tokens(shape, plan) * (residual + inner)
    return float(memory_bound_seconds(profile.device, moved))


def _head_seconds(
    shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile, software: Software
) -> float:
    tokens, local = _tokens(shape, plan), shape.vocab / plan.tensor
    dtype = "bfloat16" if dtype_bytes(software.dtype) == 1 else software.dtype
    product = 3 * float(matmul_seconds(profile.device, dtype, 1, tokens, local, shape.hidden))
    loss = float(memory_bound_seconds(profile.device, 4 * software.head_passes * tokens * local))
    return product / software.matmul_fraction + loss


def _head_excess(plan: TransformerPlan, block: _Block, head_s: float) -> float:
    """What the slowest stage adds: the head, less the blocks that balancing moves away from its stage."""
    if plan.pipeline == 1:
        return head_s
    block_s = block.forward_s + block.backward_s + block.forward_collective_s + block.backward_collective_s
    return min(head_s / plan.pipeline + 0.5 * block_s, head_s)


def _tensor_seconds(shape: TransformerShape, plan: TransformerPlan, software: Software, axis: AxisLinks) -> float:
    if plan.tensor == 1:
        return 0.0
    moved = _tokens(shape, plan) * shape.hidden * max(2, dtype_bytes(software.dtype))
    if plan.tensor_mode == "all_reduce":
        once = 2 * _seconds("all_reduce", moved, axis)
    else:
        once = 2 * (_seconds("all_gather", moved, axis) + _seconds("reduce_scatter", moved, axis))
    return once * (1 - software.tensor_overlap)


def _context_seconds(shape: TransformerShape, plan: TransformerPlan, software: Software, axis: AxisLinks) -> float:
    if plan.context == 1:
        return 0.0
    keys = 2 * _tokens(shape, plan) * shape.key_value_hidden / plan.tensor * max(2, dtype_bytes(software.dtype))
    return _seconds("all_gather", keys * plan.context, axis)


def _send_seconds(shape: TransformerShape, plan: TransformerPlan, software: Software, axes: _Axes) -> float:
    """Sends on the critical path. In the steady state every microbatch waits once in 1F1B's alternation."""
    if plan.pipeline == 1:
        return 0.0
    ways = plan.tensor if plan.tensor_mode == "sequence" else 1
    moved = _tokens(shape, plan) * shape.hidden * max(2, dtype_bytes(software.dtype)) / ways
    once = _seconds("send", moved, axes.pipeline)
    steady = 2 * plan.microbatches * (plan.pipeline - 1) / plan.pipeline
    return (2 * (plan.pipeline - 1) + steady * plan.chunks) * once


def _local_parameters(shape: TransformerShape, plan: TransformerPlan) -> float:
    tables = shape.head_tables * shape.vocab * shape.hidden / min(plan.pipeline, shape.head_tables)
    return (shape.layers * shape.layer_parameters / plan.pipeline + tables) / plan.tensor


def _storage_seconds(
    shape: TransformerShape, plan: TransformerPlan, software: Software, axis: AxisLinks, compute_s: float
) -> float:
    """Exposed gathers of sharded parameters, per microbatch (and the reduction of their gradients)."""
    if plan.storage != "fsdp" or plan.data == 1:
        return 0.0
    layer_bytes = 2.0 * shape.layer_parameters / plan.tensor
    gather_s, reduce_s = (_seconds(kind, layer_bytes, axis) for kind in ("all_gather", "reduce_scatter"))
    layers = shape.layers / plan.pipeline
    total = layers * (2 * gather_s + reduce_s)
    hidden = min(total, compute_s) * software.overlap
    return total - hidden


def _gradient_seconds(
    shape: TransformerShape, plan: TransformerPlan, software: Software, axis: AxisLinks, compute_s: float
) -> float:
    """Exposed reduction of the gradients, once per step."""
    if plan.storage == "fsdp" or plan.data == 1:
        return 0.0
    gradient_bytes = 4.0 * _local_parameters(shape, plan)
    if plan.storage == "replicated":
        total = _seconds("all_reduce", gradient_bytes, axis)
    else:
        total = _seconds("reduce_scatter", gradient_bytes, axis) + _seconds("all_gather", gradient_bytes / 2, axis)
    return total - min(total, compute_s) * software.overlap


def _optimizer_seconds(shape: TransformerShape, plan: TransformerPlan, profile: HardwareProfile) -> float:
    """Mixed-precision Adam: fp32 master, two states and the gradient read, three written, 16-bit copy written."""
    ways = 1 if plan.storage == "replicated" else plan.data
    return float(memory_bound_seconds(profile.device, 30.0 * _local_parameters(shape, plan) / ways))


def _seconds(kind: str, moved: float, axis: AxisLinks) -> float:
    return float(collective_seconds(kind, moved, axis))
