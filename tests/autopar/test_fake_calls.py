"""A call answered from memory gives what the call itself would give."""

from __future__ import annotations

import pytest
import torch

from autopar.fake_calls import FakeCalls
from autopar.torch_compat import FakeTensor, FakeTensorMode

aten = torch.ops.aten


def described(tensor: torch.Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), storage.nbytes(), tensor.device


@pytest.fixture
def calls() -> FakeCalls:
    return FakeCalls(FakeTensorMode())


def matrix(calls: FakeCalls, dtype: torch.dtype = torch.float32) -> FakeTensor:
    return calls.empty((4, 6), dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.exp.default, ()), (aten.t.default, ()), (aten.slice.Tensor, (1, 2, 5)), (aten.split.Tensor, (2, 1)),
        (aten.max.dim, (1,)), (aten._to_copy.default, ()), (aten.sum.dim_IntList, ([0], True)),
    ],
)  # fmt: skip
def test_a_repeated_call_gives_tensors_of_the_same_form_on_storages_of_their_own(calls, target, arguments):
    first, second = matrix(calls), matrix(calls)
    pairs = []
    for value in (first, second):
        result = calls(target, (value, *arguments), {})
        pairs.append([result] if isinstance(result, torch.Tensor) else list(result))
    for one, two in zip(*pairs, strict=True):
        assert described(one) == described(two)
        shares = [
            it.untyped_storage()._cdata == base.untyped_storage()._cdata for it, base in ((one, first), (two, second))
        ]
        assert shares[0] == shares[1]
        assert one.untyped_storage()._cdata != two.untyped_storage()._cdata


def test_constants_of_other_types_are_other_calls(calls):
    value = matrix(calls, torch.int64)
    assert [calls(aten.add.Scalar, (value, by), {}).dtype for by in (1, 1.0)] == [torch.int64, torch.float32]


def test_an_op_in_place_gives_back_its_argument(calls):
    for value in (matrix(calls), matrix(calls)):
        assert calls(aten.add_.Scalar, (value, 1), {}) is value
