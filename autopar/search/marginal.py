"""The marginal form of a network as a linear model, with usage rows that enter only when they are broken.

Variables: one per strategy of a node, one per allowed pair of classes of an edge. For each class of an endpoint the
edge's variables sum to the strategies of that class (Schlesinger 1976; Koster, van Hoesel and Kolen 1998). Strategies
of one endpoint whose rows of the matrix are equal are one class: exact, and far fewer pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.search.mathopt import LinearModel
from autopar.search.network import Array, Network


def equal_rows(matrix: Array) -> tuple[Array, Array]:
    """(class per row, one row per class), classes numbered as they appear."""
    seen: dict[bytes, int] = {}
    contiguous = np.ascontiguousarray(matrix)
    classes = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in contiguous])
    representatives = np.unique(classes, return_index=True)[1]
    return classes, representatives


@dataclass(frozen=True, slots=True)
class _Block:
    """Where the pair variables of one edge stand."""

    first: int
    second: int
    row_class: Array
    col_class: Array
    column_of: Array  # [row class, column class]; -1 where forbidden


class MarginalModel:
    """The linear model of a network; `model()` gives it with the usage rows added so far."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.nodes = network.nodes()
        sizes = [network.size(node) for node in self.nodes]
        starts = np.cumsum([0, *sizes])
        self.start = dict(zip(self.nodes, starts[:-1].tolist(), strict=True))
        self.picks = int(starts[-1])
        self.costs: list[Array] = [network.unary[node] for node in self.nodes]
        self.columns = self.picks
        self.row_count = 0
        self.rows: list[Array] = []
        self.cols: list[Array] = []
        self.values: list[Array] = []
        self.row_lower: list[Array] = []
        self.row_upper: list[Array] = []
        self.time_rows: list[int] = []
        self.blocks: list[_Block] = []
        node_rows = np.repeat(np.arange(len(self.nodes)), sizes)
        self._add_rows(node_rows, np.arange(self.picks), np.ones(self.picks), np.ones(len(self.nodes)))
        for first in self.nodes:
            for second, matrix in network.links[first].items():
                if first < second:
                    self._add_edge(first, second, matrix)

    def _add_rows(self, rows: Array, cols: Array, values: Array, equal_to: Array) -> None:
        self.rows.append(rows + self.row_count)
        self.cols.append(cols)
        self.values.append(values)
        self.row_lower.append(equal_to)
        self.row_upper.append(equal_to)
        self.row_count += len(equal_to)

    def _add_edge(self, first: int, second: int, matrix: Array) -> None:
        row_class, row_of = equal_rows(matrix)
        col_class, col_of = equal_rows(matrix.T)
        small = matrix[np.ix_(row_of, col_of)]
        at_row, at_col = np.nonzero(small < np.inf)
        pairs = np.arange(len(at_row)) + self.columns
        column_of = np.full(small.shape, -1)
        column_of[at_row, at_col] = pairs
        self.blocks.append(_Block(first, second, row_class, col_class, column_of))
        self.columns += len(at_row)
        self.costs.append(small[at_row, at_col])
        for at, node, classes, count in (
            (at_row, first, row_class, len(row_of)),
            (at_col, second, col_class, len(col_of)),
        ):
            own = np.arange(len(classes)) + self.start[node]
            rows, cols = np.concatenate([at, classes]), np.concatenate([pairs, own])
            values = np.concatenate([np.ones(len(pairs)), -np.ones(len(own))])
            self._add_rows(rows, cols, values, np.zeros(count))

    def add_usage_rows(self, times: Iterable[int]) -> None:
        """One row per time point: the usages of the live nodes fit the capacity there."""
        chosen = np.array(sorted(set(times)), dtype=np.int64)
        if not len(chosen):
            return
        for node, load in self.network.loads.items():
            amounts = self.network.amounts(node)
            live = (load.first[:, None] <= chosen) & (chosen < load.last[:, None])
            total = live.T.astype(np.float64) @ amounts  # [times, strategies]
            at_time, at_pick = np.nonzero(total)
            self.rows.append(at_time + self.row_count)
            self.cols.append(at_pick + self.start[node])
            self.values.append(total[at_time, at_pick])
        self.row_lower.append(np.full(len(chosen), -np.inf))
        self.row_upper.append(self.network.capacity[chosen])
        self.row_count += len(chosen)
        self.time_rows.extend(chosen.tolist())

    def forbid_together(self, time: int, positions: dict[int, int]) -> None:
        """Cut off one choice of the nodes live at a time point: it is over capacity by less than a tolerance."""
        loads = self.network.loads
        live = [node for node in loads if ((loads[node].first <= time) & (time < loads[node].last)).any()]
        columns = np.array([self.start[node] + positions[node] for node in live], dtype=np.int64)
        self.rows.append(np.full(len(live), self.row_count))
        self.cols.append(columns)
        self.values.append(np.ones(len(live)))
        self.row_lower.append(np.zeros(1))
        self.row_upper.append(np.array([len(live) - 1.0]))
        self.row_count += 1

    def model(self, *, integers: int | None = None) -> LinearModel:
        """The model so far; the first `integers` columns are integer (all picks by default)."""
        integers = self.picks if integers is None else integers
        is_integer = np.zeros(self.columns, dtype=bool)
        is_integer[:integers] = True
        rows, values = np.concatenate(self.rows), np.concatenate(self.values)
        lower, upper = np.concatenate(self.row_lower), np.concatenate(self.row_upper)
        scale = np.ones(self.row_count)  # the solver's absolute tolerance of 1e-6 then is 1e-9 of a capacity
        usage = np.isneginf(lower) & (upper > 0)
        scale[usage] = 1000.0 / upper[usage]
        return LinearModel(
            costs=np.concatenate(self.costs),
            upper=np.ones(self.columns),
            is_integer=is_integer,
            rows=rows,
            columns=np.concatenate(self.cols),
            values=values * scale[rows],
            row_lower=lower,
            row_upper=upper * scale,
        )

    def point(self, positions: dict[int, int]) -> Array:
        """The values of all columns that stand for a choice."""
        values = np.zeros(self.columns)
        values[[self.start[node] + positions[node] for node in self.nodes]] = 1.0
        for block in self.blocks:
            row, col = block.row_class[positions[block.first]], block.col_class[positions[block.second]]
            values[block.column_of[row, col]] = 1.0
        return values

    def positions(self, values: Array) -> dict[int, int]:
        """The strategy of the greatest value, per node, by position."""
        return {
            node: int(values[self.start[node] : self.start[node] + self.network.size(node)].argmax())
            for node in self.nodes
        }

    def usage(self, values: Array) -> Array:
        """The (possibly fractional) usage at every time point."""
        network = self.network
        amounts = {}
        for node in network.loads:
            picked = values[self.start[node] : self.start[node] + network.size(node)]
            amounts[node] = network.amounts(node) @ picked
        return network.profile(amounts)
