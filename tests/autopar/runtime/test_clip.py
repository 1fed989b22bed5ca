"""Clipping: the norm of a single device, whatever the layouts."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.parallel_module import ParallelModule
from autopar.sharding.layout import REPLICATE, Layout
from tests.autopar.runtime.compilers import FollowingCompiler
from tests.autopar.runtime.models import assert_same_state, everything, tokens
from tests.gloo import run_on_ranks

S0 = Shard(0)
STORED: dict[str, Layout] = {"embedding.weight": (S0, S0), "body.weight": (REPLICATE, Shard(1)), "body.bias": (S0, S0)}


def clip(norm_type: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = everything()
    module = ParallelModule(model, mesh, FollowingCompiler(mesh, (S0, S0), STORED))
    with module.no_sync():
        (module(**tokens())["loss"] * 10).backward()
    (module(**tokens(seed=2))["loss"] * 10).backward()
    for seed in (1, 2):
        (model(**tokens(seed=seed))["loss"] * 10).backward()
    for limit in (1e6, 0.5):
        total = clip_grad_norm_(module, limit, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)
        assert type(total) is torch.Tensor
        torch.testing.assert_close(total, expected)
        assert_same_state_up_to_calls(module, model)


def assert_same_state_up_to_calls(module: ParallelModule, model: torch.nn.Module) -> None:
    model.get_buffer("calls").copy_(module.get_buffer("calls"))
    assert_same_state(module, model)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
def test_clipping_over_shards_is_clipping_on_one_device(norm_type: float) -> None:
    run_on_ranks(clip, 4, norm_type)
