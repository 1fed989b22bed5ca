"""Runs the strategies of a call on shards and compares with the op on the whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.sharding.check_rule import as_outputs, describe
from autopar.sharding.execution import call_in, can_run, fake_calls_of, run_sharded, trace_op, worst_error
from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import rules_of
from autopar.sharding.strategies import Strategy

TOLERANCE = 1e-10  # of float64 results, relative to the largest magnitude
SINGLE_PRECISION_TOLERANCE = 1e-5


def runnable_strategies(call: OpCall, mesh_shape: tuple[int, ...], most: int = 1000) -> list[Strategy]:
    """Strategies with work for every rank; `most` of them, drawn at random where there are more."""
    products = [Strategy(choice) for choice in itertools.product(rules_of(call), repeat=len(mesh_shape))]
    runnable = [strategy for strategy in products if can_run(call, strategy, mesh_shape)]
    return runnable if len(runnable) <= most else random.Random(0).sample(runnable, most)


def wrong_strategies(
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meshes: Sequence[tuple[int, ...]] = ((2,), (3,)),
    most: int = 1000,
) -> tuple[list[str], int]:
    """(what went wrong, one line each; how many strategies ran)."""
    try:
        gm = trace_op(target, args, kwargs)
    except Exception as error:  # an op that no plan can hold has no business with a rule
        return [f"{target} cannot be traced: {type(error).__name__} {str(error)[:300]}"], 0
    call, fake_calls = call_in(gm), fake_calls_of(gm)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    expected = as_outputs(target(*args, **kwargs))
    wrong, count = [], 0
    for mesh_shape in meshes:
        for strategy in runnable_strategies(call, mesh_shape, most):
            count += 1
            names = f"{call.name} on {mesh_shape}: {' x '.join(map(describe, strategy.rules))}"
            try:
                off_by = worst_error(run_sharded(gm, strategy, mesh_shape, tensors, fake_calls), expected)
            except Exception as error:  # any failure of any op is a failed proof, and is listed
                wrong.append(f"{names}: {type(error).__name__} {str(error)[:300]}")
                continue
            if off_by > tolerance(expected):
                wrong.append(f"{names}: off by {off_by:.3g}")
    return wrong, count


def tolerance(expected: Sequence[torch.Tensor | None]) -> float:
    """The tolerance of the least precise output."""
    single = any(out is not None and out.dtype in (torch.float32, torch.complex64) for out in expected)
    return SINGLE_PRECISION_TOLERANCE if single else TOLERANCE
