"""Balanced assignment against SciPy's solver of the assignment problem with every expert repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from autopar.ops.balanced_assignment import balanced_assignment


def best_total(scores: Tensor) -> float:
    """The largest sum of scores under the experts' shares, by the Hungarian method."""
    tokens, experts = scores.shape
    columns = scores.double().repeat_interleave(-(-tokens // experts), 1).numpy()
    rows, chosen = linear_sum_assignment(-columns)
    return float(columns[rows, chosen].sum())


def check(scores: Tensor) -> None:
    tokens, experts = scores.shape
    found = balanced_assignment(scores)
    assert found.dtype == torch.int64
    assert found.shape == (tokens,)
    assert int(torch.bincount(found, minlength=experts).max()) <= -(-tokens // experts)
    total = float(scores.double().gather(1, found.unsqueeze(1)).sum())
    assert total == pytest.approx(best_total(scores), rel=1e-9, abs=1e-9)


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["normal", "ties", "skewed", "equal", "rows"]),
    st.integers(0),
)
def test_the_sum_of_scores_is_the_largest_possible(tokens: int, experts: int, kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    scores = torch.randn(tokens, experts, generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "skewed":
        scores[:, 0] += 100
    elif kind == "equal":
        scores = torch.full_like(scores, 0.3)
    elif kind == "rows":
        scores = scores[:1].expand(tokens, experts)
    check(scores)


def test_where_experts_divide_the_tokens_all_get_the_same() -> None:
    found = balanced_assignment(torch.randn(96, 8))
    assert torch.bincount(found).tolist() == [12] * 8


def test_scores_that_are_no_finite_numbers_still_give_a_balanced_assignment() -> None:
    scores = torch.randn(12, 3)
    scores[0, 0], scores[1, 1], scores[2, 2] = np.nan, np.inf, -np.inf
    found = balanced_assignment(scores)
    assert torch.bincount(found).tolist() == [4, 4, 4]
    assert found[1] == 1
    assert found[2] != 2


def test_the_op_passes_the_checks_of_torch() -> None:
    torch.library.opcheck(torch.ops.autopar.balanced_assignment.default, (torch.randn(12, 4),))
