"""Microbatches: run one by one and put together, they give what the whole batch gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.arguments import call_arguments
from autopar.capture.program import Program
from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import MicrobatchError
from autopar.runtime.strided import Strided
from autopar.runtime.tangents import varied_tangents
from autopar.runtime.virtual_run import program_values
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import is_partial, shard_dim
from autopar.stages.microbatch import Microbatches, cut_microbatches, part_of
from autopar.zoo.plain import make_plain
from tests.autopar.models import MODELS


def captured(made: Any) -> tuple[Program, dict[str, Tensor]]:
    """The program of a model on its inputs, and the value of every placeholder."""
    model, inputs = made
    args, kwargs = call_arguments(inputs)
    program = capture(model, args, kwargs)
    leaves = tensor_leaves(args, kwargs)
    return program, program_values(model, program, leaves, 0, varied_tangents(program))


def run_in_pieces(pieces: Microbatches, values: dict[str, Tensor]) -> list[Tensor]:
    """The results of all microbatches, put together as `outputs` says."""
    early: dict[str, Tensor] = {}
    if pieces.early is not None:
        names = [node.name for node in pieces.early.graph.nodes if node.op == "placeholder"]
        results = Strided(pieces.early).run(*(values[name] for name in names))
        order = list(dict.fromkeys(value.node for value in pieces.early_values))
        by_node = dict(zip(order, results, strict=True))
        early = {value.name: by_node[value.node] for value in pieces.early_values}
    collected: list[list[Tensor]] = [[] for _ in pieces.outputs]
    for item, piece in enumerate(pieces.pieces):
        whole = [early[it.name] if it.name in early else values[it.node] for it in piece.inputs]
        pairs = zip(whole, piece.inputs, strict=True)
        given = [part_of(value, pieces.inputs[it.node], pieces.cut, item).clone() for value, it in pairs]
        for found, value in zip(collected, Strided(piece.graph_module).run(*given), strict=True):
            found.append(value)
    return [_together(parts, placement) for parts, placement in zip(collected, pieces.outputs, strict=True)]


def _together(parts: list[Tensor], placement: Any) -> Tensor:
    dim = shard_dim(placement)
    if dim is not None:
        return torch.cat(parts, dim)
    return torch.stack(parts).sum(0) if is_partial(placement) else parts[0]


def check(made: Any, microbatches: int) -> Microbatches:
    program, values = captured(made)
    pieces = cut_microbatches(program, microbatches, RuleBook().rules_of)
    with torch.no_grad():
        expected = Strided(program.graph_module).run(*(values[item.node] for item in program.inputs))
        actual = run_in_pieces(pieces, values)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)
    return pieces


@pytest.mark.parametrize("microbatches", [3])
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_microbatches_together_give_the_result_of_the_batch(name: str, microbatches: int) -> None:
    pieces = check(MODELS[name](), microbatches)
    assert pieces.count == microbatches
    assert len({id(piece) for piece in pieces.pieces}) == len(set(pieces.cut.lengths))


@pytest.mark.parametrize("name", ["unet", "adapters", "lstm_tagger"])
def test_microbatches_of_other_kinds_of_models(name: str) -> None:
    check(make_plain(name), 4)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.head = nn.Linear(6, 16), nn.Dropout(0.4), nn.Linear(16, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.drop(self.linear(x))), labels, ignore_index=0)


def test_masks_are_those_of_the_batch_and_ignored_labels_are_counted_over_all_of_it() -> None:
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 2, 0, 1, 2])  # the first microbatch counts one label, the second three
    pieces = check((Dropped().train(), (torch.randn(8, 6), labels)), 2)
    assert [value.name for value in pieces.early_values] == ["early:sum_default:R"]
    assert len({id(piece) for piece in pieces.pieces}) == 2  # they draw at different places


def test_statistics_over_the_batch_are_refused_with_the_users_line() -> None:
    program, _ = captured(MODELS["resnet"]())
    with pytest.raises(MicrobatchError, match=r"batch_norm.*\n.*modeling_resnet.py(.*\n)*.*microbatches=1"):
        cut_microbatches(program, 2, RuleBook().rules_of)


def test_batch_norm_with_frozen_statistics_is_cut() -> None:
    model, inputs = MODELS["resnet"]()
    check((model.eval(), inputs), 4)


def test_a_batch_is_not_cut_into_more_parts_than_samples() -> None:
    program, _ = captured(MODELS["mlp"]())
    with pytest.raises(MicrobatchError, match="batch of 8"):
        cut_microbatches(program, 9, RuleBook().rules_of)
