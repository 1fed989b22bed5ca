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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["native_layer_norm", "native_group_norm"])
def test_statistics_of_norms_have_the_dtype_that_kernels_give_them(calls, kind, wide, name):
    if (kind, wide) == (torch.float32, torch.bfloat16):
        wide = torch.float32  # there is no kernel that narrows
    source, weight = torch.ones(4, 6, dtype=kind), torch.ones(6, dtype=wide)
    target = getattr(aten, name).default

    def arguments(source, weight):
        if name == "native_layer_norm":
            return source, [6], weight, weight, 1e-5
        return source, weight, weight, 4, 6, 1, 2, 1e-5

    real = target(*arguments(source, weight))
    for _ in range(2):  # from the mode, and from memory
        fakes = arguments(calls.mode.from_tensor(source), calls.mode.from_tensor(weight))
        assert [item.dtype for item in calls(target, fakes, {})] == [item.dtype for item in real]


@pytest.mark.parametrize("target", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
                                    aten.binary_cross_entropy.default, aten.huber_loss.default])  # fmt: skip
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_loss_lies_in_as_large_a_storage_as_the_kernel_gives_it(calls, target, reduction):
    """Reduced, several lie in the storage of all elements' losses: it lives as long as the loss."""
    options = {"reduction": reduction}
    real = target(torch.rand(4, 6), torch.rand(4, 6), **options)
    for _ in range(2):
        assert described(calls(target, (matrix(calls), matrix(calls)), options)) == described(real)
