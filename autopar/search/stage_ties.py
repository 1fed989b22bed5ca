"""Of the cuts that take as long as a given one, one that sends the fewest bytes: by dynamic programming."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.search.stage_problem import Cut, StageProblem, evaluate_cut

SLACK = 1 + 1e-9  # rounding alone
Numbers = npt.NDArray[np.float64]


def least_sent(problem: StageProblem, cut: Cut) -> Cut:
    """A cut with the options of another, no longer by `evaluate_cut`, that sends no more bytes; the fewest of all whose
    longest stage, transfer and sync are no longer."""
    cost = evaluate_cut(problem, cut)
    if cost.violations:
        return cut
    found = Cut(_Ends(problem, cut, cost.longest_s).fewest(), cut.options)
    other = evaluate_cut(problem, found)
    fewer = _sent(problem, found) < _sent(problem, cut)
    return found if fewer and not other.violations and other.step_s <= cost.step_s * SLACK else cut


def _sent(problem: StageProblem, cut: Cut) -> float:
    return float(sum(problem.crossing_bytes[end - 1] for end in cut.ends[:-1]))


class _Ends:
    """Where stages end, for given options."""

    def __init__(self, problem: StageProblem, cut: Cut, longest_s: float) -> None:
        self.problem, self.cut, self.longest_s = problem, cut, longest_s
        syncs = [problem.options[chosen].sync_s[first:end].sum() for first, end, chosen in cut.spans()]
        self.sync_s = float(max(syncs))
        self.sums = {chosen: self._sums(chosen) for chosen in set(cut.options)}

    def _sums(self, chosen: int) -> Numbers:
        """Running sums over layers: work, sync, fixed bytes, activations."""
        option = self.problem.options[chosen]
        tables = (option.work_s, option.sync_s, option.fixed_bytes, option.activation_bytes)
        return np.array([np.concatenate([[0.0], np.cumsum(table)]) for table in tables])

    def _admits(self, nth: int, end: int, firsts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """From which first layers the n-th stage may reach to `end`."""
        problem, count, chosen = self.problem, len(self.cut.ends), self.cut.options[nth]
        option, sums = problem.options[chosen], self.sums[chosen]
        work_s, sync_s, fixed, saved = sums[:, end][:, None] - sums[:, firsts]
        send_s = option.send_latency_s + problem.crossing_bytes[end - 1] / option.send_bytes_per_s
        held = fixed + problem.held(count - nth, count) * saved
        busy_s = work_s + sync_s if problem.asynchronous else work_s
        fits = (busy_s <= self.longest_s * SLACK) & (held <= option.memory_bytes * SLACK)
        fits &= sync_s <= self.sync_s * SLACK if not problem.asynchronous else True
        passes = nth == count - 1 or 2 * send_s <= self.longest_s * SLACK
        admitted: npt.NDArray[np.bool_] = fits & passes
        return admitted

    def fewest(self) -> tuple[int, ...]:
        """The ends that send the fewest bytes; there are some, those of the cut."""
        layers, count = self.problem.layers, len(self.cut.ends)
        sent = np.full((count + 1, layers + 1), np.inf)
        origin = np.zeros((count + 1, layers + 1), dtype=np.int64)
        sent[0, 0] = 0.0
        for nth in range(count):
            for end in range(nth + 1, layers - (count - nth - 1) + 1):
                firsts = np.arange(nth, end)
                own = self.problem.crossing_bytes[end - 1] if nth < count - 1 else 0.0
                totals = np.where(self._admits(nth, end, firsts), sent[nth, firsts] + own, np.inf)
                pick = int(totals.argmin())
                sent[nth + 1, end], origin[nth + 1, end] = totals[pick], firsts[pick]
        if not np.isfinite(sent[count, layers]):
            return self.cut.ends
        ends = [layers]
        for nth in range(count, 1, -1):
            ends.append(int(origin[nth, ends[-1]]))
        return tuple(reversed(ends))
