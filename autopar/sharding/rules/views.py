"""Ops that only rename, cut or join dims: the dim maps are computed from the shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.exchange import dim_of, exchanged
from autopar.sharding.rules.placing import (
    SUM,
    RuleTable,
    long_dims,
    names,
    place,
    required_tensor_at,
    result,
    summable,
    tensors_in,
    wrap_dim,
)
from autopar.sharding.rules.spatial import everywhere, padded


def shared_dims(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(source dim, target dim, even) of a reshape: dims whose even shards hold the same elements.

    Both shapes fall into the smallest groups of equal product; the outermost dims of a group correspond. A group of
    one dim on each side may be cut unevenly too.
    """
    if 0 in source:
        return
    old = [(dim, size) for dim, size in enumerate(source) if size != 1]
    new = [(dim, size) for dim, size in enumerate(target) if size != 1]
    i = j = 0
    while i < len(old) and j < len(new):
        first_old, first_new = i, j
        left, right = old[i][1], new[j][1]
        while left != right:
            if left < right:
                i += 1
                left *= old[i][1]
            else:
                j += 1
                right *= new[j][1]
        yield old[first_old][0], new[first_new][0], i > first_old or j > first_new
        i, j = i + 1, j + 1


def reshape(call: OpCall) -> Iterator[Rule]:
    """`view` and all its relatives whose elements keep their order."""
    for source, target, even in shared_dims(call.inputs[0].shape, result(call).shape):
        yield place(call, {0: Shard(source)}, Shard(target), even=even)
    yield from passing_sums(call)


def expand(call: OpCall) -> Iterator[Rule]:
    """Old dims keep their shards; a new or stretched dim may be born sharded."""
    old, new = call.inputs[0].shape, result(call).shape
    for dim, size in enumerate(new):
        own = dim - (len(new) - len(old))
        if size <= 1:
            continue
        stretched = own < 0 or old[own] != size
        yield place(call, {} if stretched else {0: Shard(own)}, Shard(dim))
    yield from passing_sums(call)


def passing_sums(call: OpCall) -> Iterator[Rule]:
    """Partial sums in every tensor give partial sums of every result."""
    if all(map(summable, (*call.inputs, *call.outputs))):
        yield Rule((SUM,) * len(call.inputs), (SUM,) * len(call.outputs))


def mapped(call: OpCall, dims: Iterable[tuple[int, int]]) -> Iterator[Rule]:
    """Rules of a list of (dim of every input, dim of every output)."""
    shape = call.inputs[0].shape
    for source, target in dims:
        if shape[source] > 1:
            yield Rule((Shard(source),) * len(call.inputs), (Shard(target),) * len(call.outputs))
    yield from passing_sums(call)


def permute(call: OpCall) -> Iterator[Rule]:
    rank = len(call.inputs[0].shape)
    return mapped(call, ((wrap_dim(source, rank), target) for target, source in enumerate(call.args[1])))


def transpose(call: OpCall) -> Iterator[Rule]:
    rank = len(call.inputs[0].shape)
    order = list(range(rank))
    if rank:
        one, other = (wrap_dim(dim, rank) for dim in call.args[1:3])
        order[one], order[other] = order[other], order[one]
    return mapped(call, ((source, target) for target, source in enumerate(order)))


def matrix_transpose(call: OpCall) -> Iterator[Rule]:
    """`t`: of a matrix, or nothing of a vector."""
    rank = len(call.inputs[0].shape)
    return mapped(call, ((dim, rank - 1 - dim) for dim in range(rank)))


def drop_dim(call: OpCall) -> Iterator[Rule]:
    """`select`, `unbind`: the dim disappears."""
    rank = len(call.inputs[0].shape)
    gone = wrap_dim(call.argument(1, "dim", 0), rank)
    return mapped(call, ((dim, dim - (dim > gone)) for dim in range(rank) if dim != gone))


def stack(call: OpCall) -> Iterator[Rule]:
    rank = len(result(call).shape)
    new = wrap_dim(call.argument(1, "dim", 0), rank)
    return mapped(call, ((dim, dim + (dim >= new)) for dim in range(rank - 1)))


def cat(call: OpCall) -> Iterator[Rule]:
    """All dims but the joined one; a legacy empty operand is left alone."""
    tensors = tensors_in(call.args[0])
    rank = len(result(call).shape)
    joined = wrap_dim(call.argument(1, "dim", 0), rank)
    if all(len(spec.shape) == rank for spec in tensors):
        yield from mapped(call, ((dim, dim) for dim in range(rank) if dim != joined))
        yield from exchanged(call, joined)


def split(call: OpCall) -> Iterator[Rule]:
    """All dims but the one that is cut."""
    rank = len(call.inputs[0].shape)
    cut = wrap_dim(call.argument(2, "dim", 0), rank)
    return mapped(call, ((dim, dim) for dim in range(rank) if dim != cut))


def exchanging_split(call: OpCall) -> Iterator[Rule]:
    """`split`, `split_with_sizes`: the dim that is cut, too."""
    yield from split(call)
    yield from exchanged(call, dim_of(call, 2))


def cut_dim(call: OpCall) -> Iterator[Rule]:
    """`slice`: the other dims, and the dim itself where nothing is cut off."""
    shape = call.inputs[0].shape
    dim = wrap_dim(call.argument(1, "dim", 0), len(shape))
    start, end, step = (call.argument(i, name) for i, name in ((2, "start"), (3, "end"), (4, "step")))
    whole = not start and (end is None or end >= shape[dim]) and step in (None, 1)
    yield from mapped(call, ((other, other) for other in range(len(shape)) if other != dim or whole))
    if not whole and step in (None, 1):
        yield from exchanged(call, dim)


def slice_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, input_sizes, dim, start, end, step)."""
    shape = call.inputs[0].shape
    dim = wrap_dim(call.args[2], len(shape))
    whole = result(call).shape[dim] == shape[dim]
    yield from mapped(call, ((other, other) for other in range(len(shape)) if other != dim or whole))
    if not whole and call.args[5] == 1:
        yield from exchanged(call, dim)


def select_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, input_sizes, dim, index): a dim returns."""
    rank = len(result(call).shape)
    back = wrap_dim(call.args[2], rank)
    return mapped(call, ((dim, dim + (dim >= back)) for dim in range(rank - 1)))


def slice_scatter(call: OpCall) -> Iterator[Rule]:
    """(self, src, dim, ...): all dims but the one that is written into."""
    rank = len(result(call).shape)
    written = wrap_dim(call.argument(2, "dim", 0), rank)
    return mapped(call, ((dim, dim) for dim in range(rank) if dim != written))


def select_scatter(call: OpCall) -> Iterator[Rule]:
    """(self, src, dim, index): `src` lacks the dim that is written into."""
    rank = len(result(call).shape)
    written = wrap_dim(call.args[2], rank)
    for dim in long_dims(result(call)):
        if dim != written:
            yield place(call, {0: Shard(dim), 1: Shard(dim - (dim > written))}, Shard(dim))
    yield from passing_sums(call)


def keep_dims(call: OpCall, touched: Iterable[int]) -> Iterator[Rule]:
    """All dims but the touched ones stay as they are, in every input and output; partial sums pass."""
    rank = len(call.inputs[0].shape)
    closed = {wrap_dim(dim, rank) for dim in touched}
    return mapped(call, ((dim, dim) for dim in range(rank) if dim not in closed))


def flip(call: OpCall) -> Iterator[Rule]:
    return keep_dims(call, call.args[1])


def roll(call: OpCall) -> Iterator[Rule]:
    """(self, shifts, dims): without dims the flattened tensor is rolled."""
    dims = call.argument(2, "dims", ())
    return keep_dims(call, dims if dims else range(len(call.inputs[0].shape)))


def repeat(call: OpCall) -> Iterator[Rule]:
    """(self, repeats): a dim that is not repeated keeps its shards; a new dim stays whole."""
    rank, counts = len(call.inputs[0].shape), call.args[1]
    new = len(counts) - rank
    return mapped(call, ((dim, dim + new) for dim in range(rank) if counts[dim + new] == 1))


def pad(call: OpCall) -> Iterator[Rule]:
    """`constant_pad_nd(self, pad, value)`: padded dims with a halo; sums pass where zeros are padded."""
    source, amounts = call.inputs[0], call.args[1]
    rules = keep_dims(call, [len(source.shape) - 1 - at // 2 for at, amount in enumerate(amounts) if amount])
    keeps_sums = call.argument(2, "value", 0) == 0
    yield from (rule for rule in rules if keeps_sums or rule.outputs[0] != SUM)
    yield from everywhere(call, source, padded(source, result(call), amounts, mode="constant"))


def rotate(call: OpCall) -> Iterator[Rule]:
    """`rot90(self, k, dims)`: all dims but the two of the plane."""
    return keep_dims(call, call.argument(2, "dims", (0, 1)))


def shuffle_channels(call: OpCall) -> Iterator[Rule]:
    """`channel_shuffle(self, groups)`: all dims but the channels."""
    return keep_dims(call, (1,))


def halve(call: OpCall) -> Iterator[Rule]:
    """`glu(self, dim)` and its backward `(grad, self, dim)`: all dims but the halved one."""
    rank = len(call.inputs[0].shape)
    dim = wrap_dim(call.args[-1] if isinstance(call.args[-1], int) else -1, rank)
    for other in long_dims(result(call)):
        if other != dim:
            yield Rule((Shard(other),) * len(call.inputs), (Shard(other),))


def triangle(call: OpCall) -> Iterator[Rule]:
    """`tril`, `triu`: batch dims."""
    rank = len(call.inputs[0].shape)
    return keep_dims(call, (rank - 2, rank - 1))


def unfold(call: OpCall) -> Iterator[Rule]:
    """(self, dim, size, step): the other dims; windows come last."""
    return keep_dims(call, (call.args[1],))


def unfold_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, input_sizes, dim, size, step)."""
    rank = len(result(call).shape)
    dim = wrap_dim(call.args[2], rank)
    return mapped(call, ((other, other) for other in range(rank) if other != dim))


def diagonal_dims(rank: int, one: int, other: int) -> Iterator[tuple[int, int]]:
    """(dim of the matrix stack, dim of the stack of diagonals)."""
    gone = {wrap_dim(one, rank), wrap_dim(other, rank)}
    kept = [dim for dim in range(rank) if dim not in gone]
    return ((dim, position) for position, dim in enumerate(kept))


def diagonal(call: OpCall) -> Iterator[Rule]:
    """(self, offset, dim1, dim2)."""
    rank = len(call.inputs[0].shape)
    dims = diagonal_dims(rank, call.argument(2, "dim1", 0), call.argument(3, "dim2", 1))
    return mapped(call, dims)


def diagonal_backward(call: OpCall) -> Iterator[Rule]:
    """(grad, input_sizes, offset, dim1, dim2)."""
    rank = len(result(call).shape)
    return mapped(call, ((small, big) for big, small in diagonal_dims(rank, call.args[3], call.args[4])))


def diagonal_scatter(call: OpCall) -> Iterator[Rule]:
    """(self, src, offset, dim1, dim2)."""
    rank = len(result(call).shape)
    for big, small in diagonal_dims(rank, call.argument(3, "dim1", 0), call.argument(4, "dim2", 1)):
        if result(call).shape[big] > 1:
            yield place(call, {0: Shard(big), 1: Shard(small)}, Shard(big))
    yield from passing_sums(call)


def diag_embed(call: OpCall) -> Iterator[Rule]:
    """(self, offset, dim1, dim2)."""
    rank = len(result(call).shape)
    dims = diagonal_dims(rank, call.argument(2, "dim1", -2), call.argument(3, "dim2", -1))
    return mapped(call, ((small, big) for big, small in dims))


def view_dtype(call: OpCall) -> Iterator[Rule]:
    """`view.dtype`: reinterpreted bits; sums do not pass."""
    for dim in long_dims(required_tensor_at(call, 0))[:-1]:
        yield place(call, {0: Shard(dim)}, Shard(dim))


RULES: RuleTable = {
    **dict.fromkeys(
        names("""
            aten.view.default aten._unsafe_view.default aten.view_copy.default aten._reshape_alias.default
            aten._reshape_copy.default aten.unsqueeze.default aten.squeeze.default aten.squeeze.dim
            aten.squeeze.dims aten.unsqueeze_copy.default aten.squeeze_copy.default aten.squeeze_copy.dim
        """),
        reshape,
    ),
    "aten.view.dtype": view_dtype,
    "aten.expand.default": expand,
    "aten.expand_copy.default": expand,
    "aten.permute.default": permute,
    "aten.t_copy.default": matrix_transpose,
    "aten.transpose_copy.int": transpose,
    "aten.unbind_copy.int": drop_dim,
    "aten.unsafe_split.Tensor": split,
    "aten.unsafe_split_with_sizes.default": split,
    "aten.narrow_copy.default": unfold,
    "aten.unfold_copy.default": unfold,
    "aten.diagonal_copy.default": diagonal,
    "aten.rot90.default": rotate,
    "aten.channel_shuffle.default": shuffle_channels,
    "aten.glu.default": halve,
    "aten.glu_backward.default": halve,
    "aten.permute_copy.default": permute,
    "aten.transpose.int": transpose,
    "aten.t.default": matrix_transpose,
    "aten.select.int": drop_dim,
    "aten.select_copy.int": drop_dim,
    "aten.unbind.int": drop_dim,
    "aten.stack.default": stack,
    "aten.cat.default": cat,
    "aten.split.Tensor": exchanging_split,
    "aten.split_with_sizes.default": exchanging_split,
    "aten.split_with_sizes_copy.default": split,
    "aten.slice.Tensor": cut_dim,
    "aten.slice_backward.default": slice_backward,
    "aten.select_backward.default": select_backward,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.flip.default": flip,
    "aten.roll.default": roll,
    "aten.repeat.default": repeat,
    "aten.constant_pad_nd.default": pad,
    "aten.tril.default": triangle,
    "aten.triu.default": triangle,
    "aten.unfold.default": unfold,
    "aten.unfold_backward.default": unfold_backward,
    "aten.diagonal.default": diagonal,
    "aten.diagonal_backward.default": diagonal_backward,
    "aten.diagonal_scatter.default": diagonal_scatter,
    "aten.diag_embed.default": diag_embed,
}
