"""What the stages of a rank have given so far: outputs, buffers, sums of gradients."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from autopar.capture.program import OutputKind
from autopar.runtime.pipeline.lanes import Lanes, Value

OutputKey = tuple[OutputKind, str]


@dataclass
class Gathered:
    """What a rank's stages have given: by output, each microbatch's part; by name, gradients summed so far."""

    outputs: dict[OutputKey, dict[int, Value]] = field(default_factory=lambda: defaultdict(dict))
    gradients: dict[tuple[int, str], Value] = field(default_factory=dict)  # by (stage, parameter)
    owned: set[tuple[int, str]] = field(default_factory=set)  # sums in tensors of their own: they are added to in place

    def add(self, stage: int, name: str, value: Value, lanes: Lanes) -> None:
        """Add to a gradient."""
        key = stage, name
        if key not in self.gradients:
            self.gradients[key] = value
        elif key not in self.owned:
            self.gradients[key] = lanes.sum(self.gradients[key], value)
            self.owned.add(key)
        else:
            for held, new in zip(self.gradients[key], value, strict=True):
                held.add_(new)

    def add_on_host(self, stage: int, name: str, value: Value) -> None:
        """Add to a gradient that lies on the host: to the first microbatch's, which is a copy of nothing else."""
        key = stage, name
        if key not in self.gradients:
            self.gradients[key] = value
            return
        for held, new in zip(self.gradients[key], value, strict=True):
            held.add_(new)

    def clear_gradients(self, stage: int) -> None:
        for key in [key for key in self.gradients if key[0] == stage]:
            del self.gradients[key]
        self.owned = {key for key in self.owned if key[0] != stage}
