"""How long the storages of an emitted graph live: what it takes, makes and returns.

The rules are those of `liveness`: a value lives to its last reader, a storage as long as any value on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor, fx

from autopar.capture.program import results_of
from autopar.passes.collectives import collective_kind, is_wait
from autopar.passes.copies import OFFLOAD, is_copy_wait
from autopar.passes.storages import storages_of
from autopar.stages.assign import size_of

Storages = tuple[int, ...]  # identities of fake storages
Lent = tuple[int, int]  # of a storage that the graph takes and nobody else holds: the last node that needs it, bytes


@dataclass(frozen=True)
class GraphStorages:
    """The storages of one graph, without those that are held anyway.

    `taken`: of each placeholder; `results`: of each result. `last`: by storage that is taken, the number of the last
    node that needs it. `made_bytes`: at each node, what the graph has made and still needs.
    """

    taken: Mapping[str, Storages]
    results: tuple[Storages, ...]
    bytes: Mapping[int, int]
    last: Mapping[int, int]
    made_bytes: npt.NDArray[np.int64]
    dense_bytes: tuple[int, ...]  # of each result on the device, as if it lay contiguously
    packed: tuple[bool, ...]  # of each result, whether it does not
    _peaks: dict[tuple[Lent, ...], int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The number of the last node."""
        return len(self.made_bytes) - 1

    def peak_bytes(self, lent: Iterable[Lent]) -> int:
        """The most that is held while the graph runs: what it makes, and what it takes that nobody else holds."""
        key = tuple(sorted(lent))
        if key not in self._peaks:
            held = np.zeros(len(self.made_bytes) + 1, dtype=np.int64)
            for last, bytes_ in key:
                held[0] += bytes_
                held[last + 1] -= bytes_
            self._peaks[key] = int((np.cumsum(held[:-1]) + self.made_bytes).max(initial=0))
        return self._peaks[key]

    @property
    def alone_bytes(self) -> int:
        """The same where nobody else holds anything that is taken."""
        return self.peak_bytes((last, self.bytes[storage]) for storage, last in self.last.items())

    def packing_bytes(self, number: int) -> int:
        """Of the copy of a result that is made to send it, where it does not lie contiguously."""
        return self.dense_bytes[number] if self.packed[number] else 0

    def of_results(self, numbers: Iterable[int]) -> dict[int, int]:
        """The storages of some results, with their bytes."""
        return {storage: self.bytes[storage] for number in numbers for storage in self.results[number]}


def graph_storages(gm: fx.GraphModule, held_anyway: Set[int]) -> GraphStorages:
    """The storages of a graph. `held_anyway`: those that do not count."""
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    bytes_: dict[int, int] = {}
    known: dict[fx.Node | None, Storages] = {None: ()}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    taken: dict[str, Storages] = {}
    for index, node in enumerate(nodes):
        own = {storage: size for storage, size in storages_of(node).items() if storage not in held_anyway}
        known[node] = tuple(own)
        if node.op == "placeholder":
            taken[node.name] = known[node]
        for storage in own:
            bytes_.setdefault(storage, own[storage])
            first.setdefault(storage, 0 if node.op == "placeholder" else index)
        readers = [node, *node.all_input_nodes]
        if is_wait(node) and collective_kind(node.all_input_nodes[0]) != "all_reduce":
            readers += node.all_input_nodes[0].all_input_nodes  # a process group holds it until the wait
        for source in readers:
            last.update(dict.fromkeys(known[source], index))
    outputs = results_of(gm.graph)
    results = tuple(known[node] for node in outputs)
    last.update({storage: max(len(nodes) - 1, 0) for storages in results for storage in storages})
    lent = {storage for storages in taken.values() for storage in storages}
    changes = np.zeros(max(len(nodes), 1) + 1, dtype=np.int64)
    for storage in bytes_.keys() - lent:
        changes[first[storage]] += bytes_[storage]
        changes[last[storage] + 1] -= bytes_[storage]
    return GraphStorages(
        taken,
        results,
        bytes_,
        {storage: last[storage] for storage in lent},
        np.cumsum(changes[:-1]),
        tuple(0 if node is None or _is_on_host(node) else size_of(node) for node in outputs),
        tuple(is_packed(node) for node in outputs),
    )


def _is_on_host(node: fx.Node) -> bool:
    """Whether a value is a copy on the host."""
    return is_copy_wait(node) and node.all_input_nodes[0].target is OFFLOAD


def is_packed(node: fx.Node | None) -> bool:
    """Whether a value has to be packed to be sent: it does not lie contiguously."""
    value = None if node is None else node.meta.get("val")
    return isinstance(value, Tensor) and not value.is_contiguous()
