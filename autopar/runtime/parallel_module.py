"""ParallelModule: the distributed model as an ordinary `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.capture.program import InputKind, Program
from autopar.capture.trace import Model, as_module
from autopar.errors import (
    InputError,
    NoParametersError,
    NotPlannedError,
    PlanError,
    UninitializedError,
    UnsupportedOptionError,
)
from autopar.passes.expert_places import ExpertPlaces
from autopar.recording import Recording
from autopar.runtime.bound_step import BoundStep, RunGraph, plainly
from autopar.runtime.checks import LARGEST, RankGroup
from autopar.runtime.execution import Call, Reduction, State, has_pending_gradients, run_call
from autopar.runtime.experts.load import ExpertCounter, ExpertLoad
from autopar.runtime.experts.placed import MovableExperts
from autopar.runtime.experts.rebalance import Rebalance, decide, read_decision, result_of
from autopar.runtime.experts.weights import ExpertWeights
from autopar.runtime.held_memory import SteppedOptimizers, local_parts
from autopar.runtime.initialise import initialise, is_meta
from autopar.runtime.inputs import call_key, modes_now, user_tensors
from autopar.runtime.mirror import Container, mirror, modes_of, training_flags
from autopar.runtime.parameters import (
    distributed_parameter,
    flat_layout,
    lay_out_optimizer_state,
    lay_out_parameter,
    replicated_buffer,
)
from autopar.runtime.recorder import Recorder, Standing, merged
from autopar.runtime.session import Session, model_key
from autopar.runtime.step import ExpertCompiler, PlanLike, StepCompiler
from autopar.sharding.dtensors import layout_of, to_device, to_host
from autopar.sharding.layout import Layout


class Planned(Enum):
    """What the parameters' layouts were chosen for."""

    NOTHING = "nothing"  # they lie flat over the mesh
    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(kw_only=True)
class _StepSession(Session):
    """What a ParallelModule remembers that runs one program on all ranks."""

    compiler: StepCompiler
    counter: ExpertCounter
    steps: dict[str, BoundStep] = field(default_factory=dict)
    shown: BoundStep | None = None  # the step whose plan and graphs the properties show
    planned: Planned = Planned.NOTHING
    putting_off: bool = False  # inside no_sync
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


class ParallelModule(Container):
    """Runs a model on a mesh: call it, call `backward()` on its loss, step any `torch.optim` optimizer.

    Parameters are DTensors under the model's own names. Plain tensors given to a call are the global batch, the same
    on every rank; each rank uses its part. DTensors are used where they lie. `model` itself is never changed; it is
    kept for later captures, so the memory of its tensors stays taken unless they are on the meta device.
    Without `example_inputs` the parameters lie flat over the mesh until the first call makes the plan; they then move
    in place, so an optimizer made before stays valid. Ranks that are called with different shapes or modes raise
    RanksDisagreeError, all of them: one small all-reduce per call, over gloo, compares the calls.
    """

    def __init__(
        self,
        model: Model,
        mesh: DeviceMesh,
        compiler: StepCompiler,
        *,
        example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        """`example_inputs`: the positional and the keyword arguments of the call to plan for now."""
        super().__init__()
        module = as_module(model)
        session = _StepSession(module, mesh, RankGroup(mesh), compiler=compiler, counter=ExpertCounter(mesh))
        self.__dict__["_autopar"] = session
        session.check_call(model_key(module))
        if next(module.parameters(), None) is None:
            raise NoParametersError(
                f"{type(module).__name__} has no parameters", fix="there is nothing to distribute: run it as it is"
            )
        parameters, buffers = _distributed(session)
        mirror(module, self, parameters, buffers)
        if example_inputs is not None:
            self._step_for(*example_inputs)

    @property
    def plan(self) -> PlanLike:
        """The plan of the training step (of the first step, while none was made for training)."""
        return self._shown().step.plan

    @property
    def forward_graph(self) -> fx.GraphModule:
        """What this rank runs forward: ATen ops on local shapes and collectives."""
        graph: fx.GraphModule = self._shown().step.local.forward
        return graph

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """What this rank runs backward; None for a step without gradients."""
        graph: fx.GraphModule | None = self._shown().step.local.backward
        return graph

    @property
    def program(self) -> Program:
        """The captured program of the step that `plan` is for."""
        return self._shown().step.program

    @property
    def mesh(self) -> DeviceMesh:
        return self._session.mesh

    @property
    def next_seed(self) -> int:
        """The seed of the random ops of the next call, if no generator is seeded before it."""
        return (self._session.seed + self._session.calls) & LARGEST

    @property
    def expert_load(self) -> ExpertLoad:
        """How many tokens chose each expert, in all calls since the first one or the last `reset_expert_load()`.

        The same on all ranks, each of which must ask: what they counted is added up now.
        """
        session = self._steps
        programs = [step.step.program for step in session.steps.values()]
        return session.counter.load(session.experts.placed(programs))

    def reset_expert_load(self) -> None:
        """Count from zero again."""
        self._steps.counter.reset()

    def rebalance(
        self, *, replicas: int | None = None, move_cost: float = 0.0, time_limit_s: float = 10.0
    ) -> Rebalance:
        """Place the experts anew over the groups of ranks that hold them, by `expert_load`, and move what they are of.

        Called on every rank, between an optimizer's step and the next call. Parameters, gradients and the state of
        their optimizers move; what is trained stays the same up to the order of sums. Experts keep the model's numbers
        for the router, `expert_load`, state_dict() and the optimizer's (both of which need every rank from then on);
        the values of `parameters()` lie in the order of `expert_load.owners`. `replicas`: slots of every layer in all;
        those beyond one for each expert hold copies of what is chosen most, fetched from the owners in each step, which
        get the gradients: nothing else knows of them. None: no copies. `move_cost`: how many tokens of the load counted
        so far a moved expert must take off the slowest group of its layer; `time_limit_s`: of the search. In a pipeline
        experts stay in their stages.
        Raises UnsupportedOptionError where no layer's experts can be moved, or an optimizer's state cannot follow;
        ExpertPlacementError for replicas that do not divide; MemoryLimitError for copies beyond the plan's limit.
        """
        session, parameters = self._session, self._parameters_by_name()
        self._check_initialized()
        self._check_gradients_are_summed()
        load = self.expert_load
        weights, items, kept = self._movable(load)
        session.ranks.all_succeed(lambda: self._check_can_follow(weights))
        place = partial(
            self._expert_compiler.place_experts, replicas=replicas, move_cost=move_cost, time_limit_s=time_limit_s
        )
        text = session.ranks.first_decides(lambda: decide(items, place, replicas))
        wanted, received = read_decision(text, items), 0
        if any(item.places != places for item, places in zip(items, wanted, strict=True)):
            by_name = {name: to for item, to in zip(weights, wanted, strict=True) for name in item.parameters}
            put_in_place = session.ranks.all_succeed(lambda: self._with_places(by_name))
            received = session.experts.move(weights, wanted, parameters, self)
            put_in_place()
        layers = [layer for item in items for layer in item.layers]
        report = result_of(load, layers, self.expert_load.holders, kept)
        return report(*zip(*session.ranks.gather((received, self._copy_bytes())), strict=True))

    @property
    def _expert_compiler(self) -> ExpertCompiler:
        return self._steps.compiler

    def _check_gradients_are_summed(self) -> None:
        if self._steps.putting_off or has_pending_gradients(self._parameters_by_name()):
            raise UnsupportedOptionError(
                "experts were to be moved while gradients are not yet summed over the ranks",
                fix="leave no_sync, call backward() and the optimizer's step first",
            )

    def _movable(self, load: ExpertLoad) -> MovableExperts:
        """The same on all ranks; see `PlacedExperts.movable`."""
        session, shown = self._steps, self._shown()
        others = [step for step in session.steps.values() if step is not shown]
        programs = [step.step.program for step in (shown, *others)]
        return session.experts.movable(programs, shown.expert_counts, load)

    def _check_can_follow(self, weights: Sequence[ExpertWeights]) -> None:
        """Raise UnsupportedOptionError for parameters of this rank, and optimizer state, that cannot be moved."""
        if any(name in self._session.hosted for item in weights for name in item.parameters):
            raise UnsupportedOptionError(
                "experts were to be moved whose weights lie on the host",
                fix="pin their weights to 'keep', and plan again",
            )
        self._session.experts.check_states(weights, self._parameters_by_name())

    def _with_places(self, wanted: Mapping[str, ExpertPlaces]) -> Callable[[], None]:
        """Make every step for experts that are where they are to be, by name of a parameter; what is given lets them be
        used. MemoryLimitError for one that does not fit then."""
        session = self._steps
        places = {key: session.experts.places(step.step.program, wanted) for key, step in session.steps.items()}
        steps = {key: self._placed(step, places[key]) for key, step in session.steps.items()}

        def use() -> None:
            found = (steps[key] for key, step in session.steps.items() if step is session.shown)
            session.shown = next(found, session.shown)
            session.steps = steps

        return use

    def _placed(self, step: BoundStep, places: Mapping[str, ExpertPlaces]) -> BoundStep:
        placed = step.with_places(places)
        if any(item.has_copies for item in places.values()):
            planned = step.planned
            placed.copy_bytes = self._expert_compiler.copy_bytes(planned.plan, planned.local, placed.step.local)
        return placed

    def _copy_bytes(self) -> int:
        """What copies of experts take on this rank, more than planned."""
        return max(step.copy_bytes for step in self._steps.steps.values())

    @property
    def _session(self) -> Session:
        return cast(Session, self.__dict__["_autopar"])

    @property
    def _steps(self) -> _StepSession:
        return cast(_StepSession, self._session)

    def _shown(self) -> BoundStep:
        shown = self._steps.shown
        if shown is None:
            raise NotPlannedError(
                "there is no plan yet", fix="call the module once, or give autopar.compile example_inputs"
            )
        return shown

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step_for(args, kwargs)
        self._check_initialized()
        run = self._recorded_run()
        seed = self.next_seed
        self._session.calls += 1
        state = State(self._parameters_by_name(), dict(self.named_buffers()))
        reduction = self._reduction(state)
        if reduction is not Reduction.NOW and step.gradients:
            step = step.deferred
        return run_call(Call(step, state, self._call_tensors(args, kwargs), seed, reduction, self._steps.counter, run))

    def _recorded_run(self) -> RunGraph:
        """How graphs are run: another step begins, if a recorder is on."""
        recorder = self._session.recorder
        if recorder is None:
            return plainly
        recorder.begin_step()
        return recorder.run

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """Time what runs in here, and count the memory it holds, on every rank at once: `.recording` of what this
        gives, when the block has ended.

        Every second step runs op by op, somewhat slower, and tells of times and memory op by op; the others, as always,
        tell how long a step takes. Of a pipeline each action is timed in every step, and its memory counted in every
        second. Results stay the same. Experts' loads are those of the block. On accelerators PyTorch's peak memory
        statistics begin anew.
        """
        session = self._session
        self.reset_expert_load()
        with SteppedOptimizers() as stepped:
            recorder = Recorder(session.mesh, session.ranks.rank, lambda: self._held_between_steps(stepped))
            session.recorder = recorder
            try:
                yield recorder
                recorder.end_step()
            finally:
                session.recorder = None
        recorder.made = self._made_recording(recorder)

    def _held_between_steps(self, stepped: SteppedOptimizers) -> Standing:
        """This rank's parts of parameters, buffers, gradients, and of the state of the optimizers that stepped."""
        here, away = list(self.buffers()), list[Tensor]()
        for name, item in self.named_parameters():
            own = [item, *([] if item.grad is None else [item.grad]), *stepped.state_of(item)]
            (away if name in self._session.hosted else here).extend(own)
        return local_parts(here, self._session.mesh.device_type), local_parts(away, "cpu")

    def _made_recording(self, recorder: Recorder) -> Recording:
        session, load = self._session, self._recorded_load()
        device = session.mesh.device_type
        return Recording(
            plan_hash=self.plan.hash,
            mesh_shape=tuple(session.mesh.shape),
            device=device if device == "cpu" else torch.get_device_module(device).get_device_name(),
            step_s=session.ranks.gather(tuple(recorder.step_s))[0],
            spans=merged(session.ranks.gather(recorder.notes)),
            expert_load={layer: tuple(count.tolist()) for layer, count in load.counts.items()} if load else {},
            group_load={layer: tuple(count.tolist()) for layer, count in load.device_load.items()} if load else {},
        )

    def _recorded_load(self) -> ExpertLoad | None:
        return self.expert_load

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In here calls do not sum their parameters' gradients over the ranks: each rank piles up its own partial sums.

        The first backward of a call made outside adds its own and sums once. Meanwhile `.grad` holds DTensors with
        `Partial` placements, as large as the gradient was before its reduction.
        """
        before = self._steps.putting_off
        self._steps.putting_off = True
        try:
            yield
        finally:
            self._steps.putting_off = before

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the state that an optimizer already holds (as after loading a checkpoint) follow its parameters.

        Of use before the first call of a module made without `example_inputs`: without it such a state stays where it
        is, and every step of the optimizer moves data. And before `rebalance`, for an optimizer that has not stepped.
        """
        self._steps.optimizers.append(optimizer)
        self._steps.experts.watch.note(optimizer)

    def _reduction(self, state: State) -> Reduction:
        if self._steps.putting_off:
            return Reduction.LATER
        return Reduction.AT_END if has_pending_gradients(state.parameters) else Reduction.NOW

    def _parameters_by_name(self) -> dict[str, DTensor]:
        return {name: cast(DTensor, parameter) for name, parameter in self.named_parameters()}

    def _step_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundStep:
        """The compiled step of a call; made now if no such call was made before."""
        session, key = self._steps, self._agreed_key(args, kwargs)
        if self._replans():
            session.steps.clear()
        if key not in session.steps:
            session.steps[key] = self._compiled(args, kwargs)
        return session.steps[key]

    def _agreed_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The key of a call that all ranks make alike; the random seed is then the first rank's."""
        key, error = self._key(args, kwargs)
        self._session.check_call(key)
        if error is not None:
            raise error
        return key

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, InputError | None]:
        """The key of a call, or the error in its inputs: ranks compare either before any of them raises."""
        requires_grad = [parameter.requires_grad for parameter in self._trainable()]
        modes = modes_now(training_flags(self), requires_grad, ("cpu", self._session.mesh.device_type))
        try:
            self._call_tensors(args, kwargs)
            return call_key(args, kwargs, modes), None
        except InputError as error:
            return f"error {error}", error

    def _trainable(self) -> Iterable[nn.Parameter]:
        """The parameters that tell a call's key what is trained: the same ones on every rank."""
        return self.parameters()

    def _call_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The call's tensors by path. Raises InputError for one that cannot be used."""
        return user_tensors(args, kwargs)

    def _wanted(self) -> Planned:
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        return Planned.TRAINING if trains else Planned.INFERENCE

    def _replans(self) -> bool:
        """Layouts chosen for inference are chosen anew by the first call that trains, never otherwise."""
        planned = self._steps.planned
        return planned is Planned.NOTHING or (planned is Planned.INFERENCE and self._wanted() is Planned.TRAINING)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundStep:
        session, layouts, hosted = self._steps, None, None
        if not self._replans():
            layouts = {name: layout_of(parameter) for name, parameter in self._parameters_by_name().items()}
            hosted = session.hosted
        with modes_of(self, session.model):
            step = session.compiler.compile_step(session.model, args, kwargs, parameter_layouts=layouts, hosted=hosted)
        session.ranks.agree("the plan", step.plan.hash)
        places = session.experts.places(step.program)
        bound = session.ranks.all_succeed(lambda: self._placed(BoundStep(step, session.mesh), places))
        self._lay_out(bound)
        session.counter.expect(bound.expert_counts)
        session.experts.watch_weights(step.program, self._parameters_by_name())
        if session.shown is None or (bound.gradients and not session.shown.gradients):
            session.shown = bound
        return bound

    def _lay_out(self, step: BoundStep) -> None:
        """Bring every parameter to its planned layout, if the layouts are this plan's to choose."""
        planned = {slot.name: slot.layout for slot in step.inputs[InputKind.PARAMETER]}
        parameters, session = self._parameters_by_name(), self._steps
        if set(planned) != set(parameters):
            raise PlanError("the plan is of a model with other parameters")
        if self._replans():
            empty = session.still_empty()
            for name, parameter in parameters.items():
                lay_out_parameter(parameter, planned[name])
                (to_host if name in step.hosted else to_device)(parameter)
            session.note_empty(empty)
            for optimizer in session.optimizers:
                lay_out_optimizer_state(optimizer)
            session.planned, session.hosted = self._wanted(), step.hosted
        for name, parameter in parameters.items():
            if layout_of(parameter) != planned[name] or (name in step.hosted) != (name in session.hosted):
                raise PlanError(f"the plan wants parameter {name!r} in another layout, or elsewhere, than it lies")

    def _check_initialized(self) -> None:
        """Raise UninitializedError while tensors of a meta model have no values."""
        empty = self._session.still_empty()
        if empty:
            raise UninitializedError(
                f"{len(empty)} tensors of the meta model have no values: {', '.join(sorted(empty)[:5])}",
                fix="load them with load_state_dict, or give their modules reset_parameters() or an _init_weights",
            )

    def __repr__(self) -> str:
        session = self._session
        return f"ParallelModule({type(session.model).__name__}, mesh={tuple(session.mesh.shape)})"


def _distributed(session: Session) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """The model's parameters, flat over the mesh, and its buffers, with the first rank's values."""
    model, mesh = session.model, session.mesh
    layouts: dict[str, Layout] = {
        name: flat_layout(tensor.shape, mesh.ndim) for name, tensor in model.named_parameters()
    }
    made = initialise(model, mesh, layouts, session.seed) if is_meta(model) else None
    parameters, buffers = {}, {}
    for name, parameter in model.named_parameters():
        ready = made.parameters.get(name) if made is not None else None
        parameters[name] = ready if ready is not None else distributed_parameter(parameter, mesh, layouts[name])
    for name, buffer in model.named_buffers():
        filled = made.buffers.get(name) if made is not None else None
        buffers[name] = filled if filled is not None else replicated_buffer(buffer, mesh)
    known: dict[str, Tensor] = {**buffers, **parameters}
    session.note_empty({name: known[name] for name in (made.missing if made is not None else ())})
    return parameters, buffers
