"""Every rule of autopar's own ops, run on 2 and 3 shards and on a 2x2 mesh, recombines to the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar.ops  # noqa: F401  (registers the ops)
from autopar.sharding.execution import call_in, fake_calls_of, run_sharded, trace_op
from autopar.sharding.registry import rules_of
from autopar.sharding.rules.custom import KEY_HEADS, KEYS, RING
from autopar.sharding.strategies import strategies_of

ops = torch.ops.autopar
F64 = torch.float64
LINES = ((2,), (3,))
MESHES = (*LINES, (2, 2))
Case = tuple[Any, tuple[Any, ...]]


def random_case(name: str, *rest: Any) -> Case:
    return getattr(ops, name).default, (torch.tensor(11), [6, 25, 12], [0, 0, 0], [6, 25, 12], *rest)


def attention_case(
    heads: tuple[int, int] = (12, 12), lengths: tuple[int, int] = (12, 12), mask: Tensor | None = None, **options: Any
) -> tuple[Case, Case]:
    """The call, and that of its backward."""
    batch = options.get("batch", 6)
    q = torch.randn(batch, heads[0], lengths[0], 4, dtype=F64)
    k, v = (torch.randn(batch, heads[1], lengths[1], 4, dtype=F64) for _ in range(2))
    dropout_p = options.get("dropout_p", 0.0)
    seed = torch.tensor(3) if dropout_p else None
    where = ([0] * 4, [batch, heads[0], *lengths])
    how = (mask, seed, dropout_p, options.get("causal", False), None, 3, *where)
    out, lse = ops.attention(q, k, v, *how)
    backward = (torch.randn_like(out), q, k, v, out, lse, *how)
    return (ops.attention.default, (q, k, v, *how)), (ops.attention_backward.default, backward)


def batch_norm_cases() -> dict[str, Case]:
    x = torch.randn(6, 12, 4, 6, dtype=F64) * 2 + 3
    grad, mean, weight = torch.randn_like(x), x.mean((0, 2, 3)), torch.randn(12, dtype=F64)
    invstd = torch.rand(12, dtype=F64) + 0.5
    sums = ops.batch_norm_backward_sums(grad, x, mean)
    return {
        "square sum": (ops.batch_norm_square_sum.default, (x, mean)),
        "apply": (ops.batch_norm_apply.default, (x, mean, invstd, weight, weight)),
        "apply without weights": (ops.batch_norm_apply.default, (x, mean, invstd, None, None)),
        "apply to one dim": (ops.batch_norm_apply.default, (x[:, :, 0, 0].contiguous(), mean, invstd, weight, None)),
        "backward sums": (ops.batch_norm_backward_sums.default, (grad, x, mean)),
        "backward apply": (ops.batch_norm_backward_apply.default, (grad, x, mean, invstd, weight, *sums, 144)),
    }


def scan_cases() -> dict[str, Case]:
    inputs, weight = torch.randn(6, 3, 16, dtype=F64), torch.randn(16, 4, dtype=F64)
    hidden, cell = torch.randn(6, 4, dtype=F64), torch.randn(6, 4, dtype=F64)
    lstm = (inputs, hidden, cell, weight)
    gru = (inputs[..., :12].contiguous(), hidden, weight[:12], weight[:12, 0].contiguous())
    rnn = (inputs[..., :4].contiguous(), hidden, weight[:4], "tanh")
    hiddens, cells, gates = ops.lstm_scan(*lstm)
    gru_hiddens, gru_gates = ops.gru_scan(*gru)
    plain = ops.rnn_scan(*rnn)
    return {
        "lstm": (ops.lstm_scan.default, lstm),
        "lstm backward": (ops.lstm_scan_backward.default, (hiddens.sin(), None, cells, gates, cell, weight)),
        "gru": (ops.gru_scan.default, gru),
        "gru backward": (
            ops.gru_scan_backward.default,
            (gru_hiddens.sin(), gru_hiddens, gru_gates, hidden, weight[:12]),
        ),
        "rnn": (ops.rnn_scan.default, rnn),
        "rnn backward": (ops.rnn_scan_backward.default, (plain.sin(), plain, *rnn[2:])),
    }


def ctc_cases() -> dict[str, Case]:
    scores = torch.randn(7, 6, 5, dtype=F64).log_softmax(-1)
    args = (scores, torch.randint(1, 5, (6, 3)), torch.tensor([7, 6, 5, 7, 7, 6]), torch.tensor([3, 2, 1, 1, 3, 2]))
    loss, alpha = ops.ctc_loss(*args, 0, True)
    return {
        "ctc": (ops.ctc_loss.default, (*args, 0, True)),
        "ctc backward": (ops.ctc_loss_backward.default, (loss.sin(), *args, loss, alpha, 0, True)),
    }


def added_mask(share: float) -> Tensor:
    """Random numbers, minus infinity for a share of them: some rows have no key at all."""
    numbers = torch.randn(1, 4, 12, 12, dtype=F64)
    numbers[torch.rand(1, 4, 12, 12) < share] = -math.inf
    return numbers


ATTENTIONS: dict[str, Callable[[], tuple[Case, Case]]] = {
    "plain": attention_case,
    "causal": lambda: attention_case(causal=True),
    "dropout": lambda: attention_case(causal=True, dropout_p=0.3),
    "grouped heads": lambda: attention_case((12, 4), dropout_p=0.2),
    "one key head": lambda: attention_case((12, 1), causal=True),
    "masked rows": lambda: attention_case((4, 2), mask=torch.rand(1, 1, 12, 12) > 0.8),
    "masked causal rows": lambda: attention_case((4, 2), mask=added_mask(0.7), causal=True, dropout_p=0.2),
    "masked keys": lambda: attention_case(mask=torch.rand(6, 1, 1, 12) > 0.3),
    "added mask": lambda: attention_case(mask=torch.randn(1, 12, 12, 12, dtype=F64)),
    "mask of pairs": lambda: attention_case((12, 6), mask=torch.rand(1, 1, 12, 12) > 0.3, causal=True),
    "more keys": lambda: attention_case((2, 2), (12, 30), causal=True, batch=2),
    "uneven": lambda: attention_case((2, 2), (26, 25), causal=True, batch=25),
}
CROSSED = ("dropout", "grouped heads", "masked causal rows")  # two rules at once: offsets, and what two axes cut
MOST = 40  # strategies per mesh, drawn at random where there are more
RANDOMS = {
    "mask": ("random_mask", 0.7, 3),
    "uniform": ("random_uniform", 3, F64),
    "normal": ("random_normal", 3, torch.float32),
    "integers": ("random_integers", 0, 9, 5),
}


def assert_every_rule_holds(
    case: Case, tolerance: float = 1e-12, meshes: tuple[tuple[int, ...], ...] = MESHES
) -> set[str]:
    """The forms that were run."""
    op, args = case
    gm = trace_op(op, args, {})
    call, tensors = call_in(gm), [item for item in args if isinstance(item, Tensor)]
    fake_calls = fake_calls_of(gm)
    whole = op(*args)
    expected = whole if isinstance(whole, tuple) else (whole,)
    forms = set()
    for mesh_shape in meshes:
        strategies = strategies_of(call, rules_of(call), mesh_shape)
        assert len(strategies) > 1
        if len(strategies) > MOST:
            strategies = tuple(Random(0).sample(strategies, MOST))
        for strategy in strategies:
            actual = run_sharded(gm, strategy, mesh_shape, tensors, fake_calls)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
            forms |= {rule.form for rule in strategy.rules}
    return forms


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_may_be_cut_as_its_rules_say(name: str) -> None:
    forward, backward = ATTENTIONS[name]()
    meshes = MESHES if name in CROSSED else LINES
    forms = assert_every_rule_holds(forward, meshes=meshes) | assert_every_rule_holds(backward, meshes=meshes)
    grouped = ("grouped heads", "one key head", "mask of pairs", "masked rows", "masked causal rows")
    assert (KEY_HEADS in forms) == (name in grouped)
    assert {KEYS, RING} <= forms


@pytest.mark.parametrize("name", RANDOMS)
def test_random_tensors_are_the_same_bits_under_every_cut(name: str) -> None:
    op, *rest = RANDOMS[name]
    assert_every_rule_holds(random_case(str(op), *rest), tolerance=0)


@pytest.mark.parametrize("name", batch_norm_cases())
def test_batch_norm_may_be_cut_in_every_dim(name: str) -> None:
    assert_every_rule_holds(batch_norm_cases()[name])


@pytest.mark.parametrize("name", scan_cases())
def test_recurrences_may_be_cut_along_the_batch(name: str) -> None:
    assert_every_rule_holds(scan_cases()[name])


@pytest.mark.parametrize("name", ctc_cases())
def test_ctc_may_be_cut_along_the_batch(name: str) -> None:
    assert_every_rule_holds(ctc_cases()[name])
