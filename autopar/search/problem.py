"""The exchange format of the search: one strategy per node, at least total cost, under a usage limit.

It is the problem of the ASPLOS 2025 contest on intra-operator parallelism, and reads and writes its JSON.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autopar.collector import collector_paused
from autopar.errors import ProblemFormatError

FORBIDDEN = 10**18
"""A cost of this size or more marks a strategy, or a pair of strategies, that must not be chosen."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Pick one strategy per node; minimise the sum of node costs and edge costs.

    At every time the usages of the live nodes sum to at most `usage_limit`. Costs may be in any one unit (seconds in
    autopar's own problems); usages are bytes. Checked once, when made: every shape agrees with every other.
    """

    costs: tuple[Array, ...]  # per node, float64 [strategies]; FORBIDDEN or more: never chosen
    usages: tuple[Array, ...]  # per node, float64 [strategies], bytes
    intervals: tuple[tuple[int, int], ...]  # per node, half-open [lo, hi); empty: the node uses nothing
    edges: tuple[tuple[int, int], ...]  # two different nodes; parallel edges both count
    edge_costs: tuple[Array, ...]  # per edge, float64 [strategies of the first, strategies of the second]
    usage_limit: float | None = None
    groups: tuple[int, ...] | None = None  # class per node: nodes of one class choose the same strategy
    name: str = ""

    def __post_init__(self) -> None:
        _check_nodes(self)
        _check_edges(self)
        _check_groups(self)
        if self.usage_limit is not None and not self.usage_limit >= 0:
            raise ProblemFormatError(f"the usage limit is {self.usage_limit}", where="usage_limit")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Problem:
        """Read the contest's JSON; a name that ends in `.gz` is gunzipped first."""
        raw = _read(Path(path))
        with collector_paused():  # it would walk millions of fresh numbers again and again
            return _from_json(raw, where=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the contest's JSON; `groups`, when present, under the extra key `groups`."""
        text = json.dumps({"problem": _to_json(self)}, separators=(",", ":"))
        data = text.encode()
        Path(path).write_bytes(gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data)


def make_problem(
    costs: Sequence[Sequence[float]],
    usages: Sequence[Sequence[float]],
    intervals: Sequence[tuple[int, int]],
    edges: Sequence[tuple[int, int]],
    edge_costs: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]],
    *,
    usage_limit: float | None = None,
    groups: Sequence[int] | None = None,
    name: str = "",
) -> Problem:
    """Build a `Problem` from plain lists; an edge's costs may be a matrix, or its rows one after the other."""
    node_costs = tuple(_vector(values, f"node {node} costs") for node, values in enumerate(costs))
    node_usages = tuple(_vector(values, f"node {node} usages") for node, values in enumerate(usages))
    _check_node_shapes(node_costs, node_usages)
    pairs = tuple((int(pair[0]), int(pair[1])) for pair in edges)
    matrices = []
    for edge, ((first, second), values) in enumerate(zip(pairs, edge_costs, strict=False)):
        if not (0 <= first < len(node_costs) and 0 <= second < len(node_costs)):
            raise ProblemFormatError(f"endpoint outside the {len(node_costs)} nodes", where=f"edge {edge}")
        shape = (len(node_costs[first]), len(node_costs[second]))
        flat = _vector(values, f"edge {edge} costs").reshape(-1)
        if flat.size != shape[0] * shape[1]:
            raise ProblemFormatError(f"{flat.size} costs for {shape[0]} x {shape[1]} pairs", where=f"edge {edge}")
        matrices.append(flat.reshape(shape))
    if len(edge_costs) != len(pairs):
        raise ProblemFormatError(f"{len(pairs)} edges but {len(edge_costs)} cost lists", where="edges")
    return Problem(
        costs=node_costs,
        usages=node_usages,
        intervals=tuple((int(low), int(high)) for low, high in intervals),
        edges=pairs,
        edge_costs=tuple(matrices),
        usage_limit=usage_limit,
        groups=None if groups is None else tuple(groups),
        name=name,
    )


def _vector(values: Any, where: str) -> Array:
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ProblemFormatError(f"not a list of numbers: {error}", where=where) from error


def _from_json(raw: bytes, where: str) -> Problem:
    try:
        body = json.loads(raw)["problem"]
        nodes, edges = body["nodes"], body["edges"]
        return make_problem(
            nodes["costs"],
            nodes["usages"],
            nodes["intervals"],
            edges["nodes"],
            edges["costs"],
            usage_limit=body.get("usage_limit"),
            groups=body.get("groups"),
            name=body.get("name", ""),
        )
    except ProblemFormatError as error:
        raise ProblemFormatError(error.what, where=f"{where}: {error.where}") from error
    except KeyError as error:
        raise ProblemFormatError(f"the key {error} is missing", where=where) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ProblemFormatError(f"not a contest JSON: {error}", where=where) from error


def _to_json(problem: Problem) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": [list(interval) for interval in problem.intervals],
            "costs": [_plain(values) for values in problem.costs],
            "usages": [_plain(values) for values in problem.usages],
        },
        "edges": {
            "nodes": [list(pair) for pair in problem.edges],
            "costs": [_plain(matrix.reshape(-1)) for matrix in problem.edge_costs],
        },
    }
    if problem.usage_limit is not None:
        body["usage_limit"] = _plain(np.array([problem.usage_limit]))[0]
    if problem.groups is not None:
        body["groups"] = list(problem.groups)
    return body


def _plain(values: Array) -> list[int] | list[float]:
    """The numbers as JSON writes them: whole ones without a point, infinity as FORBIDDEN."""
    values = np.minimum(values, float(FORBIDDEN))
    whole = bool(np.all(values == np.floor(values)))
    numbers: list[int] | list[float] = values.astype(np.int64).tolist() if whole else values.tolist()
    return numbers


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.name.endswith(".gz") else data
    except (OSError, EOFError) as error:
        raise ProblemFormatError(f"cannot be read: {error}", where=str(path)) from error


def _check_nodes(problem: Problem) -> None:
    count = len(problem.costs)
    if len(problem.usages) != count or len(problem.intervals) != count:
        sizes = f"{count} cost lists, {len(problem.usages)} usage lists, {len(problem.intervals)} intervals"
        raise ProblemFormatError(sizes, where="nodes")
    _check_node_shapes(problem.costs, problem.usages)
    _check_numbers(problem.costs, "node", "cost", lowest=-float(FORBIDDEN))
    _check_numbers(problem.usages, "node", "usage", lowest=0.0)


def _check_node_shapes(costs: Sequence[Array], usages: Sequence[Array]) -> None:
    for node, (own, used) in enumerate(zip(costs, usages, strict=False)):
        if own.ndim != 1 or own.size == 0 or own.shape != used.shape:
            what = f"costs of shape {own.shape}, usages of shape {used.shape}: want one equal, non-empty list each"
            raise ProblemFormatError(what, where=f"node {node}")


def _check_numbers(arrays: Sequence[Array], noun: str, word: str, *, lowest: float) -> None:
    different = {id(values): values.reshape(-1) for values in arrays}  # repeated layers share their arrays
    if not arrays or bool((np.concatenate([*different.values()]) >= lowest).all()):
        return
    bad = next(i for i, values in enumerate(arrays) if not bool((values >= lowest).all()))
    raise ProblemFormatError(f"a {word} is not a number or lies below {lowest:g}", where=f"{noun} {bad}")


def _check_edges(problem: Problem) -> None:
    count = len(problem.costs)
    if len(problem.edges) != len(problem.edge_costs):
        what = f"{len(problem.edges)} edges but {len(problem.edge_costs)} cost matrices"
        raise ProblemFormatError(what, where="edges")
    sizes = [len(values) for values in problem.costs]
    for edge, ((first, second), matrix) in enumerate(zip(problem.edges, problem.edge_costs, strict=True)):
        if not (0 <= first < count and 0 <= second < count) or first == second:
            what = f"endpoints {first} and {second}: want two different nodes below {count}"
            raise ProblemFormatError(what, where=f"edge {edge}")
        if matrix.shape != (sizes[first], sizes[second]):
            what = f"a {matrix.shape} cost matrix between {sizes[first]} and {sizes[second]} strategies"
            raise ProblemFormatError(what, where=f"edge {edge}")
    _check_numbers(problem.edge_costs, "edge", "cost", lowest=-float(FORBIDDEN))


def _check_groups(problem: Problem) -> None:
    if problem.groups is None:
        return
    if len(problem.groups) != len(problem.costs):
        what = f"{len(problem.groups)} classes for {len(problem.costs)} nodes"
        raise ProblemFormatError(what, where="groups")
    size_of: dict[int, int] = {}
    for node, (group, costs) in enumerate(zip(problem.groups, problem.costs, strict=True)):
        if size_of.setdefault(group, len(costs)) != len(costs):
            what = f"class {group} has nodes of {size_of[group]} and of {len(costs)} strategies"
            raise ProblemFormatError(what, where=f"groups, node {node}")
