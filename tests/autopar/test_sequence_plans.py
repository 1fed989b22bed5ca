"""Long sequences: attention whose queries, or keys, or both lie in chunks of the sequence on the ranks of an axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar

WIDTH, HEADS, KEY_HEADS, LENGTH = 16, 4, 2, 24
FORMS = {  # (q, k, v -> out, lse) on one axis, and (grad_out, q, k, v, out, lse -> grad_q, grad_k, grad_v)
    "queries": (("S2", "R", "R", "S2", "S2"), ("S2", "S2", "R", "R", "S2", "S2", "S2", "P", "P")),
    "keys": (("R", "S2", "S2", "P", "R"), ("R", "R", "S2", "S2", "R", "R", "P", "S2", "S2")),
    "ring": (("S2",) * 5, ("S2",) * 9),
}


class Attention(nn.Module):
    """Causal attention with grouped heads, and what is left of its squares."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH * KEY_HEADS // HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, KEY_HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (out * out.cos()).mean()


def written(rules: tuple[tuple[str, ...], ...], outputs: int) -> str:
    """As a plan writes a strategy: a layout per tensor, a placement per axis."""
    layouts = [",".join(placements) for placements in zip(*rules, strict=True)]
    return f"{' '.join(layouts[:-outputs])} -> {' '.join(layouts[-outputs:])}"


@pytest.mark.parametrize(
    "mesh_shape, forms",
    [
        ((4,), ("ring",)),
        ((3,), ("keys",)),
        ((2,), ("queries",)),
        ((2, 2), ("ring", "ring")),
        ((2, 2), ("keys", "ring")),
        ((2, 2), ("ring", "keys")),
        ((2, 2), ("queries", "ring")),
    ],
)
def test_attention_over_a_sequence_in_chunks_is_that_of_one_device(
    mesh_shape: tuple[int, ...], forms: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model, inputs = Attention().double(), torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    mesh = autopar.Mesh(mesh_shape, hardware="cpu")
    data = autopar.make_plan(model, mesh, example_inputs=inputs).to_json()
    keys = [key for key in data["ops"] if "attention" in key]
    assert len(keys) == 2
    for key in keys:
        backward = int("backward" in key)
        data["ops"][key] = written(tuple(FORMS[form][backward] for form in forms), 3 if backward else 2)
    report = autopar.verify(model, mesh, example_inputs=inputs, plan=autopar.Plan.from_json(data))
    assert report.ok, report.table


def test_for_one_long_sequence_the_search_cuts_it() -> None:
    """Two key heads serve two ranks at most: on eight, it is the sequence that is cut."""
    with torch.device("meta"):
        model, inputs = Attention().bfloat16(), torch.empty(1, 1 << 16, WIDTH, dtype=torch.bfloat16)
    plan = autopar.make_plan(model, autopar.Mesh((8,), hardware="h100"), example_inputs=inputs)
    (out,) = {str(entry.outputs[0]) for entry in plan.entries if "attention#" in entry.key}
    assert out == "(Shard(dim=2),)"
