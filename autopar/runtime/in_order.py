"""A mesh of gloo ranks whose groups carry out one collective after the other."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.torch_compat import group_timeout, is_gloo, mesh_over, register_gloo_in_order


def mesh_in_order(mesh: DeviceMesh) -> DeviceMesh:
    """An equal mesh over groups of its own, where the groups of `mesh` are gloo's; any other mesh as it is.

    Called by all ranks of the mesh together. The two threads of a gloo group write the name of the op that each has
    completed into one string, without a lock (`runLoop` in PyTorch's ProcessGroupGloo.cpp, seen in 2.13). Where two
    collectives are under way and a name is too long to be held in place, as that of an all-gather is, they free the
    same memory twice: the process dies, or waits for ever. A group with one thread does neither.
    """
    if mesh.size() == 1 or not all(is_gloo(mesh.get_group(axis), mesh.device_type) for axis in range(mesh.ndim)):
        return mesh
    backend, groups = register_gloo_in_order(), []
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        ranks, timeout = dist.get_process_group_ranks(group), group_timeout(group, mesh.device_type)
        groups.append(dist.new_group(ranks, timeout, backend, use_local_synchronization=True))
    return mesh_over(groups, mesh)
