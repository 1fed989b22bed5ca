"""The answer: which expert stands in which slot of which device, and what that does to load and traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autopar.search.experts.balance import device_loads
from autopar.search.experts.changes import moved_experts
from autopar.search.experts.inputs import Array, Question
from autopar.search.experts.reasons import why_there
from autopar.search.experts.traffic import crossing_tokens


@dataclass(frozen=True)
class Placement:
    """Every layer's experts on the devices of a mesh.

    `assignment`: int64 [layers, devices, slots], the expert in each slot. `device_load`: float64 [layers, devices],
    each replica of an expert taking an equal part of its load. `bound`: float64 [layers], below which no placement has
    the slowest device's load. `crossing`: float64 [layers], tokens that must cross nodes. `moved`: int64 [layers],
    experts that a device must fetch because the current placement does not have them there; zeros without one.
    `load`: float64 [layers, experts], what was asked to be placed.
    """

    assignment: Array
    device_load: Array
    bound: Array
    crossing: Array
    moved: Array
    load: Array

    @property
    def imbalance(self) -> Array:
        """float64 [layers]: the slowest device's load over the mean, 1 for a layer without load."""
        means = self.device_load.mean(1)
        return np.where(means > 0, self.device_load.max(1) / np.where(means > 0, means, 1.0), 1.0)

    @property
    def gap(self) -> Array:
        """float64 [layers]: how far the slowest device may be above the best possible, as a share of it."""
        slowest = self.device_load.max(1)
        return np.where(self.bound > 0, slowest / np.where(self.bound > 0, self.bound, 1.0) - 1, 0.0).clip(min=0)

    @cached_property
    def replicas(self) -> Array:
        """int64 [layers, experts]: how many slots each expert has."""
        experts = int(self.assignment.max()) + 1
        return np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in self.assignment])

    def moved_bytes(self, expert_bytes: int) -> int:
        """Bytes that devices fetch, for experts of so many bytes (parameters, and optimizer state if it moves too)."""
        return int(self.moved.sum()) * expert_bytes

    def why(self, layer: int, expert: int) -> str:
        """Why an expert is where it is, in plain words. Raises ExpertPlacementError where there is none such."""
        return why_there(self, layer, expert)

    def to_dict(self) -> dict[str, Any]:
        """Lists and numbers, for JSON."""
        fields = ("assignment", "device_load", "bound", "crossing", "moved", "imbalance")
        return {name: np.asarray(getattr(self, name)).tolist() for name in fields}

    def __str__(self) -> str:
        layers, devices, slots = self.assignment.shape
        imbalance = self.imbalance
        lines = [
            f"{layers} layers of {self.replicas.shape[1]} experts on {devices} devices, {slots} slots each",
            f"slowest device over mean: {imbalance.mean():.4f} on average, {imbalance.max():.4f} at most; "
            f"within {self.gap.max():.2%} of the best possible",
            f"tokens that cross nodes: {self.crossing.sum():.4g}; experts to move: {int(self.moved.sum())}",
        ]
        return "\n".join(lines)


def make_placement(question: Question, layers: list[Array], bounds: Array) -> Placement:
    """Measure what was found."""
    assignment = np.stack(layers)
    experts = question.load.shape[1]
    loads = np.stack([device_loads(load, slots) for load, slots in zip(question.load, layers, strict=True)])
    moved = np.zeros(len(layers), dtype=np.int64)
    if question.current is not None:
        pairs = zip(layers, question.current, strict=True)
        moved = np.array([moved_experts(slots, current, experts) for slots, current in pairs])
    return Placement(
        assignment, loads, np.minimum(bounds, loads.max(1)), crossing_tokens(question, assignment), moved, question.load
    )
