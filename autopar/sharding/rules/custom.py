"""Autopar's own ops: attention, random tensors, the pieces of batch norm, recurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall, TensorSpec, is_spec
from autopar.sharding.rule import Ring, Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, place, required_tensor_at, result, tensor_at

KEY_HEADS = "own key heads"  # k and v are whole; a rank reads those of the heads that its queries use
KEYS = "keys"  # k and v are cut along the sequence; the ranks' softmaxes are merged by their log-sum-exps
RING = "ring"  # q, k and v are cut along the sequence; k and v go around, and the blocks' softmaxes are merged
BATCH, HEADS, LENGTH = range(3)


def _mask_placement(mask: TensorSpec | None, dim: int) -> Placement:
    """A mask follows the scores in a dim that it has, and broadcasts over the others."""
    return Shard(dim) if mask is not None and mask.shape[dim] > 1 else REPLICATE


def _attention(call: OpCall, first: int) -> Iterator[tuple[str, dict[int, Placement], dict[str, Any]]]:
    """(what is cut, placements of q, k, v and mask, options): q is argument `first`, the mask argument `mask_at`."""
    mask_at = len(call.args) - 8
    q, k, v = first, first + 1, first + 2
    mask = tensor_at(call, mask_at)
    query_heads, key_heads = (required_tensor_at(call, index).shape[HEADS] for index in (q, k))
    for name, dim in (("batch", BATCH), ("heads", HEADS)):
        cut: Placement = Shard(dim)
        options: dict[str, Any] = {"even": True} if dim == HEADS else {}
        yield name, {q: cut, k: cut, v: cut, mask_at: _mask_placement(mask, dim)}, options
    if key_heads < query_heads:
        placed = {q: Shard(HEADS), mask_at: _mask_placement(mask, HEADS)}
        yield "query heads", placed, {"even": True, "form": KEY_HEADS}
    yield "queries", {q: Shard(LENGTH), mask_at: _mask_placement(mask, LENGTH)}, {}
    yield "keys", {k: Shard(LENGTH), v: Shard(LENGTH), mask_at: _mask_placement(mask, 3)}, {"form": KEYS}
    around = {**dict.fromkeys((q, k, v), Shard(LENGTH)), mask_at: _mask_placement(mask, LENGTH)}
    options = {"form": RING, "ring": Ring((k, v), rounds=1 if first == 0 else 2)}
    if (
        mask is not None and mask.shape[3] > 1
    ):  # a mask's columns are cut on the axes of the keys alone, not as keys are
        options["excludes"] = KEYS
    yield "ring", around, options


def attention(call: OpCall) -> Iterator[Rule]:
    """(q, k, v, mask, seed, dropout_p, is_causal, ...) -> (out, lse)."""
    cut = {"batch": BATCH, "heads": HEADS, "query heads": HEADS, "queries": LENGTH, "ring": LENGTH}
    for name, placed, options in _attention(call, 0):
        if name in cut:
            yield place(call, placed, Shard(cut[name]), **options)
        else:
            bytes_of_lse = result(call, 1).nbytes
            yield place(call, placed, (SUM, REPLICATE), internal_bytes=2 * bytes_of_lse, **options)


def attention_backward(call: OpCall) -> Iterator[Rule]:
    """(grad_out, q, k, v, out, lse, mask, ...) -> (grad_q, grad_k, grad_v): from lse, each score needs no other."""
    for name, placed, options in _attention(call, 1):
        like_q = placed.get(1, REPLICATE)
        keys = placed.get(2, SUM)
        queries = SUM if name == "keys" else like_q
        yield place(call, {**placed, 0: like_q, 4: like_q, 5: like_q}, (queries, keys, keys), **options)


def random(call: OpCall) -> Iterator[Rule]:
    """(seed, shape, offset, full_shape, ...): any dim."""
    for dim in long_dims(result(call)):
        yield place(call, {}, Shard(dim))


def _channels_and_others(call: OpCall, wide: tuple[int, ...], narrow: tuple[int, ...]) -> Iterator[Rule]:
    """Tensors with channels in dim 1 (`wide`) and per-channel ones (`narrow`), by argument."""
    x = required_tensor_at(call, wide[0])
    outputs = [spec for spec in call.outputs if spec is not None]
    channels = {**dict.fromkeys(wide, Shard(1)), **dict.fromkeys(narrow, Shard(0))}
    yield place(call, channels, tuple(Shard(0 if len(spec.shape) == 1 else 1) for spec in outputs))
    for dim in long_dims(x):
        if dim != 1:
            results = tuple(SUM if len(spec.shape) == 1 else Shard(dim) for spec in outputs)
            yield place(call, dict.fromkeys(wide, Shard(dim)), results)


def batch_norm_square_sum(call: OpCall) -> Iterator[Rule]:
    """(x, mean) -> per channel."""
    return _channels_and_others(call, (0,), (1,))


def batch_norm_apply(call: OpCall) -> Iterator[Rule]:
    """(x, mean, invstd, weight, bias) -> y."""
    return _channels_and_others(call, (0,), (1, 2, 3, 4))


def batch_norm_backward_sums(call: OpCall) -> Iterator[Rule]:
    """(grad_out, x, mean) -> (grad_sum, product_sum)."""
    return _channels_and_others(call, (0, 1), (2,))


def batch_norm_backward_apply(call: OpCall) -> Iterator[Rule]:
    """(grad_out, x, mean, invstd, weight, grad_sum, product_sum, count) -> grad_x."""
    return _channels_and_others(call, (0, 1), (2, 3, 4, 5, 6))


def scan(weights: tuple[int, ...]) -> Callable[[OpCall], Iterator[Rule]]:
    """A recurrence: the batch is dim 0 of all but the `weights`, by argument."""

    def rules(call: OpCall) -> Iterator[Rule]:
        batched = [index for index, value in enumerate(call.args) if is_spec(value) and index not in weights]
        if 0 in long_dims(result(call)):
            yield place(call, dict.fromkeys(batched, Shard(0)), Shard(0))

    return rules


def ctc_loss(call: OpCall) -> Iterator[Rule]:
    """(log_probs, targets, input_lengths, target_lengths, ...) -> (loss, alpha): the batch, of padded targets."""
    if len(required_tensor_at(call, 1).shape) == 2:
        yield place(call, {0: Shard(1), 1: Shard(0), 2: Shard(0), 3: Shard(0)}, Shard(0))


def ctc_loss_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, ...) -> grad_log_probs."""
    if len(required_tensor_at(call, 2).shape) == 2:
        yield place(call, {**dict.fromkeys(range(7), Shard(0)), 1: Shard(1)}, Shard(1))


RULES: RuleTable = {
    "autopar.attention.default": attention,
    "autopar.attention_backward.default": attention_backward,
    "autopar.random_mask.default": random,
    "autopar.random_uniform.default": random,
    "autopar.random_normal.default": random,
    "autopar.random_integers.default": random,
    "autopar.batch_norm_square_sum.default": batch_norm_square_sum,
    "autopar.batch_norm_apply.default": batch_norm_apply,
    "autopar.batch_norm_backward_sums.default": batch_norm_backward_sums,
    "autopar.batch_norm_backward_apply.default": batch_norm_backward_apply,
    "autopar.ctc_loss.default": ctc_loss,
    "autopar.ctc_loss_backward.default": ctc_loss_backward,
    "autopar.lstm_scan.default": scan(weights=(3,)),
    "autopar.lstm_scan_backward.default": scan(weights=(5,)),
    "autopar.gru_scan.default": scan(weights=(2, 3)),
    "autopar.gru_scan_backward.default": scan(weights=(4,)),
    "autopar.rnn_scan.default": scan(weights=(2,)),
    "autopar.rnn_scan_backward.default": scan(weights=(2,)),
}
