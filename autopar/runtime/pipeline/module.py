"""The distributed model with its layers on several ranks, as an ordinary `nn.Module`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.program import InputKind, Program
from autopar.capture.trace import Model, as_module
from autopar.errors import InputError, UnsupportedOptionError
from autopar.passes.expert_places import ExpertPlaces
from autopar.runtime.checks import RankGroup
from autopar.runtime.experts.load import ExpertCounter, ExpertLoad, of_all_stages
from autopar.runtime.experts.order import inverse
from autopar.runtime.experts.placed import MovableExperts
from autopar.runtime.experts.weights import expert_weights
from autopar.runtime.initialise import initialise, is_meta
from autopar.runtime.inputs import user_tensors
from autopar.runtime.mirror import Container, mirror, training_of
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.parameters import distributed_parameter, replicated_buffer
from autopar.runtime.pipeline.call import Call, PipelineFunction, result_of
from autopar.runtime.pipeline.gathered import Gathered
from autopar.runtime.pipeline.rank import PipelineRank
from autopar.runtime.pipeline.run import BoundPipeline, parameter_names
from autopar.runtime.pipeline.step import PipelineStep, user_outputs
from autopar.runtime.pipeline.weights import Update
from autopar.runtime.pipeline.worker import Worker
from autopar.runtime.session import Session, model_key
from autopar.runtime.step import ExpertCompiler, PlanLike
from autopar.sharding.dtensors import as_dtensor, layout_of, on_device, to_host
from autopar.sharding.layout import Layout, replicated
from autopar.torch_compat import apply_function


@dataclass(frozen=True)
class CompiledPipeline:
    """A step and its plan."""

    step: PipelineStep
    plan: PlanLike


class PipelineCompiler(ExpertCompiler, Protocol):
    """Makes compiled pipelines; called on all ranks at once."""

    def compile_pipeline(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: PipelineStep | None
    ) -> CompiledPipeline:
        """Capture, plan and stage `model(*args, **kwargs)` in the modes of the moment.

        `like`, if given: another shape or mode of a model whose parameters lie as that step has them.
        """


@dataclass(kw_only=True)
class _PipelineSession(Session):
    """What a PipelineModule remembers besides its tensors."""

    compiler: PipelineCompiler
    place: PipelineRank
    counter: ExpertCounter
    steps: dict[str, tuple[BoundPipeline, PlanLike]] = field(default_factory=dict)
    first: str = ""  # the key of the step that the parameters were laid out for
    outputs_everywhere: bool = False
    may_be_empty: bool = False  # on all ranks or none: a tensor of a meta model may have no values yet
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)  # by stage


Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class PipelineModule(ParallelModule):
    """Runs a model whose stages lie along one axis of a mesh; each rank holds the parameters of its stages alone.

    Calling it runs all microbatches of the batch through all stages, forward and, where gradients are enabled and the
    model returns its loss, backward too: `backward()` on the loss then hands the gradients over. Every rank is given
    the whole batch, and gets the loss. Outputs beside a loss are let go of; see `outputs_everywhere`.
    """

    def __init__(
        self,
        model: Model,
        mesh: DeviceMesh,
        compiler: PipelineCompiler,
        axis: int,
        *,
        example_inputs: tuple[tuple[Any, ...], dict[str, Any]],
        optimizer: Factory | None = None,
    ) -> None:
        """`optimizer`: makes the optimizers that `train_step` owns, one for each stage."""
        Container.__init__(self)
        module = as_module(model)
        place = PipelineRank(mesh, axis)
        counter = ExpertCounter(place.stage_mesh)
        session = _PipelineSession(module, mesh, RankGroup(mesh), compiler=compiler, place=place, counter=counter)
        self.__dict__["_autopar"] = session
        session.check_call(model_key(module))
        args, kwargs = example_inputs
        bound, plan = self._staged(args, kwargs, like=None)
        parameters, buffers = self._distributed(bound)
        mirror(module, self, parameters, buffers)
        session.hosted = bound.hosted
        session.experts.watch_weights(bound.step.staged.program, self._parameters_by_name())
        session.first = self._agreed_key(args, kwargs)
        session.steps[session.first] = bound, plan
        if optimizer is not None:
            self._make_optimizers(bound, optimizer)

    def _make_optimizers(self, bound: BoundPipeline, factory: Factory) -> None:
        own = dict(self.named_parameters())
        for stage, variants in bound.variants.items():
            trained = [own[name] for name in parameter_names(variants[0]) if own[name].requires_grad]
            if trained:
                self._pipeline.optimizers[stage] = factory(trained)

    @property
    def plan(self) -> PlanLike:
        return self._pipeline.steps[self._pipeline.first][1]

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
        return self._pipeline.place.stage_mesh

    @property
    def pipeline_group(self) -> Any:
        """The process group of the ranks at this rank's place of all stages."""
        return self._pipeline.place.group

    @property
    def _first(self) -> BoundPipeline:
        return self._pipeline.steps[self._pipeline.first][0]

    @property
    def _pipeline(self) -> _PipelineSession:
        return cast(_PipelineSession, self._session)

    @contextmanager
    def outputs_everywhere(self) -> Iterator[None]:
        """In here outputs beside a loss, too, are given in full to every rank."""
        before = self._pipeline.outputs_everywhere
        self._pipeline.outputs_everywhere = True
        try:
            yield
        finally:
            self._pipeline.outputs_everywhere = before

    def no_sync(self) -> NoReturn:
        raise UnsupportedOptionError(
            "a pipeline adds up its microbatches' gradients by itself", fix="give it larger batches, more microbatches"
        )

    @property
    def expert_load(self) -> ExpertLoad:
        """How many tokens chose each expert, of all stages; every rank of the mesh must ask. See `ParallelModule`."""
        session = self._pipeline
        own = session.counter.load({})
        parts = session.ranks.gather(
            ([(layer, count.tolist()) for layer, count in own.counts.items()], dict(own.spans))
        )
        layers = [layer for item in expert_weights(self.program) for layer in item.layers]
        return of_all_stages(parts, layers, session.experts.placed([self.program]))

    def reset_expert_load(self) -> None:
        """Count from zero again."""
        self._pipeline.counter.reset()

    @property
    def _expert_compiler(self) -> ExpertCompiler:
        return self._pipeline.compiler

    def _check_gradients_are_summed(self) -> None:
        """They are, once a call is through."""

    def _movable(self, load: ExpertLoad) -> MovableExperts:
        """Of all stages."""
        session, first = self._pipeline, self._first
        others = [bound for bound, _ in session.steps.values() if bound is not first]
        programs = [bound.step.staged.program for bound in (first, *others)]
        counts = [count for own in session.ranks.gather(first.expert_counts) for count in own]
        stages = Counter(
            item.name
            for stage in first.step.staged.stages
            for item in stage.program.inputs
            if item.kind is InputKind.PARAMETER
        )
        shared = {name: "several stages read its weights" for name, count in stages.items() if count > 1}
        return session.experts.movable(programs, counts, load, shared)

    def _with_places(self, wanted: Mapping[str, ExpertPlaces]) -> Callable[[], None]:
        session = self._pipeline
        steps = {key: (self._placed_stages(bound, plan, wanted), plan) for key, (bound, plan) in session.steps.items()}

        def use() -> None:
            for bound, _ in session.steps.values():
                bound.replaced = True
            session.steps = steps

        return use

    def _placed_stages(
        self, bound: BoundPipeline, plan: PlanLike, wanted: Mapping[str, ExpertPlaces] = MappingProxyType({})
    ) -> BoundPipeline:
        """A call's stages with the experts where they are, or are to be; MemoryLimitError if one does not fit then."""
        experts = self._pipeline.experts
        placed = bound.with_places(lambda program: experts.places(program, wanted))
        for stage, variants in placed.variants.items():
            for before, after in zip(placed.planned[stage], variants, strict=True):
                if any(places.has_copies for places in experts.places(after.program, wanted).values()):
                    more = self._expert_compiler.copy_bytes(plan, before.lanes[0], after.lanes[0])
                    placed.copy_bytes = max(placed.copy_bytes, more)
        return placed

    def _copy_bytes(self) -> int:
        return max(bound.copy_bytes for bound, _ in self._pipeline.steps.values())

    def _recorded_load(self) -> None:
        return None

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the state that an optimizer already holds follow experts that `rebalance` moves."""
        self._pipeline.experts.watch.note(optimizer)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One call of the schedule with its updates of the weights; the mean of the microbatches' losses.

        With an asynchronous schedule each microbatch is a batch of its own, and meets the weights that the schedule
        gives it; all updates are made when this returns. With a synchronous one it is the usual loop in one call.
        """
        session = self._pipeline
        if not session.optimizers:
            raise UnsupportedOptionError(
                "train_step owns the optimizer, and has none", fix="give autopar.compile optimizer=, a class or factory"
            )
        if self._first.step.schedule.synchronous:
            loss = self._loss_of(self(*args, **kwargs))
            torch.autograd.backward(loss)
            for optimizer in session.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()
        if self._key(args, kwargs)[0] != session.first:
            raise InputError(
                "this batch has other shapes or modes than the schedule was made for",
                fix="train in the mode and with batches of the size of example_inputs, or compile again",
            )
        bound = self._bound_for(args, kwargs)
        session.calls += bound.step.schedule.microbatches
        with torch.no_grad():
            return self._call(bound, self._worker(bound, args, kwargs, self.next_seed, self._update)).train()

    def _loss_of(self, result: Any) -> Tensor:
        leaves = pytree.tree_leaves(result)
        losses = [item for item in leaves if isinstance(item, Tensor) and item.dim() == 0 and item.requires_grad]
        if len(losses) != 1:
            raise UnsupportedOptionError("train_step needs a model that returns one loss", fix="use the usual loop")
        return losses[0]

    def _update(self, stage: int, gathered: Gathered) -> None:
        """An optimizer's step of one stage with the mean gradient of the microbatches since the last."""
        own, bound = self._parameters_by_name(), self._first
        count = max(1, bound.step.schedule.update_every)
        for name in parameter_names(bound.variants[stage][0]):
            value = gathered.gradients.pop((stage, name), None)
            held = own[name]
            if value is not None:
                gradient = value[0] / count if count > 1 else value[0]
                held.grad = as_dtensor(gradient.contiguous(), self.stage_mesh, layout_of(held), held.shape)
        if stage in self._pipeline.optimizers:
            self._pipeline.optimizers[stage].step()
            self._pipeline.optimizers[stage].zero_grad()

    def _worker(
        self, bound: BoundPipeline, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int, update: Update | None
    ) -> Worker:
        tensors = self._call_tensors(args, kwargs)
        buffers, counter = dict(self.named_buffers()), self._pipeline.counter
        recorder = self._session.recorder
        if recorder is not None:
            recorder.begin_step()
        given = tuple(user_outputs(bound.step.staged.program)) if self._pipeline.outputs_everywhere else None
        worker = bound.worker(tensors, self._parameters_by_name(), buffers, seed, update, counter, given)
        if recorder is not None:
            worker.timed = recorder.action
        return worker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        schedule = self._first.step.schedule
        if torch.is_grad_enabled() and not schedule.synchronous:
            raise UnsupportedOptionError(
                f"the schedule {schedule.name!r} updates the weights while it runs",
                fix="train with pmodel.train_step(*inputs); call the module under torch.no_grad()",
            )
        bound = self._bound_for(args, kwargs)
        self._check_initialized()
        seed = self.next_seed
        pieces = bound.step.staged.microbatches
        self._session.calls += pieces.count if pieces.independent else 1  # each batch draws by a seed of its own
        call = self._call(bound, self._worker(bound, args, kwargs, seed, None))
        if bound.has_gradients and torch.is_grad_enabled():
            anchor = torch.zeros((), requires_grad=True, device=self._session.mesh.device_type)
            outputs = apply_function(PipelineFunction, call, anchor, *call.differentiated)
        else:
            with torch.no_grad():
                outputs = call.run_forward()
        return result_of(call, outputs)

    def _check_initialized(self) -> None:
        """On all ranks or on none, as they hold different tensors."""
        session = self._pipeline
        if session.may_be_empty:
            session.ranks.all_succeed(super()._check_initialized)
            session.may_be_empty = False

    def _call(self, bound: BoundPipeline, worker: Worker) -> Call:
        return Call(bound, worker, self._parameters_by_name(), dict(self.named_buffers()))

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of all parameters, of all stages, in full on every rank: for comparing and debugging."""
        place = self._pipeline.place
        own, known = dict(self.named_parameters()), dict(self._session.model.named_parameters())
        found, device = {}, self._session.mesh.device_type
        for name, rank in self._holders().items():
            held = own.get(name)
            has = torch.tensor(int(held is not None and held.grad is not None), device=device)
            if not int(place.broadcast(has, rank)):
                continue
            if place.rank == rank:
                assert held is not None
                full = self._in_model_order(name, on_device(cast(DTensor, held.grad)).full_tensor()).contiguous()
            else:
                full = torch.empty(known[name].shape, dtype=known[name].dtype, device=device)
            found[name] = place.broadcast(full, rank)
        return found

    def _in_model_order(self, name: str, full: Tensor) -> Tensor:
        """A full value of a parameter, whose rows may be experts that were moved."""
        order = self._pipeline.experts.orders.get(name)
        return full if order is None else full[inverse(order.experts)]

    def counted_parameters(self) -> set[str]:
        """This rank's parameters but those that an earlier stage's rank has too: each counts once in all."""
        return {name for name, rank in self._holders().items() if rank == self._pipeline.place.rank}

    def over_stages(self, norm: Tensor, norm_type: float) -> Tensor:
        """The norm of what all stages have, from this rank's own."""
        greatest = norm_type == float("inf")
        value = norm.detach().clone() if greatest else norm.detach() ** norm_type
        if len(self._pipeline.place.line) > 1:
            reduce_op = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
            dist.all_reduce(value, reduce_op, group=self.pipeline_group)
        return value if greatest else value ** (1.0 / norm_type)

    def _holders(self) -> dict[str, int]:
        """By parameter, the first pipeline rank that holds it."""
        ranks = self._first.step.parameter_ranks
        return {name: ranks.get(name, 0) for name, _ in self._session.model.named_parameters()}

    def _bound_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundPipeline:
        session, key = self._pipeline, self._agreed_key(args, kwargs)
        if key not in session.steps:
            with training_of(self, session.model):
                session.steps[key] = self._staged(args, kwargs, like=self._first.step)
        return session.steps[key][0]

    def _staged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, like: PipelineStep | None
    ) -> tuple[BoundPipeline, PlanLike]:
        """A call captured, planned and staged, by all ranks alike."""
        session = self._pipeline
        compiled = session.compiler.compile_pipeline(session.model, args, kwargs, like=like)
        session.ranks.agree("the plan", compiled.plan.hash)
        made = session.ranks.all_succeed(lambda: BoundPipeline(compiled.step, session.place))
        bound = session.ranks.all_succeed(lambda: self._placed_stages(made, compiled.plan))
        session.counter.expect(bound.expert_counts)
        return bound, compiled.plan

    def _trainable(self) -> Iterable[nn.Parameter]:
        """Those of the original, of which every rank has all."""
        return self._session.model.parameters()

    def _call_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        tensors = user_tensors(args, kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            raise InputError("a pipeline takes whole batches", fix="pass plain tensors, the same on every rank")
        return tensors

    def _distributed(self, bound: BoundPipeline) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """This rank's parameters, laid out as planned, and all buffers, with the first rank's values."""
        session, place = self._pipeline, self._pipeline.place
        model, mesh = session.model, place.stage_mesh
        layouts: dict[str, Layout] = {}
        for variants in bound.variants.values():
            for item in variants[0].program.inputs:
                if item.kind is InputKind.PARAMETER:
                    layouts[item.name] = variants[0].input_layout(item.node)
        read = bound.step.parameter_ranks
        for name, _ in model.named_parameters():  # what no stage reads stays on the first
            if name not in read and place.rank == 0:
                layouts[name] = replicated(mesh.ndim)
        made = initialise(model, mesh, layouts, session.seed) if is_meta(model) else None
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
            buffers[name] = replicated_buffer(buffer if filled is None else filled, session.mesh)
        for name in bound.hosted:
            to_host(cast(DTensor, parameters[name]))
        missing = made.missing if made is not None else frozenset[str]()
        known: dict[str, Tensor] = {**buffers, **parameters}
        session.note_empty({name: known[name] for name in missing if name in known})
        session.may_be_empty = bool(missing)
        return parameters, buffers

    def __repr__(self) -> str:
        session = self._pipeline
        stages = self._first.step.schedule.stages_of(session.place.rank)
        return f"PipelineModule({type(session.model).__name__}, mesh={tuple(session.mesh.shape)}, stages={stages})"
