"""So many devices in whatever mesh is fastest: the shapes that suit the hardware, and the plan of the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.errors import AutoparError, MemoryLimitError, NotDivisibleError
from autopar.mesh import Devices, Mesh
from autopar.plan import Plan

Attempt = Callable[[Mesh], Plan]


def mesh_shapes(devices: int, ranks_per_node: int) -> tuple[tuple[int, ...], ...]:
    """One axis over all devices, and two axes of which the inner one stays inside nodes.

    An inner axis that would cross nodes has the links of the outer one, and is left out; so is one that leaves a node
    with part of a group.
    """
    inner = [ranks for ranks in range(2, devices) if devices % ranks == 0 and ranks_per_node % ranks == 0]
    return (devices,), *((devices // ranks, ranks) for ranks in inner)


def meshes_of(devices: Devices) -> tuple[Mesh, ...]:
    """The meshes to try."""
    per_node = min(devices.count, devices.profile.ranks_per_node)
    shapes = mesh_shapes(devices.count, per_node)
    return tuple(Mesh(shape, hardware=devices.profile, device_type=devices.device_type) for shape in shapes)


def plan_of_fastest(meshes: Sequence[Mesh], plan_on: Attempt) -> Plan:
    """The plan with the fastest step, with those of the other meshes beside it for the frontier.

    Raises the error of the mesh that came closest to the memory limit, or else of the first one, where none has a plan.
    """
    plans, errors = [], list[AutoparError]()
    for mesh in meshes:
        try:
            plans.append(plan_on(mesh))
        except (MemoryLimitError, NotDivisibleError) as error:
            errors.append(error)
    if not plans:
        raise min(errors, key=lambda error: not isinstance(error, MemoryLimitError))
    best = min(plans, key=lambda plan: plan.step_s)
    others = tuple(plan for plan in plans if plan is not best)
    return replace(best, other_meshes=others) if others else best
