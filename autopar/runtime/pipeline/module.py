"""The distributed model with its layers on several ranks, as an ordinary `nn.Module`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.program import InputKind, LeafIndex, OmittedOutput, OutputKind, Program, ProgramOutput
from autopar.capture.trace import Model, as_module
from autopar.errors import InputError, UninitializedError, UnsupportedOptionError
from autopar.runtime.checks import RankGroup
from autopar.runtime.initialise import initialise, is_meta
from autopar.runtime.inputs import call_key, modes_now, user_tensors
from autopar.runtime.mirror import mirror, modes_of, training_flags
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import distributed_parameter
from autopar.runtime.pipeline.rank import PipelineRank
from autopar.runtime.pipeline.run import BACKWARD, BoundPipeline
from autopar.runtime.pipeline.step import PipelineStep, user_outputs
from autopar.runtime.pipeline.worker import Worker
from autopar.runtime.step import PlanLike
from autopar.sharding.layout import Layout, replicated


@dataclass(frozen=True)
class CompiledPipeline:
    """A step and its plan."""

    step: PipelineStep
    plan: PlanLike


class PipelineCompiler(Protocol):
    """Makes compiled pipelines; called on all ranks at once."""

    def compile_pipeline(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: PipelineStep | None
    ) -> CompiledPipeline:
        """Capture, plan and stage `model(*args, **kwargs)` in the modes of the moment.

        `like`, if given: another shape or mode of a model whose parameters lie as that step has them.
        """


@dataclass
class _Session:
    model: nn.Module
    mesh: DeviceMesh
    compiler: PipelineCompiler
    ranks: RankGroup
    place: PipelineRank
    steps: dict[str, tuple[BoundPipeline, PlanLike]] = field(default_factory=dict)
    first: str = ""  # the key of the step that the parameters were laid out for
    seed: int = 0
    calls: int = 0
    outputs_everywhere: bool = False
    missing: tuple[str, ...] = ()


class PipelineModule(ParallelModule):
    """Runs a model whose stages lie along one axis of a mesh; each rank holds the parameters of its stages alone.

    Calling it runs all microbatches of the batch through all stages, forward and, where gradients are enabled and the
    model returns its loss, backward too: `backward()` on the loss then hands the gradients over. Every rank is given
    the whole batch, and gets the loss. Outputs beside a loss are left where they are; see `outputs_everywhere`.
    """

    def __init__(
        self,
        model: Model,
        mesh: DeviceMesh,
        compiler: PipelineCompiler,
        axis: int,
        *,
        example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        nn.Module.__init__(self)
        module = as_module(model)
        ranks = RankGroup(mesh)
        session = _Session(module, mesh, compiler, ranks, PipelineRank(mesh, axis))
        self.__dict__["_autopar"] = session
        args, kwargs = example_inputs
        compiled = compiler.compile_pipeline(module, args, kwargs, like=None)
        ranks.agree("the plan", compiled.plan.hash)
        bound = ranks.all_succeed(lambda: BoundPipeline(compiled.step, session.place))
        parameters, buffers = self._distributed(bound)
        mirror(module, self, parameters, buffers)
        key, error = self._key(args, kwargs)
        session.seed = ranks.check_call(key)
        if error is not None:
            raise error
        session.first = key
        session.steps[key] = bound, compiled.plan

    @property
    def plan(self) -> PlanLike:
        return self._session.steps[self._session.first][1]

    @property
    def program(self) -> Program:
        """The captured program of the whole batch."""
        return self._first.step.staged.program

    @property
    def step(self) -> PipelineStep:
        """What runs: microbatches, stages, schedule."""
        return self._first.step

    @property
    def forward_graph(self) -> fx.GraphModule:
        """What this rank runs forward for one microbatch, of its first stage."""
        return next(iter(self._first.variants.values()))[0].forward[0]

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        backward = next(iter(self._first.variants.values()))[0].backward
        return backward[0] if backward else None

    @property
    def stage_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's stages: the mesh of its parameters."""
        return self._session.place.stage_mesh

    @property
    def pipeline_group(self) -> Any:
        """The process group of the ranks at this rank's place of all stages."""
        return self._session.place.group

    @property
    def _first(self) -> BoundPipeline:
        return self._session.steps[self._session.first][0]

    @property
    def _session(self) -> _Session:  # type: ignore[override]
        return cast(_Session, self.__dict__["_autopar"])

    @contextmanager
    def outputs_everywhere(self) -> Iterator[None]:
        """In here outputs beside a loss, too, are given in full to every rank."""
        before = self._session.outputs_everywhere
        self._session.outputs_everywhere = True
        try:
            yield
        finally:
            self._session.outputs_everywhere = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        raise UnsupportedOptionError(
            "a pipeline adds up its microbatches' gradients by itself", fix="give it larger batches, more microbatches"
        )
        yield

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is left to do: the parameters lie as planned from the start."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._bound_for(args, kwargs)
        if self._session.missing:
            raise UninitializedError(
                f"{len(self._session.missing)} tensors of the meta model have no values",
                fix="give their modules reset_parameters() or an _init_weights",
            )
        seed = self.next_seed
        self._session.calls += 1
        worker = bound.worker(user_tensors(args, kwargs), self._parameters_by_name(), dict(self.named_buffers()), seed)
        call = _Call(self, bound, worker)
        trains = bound.has_gradients and torch.is_grad_enabled()
        if trains:
            anchor = torch.zeros((), requires_grad=True, device=self._session.mesh.device_type)
            outputs = _Pipeline.apply(call, anchor, *call.differentiated)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs = call.run_forward()
        return self._result(bound, outputs)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of all parameters, of all stages, in full on every rank: for comparing and debugging."""
        place = self._session.place
        own = dict(self.named_parameters())
        found = {}
        for name, rank in self._holders().items():
            held = own.get(name)
            has = torch.tensor(int(held is not None and held.grad is not None), device=self._session.mesh.device_type)
            if not int(place.broadcast(has, rank)):
                continue
            if place.rank == rank:
                assert held is not None
                full = cast(DTensor, held.grad).full_tensor().contiguous()
            else:
                shape = dict(self._session.model.named_parameters())[name]
                full = torch.empty(shape.shape, dtype=shape.dtype, device=self._session.mesh.device_type)
            found[name] = place.broadcast(full, rank)
        return found

    def _holders(self) -> dict[str, int]:
        """By parameter, the first pipeline rank that holds it."""
        step = self._first.step
        ranks = {
            item.name: step.schedule.rank_of(stage.index)
            for stage in reversed(step.staged.stages)
            for item in stage.program.inputs
            if item.kind is InputKind.PARAMETER
        }
        return {name: ranks.get(name, 0) for name, _ in self._session.model.named_parameters()}

    def _result(self, bound: BoundPipeline, outputs: tuple[Tensor, ...]) -> Any:
        program = bound.step.staged.program
        keys = user_outputs(program)
        given = iter(outputs)
        by_key = {key: next(given) for key in keys if self._is_given(bound, key[0])}
        leaves = []
        for leaf in program.output_leaves:
            if not isinstance(leaf, LeafIndex):
                leaves.append(leaf)
                continue
            key = keys[leaf.index]
            leaves.append(
                by_key[key] if key in by_key else OmittedOutput(key[1], "tensor on the ranks of its stage", _ELSEWHERE)
            )
        return pytree.tree_unflatten(leaves, program.output_spec)

    def _is_given(self, bound: BoundPipeline, kind: OutputKind) -> bool:
        has_loss = any(output.kind is OutputKind.LOSS for output in bound.step.staged.program.outputs)
        return kind is OutputKind.LOSS or not has_loss or self._session.outputs_everywhere

    def _bound_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundPipeline:
        session = self._session
        key, error = self._key(args, kwargs)
        seed = session.ranks.check_call(key)
        if error is not None:
            raise error
        if seed != session.seed:
            session.seed, session.calls = seed, 0
        if key not in session.steps:
            with modes_of(self, session.model):
                compiled = session.compiler.compile_pipeline(session.model, args, kwargs, like=self._first.step)
            session.ranks.agree("the plan", compiled.plan.hash)
            bound = session.ranks.all_succeed(lambda: BoundPipeline(compiled.step, session.place))
            session.steps[key] = bound, compiled.plan
        return session.steps[key][0]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, InputError | None]:
        """As a ParallelModule's; which parameters are trained is read from the original, which all ranks have."""
        frozen = [parameter.requires_grad for parameter in self._session.model.parameters()]
        modes = modes_now(training_flags(self), frozen, ("cpu", self._session.mesh.device_type))
        try:
            tensors = user_tensors(args, kwargs)
            if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
                raise InputError("a pipeline takes whole batches", fix="pass plain tensors, the same on every rank")
            return call_key(args, kwargs, modes), None
        except InputError as error:
            return f"error {error}", error

    def _distributed(self, bound: BoundPipeline) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """This rank's parameters, laid out as planned, and all buffers, with the first rank's values."""
        session, place = self._session, self._session.place
        model, mesh = session.model, place.stage_mesh
        layouts: dict[str, Layout] = {}
        for variants in bound.variants.values():
            for item in variants[0].program.inputs:
                if item.kind is InputKind.PARAMETER:
                    layouts[item.name] = variants[0].input_layout(item.node)
        owners = {
            item.name: bound.step.schedule.rank_of(stage.index)
            for stage in reversed(bound.step.staged.stages)
            for item in stage.program.inputs
            if item.kind is InputKind.PARAMETER
        }
        for name, _ in model.named_parameters():  # what no stage reads stays on the first
            if name not in owners and place.rank == 0:
                layouts[name] = replicated(mesh.ndim)
        made = initialise(model, mesh, layouts, torch.initial_seed()) if is_meta(model) else None
        session.missing = tuple(sorted(made.missing)) if made is not None else ()
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if made is not None and parameter.is_meta:
                if name in made.parameters:
                    parameters[name] = made.parameters[name]
                continue
            value = place.from_first(parameter.detach().to(session.mesh.device_type).clone())
            if name in layouts:
                value.requires_grad_(parameter.requires_grad)
                parameters[name] = distributed_parameter(value, mesh, layouts[name])
        for name, buffer in model.named_buffers():
            filled = made.buffers.get(name) if made is not None else None
            value = buffer.detach() if filled is None else filled
            value = value.to(session.mesh.device_type).clone(memory_format=torch.contiguous_format)
            buffers[name] = _from_first_of_all(value, session.mesh)
        return parameters, buffers

    def __repr__(self) -> str:
        session = self._session
        stages = self._first.step.schedule.stages_of(session.place.rank)
        return f"PipelineModule({type(session.model).__name__}, mesh={tuple(session.mesh.shape)}, stages={stages})"


_ELSEWHERE = "call the module inside `with pmodel.outputs_everywhere():`, which gives it to every rank"


def _from_first_of_all(value: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis, ranks in enumerate(mesh.shape):
        if ranks > 1:
            torch.distributed.broadcast(value, group=mesh.get_group(axis), group_src=0)
    return value


@dataclass
class _Call:
    """One call between its forward and its backward."""

    module: PipelineModule
    bound: BoundPipeline
    worker: Worker
    gradients: Mapping[str, DTensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The parameters of this rank that get gradients."""
        program = self.bound.step.staged.program
        trained = {output.name for output in program.outputs if output.kind is OutputKind.GRADIENT}
        return [name for name, item in self.module.named_parameters() if name in trained and item.requires_grad]

    @property
    def differentiated(self) -> list[Tensor]:
        parameters = self.module._parameters_by_name()
        return [parameters[name] for name in self.names]

    def run_all(self) -> tuple[Tensor, ...]:
        """Run the schedule; the gradients are then those of the loss."""
        self.bound.follow(self.worker, self.bound.actions)
        self.gradients = self.bound.parameter_gradients(self.worker)
        return self._results()

    def run_forward(self) -> tuple[Tensor, ...]:
        """Run the forward half of the schedule."""
        self.bound.follow(self.worker, [it for it in self.bound.actions if it.kind not in BACKWARD])
        return self._results()

    def _results(self) -> tuple[Tensor, ...]:
        self._write_buffers()
        keys = user_outputs(self.bound.step.staged.program)
        return tuple(
            self.bound.everywhere(self.worker, key) for key in keys if self.module._is_given(self.bound, key[0])
        )

    def run_backward(self, tangents: Mapping[str, Tensor]) -> None:
        """Run the backward half."""
        self.worker.batch = type(self.worker.batch)(
            self.worker.batch.inputs, self.worker.batch.buffers, tangents, self.worker.batch.seed
        )
        self.bound.follow(self.worker, [it for it in self.bound.actions if it.kind in BACKWARD])
        self.gradients = self.bound.parameter_gradients(self.worker)

    def delivered(self, arrived: Mapping[ProgramOutput, Tensor | None]) -> list[Tensor | None]:
        """The gradients of this rank's parameters, from what arrived at the outputs."""
        given = {output: tangent for output, tangent in arrived.items() if tangent is not None}
        if not given:
            return [None for _ in self.names]
        if not self.bound.has_loss:
            self.run_backward(self._tangents(given))
            return [self.gradients.get(name) for name in self.names]
        (scale,) = given.values()
        plain = bool(scale == 1)
        return [
            None if (gradient := self.gradients.get(name)) is None else gradient if plain else gradient * scale
            for name in self.names
        ]

    def _tangents(self, given: Mapping[ProgramOutput, Tensor]) -> dict[str, Tensor]:
        """What arrived at each output that is differentiated; zeros where nothing did."""
        program = self.bound.step.staged.program
        tangents = {}
        for output, node in zip(program.outputs, program.results, strict=True):
            if output.differentiable:
                zeros = torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype)
                tangents[output.name] = given.get(output, zeros.to(self.module.mesh.device_type)).contiguous()
        return tangents

    def _write_buffers(self) -> None:
        buffers = dict(self.module.named_buffers())
        for output in self.bound.step.staged.program.outputs:
            if output.kind is OutputKind.BUFFER:
                value = self.bound.everywhere(self.worker, (output.kind, output.name))
                buffers[output.name].copy_(value)


class _Pipeline(torch.autograd.Function):
    """The whole schedule as one autograd node."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run_all() if call.bound.has_loss else call.run_forward()
        ctx.set_materialize_grads(False)
        ctx.call = call
        program = call.bound.step.staged.program
        keys = [key for key in user_outputs(program) if call.module._is_given(call.bound, key[0])]
        by_key = {(output.kind, output.name): output for output in program.outputs}
        ctx.outputs = [by_key[key] for key in keys]
        ctx.mark_non_differentiable(
            *(value for output, value in zip(ctx.outputs, outputs, strict=True) if not output.differentiable)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        call: _Call = ctx.call
        return None, None, *call.delivered(dict(zip(ctx.outputs, arrived, strict=True)))
