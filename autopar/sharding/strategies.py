"""Strategies: an op's choices over ALL mesh axes, as products of its one-axis rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autopar.sharding.layout import Layout, is_partial, local_shape, ranks_per_dim, shard_dim
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule

MIN_UNEVEN_CHUNK = 8  # a short last chunk wastes at most 1/8 of the work of a dim at least this many chunks long


@dataclass(frozen=True)
class Strategy:
    """One choice for an op: a rule for each mesh axis."""

    rules: tuple[Rule, ...]

    @cached_property
    def inputs(self) -> tuple[Layout, ...]:
        """Per tensor input, the layout that it must have."""
        return tuple(zip(*(rule.inputs for rule in self.rules), strict=True))

    @cached_property
    def outputs(self) -> tuple[Layout, ...]:
        """Per tensor output, the layout that it will have."""
        return tuple(zip(*(rule.outputs for rule in self.rules), strict=True))

    def axes_with(self, form: str) -> tuple[int, ...]:
        """The mesh axes whose rule runs in that local form."""
        return tuple(axis for axis, rule in enumerate(self.rules) if rule.form == form)


def strategies_of(call: OpCall, rules: Sequence[Rule], mesh_shape: Sequence[int]) -> tuple[Strategy, ...]:
    """All products of `rules` over the mesh axes whose shards divide; an axis of one rank has only the first rule."""
    per_axis = [tuple(rules) if ranks > 1 else tuple(rules[:1]) for ranks in mesh_shape]
    products = (Strategy(choice) for choice in itertools.product(*per_axis))
    divides = _Divides(call, tuple(mesh_shape))
    return tuple(strategy for strategy in products if divides(strategy))


@dataclass
class _Divides:
    """Whether every shard of every tensor of one call has the size that a strategy's rules demand."""

    call: OpCall
    mesh_shape: tuple[int, ...]
    known: dict[tuple[int, Layout, bool, bool], bool] = field(default_factory=dict)  # many strategies share layouts

    def __call__(self, strategy: Strategy) -> bool:
        if not (splits_divide(strategy, self.mesh_shape) and compatible(strategy)):
            return False
        even = any(rule.even for rule in strategy.rules)
        short = any(rule.short for rule in strategy.rules)
        layouts = (*strategy.inputs, *strategy.outputs)
        return all(self._shardable(index, layout, even=even, short=short) for index, layout in enumerate(layouts))

    def _shardable(self, index: int, layout: Layout, *, even: bool, short: bool) -> bool:
        key = (index, layout, even, short)
        if key not in self.known:
            spec = (*self.call.inputs, *self.call.outputs)[index]
            self.known[key] = spec is None or shardable(spec, layout, self.mesh_shape, even=even, short=short)
        return self.known[key]


def splits_divide(strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
    """Whether every count among the arguments that the rules cut divides by the ranks of the axes that cut it."""
    ways: dict[int, int] = {}
    for rule, ranks in zip(strategy.rules, mesh_shape, strict=True):
        if rule.splits:
            ways[rule.splits] = ways.get(rule.splits, 1) * ranks
    return all(count % ranks == 0 for count, ranks in ways.items())


def compatible(strategy: Strategy) -> bool:
    """Whether the axes' rules go together.

    No dim has a halo on two axes: neighbours across the outer one are in no group of the inner one. No rule runs beside
    a form that it excludes.
    """
    dims = [shard_dim(rule.outputs[0]) for rule in strategy.rules if rule.halo is not None]
    forms = {rule.form for rule in strategy.rules if rule.form}
    return len(dims) == len(set(dims)) and forms.isdisjoint(rule.excludes for rule in strategy.rules)


def shardable(spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int], *, even: bool, short: bool = False) -> bool:
    """Whether a tensor may be computed on in `layout`: dims divide, or are long enough that a short tail is cheap.

    `short`: a tail may be short at any length.
    """
    if any((shard_dim(placement) or 0) >= max(1, len(spec.shape)) for placement in layout):
        return False
    if any(shard_dim(placement) is not None for placement in layout) and not spec.shape:
        return False
    if mixes_partials(layout):
        return False
    for size, ways in zip(spec.shape, ranks_per_dim(len(spec.shape), layout, mesh_shape), strict=True):
        if ways > 1 and size % ways and (even or (size < MIN_UNEVEN_CHUNK * ways and not short)):
            return False
    return True


def mixes_partials(layout: Layout) -> bool:
    """Whether two axes are partial under different reductions: such sums and maxima do not commute."""
    return len({placement for placement in layout if is_partial(placement)}) > 1


def local_bytes(spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> int:
    """Bytes of the largest shard."""
    count = spec.dtype.itemsize
    for size in local_shape(spec.shape, layout, mesh_shape):
        count *= size
    return count
