"""A mean loss as a sum over a count: the count depends on the targets alone, so it is known before any microbatch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture.program import Program
from autopar.fake_calls import FakeCalls
from autopar.passes.copy_graph import copy_graph
from autopar.passes.localize import fake_mode_of
from autopar.sharding.op_call import target_of
from autopar.sharding.rules.loss import NO_REDUCTION

aten = torch.ops.aten
MEAN = 1
LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def explicit_counts(program: Program) -> Program:
    """Write each mean negative log-likelihood as (sum of the single losses) / (total weight of the targets).

    Invariant: every value is what it was, up to the order of sums. The backward reads the same total weight.
    """
    gm = copy_graph(program.graph_module)
    calls = FakeCalls(fake_mode_of(gm))
    for node in list(gm.graph.nodes):
        if node.target in LOSSES and node.args[3] == MEAN:
            _Rewrite(node, calls).run()
    gm.graph.lint()
    return replace(program, graph_module=gm)


class _Rewrite:
    """Adds the ops that stand in for one loss, in front of it, with its metadata and keys of their own."""

    def __init__(self, loss: fx.Node, calls: FakeCalls) -> None:
        self.loss, self.calls, self.made = loss, calls, 0

    def run(self) -> None:
        scores, target, weight, _, ignored = self.loss.args[:5]
        picked = self._op(target_of(self.loss), scores, target, weight, NO_REDUCTION, ignored)
        single = self._op(operator.getitem, picked, 0)
        count = self._count(target, weight, ignored)
        mean = self._op(aten.div.Tensor, self._op(aten.sum.default, single), count)
        for user in list(self.loss.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(mean if user.args[1] == 0 else count)
            user.graph.erase_node(user)
        self.loss.graph.erase_node(self.loss)

    def _count(self, target: Any, weight: Any, ignored: Any) -> fx.Node:
        """The total weight of the targets that are not ignored, in the dtype of the loss."""
        dtype = self.loss.meta["val"][1].dtype
        counted = self._op(aten.ne.Scalar, target, ignored)
        if weight is not None:
            somewhere = self._op(aten.mul.Tensor, target, counted)
            counted = self._op(aten.mul.Tensor, self._op(aten.index.Tensor, weight, [somewhere]), counted)
        wide = torch.promote_types(dtype, torch.float32)
        total = self._op(aten.sum.default, self._op(aten._to_copy.default, counted, dtype=wide))
        return total if wide == dtype else self._op(aten._to_copy.default, total, dtype=dtype)

    def _op(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        graph = self.loss.graph
        with graph.inserting_before(self.loss):
            node = graph.call_function(target, args, kwargs)
        node.meta.update(self.loss.meta)
        node.meta["key"] = f"{self.loss.meta['key']}.{self.made}"
        values = fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        node.meta["val"] = self.calls(target, *values)
        self.made += 1
        return node
