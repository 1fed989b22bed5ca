"""Exact memory of an emitted program over its order: which storages live after which node.

The rules are those of the generated code: a value is freed after its last reader, and a storage lives as long as any
value on it. What the caller holds stays to the end of the step: parameters, buffers, inputs, and every result from
where it is made; tensors saved for the backward stay to their last reader there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from torch import fx

from autopar.capture.program import InputKind, results_of
from autopar.passes.collectives import collective_kind, is_collective, is_wait
from autopar.passes.copies import OFFLOAD, is_copy, is_copy_wait
from autopar.passes.host_parameters import ON_HOST
from autopar.passes.pipeline import LocalProgram
from autopar.passes.storages import storages_of, view_root

Kind = Literal["parameter", "buffer", "input", "gradient", "output", "saved", "activation", "gathered", "collective"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""saved: read by the backward. collective: what a collective wrote, and what ops of the same move made of it; gathered:
the same of a parameter, and a copy on the device of one that lies on the host. What is offloaded and what lies on the
host counts apart, by the same kinds."""

_INPUT_KINDS: dict[InputKind, Kind] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
Storage = int  # identity of a fake storage within one program


@dataclass(frozen=True)
class Timeline:
    """Live bytes at each index of the emitted order: forward nodes, then backward nodes."""

    nodes: tuple[str, ...]
    bytes_by_kind: Mapping[Kind, tuple[int, ...]]
    backward_start: int  # index of the first node of the backward
    born: tuple[int, ...]  # bytes that begin to live with each node
    labels: tuple[tuple[str, str], ...] = ()  # per node, what it is called and the user's line
    lifetimes: tuple[Lifetime, ...] = ()
    host_by_kind: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)  # the same of the host

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Live bytes while each node runs, its result and what it reads included."""
        return _sums(self.bytes_by_kind)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)

    @property
    def peak_index(self) -> int:
        return _peak_index(self.totals)

    def peak_by_kind(self) -> dict[str, int]:
        """Bytes of each kind at the peak."""
        return _at(self.bytes_by_kind, self.peak_index) if self.nodes else {}

    @property
    def host_memory(self) -> dict[str, int]:
        """Bytes of each kind where most lies on the host."""
        return _at(self.host_by_kind, _peak_index(_sums(self.host_by_kind))) if self.host_by_kind else {}


def _sums(by_kind: Mapping[Kind, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*by_kind.values(), strict=True)))


def _peak_index(totals: Sequence[int]) -> int:
    return totals.index(max(totals)) if totals else 0


def _at(by_kind: Mapping[Kind, tuple[int, ...]], index: int) -> dict[str, int]:
    return {kind: values[index] for kind, values in by_kind.items() if values[index]}


@dataclass(frozen=True)
class Lifetime:
    """A storage: its bytes, and the first and last index at which it lives."""

    bytes: int
    kind: Kind
    first: int
    last: int  # included
    name: str = ""  # of the parameter or input, or `module/op#occurrence` of the op that makes it
    where: str = ""  # the user's line


def predicted_timeline(local: LocalProgram) -> Timeline:
    """The memory of one forward and one backward of a rank, from fake values alone.

    Includes what the rank holds before: parameters, buffers, inputs. Leaves out workspaces inside kernels.
    """
    nodes = [node for node in local.forward.graph.nodes if node.op != "output"]
    start = len(nodes)
    if local.backward is not None:
        nodes += [node for node in local.backward.graph.nodes if node.op != "output"]
    collected = _Lifetimes(local, nodes, start)
    lifetimes, host = collected.all(), collected.on_host()
    born = [0] * len(nodes)
    for life in lifetimes:
        born[life.first] += life.bytes
    names = _names(local)
    labels = tuple(_label(node, names) for node in nodes)
    names_of, by_kind = tuple(node.name for node in nodes), _alive(lifetimes, KINDS, len(nodes))
    away = _alive(host, tuple(dict.fromkeys(life.kind for life in host)), len(nodes))
    return Timeline(names_of, by_kind, start, tuple(born), labels, tuple(lifetimes), away)


def _alive(lives: Iterable[Lifetime], kinds: Sequence[Kind], count: int) -> dict[Kind, tuple[int, ...]]:
    """Bytes of each kind at each index."""
    changes = {kind: [0] * (count + 1) for kind in kinds}
    for life in lives:
        changes[life.kind][life.first] += life.bytes
        changes[life.kind][life.last + 1] -= life.bytes
    return {kind: tuple(_running_sums(values[:count])) for kind, values in changes.items()}


def _names(local: LocalProgram) -> dict[str, str]:
    """What the placeholders are called."""
    return {item.node: item.name for item in local.program.inputs}


def _label(node: fx.Node, names: Mapping[str, str]) -> tuple[str, str]:
    """(what a node is called, the user's line)."""
    name = names.get(node.name) if node.op == "placeholder" else node.meta.get("key")
    if "move" in node.meta or is_collective(node) or is_wait(node):
        module = node.meta.get("module", "")
        name = f"{module}/{node.name}" if module else node.name
    return name or node.name, node.meta.get("where", "")


def _running_sums(values: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


class _Lifetimes:
    """Collects the lifetime of every storage. Storages of the two graphs are one by identity: both graphs hold the
    fake values of the joint graph."""

    def __init__(self, local: LocalProgram, nodes: list[fx.Node], start: int) -> None:
        self.local, self.nodes, self.start = local, nodes, start
        self.kinds = {item.node: item.kind for item in local.program.inputs}
        self.names = _names(local)
        self.known: dict[fx.Node, dict[Storage, int]] = {}
        self.first: dict[Storage, int] = {}
        self.last: dict[Storage, int] = {}
        self.bytes: dict[Storage, int] = {}
        self.kind: dict[Storage, Kind] = {}
        self.away: set[Storage] = set()  # on the host
        self.made: dict[Storage, tuple[str, str]] = {}

    def all(self) -> list[Lifetime]:
        for index, node in enumerate(self.nodes):
            for storage, bytes_ in self._storages(node).items():
                self._make(storage, bytes_, index, node)
            for source in [node, *node.all_input_nodes]:
                for storage in self._storages(source):
                    self.last[storage] = index
            self._hold_input_of_collective(node, index)
        self._hold_results()
        return [self._life(it) for it in self.kind if it not in self.away]

    def on_host(self) -> list[Lifetime]:
        """What is offloaded, and what lies on the host."""
        return [self._life(it) for it in self.kind if it in self.away]

    def _life(self, storage: Storage) -> Lifetime:
        first, last = self.first[storage], self.last[storage]
        return Lifetime(self.bytes[storage], self.kind[storage], first, last, *self.made[storage])

    def _storages(self, node: fx.Node) -> dict[Storage, int]:
        """The storages under a node's value; outputs of an op that are never picked count too."""
        if node not in self.known:
            self.known[node] = storages_of(node)
        return self.known[node]

    def _make(self, storage: Storage, bytes_: int, index: int, node: fx.Node) -> None:
        if storage in self.first:
            return
        kind = self._kind_of(node)
        self.made[storage] = _label(node, self.names)
        held = kind in ("parameter", "buffer", "input") and index < self.start
        self.first[storage], self.bytes[storage], self.kind[storage] = 0 if held else index, bytes_, kind
        if node.meta.get(ON_HOST) or node.target is OFFLOAD:
            self.away.add(storage)

    def _kind_of(self, node: fx.Node) -> Kind:
        if node.target is OFFLOAD:
            return "saved"
        if node.op == "placeholder":
            kind = self.kinds.get(node.name)
            return "input" if kind is None else _INPUT_KINDS.get(kind, "input")
        if node.op == "get_attr":
            return "buffer"
        if not (is_copy(node) or self._is_moved(node)):
            return "activation"
        if self._is_of_parameter(node):
            return "gathered"
        return "activation" if is_copy(node) else "collective"

    def _is_moved(self, node: fx.Node) -> bool:
        return is_collective(node) or is_wait(node) or "move" in node.meta

    def _is_of_parameter(self, node: fx.Node) -> bool:
        """Whether what is moved is a parameter, or a view of one."""
        node = view_root(node)
        while node.all_input_nodes and (self._is_moved(node) or is_copy(node) or is_copy_wait(node)):
            node = view_root(node.all_input_nodes[0])
        return self.kinds.get(node.name) is InputKind.PARAMETER

    def _hold_input_of_collective(self, wait: fx.Node, index: int) -> None:
        """A process group holds the input until the wait (all_reduce works on a copy of its own)."""
        if not is_wait(wait) or collective_kind(wait.all_input_nodes[0]) == "all_reduce":
            return
        for source in wait.all_input_nodes[0].all_input_nodes:
            for storage in self._storages(source):
                self.last[storage] = index

    def _hold_results(self) -> None:
        """What the caller holds: inputs to the end, results from their graph's end on."""
        end = len(self.nodes) - 1
        saved = set(self.local.saved)
        for storage, kind in self.kind.items():
            if kind in ("parameter", "buffer", "input"):
                self.last[storage] = end
        self._hold(self.local.forward, end, "output", len(saved), self.start - 1)
        if self.local.backward is not None:
            self._hold(self.local.backward, end, "gradient", 0, end)

    def _hold(self, gm: fx.GraphModule, end: int, kind: Kind, saved: int, graph_end: int) -> None:
        """Results live to the end of the step; the `saved` last ones to their last reader in the backward."""
        results = results_of(gm.graph)
        count = len(results) - saved
        for position, node in enumerate(results):
            for storage in self._storages(node) if isinstance(node, fx.Node) else ():
                last = end if position < count else max(self.last[storage], graph_end)
                self.last[storage] = max(self.last[storage], last)
                sent = storage in self.away and self.kind[storage] == "saved"
                if sent or self.kind[storage] in ("activation", "gathered", "collective"):
                    self.kind[storage] = kind if position < count else "saved"
