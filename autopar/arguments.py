"""The keywords of the public functions, read and checked once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.precision import Precision, Reduction
from autopar.cost_models.hardware import HardwareProfile
from autopar.errors import CaptureError, PlanError, UnknownStrategyError, UnsupportedOptionError
from autopar.mesh import Mesh
from autopar.passes.packings import LOSSY
from autopar.plan import Plan
from autopar.plan_questions import check_memory_limit
from autopar.planner.constraints import Constraint, as_constraints
from autopar.planner.make import Options, Search
from autopar.planner.optimizers import OptimizerFactory, optimizer_of
from autopar.planner.pipeline_request import PipelineRequest, is_accumulated, pipeline_axis
from autopar.schedules.generate import GENERATORS
from autopar.sharding.discovery.book import Discovery
from autopar.sharding.discovery.cache import DiskCache, cache_folder

AnyMesh = Mesh | DeviceMesh | Sequence[int] | int
Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Hardware = str | Path | HardwareProfile
Constraints = Mapping[str, str] | Sequence[Constraint | tuple[str, str]]
GivenPlan = Plan | str | Path

_LATER = {
    "backend": "compilation of the emitted graphs",
}

PRECISIONS = {
    name + suffix: Precision(dtype, reduction)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    for suffix, reduction in (("", Reduction.FASTEST), ("-wide", Reduction.WIDE))
}


def call_arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: a tensor is one positional input, a tuple several, a dict keyword inputs."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    raise CaptureError(
        f"example_inputs is a {type(inputs).__name__}",
        fix="pass a tensor, a tuple of positional inputs or a dict of keyword inputs",
    )


def with_batch(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same inputs with another batch: dim 0, where it is as long as most inputs' is, repeated or cut short."""
    leaves, spec = tree_flatten((args, kwargs))
    lengths = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not lengths:
        raise CaptureError("no input has a batch dim", fix="plan again with inputs of the other size")
    batch = max(set(lengths), key=lambda length: (lengths.count(length), length))
    resized = [
        leaf[torch.arange(size, device=leaf.device) % batch]
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
        else leaf
        for leaf in leaves
    ]
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(resized, spec)
    return found


def refuse_unsupported(**options: Any) -> None:
    """Raise for an option that is public but not carried out yet, rather than ignore it."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedOptionError(
                f"{name}={value!r}: this version does not carry out {_LATER[name]}", fix=f"leave {name} out"
            )


def make_request(
    stages: int | str | None, schedule: str | None, microbatches: int | None, batch_semantics: str | None = None
) -> PipelineRequest:
    """The pipeline asked for. Raises UnsupportedOptionError for what is no number, no schedule or no semantics."""
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnsupportedOptionError(f"{name}={value!r} is not a number of {name}", fix="give a number from 1 on")
    if schedule is not None and schedule not in GENERATORS:
        raise UnsupportedOptionError(f"there is no schedule {schedule!r}", fix=f"use one of {', '.join(GENERATORS)}")
    assert not isinstance(stages, str)
    request = PipelineRequest(stages, schedule, microbatches, is_accumulated(batch_semantics))
    if request.is_asynchronous and request.accumulated:
        raise UnsupportedOptionError(
            f"{schedule} updates the weights after microbatches, and accumulates nothing",
            fix="leave batch_semantics out: each microbatch is a batch by itself there anyway",
        )
    if request.accumulated and microbatches is None:
        raise UnsupportedOptionError(
            "what a model computes depends on how many batches are accumulated", fix="give microbatches="
        )
    if request.is_asynchronous and microbatches is None:
        raise UnsupportedOptionError(
            f"{schedule} updates the weights after microbatches, and is not told how many a batch has",
            fix="give microbatches=",
        )
    return request


def wants_pipeline(mesh: Mesh, request: PipelineRequest, plan: Plan | None) -> int | None:
    """The mesh axis of the pipeline, if there is to be one. Raises MeshError, UnsupportedOptionError."""
    asked = request.schedule is not None or request.microbatches not in (None, 1) or request.accumulated
    if plan is not None:
        axis = plan.pipeline.axis if plan.pipeline else None
    else:
        axis = pipeline_axis(mesh, request.stages, wanted=asked)
    if axis is None and asked:
        raise UnsupportedOptionError(
            "a schedule and microbatches are for pipelines, and no axis of the mesh is one's",
            fix='name an axis of the mesh "pp", or give stages= the length of an axis; an axis "pp" of one rank '
            "accumulates gradients",
        )
    return axis


def make_options(
    search: Search,
    memory_limit_bytes: int | None,
    optimizer: OptimizerFactory | None,
    constraints: Constraints,
    precision: str | None = None,
    compress: str | None = None,
) -> Options:
    """The planner's options from the public keywords. Raises an error of the keyword that cannot be read."""
    check_memory_limit(memory_limit_bytes)
    if not isinstance(search, str) and not callable(search):
        raise UnknownStrategyError(f"search is a {type(search).__name__}", fix="give a name, as 'ilp', or a function")
    return Options(
        search=search,
        memory_limit_bytes=None if memory_limit_bytes is None else int(memory_limit_bytes),
        optimizer=optimizer_of(optimizer),
        constraints=as_constraints(constraints),
        precision=precision_of(precision),
        compress=lossy_residency(compress),
        discovery=Discovery(DiskCache(folder) if (folder := cache_folder(os.environ)) else None),
    )


def precision_of(name: str | None) -> Precision | None:
    """The policy of that name: `bf16` or `fp16`; with `-wide` behind it, gradients are summed in parameters' dtypes."""
    if name is None:
        return None
    if name not in PRECISIONS:
        raise UnsupportedOptionError(
            f"precision={name!r} is no policy", fix=f"give one of {', '.join(map(repr, PRECISIONS))}, or leave it out"
        )
    return PRECISIONS[name]


def lossy_residency(name: str | None) -> str:
    """The residency that `compress=` allows, if any."""
    if name is not None and name not in LOSSY:
        raise UnsupportedOptionError(
            f"compress={name!r} is no form of saved values",
            fix=f"give one of {', '.join(map(repr, LOSSY))}, or leave it out: what loses nothing may always be chosen",
        )
    return "" if name is None else LOSSY[name]


def load_plan(plan: GivenPlan | None) -> Plan | None:
    """A plan as it is, or read from a path."""
    if isinstance(plan, (str, Path)):
        return Plan.load(plan)
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}", fix="pass an autopar.Plan, or the path of a saved one")
    return plan
