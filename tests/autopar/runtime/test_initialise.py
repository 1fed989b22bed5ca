"""Models on the meta device: initialised shard by shard, or loaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from autopar.errors import UninitializedError
from autopar.runtime.parallel_module import ParallelModule
from tests.autopar.runtime.compilers import FollowingCompiler
from tests.autopar.runtime.models import assert_same_state, batch, full
from tests.autopar.runtime.test_calls import error_of
from tests.gloo import run_on_ranks

S0 = Shard(0)


class Scaled(nn.Module):
    """Holds a parameter that no method initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.body = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x) * self.scale
        return result


class Pretrained(Scaled):
    """Initialises every module by its type, as Hugging Face models do."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
        elif isinstance(module, Pretrained):
            nn.init.constant_(module.scale, 3.0)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, 6))


def distributed(model: nn.Module, mesh_shape: tuple[int, ...]) -> ParallelModule:
    mesh = init_device_mesh("cpu", mesh_shape)
    return ParallelModule(model, mesh, FollowingCompiler(mesh, (S0,) * len(mesh_shape)))


def initialised_values(mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = network()
    module = distributed(model, mesh_shape)
    module(batch()).sum().backward()
    assert all(tensor.is_meta for tensor in model.parameters())
    values: dict[str, torch.Tensor] = module.state_dict()
    return {name: full(tensor.detach()) for name, tensor in values.items()}


def test_meta_models_initialise_to_the_same_values_on_every_mesh() -> None:
    four, two = run_on_ranks(initialised_values, 4, (2, 2)), run_on_ranks(initialised_values, 2, (2,))
    for values in (*four[1:], *two):
        torch.testing.assert_close(values, four[0])
        assert all(torch.equal(values[name], four[0][name]) for name in values if name.endswith(("weight", "bias")))
    weight = four[0]["0.weight"]
    assert 0.1 < float(weight.std()) < 0.3 and float(weight.abs().max()) <= 8**-0.5
    assert int(four[0]["1.num_batches_tracked"]) == 1


def load_what_is_missing() -> None:
    with torch.device("meta"):
        models = Scaled(), Pretrained()
    module, known = (distributed(model, (2,)) for model in models)
    assert "scale" in error_of(UninitializedError, lambda: module(batch()))
    torch.manual_seed(1)
    loaded = Scaled()
    module.load_state_dict(loaded.state_dict())
    torch.testing.assert_close(module(batch()), loaded(batch()))
    assert_same_state(module, loaded)
    known(batch())
    assert torch.equal(known.scale.full_tensor(), torch.full((8,), 3.0))
    assert torch.equal(known.body.weight.full_tensor(), torch.full((8, 8), 0.25))


def test_what_no_module_initialises_must_be_loaded_first() -> None:
    run_on_ranks(load_what_is_missing, 2)
