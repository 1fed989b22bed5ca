"""Does what discovery claims hold on values and sizes that it never saw, in programs as the passes emit them?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.sharding.check_rule import as_outputs, describe
from autopar.sharding.discovery.book import Discovery
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.discovery.samples import Kind, draw
from autopar.sharding.discovery.scaling import Precision, Setting, has_form, namings, scaled, small_sizes
from autopar.sharding.execution import call_in, can_run, fake_calls_of, run_sharded, trace_op, worst_error
from autopar.sharding.op_call import OpCall
from autopar.sharding.strategies import Strategy
from tests.autopar.sharding.rules.proving import tolerance
from tests.autopar.sharding.rules.recording import Sample

MESHES = ((2,), (3,), (2, 2))
OTHER_SIZES = ((12, 30, 36, 42, 48, 54, 60, 66), (13, 17, 19, 23, 29, 31, 37, 41))  # in none of discovery's trials
LARGEST = 1 << 18  # elements
MOST_PAIRS = 12


def finding_of(call: OpCall) -> Finding:
    """What is discovered, whatever rules are written; nothing is remembered."""
    return Discovery(memory={})(call)


def wrong_claims(sample: Sample) -> tuple[Finding, list[str], int]:
    """(what was found, the claims that do not hold, how many runs there were)."""
    finding = finding_of(sample.call)
    wrong: list[str] = []
    count = 0
    if finding.rules:
        examples = [(sample.args, sample.kwargs), *(_in_other_sizes(sample.call) if finding.is_general else ())]
        for args, kwargs in examples:
            found, runs = _wrong_strategies(sample.call.target, args, kwargs, finding)
            wrong += found
            count += runs
    return finding, wrong, count


def _in_other_sizes(call: OpCall) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for row, naming in itertools.product(OTHER_SIZES, namings(call)):
        setting = Setting(frozenset(), naming, Precision.OWN)
        sizes = small_sizes(call, setting, row, {})
        problem = scaled(call, setting, sizes, "cpu")
        if problem.numel > LARGEST:
            continue
        for kind in (Kind("normal", "below the smallest size"), Kind("unit", "below the smallest size")):
            tensors = draw(problem, kind, 1000)
            outputs = problem.run(tensors)
            if outputs is not None and has_form(call, sizes, outputs, Precision.OWN):
                yield problem.arguments(tensors)
                break


def _wrong_strategies(target: Any, args: Any, kwargs: dict[str, Any], finding: Finding) -> tuple[list[str], int]:
    gm = trace_op(target, args, kwargs)
    call, fake_calls = call_in(gm), fake_calls_of(gm)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    expected = as_outputs(target(*args, **kwargs))
    wrong, count = [], 0
    for mesh_shape in MESHES:
        for strategy in _strategies(call, finding, mesh_shape):
            count += 1
            shapes = [tuple(tensor.shape) for tensor in tensors]
            names = f"{call.name}{shapes} on {mesh_shape}: {' x '.join(map(describe, strategy.rules))}"
            try:
                off_by = worst_error(run_sharded(gm, strategy, mesh_shape, tensors, fake_calls), expected)
            except Exception as error:  # a program that cannot run is a false claim too
                wrong.append(f"{names}: {type(error).__name__} {str(error)[:200]}")
                continue
            if off_by > tolerance(expected):
                wrong.append(f"{names}: off by {off_by:.3g}")
    return wrong, count


def _strategies(call: OpCall, finding: Finding, mesh_shape: Sequence[int]) -> list[Strategy]:
    products = itertools.product(finding.rules, repeat=len(mesh_shape))
    runnable = (Strategy(rules) for rules in products if can_run(call, Strategy(rules), tuple(mesh_shape)))
    return list(itertools.islice(runnable, MOST_PAIRS))
