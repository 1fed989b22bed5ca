"""What a module on a mesh remembers besides its tensors, whether its ranks run one program or the stages of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.checks import RankGroup
from autopar.runtime.experts.placed import PlacedExperts
from autopar.runtime.recorder import Recorder


@dataclass
class Session:
    """`model`: the original; `ranks`: those of `mesh`, as one party."""

    model: nn.Module
    mesh: DeviceMesh
    ranks: RankGroup
    empty: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # tensors without values, their writes so far
    seed: int = 0  # of the first rank's generator, when last looked at
    calls: int = 0  # since that seed was set
    recorder: Recorder | None = None  # while a run is recorded
    hosted: frozenset[str] = frozenset()  # the parameters that lie on the host
    experts: PlacedExperts = field(default_factory=PlacedExperts)

    def check_call(self, key: str) -> None:
        """Compare a key over all ranks, and take the first rank's seed: calls count from a new one."""
        seed = self.ranks.check_call(key)
        if seed != self.seed:
            self.seed, self.calls = seed, 0

    def note_empty(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember that these tensors have no values, unless somebody writes them from here on."""
        self.empty = {name: (tensor, _writes(tensor)) for name, tensor in tensors.items()}

    def still_empty(self) -> dict[str, Tensor]:
        """The tensors of a meta model that were written neither by their modules nor by the user."""
        self.empty = {name: item for name, item in self.empty.items() if _writes(item[0]) == item[1]}
        return {name: tensor for name, (tensor, _) in self.empty.items()}


def model_key(model: nn.Module) -> str:
    """The names, shapes and dtypes of a model's tensors: ranks compare them before they exchange values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return "\n".join(f"{name} {tensor.dtype}{list(tensor.shape)} {tensor.is_meta}" for name, tensor in tensors)


def _writes(tensor: Tensor) -> int:
    """How often the tensor was written in place, through itself or through its shard."""
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor._version + shard._version
