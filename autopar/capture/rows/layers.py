"""Experts whose rows are written to one tensor, one after the other, made one op: their cost follows the routing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.recorder import node_of
from autopar.capture.rows.equal_values import EqualValues, storages_of
from autopar.capture.rows.feed_forward import FeedForward, Reader, Weight
from autopar.capture.rows.masks import Labels, Masks
from autopar.capture.rows.places import Place, apart, spread
from autopar.capture.rows.selection import Rows, refuse
from autopar.source import calling_line
from autopar.torch_compat import unflatten

aten = torch.ops.aten
PlaceOf = Callable[[tuple[str, int, str] | None], Callable[[], AbstractContextManager[None]]]
Naming = Callable[[Any], Any]  # equal names, equal values


@dataclass(frozen=True, eq=False)
class Turn:
    """One expert's rows: who computes them, where they count, and times what.

    `slots` names what says, for each slot of a token, which expert it goes to, and to no other; None if nothing does.
    """

    expert: FeedForward
    mask: Tensor  # bool [tokens, slots]
    scores: Tensor | None  # [tokens, slots]
    labels: Labels | None  # of the mask
    slots: Hashable
    is_whole: bool  # the mask is the condition, in no branch that could narrow it

    @property
    def label(self) -> int | None:
        """What the expert is called there."""
        return None if self.labels is None else self.labels.label

    @property
    def weights(self) -> tuple[Hashable, ...]:
        """Of the expert: the same, the same expert."""
        linears = [*(up for up, _, _ in self.expert.ups), self.expert.down]
        return tuple((linear.weight.node, id(linear.bias)) for linear in linears)


@dataclass(eq=False)
class Layer:
    """Turns that are still to be written to `base`, whose rows are added to it or put in the place of its own."""

    base: Tensor
    is_sum: bool
    order: tuple[int, ...]  # dims of the condition: the tokens', then the slots'
    inside: Callable[[], AbstractContextManager[None]]
    has_gradients: bool
    keeps_tokens: bool = False  # they are about to be written to, and the backward is to have them as they are
    turns: list[Turn] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)  # of what the turns read and write

    def takes(self, base: Tensor, turn: Turn, order: tuple[int, ...], *, is_sum: bool) -> bool:
        """Whether a turn goes to the same op."""
        first, other = self.turns[0], turn.expert
        alike = (self.base is base, self.is_sum == is_sum, self.order == order, first.mask.shape == turn.mask.shape)
        if not all(alike) or self.has_gradients != torch.is_grad_enabled() or _form(first.expert) != _form(other):
            return False
        return is_sum or (turn.slots == first.slots and turn.label not in [item.label for item in self.turns])


def _form(expert: FeedForward) -> tuple[Any, ...]:
    """What the experts of one op have in common."""
    ups = tuple(
        (up.weight.value.shape, up.weight.is_flipped, up.bias is None, first, last) for up, first, last in expert.ups
    )
    down = expert.down
    shape = (down.weight.value.shape, down.weight.is_flipped, down.bias is None, down.dtype)
    sources = [up.source for up, _, _ in expert.ups]
    return id(expert.x), expert.activation, ups, tuple(map(sources.index, sources)), shape


class Layers:
    """Collects turns, and writes each layer when something else is about to touch its tensors.

    `values`: of nodes, the tensors that the program holds. `place`: gives contexts in which ops come from a line and
    from the module that runs now.
    """

    def __init__(
        self,
        values: dict[fx.Node, Tensor],
        masks: Masks,
        equal: EqualValues,
        place: PlaceOf,
    ) -> None:
        self._values, self._masks, self._name, self._place = values, masks, equal.name, place
        self._reader = Reader(values, equal.is_current)
        self._waiting: list[Layer] = []
        self._is_held = self.is_writing = False

    def offer(self, place: Place, rows: Rows, mask: Tensor, *, is_whole: bool, is_sum: bool) -> bool:
        """Take a write of rows to `place` where `mask` holds; False if they are no expert's of a known form."""
        with self.held():
            order = place.coordinates
        if place.first or place.base.dim() != 2 or order is None or len(order) != 1:
            return False
        others = tuple(dim for dim in place.selection.dims if dim != order[0])
        if others and not is_sum:
            return False
        order = (*order, *others)
        with self.held():
            turn = self._turn(rows, mask.permute(order), place, order, is_whole=is_whole)
        if turn is None or (not is_sum and turn.slots is None):
            return False
        with self.held():
            layer = next(
                (layer for layer in self._waiting if layer.takes(place.base, turn, order, is_sum=is_sum)), None
            )
        if layer is None:
            touched = storages_of([place.base])
            self.flush(
                lambda other: (
                    not touched.isdisjoint(other.storages)
                    and not (is_sum and other.is_sum and other.base is place.base)  # addends, in whatever order
                )
            )
            layer = Layer(place.base, is_sum, order, self._place(calling_line()), torch.is_grad_enabled())
            self._waiting.append(layer)
        layer.turns.append(turn)
        kept = [place.base, turn.expert.x, turn.mask, *([] if turn.scores is None else [turn.scores])]
        read = kept[1:] if is_sum else kept  # other layers may add to the same tensor first
        layer.versions.extend((tensor, tensor._version) for tensor in read)
        layer.storages |= storages_of(kept)
        return True

    def _turn(self, rows: Rows, mask: Tensor, place: Place, order: tuple[int, ...], *, is_whole: bool) -> Turn | None:
        factors = _factors(rows)
        if any(isinstance(item, Rows) and not item.state.is_unchanged for item in factors):
            return None
        rows_of = [item for item in factors if isinstance(item, Rows)]
        wanted = torch.is_grad_enabled() and any(item.state.dense.requires_grad for item in rows_of)
        if rows.state.dense.requires_grad != wanted:  # the product was made under no_grad
            return None
        self._values.update({node_of(item.state.dense): item.state.dense for item in rows_of})
        experts = [(item, self._reader.read(node_of(item.state.dense))) for item in rows_of]
        found = [(item, expert) for item, expert in experts if expert is not None]
        if len(found) != 1 or found[0][0].state.space != order[:1] or found[0][0].state.dim:
            return None
        scores = None
        for factor in factors:
            if factor is found[0][0]:
                continue
            one = _score(factor, order) if isinstance(factor, Rows) else factor
            if one is None:
                return None
            scores = one if scores is None else scores * one
        if scores is not None and not isinstance(scores, Tensor):
            return None
        labels = self._masks.labels(node_of(place.selection.condition))
        flat = mask.flatten(1) if mask.dim() > 1 else mask[:, None]
        is_one = labels is not None and labels.label is not None
        slots = (self._name(labels.index), labels.dims) if labels is not None and is_one else None
        return Turn(found[0][1], flat, scores, labels, slots, is_whole)

    def waiting_for(self, base: Tensor) -> int:
        """How many turns are still to be written to a tensor."""
        return sum(len(layer.turns) for layer in self._waiting if layer.base is base)

    @contextmanager
    def held(self) -> Iterator[None]:
        """In here nothing is written, whatever is touched."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def flush_for(self, tensors: Sequence[Tensor]) -> None:
        """Write what touches the memory of any of these."""
        if self._waiting and not self._is_held:
            touched = storages_of(tensor for tensor in tensors if not isinstance(tensor, Rows))
            self.flush(lambda layer: not touched.isdisjoint(storages_of([layer.base])))

    def flush_before_write(self, tensors: Sequence[Tensor]) -> None:
        """Write what reads the memory of any of these."""
        if self._waiting and not self._is_held:
            touched = storages_of(tensor for tensor in tensors if not isinstance(tensor, Rows))
            for layer in self._waiting:
                layer.keeps_tokens = layer.keeps_tokens or not touched.isdisjoint(
                    storages_of([layer.turns[0].expert.x])
                )
            self.flush(lambda layer: not touched.isdisjoint(layer.storages))

    def flush(self, chosen: Callable[[Layer], bool] = lambda _: True) -> None:
        """Write the chosen layers, in the order in which they began."""
        ready = [layer for layer in self._waiting if chosen(layer)]
        self._waiting = [layer for layer in self._waiting if layer not in ready]
        for layer in ready:
            if any(tensor._version != version for tensor, version in layer.versions):
                refuse("a tensor that experts read is written to before what they computed is read")
            with layer.inside(), torch.set_grad_enabled(layer.has_gradients), _without_autocast(layer.base):
                self.is_writing = True
                self._write(layer)
                self.is_writing = False

    def _write(self, layer: Layer) -> None:
        experts = list({turn.weights: turn.expert for turn in layer.turns}.values())
        index, scores = self._routing(layer)
        kind, x = experts[0].down.dtype, experts[0].x.clone() if layer.keeps_tokens else experts[0].x
        up, up_bias = _ups(experts, self._values, self._name)
        down = stacked([expert.down.weight for expert in experts], self._values, self._name)
        down_bias = _stacked_biases([expert.down.bias for expert in experts])
        parts = [None if item is None else item.to(kind) for item in (up_bias, down, down_bias)]
        out = torch.ops.autopar.experts(
            x.to(kind), index, scores, up.to(kind), parts[0], parts[1], parts[2], experts[0].activation, 0
        ).to(layer.base.dtype)
        if layer.is_sum:
            layer.base.add_(out)
            return
        layer.base.copy_(torch.where((index >= 0).any(1, keepdim=True), out, layer.base))

    def _routing(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """(which expert each slot of a token goes to, -1 for none; times what): both [tokens, slots]."""
        numbers = {weights: place for place, weights in enumerate(dict.fromkeys(turn.weights for turn in layer.turns))}
        groups: dict[Any, list[tuple[Turn, int]]] = {}
        for turn in layer.turns:
            key: Any = turn.slots
            if key is None or any(other.label == turn.label for other, _ in groups.get(key, [])):
                key = turn.weights  # slots of its own: a token's in several of these masks is one, of all their scores
            groups.setdefault(key, []).append((turn, numbers[turn.weights]))
        parts = [
            self._group(layer, group) if group[0][0].slots == key else _own_slot(layer, group)
            for key, group in groups.items()
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([index for index, _ in parts], 1), torch.cat([scores for _, scores in parts], 1)

    def _group(self, layer: Layer, group: Sequence[tuple[Turn, int]]) -> tuple[Tensor, Tensor]:
        """Of turns of which a slot is in one at most."""
        turns, numbers = [turn for turn, _ in group], [number for _, number in group]
        with torch.no_grad():
            index = self._own_index(layer, turns, numbers)
            if index is None:
                taken = torch.stack([turn.mask for turn in turns])
                first = taken.to(torch.int64).argmax(0)
                if numbers != list(range(len(numbers))):
                    first = torch.tensor(numbers, device=first.device)[first]
                index = torch.where(taken.any(0), first, -1)
        scores = [turn.scores for turn in turns]
        if all(score is None for score in scores):
            return index, torch.ones(index.shape, dtype=layer.base.dtype, device=layer.base.device)
        if len({None if score is None else self._name(node_of(score)) for score in scores}) == 1:
            assert scores[0] is not None
            return index, scores[0]
        parts = [torch.where(turn.mask, _scores(turn, layer), 0) for turn in turns]
        return index, torch.stack(parts).sum(0)

    def _own_index(self, layer: Layer, turns: Sequence[Turn], numbers: Sequence[int]) -> Tensor | None:
        """The tensor that the masks were made of, if it numbers the experts as they are numbered here.

        Any other number in it is no expert's, here as in the op.
        """
        labels = [turn.labels for turn in turns if turn.labels is not None]
        node, dims = labels[0].index, labels[0].dims
        is_whole = all(turn.is_whole for turn in turns) and all(item.is_exact for item in labels)
        in_turn = [item.label for item in labels] == list(numbers) == list(range(len(numbers)))
        if not is_whole or not in_turn or self._masks.is_written(node):
            return None
        if node not in self._values or sorted(dims) != list(range(len(dims))):
            return None
        turned = self._values[node].permute([dims[dim] for dim in layer.order])
        return turned.flatten(1) if turned.dim() > 1 else turned[:, None]


def _own_slot(layer: Layer, group: Sequence[tuple[Turn, int]]) -> tuple[Tensor, Tensor]:
    """Of one expert's turns, whose rows of a token come to one row, times the sum of their scores."""
    with torch.no_grad():
        is_taken = torch.cat([turn.mask for turn, _ in group], 1).any(1, keepdim=True)
        index = torch.where(is_taken, group[0][1], -1)
    given = [torch.where(turn.mask, _scores(turn, layer), 0) for turn, _ in group]
    return index, torch.cat(given, 1).sum(1, keepdim=True)


def _scores(turn: Turn, layer: Layer) -> Tensor:
    return torch.ones((), dtype=layer.base.dtype, device=layer.base.device) if turn.scores is None else turn.scores


def _without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = torch.autocast(tensor.device.type, enabled=False)
    return context


def _factors(rows: Rows) -> list[Any]:
    """What rows are the product of."""
    factors = rows.state.factors
    if factors is None:
        return [rows]
    return [part for factor in factors for part in (_factors(factor) if isinstance(factor, Rows) else [factor])]


def _score(rows: Rows, order: tuple[int, ...]) -> Tensor | None:
    """[tokens, slots] of rows of one number each."""
    state = rows.state
    if state.dense.dim() != 2 or state.dim or state.dense.shape[1] != 1:
        return None
    space = state.selection.dims
    full = spread(state.dense[:, 0], 0, state.space, space, state.selection)
    found = apart(full, 0, space, order, state.selection)
    return found.flatten(1) if len(order) > 1 else found[:, None]


def _ups(
    experts: Sequence[FeedForward], values: Mapping[fx.Node, Tensor], name: Naming
) -> tuple[Tensor, Tensor | None]:
    """(up [E, G, F, H], its bias [E, G, F])."""
    spans = experts[0].ups
    stacks: dict[fx.Node, tuple[Tensor, Tensor | None]] = {}
    matrices, biases = [], []
    for gate, (first, start, end) in enumerate(spans):
        if first.weight.node not in stacks:
            ups = [expert.ups[gate][0] for expert in experts]
            stacks[first.weight.node] = (
                stacked([up.weight for up in ups], values, name),
                _stacked_biases([up.bias for up in ups]),
            )
        weight, bias = stacks[first.weight.node]
        matrices.append(weight[:, start:end])
        biases.append(None if bias is None else bias[:, start:end])
    whole, bias = next(iter(stacks.values()))
    starts = [start for _, start, _ in spans]
    size = matrices[0].shape[1]
    in_turn = starts == [gate * size for gate in range(len(spans))] and whole.shape[1] == len(spans) * size
    if len(stacks) == 1 and in_turn:
        sizes = (len(spans), -1)
        return unflatten(whole, 1, sizes), None if bias is None else unflatten(bias, 1, sizes)
    given = [item for item in biases if item is not None]
    return torch.stack(matrices, 1), torch.stack(given, 1) if given else None


def stacked(weights: Sequence[Weight], values: Mapping[fx.Node, Tensor], name: Naming) -> Tensor:
    """[E, outputs, inputs]; the tensor that all are slices of, if they are all of them in turn."""
    nodes = [weight.node for weight in weights]
    first = nodes[0].args[0] if nodes[0].target is aten.select.int else None
    whole = values.get(first) if isinstance(first, fx.Node) else None
    in_turn = all(
        node.target is aten.select.int and node.args[1:] == (0, place) and name(node.args[0]) == name(nodes[0].args[0])
        for place, node in enumerate(nodes)
    )
    if whole is None or not in_turn or whole.shape[0] != len(nodes):
        whole = torch.stack([weight.value for weight in weights])
    return whole.transpose(1, 2) if weights[0].is_flipped else whole


def _stacked_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return torch.stack(given) if given else None
