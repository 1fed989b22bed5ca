"""Decompositions, solvers and transforms: batch dims, and the dims that a Fourier transform does not touch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Shard

from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, names, place, required_tensor_at, result
from autopar.sharding.rules.views import keep_dims

# ops on stacks of matrices: the dims of the first argument before the last two are the batch
OVER_STACKS = names("""
    cholesky.default cholesky_inverse.default linalg_cholesky_ex.default linalg_inv_ex.default linalg_qr.default
    linalg_lu.default linalg_lu_factor_ex.default linalg_ldl_factor_ex.default linalg_eig.default
    _linalg_eigh.default _linalg_svd.default _linalg_det.default _linalg_slogdet.default
    linalg_matrix_exp.default linalg_householder_product.default _linalg_solve_ex.default
    linalg_solve_triangular.default triangular_solve.default cholesky_solve.default geqrf.default
    linalg_lu_solve.default linalg_pinv.atol_rtol_tensor ormqr.default lu_unpack.default
    linalg_ldl_solve.default
""")


def over_stacks(call: OpCall) -> Iterator[Rule]:
    """Batch dims, where all tensors share them."""
    batch = required_tensor_at(call, 0).shape[:-2]
    for spec in (*call.inputs, *call.outputs):
        if spec is None or spec.shape[: len(batch)] != batch:
            return
    for dim, size in enumerate(batch):
        if size > 1:
            yield Rule((Shard(dim),) * len(call.inputs), (Shard(dim),) * len(call.outputs))


def fourier(call: OpCall) -> Iterator[Rule]:
    """(self, dim, ...): the dims that are not transformed."""
    return (rule for rule in keep_dims(call, call.args[1]) if not rule.outputs[0].is_partial())


def distances(call: OpCall) -> Iterator[Rule]:
    """`_cdist_forward(x1, x2, p, mode)`: batch dims, rows of either side."""
    left, right = required_tensor_at(call, 0).shape, required_tensor_at(call, 1).shape
    rank = len(result(call).shape)
    for dim in long_dims(result(call)):
        if dim < rank - 2 and left[:-2] == right[:-2]:
            yield place(call, {0: Shard(dim), 1: Shard(dim)}, Shard(dim))
    yield place(call, {0: Shard(len(left) - 2)}, Shard(rank - 2))
    yield place(call, {1: Shard(len(right) - 2)}, Shard(rank - 1))


def distances_backward(call: OpCall) -> Iterator[Rule]:
    """`_cdist_backward(grad, x1, x2, p, distances)`: batch dims, rows of `x1`; the rows of `x2` are summed over."""
    left, right = required_tensor_at(call, 1).shape, required_tensor_at(call, 2).shape
    rank = len(left)
    for dim in long_dims(result(call)):
        if dim < rank - 2 and left[:-2] == right[:-2]:
            yield place(call, dict.fromkeys((0, 1, 2, 4), Shard(dim)), Shard(dim))
    yield place(call, dict.fromkeys((0, 1, 4), Shard(rank - 2)), Shard(rank - 2))
    yield place(call, {0: Shard(rank - 1), 2: Shard(rank - 2), 4: Shard(rank - 1)}, SUM)


def trilinear(call: OpCall) -> Iterator[Rule]:
    """`_trilinear(i1, i2, i3, expand1, expand2, expand3, sumdim)`: a product of three tensors, each with dims of size
    one inserted, summed over some dims."""
    factors = call.args[:3]
    inserted = [wrapped(call.args[3 + index], len(factors[index].shape)) for index in range(3)]
    rank = len(factors[0].shape) + len(inserted[0])
    summed = {dim % rank for dim in call.args[6]}
    for dim in range(rank):
        own = {at: dim - sum(it < dim for it in inserted[at]) for at in range(3) if dim not in inserted[at]}
        cut = {at: Shard(place_) for at, place_ in own.items() if factors[at].shape[place_] > 1}
        if cut:
            yield place(call, cut, SUM if dim in summed else Shard(dim - sum(it < dim for it in summed)))


def wrapped(dims: Sequence[int], rank: int) -> set[int]:
    """The dims that are inserted into a tensor, counted in the result."""
    return {dim % (rank + len(dims)) for dim in dims}


def cross(call: OpCall) -> Iterator[Rule]:
    """`linalg_cross(self, other, *, dim)`: the other dims, where the operands do not broadcast."""
    if len({spec.shape for spec in call.inputs}) == 1:
        kept = keep_dims(call, (dict(call.kwargs).get("dim", -1),))
        yield from (rule for rule in kept if not rule.outputs[0].is_partial())


RULES: RuleTable = {
    **{f"aten.{name}": over_stacks for name in OVER_STACKS},
    "aten._fft_c2c.default": fourier,
    "aten._fft_r2c.default": fourier,
    "aten._fft_c2r.default": fourier,
    "aten._cdist_forward.default": distances,
    "aten._cdist_backward.default": distances_backward,
    "aten._trilinear.default": trilinear,
    "aten.linalg_cross.default": cross,
}
