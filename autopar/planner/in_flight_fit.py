"""Layouts of a pipeline stage made to hold less of every microbatch in flight, by recomputing.

Of the microbatches in flight all but one hold what their forwards saved, and that alone: to free a rank it has to be
less at the end of the forward, whatever one microbatch holds at its own peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from autopar.planner.fit import Fit, Fitted
from autopar.planner.measure import Measured
from autopar.planner.residency import Residency

BESIDE = "in flight"  # the kind of memory that is counted beside


@dataclass
class InFlightFit(Fit):
    """A fit to a limit on what is held at the end of the forward: `beside_bytes` are counted there, nowhere else."""

    beside_bytes: int = 0
    known: dict[Residency, Measured] = field(default_factory=dict)  # as measured, nothing beside

    def measured(self, residency: Residency) -> Fitted:
        return self.counted(super().measured(residency))

    def counted(self, fitted: Fitted) -> Fitted:
        """With what is counted beside."""
        measured = self.known[fitted.residency] = fitted.measured
        end = max(0, measured.timeline.backward_start - 1)
        bump = np.zeros(len(measured.totals))
        bump[end] = self.beside_bytes
        more = max(0, int(measured.totals[end]) + self.beside_bytes - measured.peak_bytes)
        memory: Mapping[str, int] = {**measured.memory, BESIDE: more}
        counted = replace(measured, memory=memory, totals=measured.totals + bump, before=measured.before + bump)
        return replace(fitted, measured=counted)


def saving_less(fit: Fit, start: Fitted, less_bytes: int) -> Fitted | None:
    """The cheapest residency found that saves so much less than a measured one, at no higher peak; None for none.

    Parameters lie where they lay: to put one on the host frees the rank once, and not of every microbatch.
    """
    peak = start.measured.peak_bytes
    end = max(0, start.measured.timeline.backward_start - 1)
    beside = peak - int(start.measured.totals[end]) + less_bytes
    given = {item.name: getattr(fit, item.name) for item in fields(Fit)}
    given["packing"] = fit.packing.hosting_only(start.residency.hosted)
    own = InFlightFit(**given, beside_bytes=beside)
    fitted, _ = own.under(peak, own.counted(start))
    return None if fitted is None else replace(fitted, measured=own.known[fitted.residency])
