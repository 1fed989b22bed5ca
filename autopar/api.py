"""The front door: compile, make_plan, verify, run_virtual. The stages, in order, on one screen.

model, inputs -> capture -> decisions -> problem -> search -> plan -> passes -> runtime
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.arguments import (
    AnyMesh,
    Constraints,
    GivenPlan,
    Hardware,
    Inputs,
    call_arguments,
    load_plan,
    make_options,
    make_request,
    refuse_unsupported,
    wants_pipeline,
    with_batch,
)
from autopar.auto_stages import AUTO, Stages, best_plan, choosing_stages
from autopar.capture.program import Program
from autopar.capture.trace import Model, as_module, capture, tensor_leaves
from autopar.compiler import (
    Compiler,
    StagedCompiler,
    part_to_capture,
    pipeline_or_follow,
    pipeline_step,
    plan_or_follow,
)
from autopar.errors import MeshError, UnsupportedOptionError
from autopar.mesh import Devices, Mesh, as_mesh
from autopar.passes.packings import error_of
from autopar.plan import Plan
from autopar.planner.make import Options, Search
from autopar.planner.mesh_shapes import meshes_of, plan_of_fastest
from autopar.planner.optimizers import OptimizerFactory
from autopar.planner.pipeline_request import PipelineRequest, followed_request
from autopar.planner.reconsider import with_questions, with_stage_questions
from autopar.runtime.checks import RankGroup
from autopar.runtime.in_order import mesh_in_order
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.pipeline.module import PipelineModule
from autopar.runtime.pipeline.virtual_run import run_virtual_pipeline
from autopar.runtime.step import geometry_of
from autopar.runtime.virtual_run import VirtualRun, run_virtual_step
from autopar.verification import (
    Report,
    Values,
    accumulated_values,
    compare,
    eager_values,
    full_values,
    is_random,
    traced_values,
)

SEED = 0  # of the step that verify and run_virtual run


@choosing_stages(lambda *args, **keywords: make_plan(*args, **keywords))
def compile(  # noqa: A001 - the public name, as in torch.compile
    model: Model,
    mesh: DeviceMesh,
    *,
    example_inputs: Inputs | None = None,
    plan: GivenPlan | None = None,
    search: Search = "ilp",
    hardware: Hardware | None = None,
    memory_limit_bytes: int | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: str | None = None,
    compress: str | None = None,
    stages: Stages | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    batch_semantics: str | None = None,
    constraints: Constraints = (),
    backend: None = None,
) -> ParallelModule:
    """Turn a single-device model into one that runs over a mesh; the training loop stays as it is.

    `mesh`: a live `DeviceMesh`; call on every rank. `example_inputs`: a tensor, a tuple of positional inputs or a dict
    of keyword inputs, the global batch; without them the first call plans. `plan`: follow a saved, edited or hand-made
    plan. `search`: `ilp`, another registered strategy or function, or a hand plan: `ddp`, `fsdp`, `megatron`.
    `memory_limit_bytes`: per rank, by default the profile's less a margin. `optimizer`: a class or factory whose state
    is counted. `precision`: `bf16` or `fp16`, to compute in; parameters and gradients keep their dtype (`-wide` behind
    it: sums over ranks are in it too). `compress`: `bf16`, `fp8` or `int8`, in which the backward's values may be held
    where memory is short. `stages="auto"`: divide the mesh's first axis. `batch_semantics="accumulated"`: each
    microbatch is a batch by itself, as in gradient accumulation. `constraints`: `{"*.wte.weight": "R,S0"}`.
    Raises an `AutoparError` (what, where, what to do) on every rank; the model is left as it was.
    One process is a mesh too (under torchrun, the group is there already):

    >>> import autopar, torch, torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> pmodel = autopar.compile(torch.nn.Linear(8, 2), mesh)
    >>> pmodel(torch.ones(4, 8)).sum().backward()
    >>> sorted(name for name, parameter in pmodel.named_parameters() if parameter.grad is not None)
    ['bias', 'weight']
    >>> dist.destroy_process_group()
    """

    def read() -> _Given:
        refuse_unsupported(backend=backend)
        options = make_options(search, memory_limit_bytes, optimizer, constraints, precision, compress)
        request = make_request(stages, schedule, microbatches, batch_semantics)
        return _read(model, mesh, hardware, options, plan, example_inputs, request, optimizer)

    return _compiled(mesh, _agreed(mesh, read))


def _compiled(mesh: DeviceMesh, agreed: _Agreed) -> ParallelModule:
    given, mesh = agreed.given, mesh_in_order(mesh)
    if agreed.axis is None:
        geometry = geometry_of(mesh)
        compiler = Compiler(given.mesh, given.options, geometry, agreed.ranks, given.plan)
        return ParallelModule(given.model, mesh, compiler, example_inputs=given.inputs)
    if given.inputs is None:
        raise UnsupportedOptionError(
            "a pipeline is planned before its first call: which rank holds which parameter depends on it",
            fix="give autopar.compile example_inputs",
        )
    staged = StagedCompiler(given.mesh, given.options, given.request, agreed.ranks, given.plan)
    factory = given.optimizer
    return PipelineModule(given.model, mesh, staged, agreed.axis, example_inputs=given.inputs, optimizer=factory)


@dataclass(frozen=True)
class _Given:
    """What a caller gave, read and checked."""

    model: nn.Module
    mesh: Mesh
    options: Options
    plan: Plan | None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
    request: PipelineRequest
    optimizer: OptimizerFactory | None = None

    @property
    def axis(self) -> int | None:
        """The mesh axis of the pipeline, if there is to be one."""
        return wants_pipeline(self.mesh, self.request, self.plan)


def _read(
    model: Model,
    mesh: AnyMesh,
    hardware: Hardware | None,
    options: Options,
    plan: GivenPlan | None,
    example_inputs: Inputs | None,
    request: PipelineRequest,
    optimizer: OptimizerFactory | None = None,
) -> _Given:
    """What a caller gave, checked; what is not asked of a pipeline is asked for by a plan that is followed."""
    followed = load_plan(plan)
    inputs = None if example_inputs is None else call_arguments(example_inputs)
    request = followed_request(request, followed)
    return _Given(as_module(model), as_mesh(mesh, hardware), options, followed, inputs, request, optimizer)


@dataclass(frozen=True)
class _Agreed:
    """What all ranks were given alike."""

    given: _Given
    ranks: RankGroup
    axis: int | None


def _agreed(mesh: DeviceMesh, read: Callable[[], _Given]) -> _Agreed:
    """What the caller gave, the same on all ranks; what is wrong on one rank raises on all."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"compile needs a live DeviceMesh, got {type(mesh).__name__}",
            fix="use torch.distributed.device_mesh.init_device_mesh; for virtual ranks make_plan, verify, run_virtual",
        )
    ranks = RankGroup(mesh)
    given = ranks.all_succeed(read)
    followed = "none" if given.plan is None else given.plan.hash
    when = "at the first call" if given.inputs is None else "now, for the example inputs"
    lines = [given.options.text, f"hardware {given.mesh.profile.name}", f"plan {followed}", f"to be planned {when}"]
    ranks.agree("the options", "\n".join([*lines, given.request.text]))
    return _Agreed(given, ranks, ranks.all_succeed(lambda: given.axis))


def make_plan(
    model: Model,
    mesh: AnyMesh | Devices,
    *,
    example_inputs: Inputs,
    plan: GivenPlan | None = None,
    search: Search = "ilp",
    hardware: Hardware | None = None,
    memory_limit_bytes: int | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: str | None = None,
    compress: str | None = None,
    stages: Stages | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    batch_semantics: str | None = None,
    constraints: Constraints = (),
    backend: None = None,
) -> Plan:
    """Plan without running: meta models, virtual meshes, no process group; the keywords are those of `compile`.

    With `plan=`, that plan is checked and priced anew. Of `Devices`, the plan is that of the fastest mesh that suits.

    >>> import autopar, torch
    >>> layer = torch.nn.Linear(8, 8)
    >>> autopar.make_plan(layer, autopar.Mesh((2,)), example_inputs=torch.ones(4, 8)).mesh_shape
    (2,)
    """
    refuse_unsupported(backend=backend)
    views = meshes_of(mesh) if isinstance(mesh, Devices) else (as_mesh(mesh, hardware),)
    if stages == AUTO:
        again = partial(
            make_plan, model, example_inputs=example_inputs, search=search, memory_limit_bytes=memory_limit_bytes,
            optimizer=optimizer, precision=precision, compress=compress, schedule=schedule, microbatches=microbatches,
            batch_semantics=batch_semantics, constraints=constraints,
        )  # fmt: skip
        return plan_of_fastest(views, lambda view: best_plan(view, again))
    options = make_options(search, memory_limit_bytes, optimizer, constraints, precision, compress)
    request = make_request(stages, schedule, microbatches, batch_semantics)
    given = _read(model, views[0], None, options, plan, example_inputs, request)
    return plan_of_fastest(views, _planner(given))


def _planner(given: _Given) -> Callable[[Mesh], Plan]:
    """From a view of the mesh to the plan on it; the model is captured once."""
    assert given.inputs is not None
    (args, kwargs), options = given.inputs, given.options
    captured = partial(capture, given.model, device=given.mesh.device_type, precision=options.precision)
    program = captured(*part_to_capture(given.request, args, kwargs))

    def plan_on(view: Mesh) -> Plan:
        if wants_pipeline(view, given.request, given.plan) is not None:
            return with_stage_questions(pipeline_or_follow(program, view, options, given.request, plan=given.plan))
        planned = plan_or_follow(program, view, options, given.plan)
        return with_questions(planned, lambda size: captured(*with_batch(args, kwargs, size)))

    return plan_on


@choosing_stages(lambda *args, **keywords: make_plan(*args, **keywords))
def run_virtual(
    model: Model,
    mesh: AnyMesh,
    *,
    example_inputs: Inputs,
    plan: GivenPlan | None = None,
    search: Search = "ilp",
    hardware: Hardware | None = None,
    memory_limit_bytes: int | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: str | None = None,
    compress: str | None = None,
    stages: Stages | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    batch_semantics: str | None = None,
    constraints: Constraints = (),
    backend: None = None,
) -> VirtualRun:
    """One training step of all ranks in lockstep in this process, collectives included: outputs, gradients, buffers.

    No process group is needed, and no rank count is too large for a debugger. The keywords are those of `compile`.

    >>> import autopar, torch
    >>> run = autopar.run_virtual(torch.nn.Linear(8, 8), (2,), example_inputs=torch.ones(4, 8), search="ddp")
    >>> sorted(run.gradients), len(run.peak_bytes)
    (['bias', 'weight'], 2)
    """
    refuse_unsupported(backend=backend)
    options = make_options(search, memory_limit_bytes, optimizer, constraints, precision, compress)
    request = make_request(stages, schedule, microbatches, batch_semantics)
    return _run_virtual(_read(model, mesh, hardware, options, plan, example_inputs, request))[0]


@choosing_stages(lambda *args, **keywords: make_plan(*args, **keywords))
def verify(
    model: Model,
    mesh: AnyMesh,
    *,
    example_inputs: Inputs,
    plan: GivenPlan | None = None,
    search: Search = "ilp",
    hardware: Hardware | None = None,
    memory_limit_bytes: int | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: str | None = None,
    compress: str | None = None,
    stages: Stages | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    batch_semantics: str | None = None,
    constraints: Constraints = (),
    backend: None = None,
    tolerance: float | None = None,
) -> Report:
    """Compare one step of the distributed program with the single-device one: outputs, every gradient, every buffer.

    On a virtual mesh all ranks run in this process; on a live `DeviceMesh` the real ones do (call it on every rank).
    The reference is the model as PyTorch runs it; if the model is random, the captured program on one device, which
    draws the same numbers. Errors are relative to the largest magnitude of each tensor; `tolerance` replaces the
    default limits (1e-5 for outputs and 1e-4 for gradients in float32, 1e-10 in float64; for gradients of values that
    were held in less precision, at least 4 times the error of the form).

    >>> import autopar, torch
    >>> autopar.verify(torch.nn.Linear(8, 8), (2,), example_inputs=torch.ones(4, 8), search="ddp").ok
    True
    """

    def read() -> _Given:
        refuse_unsupported(backend=backend)
        options = make_options(search, memory_limit_bytes, optimizer, constraints, precision, compress)
        request = make_request(stages, schedule, microbatches, batch_semantics)
        return _read(model, mesh, hardware, options, plan, example_inputs, request)

    if isinstance(mesh, DeviceMesh):
        return _verify_live(mesh, read, example_inputs, tolerance)
    given = read()
    run, program, followed = _run_virtual(given)
    actual = Values(run.outputs, run.gradients, run.buffers)
    expected, reference = _reference(given, program, example_inputs)
    saved_error = error_of(entry.residency for entry in followed.every_entry)
    report = compare(actual, expected, reference=reference, tolerance=tolerance, saved_error=saved_error)
    return replace(report, plan=followed, peak_bytes=max(run.peak_bytes))


def _run_virtual(given: _Given) -> tuple[VirtualRun, Program, Plan]:
    assert given.inputs is not None
    args, kwargs = given.inputs
    is_staged = given.axis is not None
    _refuse_asynchronous(given.request)
    part = part_to_capture(given.request, args, kwargs)
    program = capture(given.model, *part, device="cpu", precision=given.options.precision)
    if is_staged:
        staged = pipeline_or_follow(program, given.mesh, given.options, given.request, plan=given.plan)
        run = run_virtual_pipeline(given.model, pipeline_step(staged), args, kwargs, seed=SEED)
        return run, program, staged.plan
    planned = plan_or_follow(program, given.mesh, given.options, given.plan)
    run = run_virtual_step(given.model, program, planned.assignment, given.mesh.shape, args, kwargs, seed=SEED)
    return run, program, planned.plan


def _refuse_asynchronous(request: PipelineRequest) -> None:
    if request.is_asynchronous:
        raise UnsupportedOptionError(
            f"{request.schedule} has no step of a single device that it could be compared with",
            fix="verify with a synchronous schedule; train with compile(...).train_step(*inputs)",
        )


def _reference(given: _Given, program: Program, inputs: Inputs, seed: int = SEED) -> tuple[Values, str]:
    args, kwargs = call_arguments(inputs)
    if given.request.accumulated and given.axis is not None:
        assert given.request.microbatches is not None
        policy, count = given.options.precision, given.request.microbatches
        found = accumulated_values(given.model, program, args, kwargs, count, seed=seed, precision=policy)
        return found, f"the model on one device, on {count} microbatches one after another"
    if is_random(program):
        found = traced_values(given.model, program, tensor_leaves(args, kwargs), seed)
        return found, "the captured program on one device"
    policy = given.options.precision
    under = f" under the same policy, in {str(policy.dtype).removeprefix('torch.')}" if policy else ""
    return eager_values(given.model, program, args, kwargs, policy), f"the model as PyTorch runs it{under}"


def _verify_live(mesh: DeviceMesh, read: Callable[[], _Given], inputs: Inputs, tolerance: float | None) -> Report:
    agreed = _agreed(mesh, read)
    given = agreed.given
    _refuse_asynchronous(given.request)
    args, kwargs = call_arguments(inputs)
    pmodel = _compiled(mesh, agreed)
    program, seed = pmodel.program, pmodel.next_seed
    actual = full_values(pmodel, program, args, kwargs)
    expected, reference = _reference(given, program, inputs, seed)
    plan = cast(Plan, pmodel.plan)
    saved_error = error_of(entry.residency for entry in plan.every_entry)
    report = compare(actual, expected, reference=reference, tolerance=tolerance, saved_error=saved_error)
    return replace(report, plan=plan)
