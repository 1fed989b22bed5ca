"""`stages="auto"`: how much of a mesh's first axis becomes pipeline stages, by planning each way to divide it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, UnsupportedOptionError
from autopar.mesh import Mesh, as_mesh
from autopar.plan import Plan
from autopar.planner.pipeline_request import PIPELINE_AXES
from autopar.runtime.checks import RankGroup

AUTO: Final = "auto"
Stages: TypeAlias = int | Literal["auto"]

P = ParamSpec("P")
R = TypeVar("R")


def meshes(mesh: Mesh) -> list[Mesh]:
    """The mesh as it is, and with its first axis divided: stages outside, what is left of it inside.

    A mesh that names the pipeline's axis is divided already.
    """
    if any(name in PIPELINE_AXES for name in mesh.axis_names):
        return [mesh]
    first, *rest = mesh.shape
    name, *names = mesh.axis_names
    found = [mesh]
    for stages in (count for count in range(2, first + 1) if first % count == 0):
        inner = [(name, first // stages)] if stages < first else []
        axes = [("pp", stages), *inner, *zip(names, rest, strict=True)]
        shape, own = tuple(size for _, size in axes), tuple(own for own, _ in axes)
        found.append(Mesh(shape, own, hardware=mesh.profile, device_type=mesh.device_type))
    return found


def best_plan(mesh: Mesh, plan_on: Callable[[Mesh], Plan]) -> Plan:
    """The plan of the shortest step over all divisions of the mesh; one that cannot be planned is passed over.

    Raises what the mesh as it is raised, if none can. `alternatives`: the other divisions, with their steps.
    """
    refused: list[AutoparError] = []
    plans: list[Plan] = []
    for candidate in meshes(mesh):
        try:
            plans.append(plan_on(candidate))
        except AutoparError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    best = min(plans, key=lambda plan: plan.step_s)
    steps = {" x ".join(f"{name} {size}" for name, size in zip(it.axis_names, it.mesh_shape, strict=True)): it.step_s
             for it in plans}  # fmt: skip
    return replace(best, alternatives={**best.alternatives, **steps})


def choosing_stages(make_plan: Callable[..., Plan]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: `stages="auto"` plans first, then calls the function with the mesh and the plan that were chosen."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if keywords.get("stages") != AUTO:
                return function(*args, **keywords)
            return _with_choice(make_plan, function, *args, **keywords)

        return call

    return decorate


def _with_choice(make_plan: Callable[..., Plan], function: Callable[..., R], model: Any, mesh: Any, **given: Any) -> R:
    if given.get("plan") is not None or given.get("example_inputs") is None:
        raise UnsupportedOptionError(
            'stages="auto" plans for example_inputs, and follows no plan', fix="give example_inputs, and no plan"
        )
    keywords = {name: value for name, value in given.items() if name not in ("tolerance", "plan", "stages")}
    view = as_mesh(mesh, given.get("hardware"))
    plan_on = functools.partial(make_plan, model, **{**keywords, "hardware": None})
    chosen: Any
    if isinstance(mesh, DeviceMesh):
        text = RankGroup(mesh).first_decides(lambda: json.dumps(best_plan(view, plan_on).to_json()))
        plan = Plan.from_json(json.loads(text))
        chosen = mesh
        if plan.mesh_shape != view.shape:
            chosen = DeviceMesh(
                mesh.device_type, mesh.mesh.reshape(plan.mesh_shape), mesh_dim_names=tuple(plan.axis_names)
            )
    else:
        plan = best_plan(view, plan_on)
        chosen = Mesh(plan.mesh_shape, plan.axis_names, hardware=view.profile, device_type=view.device_type)
    pinned = {"stages": None, "schedule": None, "microbatches": None, "batch_semantics": None, "plan": plan}
    return function(model, chosen, **{**given, **pinned})
