"""capture(): run the model and its backward once on fake tensors, and keep what ran as one graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.utils import _pytree as pytree

from autopar.capture.assemble import DENSE_FORMS, Interface, assemble
from autopar.capture.attributes import no_fakes_left
from autopar.capture.conversions import conversions_that_change_nothing
from autopar.capture.intercept import Interceptor
from autopar.capture.observer import Observer
from autopar.capture.precision import Precision, kept_wide
from autopar.capture.program import InputKind, LeafIndex, OmittedOutput, OutputKind, Program, ProgramOutput
from autopar.capture.recorder import Recorder
from autopar.capture.replacements.experts import traceable_experts
from autopar.capture.replacements.normalization import traceable_batch_norms
from autopar.capture.rows.selection import refuse_rows
from autopar.capture.rows.tracer import RowTracer
from autopar.collector import collector_paused
from autopar.errors import (
    AutoparError,
    CaptureError,
    DataDependentError,
    MeshError,
    MutatedInputError,
    NoParametersError,
)
from autopar.source import raising_line
from autopar.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    is_cuda_built,
    outside_tracing,
    without_autocast_cache,
)

Model = nn.Module | ExportedProgram


def as_module(model: Model) -> nn.Module:
    """The module that a model is, or that an exported program holds. Raises CaptureError for anything else."""
    module = _exported(model) if isinstance(model, ExportedProgram) else model
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model is a {type(module).__name__}", fix="pass an nn.Module or an ExportedProgram")
    return module


def _exported(program: ExportedProgram) -> nn.Module:
    """Its module, with views that copy where they must: the traced values may have strides of their own."""
    module = program.module()
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
                node.target = torch.ops.aten.reshape.default
            part.recompile()
    return module


def tied_names(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """(other name, first name) of every parameter and buffer that the model holds under several names."""
    first: dict[int, str] = {}
    tied = []
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if id(tensor) in first:
            tied.append((name, first[id(tensor)]))
        else:
            first[id(tensor)] = name
    return tuple(tied)


def tensor_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by their path in it (`0`, `labels`, `batch.mask`), in the order of the flat arguments."""
    found = {}
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            found[".".join(_key_text(key) for key in path[1:])] = leaf
    return found


def _key_text(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


@collector_paused()
def capture(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: str = "cpu",
    precision: Precision | None = None,
) -> Program:
    """The joint graph of `model(*args, **kwargs)` and of its backward, in full shapes; nothing is computed.

    Under a `precision` the casts are ops of the graph: parameters, inputs and gradients keep their dtypes at its edges.
    With gradients disabled (`torch.no_grad`), or nothing that requires them, the graph has no backward. The model, its
    tensors and the random state are left as they were. Raises a `CaptureError`.
    """
    trace = _Trace(as_module(model), args, kwargs, device, precision)
    left_alone = torch.random.fork_rng(devices=[]), no_fakes_left(trace.model), traceable_experts(trace.model)
    with left_alone[0], left_alone[1], left_alone[2]:
        torch.manual_seed(0)  # keys of random ops are drawn while tracing: the same for every trace of one program
        return trace.run()


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Turn what PyTorch raises on an untraceable program into a `CaptureError` with the user's line."""
    try:
        yield
    except AutoparError:
        raise
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise DataDependentError(
            f"the program's control flow depends on data ({getattr(error, 'func', 'a tensor used as a Python value')})",
            where=raising_line(error.__traceback__),
            fix="compute the choice with torch.where, or decide it outside the model",
        ) from error
    except DynamicOutputShapeException as error:
        raise DataDependentError(
            f"the shape of {error.func} depends on data",
            where=raising_line(error.__traceback__),
            fix="use a form of fixed shape there: a mask with torch.where, or topk. Experts: autopar.nn.Experts, "
            "transformers' experts interface, or a loop over all of them that takes tokens by torch.where(mask)",
        ) from error
    except Exception as error:  # the user's model may raise anything, also through ours, and `from` keeps what it was
        raise CaptureError(
            f"the model cannot be traced: {type(error).__name__}: {error}",
            where=raising_line(error.__traceback__),
            fix="run the model once on these inputs as it is; if that works, it is a limit of tracing on fake tensors",
        ) from error


class _Trace:
    """One run of the tracer: what the joint function notes down while it is traced, and the program made of it."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: str,
        precision: Precision | None,
    ) -> None:
        self.model, self.device, self.precision = model, device, precision
        self.parameters, self.buffers = dict(model.named_parameters()), dict(model.named_buffers())
        if not self.parameters:
            raise NoParametersError(
                f"{type(model).__name__} has no parameters", fix="there is nothing to distribute: run it as it is"
            )
        _refuse_torchscript(model)
        self.kept_wide = kept_wide(model)
        self.flat, self.input_spec = pytree.tree_flatten((args, kwargs))
        self.inputs = tensor_leaves(args, kwargs)
        kinds = (
            (InputKind.PARAMETER, self.parameters),
            (InputKind.BUFFER, self.buffers),
            (InputKind.INPUT, self.inputs),
        )
        for kind, named in kinds:
            _refuse_other_layouts(kind, named)
        self.interface = [(kind, name) for kind, named in kinds for name in named] + [(InputKind.SEED, "seed")]
        self.tangents: list[tuple[int, str]] = []  # (position in the graph, output's name) of what stands for tangents
        self.outputs: list[ProgramOutput] = []
        self.wants_gradients = torch.is_grad_enabled()
        if self.wants_gradients and device.startswith("cuda") and not is_cuda_built():
            raise MeshError(  # autograd would end the process
                "this PyTorch was built without cuda", fix="leave out device_type: the hardware is what is planned for"
            )

    def run(self) -> Program:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = [*self.parameters.values(), *self.buffers.values(), *self.inputs.values()]
        with mode:
            fakes = [self._fake(tensor) for tensor in tensors]
            fakes.append(torch.zeros((), dtype=torch.int64, device=self.device))
        self.recorder = Recorder(mode)
        with without_autocast_cache(), _clean_errors():
            graph_module = self.recorder.record(self._joint, fakes)
        nodes = self.recorder.nodes
        origins = self.observer.origins(nodes, self.boundary)
        for index, (node, origin) in enumerate(zip(nodes, origins, strict=True)):
            phase = "forward" if index < self.boundary else "backward"
            node.meta["custom"] = {"origin": origin, "phase": phase}
        scattered = frozenset(index for index, tensor in enumerate(tensors) if not tensor.is_contiguous())
        interface = Interface(self.interface, self.tangents, self.outputs, scattered)
        graph_module, inputs, outputs, constants = assemble(graph_module, interface, mode)
        written = {output.name for output in outputs if output.kind is OutputKind.BUFFER}
        _refuse_shared_storage({**self.parameters, **self.buffers}, written)
        return Program(
            graph_module=graph_module,
            inputs=inputs,
            outputs=outputs,
            input_spec=self.input_spec,
            output_spec=self.output_spec,
            output_leaves=self.output_leaves,
            tied=tied_names(self.model),
            constants=constants,
            notes=self.rows.notes(),
        )

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return fresh.requires_grad_(tensor.requires_grad)

    def _joint(self, *fakes: torch.Tensor) -> list[torch.Tensor]:
        names = [*self.parameters, *self.buffers]
        state = dict(zip(names, fakes, strict=False))
        inputs = fakes[len(names) : -1]
        replace = Interceptor(fakes[-1], _draw_key).replace
        self.rows = RowTracer(replace, self.recorder, lambda line: self.observer.resuming(line))
        self.recorder.before_write = self.rows.check_write
        self.observer = Observer(self.model, self.rows.replace, self.recorder.nodes)
        queue = iter(inputs)
        flat = [next(queue) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.flat]
        args, kwargs = pytree.tree_unflatten(flat, self.input_spec)
        names = [*self.parameters, *(input_gradient(name) for name in self.inputs)]
        wanted = dict(zip(names, [*fakes[: len(self.parameters)], *inputs], strict=True))

        def step(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            result = self.model(*args, **kwargs)
            self.rows.finish()
            leaves = self._note_outputs(self.precision.widened_result(result) if self.precision else result)
            values = leaves + self._reassigned_buffers(state)
            refuse_rows(values)
            self.boundary = len(self.recorder.nodes)
            return values + self._gradients(leaves, {name: item for name, item in wanted.items() if item.requires_grad})

        watching = (
            self.observer.watching_modules(),
            traceable_batch_norms(self.model),
            conversions_that_change_nothing(self.model),
        )
        with watching[0], watching[1], watching[2], self.observer:
            held = {f"model.{name}": self._narrowed(name, item) for name, item in state.items()}
            if self.precision is not None:
                args, kwargs = self.precision.narrowed_call(args, kwargs)
            traced: list[torch.Tensor] = functional_call(_Step(self.model, step), held, args, kwargs)
            return traced

    def _narrowed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter as the model computes with it; the cast belongs to the module that holds the parameter."""
        if self.precision is None or name not in self.parameters or name in self.kept_wide:
            return value
        with self.observer.inside(name.rpartition(".")[0]):
            return self.precision.narrowed(value)

    def _note_outputs(self, result: Any) -> list[torch.Tensor]:
        """Flatten the model's result; say which outputs are differentiated (see `differentiated`)."""
        paths, self.output_spec = pytree.tree_flatten_with_path(result)
        tensors: list[tuple[str, torch.Tensor]] = []
        leaves: list[Any] = []
        for path, leaf in paths:
            name = ".".join(_key_text(key) for key in path) or "output"
            leaves.append(_carried(name, leaf, len(tensors)))
            if isinstance(leaf, torch.Tensor):
                tensors.append((name, leaf))
        _refuse_opaque(leaves, tensors)
        self.output_leaves = tuple(leaves)
        chosen = differentiated(tensors) if self.wants_gradients else set()
        for name, tensor in tensors:
            kind = OutputKind.LOSS if name in chosen and tensor.dim() == 0 else OutputKind.OUTPUT
            self.outputs.append(ProgramOutput(kind, name, differentiable=name in chosen))
        return [tensor for _, tensor in tensors]

    def _reassigned_buffers(self, before: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """New values of buffers that the model set by assignment; in-place changes are found by functionalization."""
        after = dict(self.model.named_buffers(remove_duplicate=False))
        changed = [name for name in self.buffers if after[name] is not before[name]]
        self.rows.check_reassigned(after[name] for name in changed)
        self.outputs.extend(ProgramOutput(OutputKind.BUFFER, name) for name in changed)
        return [after[name].detach() for name in changed]

    def _gradients(self, leaves: list[torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the differentiated outputs with respect to all that requires them, tangents as new inputs."""
        roots, tangents = [], []
        for leaf, output in zip(leaves, self.outputs, strict=False):
            if output.differentiable:
                tangents.append(torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device))
                self.tangents.append((len(self.recorder.nodes) - 1, output.name))
                roots.append(leaf)
        if not roots:
            return []
        self.observer.watch_backward(roots)
        with torch.autocast(self.device.split(":")[0], enabled=False):
            gradients = torch.autograd.grad(roots, list(wanted.values()), tangents, allow_unused=True)
        found = {}
        for name, gradient in zip(wanted, gradients, strict=True):
            parts = [item for item in (gradient, wanted[name].grad) if item is not None]
            if parts:  # the second is what a backward of the user's own has put there by itself
                found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        _refuse_sparse(found)
        self.outputs.extend(ProgramOutput(OutputKind.GRADIENT, name) for name in found)
        return list(found.values())


def _refuse_torchscript(model: nn.Module) -> None:
    """Its tensors cannot be replaced while it runs, nor its random functions."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is TorchScript, which runs outside of Python",
                fix="pass the nn.Module that it was made of, or an ExportedProgram",
            )


def _refuse_other_layouts(kind: InputKind, tensors: Mapping[str, torch.Tensor]) -> None:
    """What the program is given must lie in memory by strides."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(f"the {kind.value} {name!r} is a tensor of layout {tensor.layout}", fix=DENSE_FORMS)


def _refuse_sparse(gradients: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        if gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of {name!r} is a sparse tensor",
                fix="leave out sparse=True of the embedding: its gradient is cut over the ranks instead",
            )


def _refuse_shared_storage(tensors: dict[str, torch.Tensor], written: set[str]) -> None:
    """A buffer that is written must not be a view of another tensor, which would have to change with it."""
    holders: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            holders.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in holders.values():
        if len(names) > 1 and not written.isdisjoint(names):
            raise MutatedInputError(
                f"the model writes into one of {', '.join(map(repr, names))}, which share their memory",
                fix="register a copy (tensor.clone()) under each name, or one tensor and take its views in forward",
            )


class _Step(nn.Module):
    """A model and its gradients in one forward, so that `functional_call` holds until backward is through.

    `torch.utils.checkpoint` runs parts of the model again in backward, on the tensors that it then holds.
    """

    def __init__(self, model: nn.Module, step: Callable[..., list[torch.Tensor]]) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return self.step(*args, **kwargs)


def input_gradient(name: str) -> str:
    """The name of the gradient of a user's input, apart from every parameter's."""
    return f"input:{name}"


def _draw_key() -> int:
    """A key for one random op, from the default generator: what `torch.utils.checkpoint` restores for a replay."""
    with outside_tracing():
        return int(torch.randint(2**31 - 1, ()))


def _carried(name: str, leaf: Any, index: int) -> Any:
    """What stands for a leaf of the result: tensor number `index`, the plain value itself, or the mark of a gap."""
    if isinstance(leaf, torch.Tensor):
        return LeafIndex(index)
    plain = (int, float, bool, str, type(None))
    return leaf if isinstance(leaf, plain) else OmittedOutput(name, type(leaf).__name__)


def _refuse_opaque(leaves: list[Any], tensors: list[tuple[str, torch.Tensor]]) -> None:
    omitted = [leaf for leaf in leaves if isinstance(leaf, OmittedOutput)]
    if omitted and not tensors:
        raise CaptureError(
            f"the result is a {omitted[0].type_name}, which holds no tensor that can be seen",
            fix="return tensors in tuples, lists, dicts or a type registered with torch.utils._pytree",
        )


def differentiated(outputs: list[tuple[str, torch.Tensor]]) -> set[str]:
    """The outputs that backward starts from.

    A field named `loss` is the loss. Else, if the first output that requires a gradient is a scalar, the scalars are.
    Else all outputs that require a gradient: the loss is computed outside.
    """
    able = [(name, tensor) for name, tensor in outputs if tensor.requires_grad]
    named = {name for name, tensor in able if name == "loss" and tensor.dim() == 0}
    if named:
        return named
    scalars = {name for name, tensor in able if tensor.dim() == 0}
    return scalars if able and able[0][0] in scalars else {name for name, _ in able}
