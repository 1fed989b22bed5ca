"""8-bit Adam against its paper: the map, the blocks, the step; and that checkpoints keep bytes."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from autopar.errors import UnsupportedOptionError
from autopar.optim import Adam8bit, AdamW8bit
from autopar.optim.blocks import blocks_align, dequantized, dynamic_map, quantized
from autopar.sharding.layout import parse_layout


def code_value(bits: str) -> float:
    """An unsigned byte of the dynamic data type, read as the paper draws it: zeros, an indicator, a fraction."""
    if "1" not in bits:
        return 0.0
    zeros = bits.index("1")
    fraction = bits[zeros + 1 :]
    parts = 2 ** len(fraction)
    middle = 0.1 + 0.9 * (int(fraction or "0", 2) + 0.5) / parts
    return float(10.0**-zeros * middle)


def test_the_unsigned_map_is_what_the_bits_say() -> None:
    bytes_ = [f"{code:08b}" for code in range(256)]
    wanted = sorted(code_value(bits) for bits in bytes_ if bits.find("1") < 7)  # seven decades: 254 codes and 0
    found = dynamic_map(signed=False).tolist()
    assert found == pytest.approx([*wanted, 1.0], rel=1e-6)


def test_the_signed_map_spends_a_bit_on_the_sign() -> None:
    values = dynamic_map(signed=True)
    assert values.numel() == 256
    assert torch.equal(values[:127].flip(0), -values[128:255])
    assert values[127] == 0.0
    assert values[255] == 1.0
    assert torch.all(values.diff() > 0)


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_goes_to_its_nearest_code(signed: bool) -> None:
    values = torch.rand(1000) ** 4
    values = torch.where(torch.rand(1000) > 0.5, values, -values) if signed else values
    scales = torch.full((1000,), 3.0)
    codes = quantized(values * 3.0, scales, signed=signed)
    distances = (dynamic_map(signed=signed) - values[:, None]).abs()
    torch.testing.assert_close(distances.gather(1, codes.long()[:, None])[:, 0], distances.amin(1))
    assert dequantized(codes, scales, signed=signed).sub(values * 3.0).abs().max() < 3.0 * 0.045


def as_in_the_paper(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """AdamW with its moments quantized between steps, block after block of the flattened tensor."""
    flat, size = weight.double().reshape(-1).clone(), weight.numel()
    kept = {True: torch.zeros(size).double(), False: torch.zeros(size).double()}
    for step, gradient in enumerate(gradients, 1):
        grad = gradient.double().reshape(-1)
        kept[True] = 0.9 * kept[True] + 0.1 * grad
        kept[False] = 0.999 * kept[False] + 0.001 * grad**2
        flat *= 1 - lr * decay
        flat -= lr * (kept[True] / (1 - 0.9**step)) / ((kept[False] / (1 - 0.999**step)).sqrt() + 1e-8)
        for signed, moment in kept.items():
            values = dynamic_map(signed=signed).double()
            for start in range(0, size, 2048):
                block = moment[start : start + 2048]
                scale = block.abs().max()
                nearest = (block[:, None] / scale - values).abs().argmin(1)
                moment[start : start + 2048] = values[nearest] * scale
    return flat.view(weight.shape)


def test_the_step_is_that_of_the_paper_over_blocks_of_2048() -> None:
    weight = torch.randn(50, 90)  # two blocks and a part of one
    gradients = [torch.randn(50, 90) * torch.linspace(0.1, 9, 90) for _ in range(3)]
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = AdamW8bit([parameter], lr=0.01, weight_decay=0.1)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    difference = (parameter.detach() - as_in_the_paper(weight, gradients, 0.01, 0.1)).abs()
    assert float((difference > 1e-6).float().mean()) < 0.002  # values halfway between two codes may go either way
    assert optimizer.state[parameter]["exp_avg"].dtype is torch.uint8


@pytest.mark.parametrize("decoupled", [True, False])
def test_small_parameters_have_the_moments_of_torch(decoupled: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(7, 5)) for _ in range(2))
    classes = (AdamW8bit, torch.optim.AdamW) if decoupled else (Adam8bit, torch.optim.Adam)
    first, second = (kind([item], weight_decay=0.1) for kind, item in zip(classes, (ours, theirs), strict=True))
    for gradient in torch.randn(4, 7, 5):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs)


def test_the_state_is_two_bytes_per_element_and_two_floats_per_block() -> None:
    parameter = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Adam8bit([parameter])
    optimizer.step()
    held = sum(value.nbytes for name, value in optimizer.state[parameter].items() if name != "step")
    assert held == 2 * 64 * 128 + 2 * 4 * math.ceil(64 * 128 / 2048)


def test_a_loaded_state_goes_on_where_it_was() -> None:
    first = torch.nn.Parameter(torch.randn(64, 128).bfloat16())
    gradients = torch.randn(3, 64, 128).bfloat16()
    optimizer = Adam8bit([first])
    first.grad = gradients[0]
    optimizer.step()
    second = copy.deepcopy(first)
    restored = Adam8bit([second])
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for gradient in gradients[1:]:
        first.grad, second.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        restored.step()
    assert torch.equal(first, second)
    assert restored.state[second]["exp_avg_scales"].dtype is torch.float32


def test_blocks_align_where_shards_are_whole_blocks() -> None:
    assert blocks_align((128, 64), parse_layout("S0", 1), (4,))
    assert blocks_align((128, 64), parse_layout("R,S0", 2), (2, 2))
    assert not blocks_align((96, 64), parse_layout("S0", 1), (4,))
    assert not blocks_align((128, 64), parse_layout("S1", 1), (4,))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="lr=-1"):
        Adam8bit([torch.nn.Parameter(torch.zeros(1))], lr=-1)
