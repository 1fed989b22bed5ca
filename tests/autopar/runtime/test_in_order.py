"""A compiled model's collectives run in gloo groups of one thread: those of two corrupt memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.passes.collectives import is_collective
from autopar.runtime.in_order import mesh_in_order
from tests.gloo import run_on_ranks


def threads_of(mesh: DeviceMesh) -> list[int]:
    cpu = torch.device("cpu")
    return [mesh.get_group(axis)._get_backend(cpu).options._threads for axis in range(mesh.ndim)]


def meshes() -> dict[str, Any]:
    """On four ranks, what became of a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = mesh_in_order(mesh)
    sums = []
    for axis in ("dp", "tp"):
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value, group=own[axis].get_group())
        sums.append(value.item())
    timeouts = {item.get_group(0)._get_backend(torch.device("cpu")).options._timeout for item in (mesh, own)}
    return {"threads": (threads_of(mesh), threads_of(own)), "equal": own == mesh and hash(own) == hash(mesh),
            "sums": sums, "timeouts": len(timeouts)}  # fmt: skip


def test_a_gloo_mesh_is_replaced_by_an_equal_one_with_one_thread_for_each_group() -> None:
    for rank, found in enumerate(run_on_ranks(meshes, 4)):
        assert found["threads"] == ([2, 2], [1, 1])
        assert found["equal"] and found["timeouts"] == 1
        assert found["sums"] == [rank % 2 * 2 + 2, rank // 2 * 4 + 1]


def groups_of_compiled() -> tuple[list[int], int]:
    """How many threads the groups of a compiled model's collectives have, and how many collectives there are."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    pmodel = autopar.compile(model, mesh, example_inputs=torch.ones(4, 8), search="fsdp")
    graph = pmodel._shown().step.local.forward.graph
    groups = [node.args[-1] for node in graph.nodes if is_collective(node)]
    found = [dist.distributed_c10d._resolve_process_group(name) for name in groups]
    return [group._get_backend(torch.device("cpu")).options._threads for group in found], len(groups)


def test_a_compiled_models_collectives_run_in_order() -> None:
    for threads, count in run_on_ranks(groups_of_compiled, 2):
        assert count > 0 and threads == [1] * count


def interfaces(named: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", named)
        return len(threads_of(mesh_in_order(init_device_mesh("cpu", (2,)))))


def test_the_interface_that_gloo_was_told_is_used() -> None:
    assert run_on_ranks(interfaces, 2, "lo") == [1, 1]
    with pytest.raises(RuntimeError, match="no-such-interface"):
        run_on_ranks(interfaces, 2, "no-such-interface")


def stays() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return mesh_in_order(mesh) is mesh


def test_a_mesh_of_one_rank_stays() -> None:
    assert run_on_ranks(stays, 1) == [True]


def twice() -> bool:
    once = mesh_in_order(init_device_mesh("cpu", (2,)))
    return mesh_in_order(once) == once


def test_a_mesh_in_order_may_be_compiled_for_again() -> None:
    assert run_on_ranks(twice, 2) == [True, True]


def test_a_mesh_of_another_backend_stays() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert stays()
    finally:
        dist.destroy_process_group()
