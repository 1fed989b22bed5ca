"""The private PyTorch names that autopar needs, in one place (tested against torch 2.11 and 2.13)."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import lru_cache
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.multiprocessing.spawn import ProcessContext, spawn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "CustomOpDef",
    "DataDependentOutputException",
    "DispatchMode",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "LazyGraphModule",
    "after_backward",
    "apply_function",
    "applying_function",
    "autograd_sequence_number",
    "below_torch_functions",
    "broadcast_shapes",
    "dtensor_of",
    "group_timeout",
    "has_kernel",
    "is_cuda_built",
    "is_gloo",
    "is_implicit_composite",
    "join_ranks",
    "mesh_over",
    "outside_tracing",
    "overload_of",
    "python_kernels",
    "register_gloo_in_order",
    "registrations",
    "run_load_hooks",
    "run_ranks",
    "set_arguments",
    "set_dtensor_content",
    "start_ranks",
    "storage_use_count",
    "unflatten",
    "use_count",
    "without_autocast_cache",
    "without_dispatch",
    "wrapper_tensor",
]


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__` has no types
    """`TorchDispatchMode` with types: what a subclass's `__torch_dispatch__` returns is the result of each op."""

    def __init__(self) -> None:
        initialize: Callable[[], None] = super().__init__
        initialize()

    def __init_subclass__(cls) -> None:
        initialize: Callable[[], None] = super().__init_subclass__
        initialize()


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """`torch.broadcast_shapes`, with types."""
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
    return torch.Size(broadcast(*shapes))


def unflatten(tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """`tensor.unflatten(dim, sizes)`, with types."""
    split: Callable[[int, Sequence[int]], torch.Tensor] = tensor.unflatten
    return split(dim, sizes)


def apply_function(function: type[torch.autograd.Function], *arguments: object) -> Any:
    """`function.apply(*arguments)`, with types."""
    apply: Callable[..., Any] = function.apply
    return apply(*arguments)


_APPLY = inspect.unwrap(vars(torch.autograd.Function)["apply"].__func__).__code__


def applying_function() -> bool:
    """Whether the forward of an `autograd.Function` runs, whose ops no gradient goes through."""
    frame = None if torch.is_grad_enabled() else inspect.currentframe()
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def start_ranks(function: Callable[..., object], ranks: int, *arguments: object) -> ProcessContext:
    """`torch.multiprocessing.spawn` with types: `function(rank, *arguments)` in a process per rank, not waited for."""
    start: Callable[..., ProcessContext] = spawn
    return start(function, arguments, nprocs=ranks, join=False)


def run_ranks(function: Callable[..., object], ranks: int, *arguments: object) -> None:
    """`start_ranks`, until all have ended."""
    running = start_ranks(function, ranks, *arguments)
    while not join_ranks(running, None):
        pass


def join_ranks(running: ProcessContext, timeout_s: float | None) -> bool:
    """Whether all processes of `start_ranks` have ended; waits for one of them, at most as long as that.

    Raises what one of them raised.
    """
    join: Callable[..., bool] = running.join
    return join(timeout=timeout_s)


def is_cuda_built() -> bool:
    """Whether this PyTorch was built with CUDA, whatever devices there are."""
    is_built: Callable[[], bool] = torch.backends.cuda.is_built
    return is_built()


def autograd_sequence_number() -> int:
    """The number that the next autograd node will carry."""
    return int(torch._C._autograd._get_sequence_nr())


_SET_ARGS, _SET_KWARGS = (vars(torch.fx.Node)[name].fset for name in ("args", "kwargs"))


def set_arguments(node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`node.args, node.kwargs = args, kwargs`, without sorting the node anew into its graph's table of ops."""
    _SET_ARGS(node, args)
    if kwargs or node.kwargs:
        _SET_KWARGS(node, kwargs)


def use_count(tensor: torch.Tensor | None) -> int:
    """How many hold the C++ tensor, of which its Python object is one; 0 of None."""
    return 0 if tensor is None else int(methodcaller("_use_count")(tensor))


def storage_use_count(tensor: torch.Tensor) -> int:
    """How many hold the storage under a tensor: tensors, and its Python object."""
    count: Callable[[int], int] = torch._C._storage_Use_Count
    return count(tensor.untyped_storage()._cdata)


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Torch calls in here run for real: no dispatch mode, no torch-function mode sees them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def below_torch_functions() -> AbstractContextManager[object]:
    """Torch-function modes do not see the torch calls in here."""
    guard: AbstractContextManager[object] = torch._C.DisableTorchFunction()
    return guard


def _full_name(op: torch._ops.OpOverload) -> str:
    """`aten::add.Tensor`: what the dispatcher calls an op."""
    name: Callable[[], str] = op.name
    return name()


@lru_cache(maxsize=4096)
def is_implicit_composite(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether autograd runs other ops in the place of `op` on such a device.

    Where autograd is left out, as in inference mode and functionalization, it comes through whole.
    """
    if not op._can_decompose():
        return False
    is_registered: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    return not is_registered(_full_name(op), torch._C._dispatch_key_for_device(device_type))


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Autocast in here casts a parameter at each use: no cast outlives the run that made it."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def without_dispatch() -> Iterator[None]:
    """Torch calls in here go to the kernels of their tensors' devices, past every mode, `FakeTensorMode` included."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def wrapper_tensor(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a subclass with the shape, dtype and device of `like`, and no values."""
    make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    return make(kind, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)


def set_dtensor_content(tensor: DTensor, content: DTensor) -> None:
    """Let `tensor` hold the shard and the placements of `content`: same shape, same object as before."""
    tensor._local_tensor, tensor._spec = content._local_tensor, content._spec


def dtensor_of(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """The DTensor of which this rank holds `local`, left where it lies; `DTensor.from_local` moves it to the device."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    make: Callable[..., DTensor] = DTensor
    return make(local, spec, requires_grad=False)


def swap_content(parameter: DTensor, content: DTensor) -> None:
    """Let a parameter be `content`, on another device: the same object, under the same hooks."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    fresh = torch.nn.Parameter(content, requires_grad=parameter.requires_grad)
    swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    swap(parameter, fresh)
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks


def run_load_hooks(optimizer: torch.optim.Optimizer) -> None:
    """For an optimizer with a `load_state_dict` of its own: call those registered to follow it."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def after_backward(callback: Callable[[], None]) -> None:
    """Called in an autograd node: run `callback` when the whole backward pass is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def overload_of(definition: CustomOpDef) -> torch._ops.OpOverload:
    """The op that `torch.library.custom_op` defined."""
    overload: torch._ops.OpOverload = definition._opoverload
    return overload


def python_kernels(op: torch._ops.OpOverload) -> dict[str, Callable[..., Any]]:
    """By role: the functions of an op that `torch.library.custom_op` defined; none of any other op."""
    definition = OPDEFS.get(op._schema.name)
    if definition is None:
        return {}
    found = {"defined": definition._init_fn}
    for device, kernel in definition._backend_fns.items():
        wrapper = inspect.unwrap(kernel)  # one of PyTorch's, which encloses the user's function as `fn`
        inner = inspect.getclosurevars(wrapper).nonlocals.get("fn")
        if inner is None:
            return {}
        found[f"on {device or 'any'}"] = inner
    return found


def registrations(op: torch._ops.OpOverload) -> str:
    """Where the kernels of an op were registered, one line for each."""
    return str(torch._C._dispatch_dump(op._schema.name))


def has_kernel(op: torch._ops.OpOverload, device_type: str) -> bool:
    """Whether an op can run on such a device."""
    is_computed: Callable[[str, str], bool] = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    return is_computed(_full_name(op), torch._C._dispatch_key_for_device(device_type))


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a group's collectives of tensors on such devices are gloo's."""
    return dist.is_gloo_available() and isinstance(group._get_backend(torch.device(device_type)), dist.ProcessGroupGloo)


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """How long a group waits for its ranks."""
    timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return timeout


def mesh_over(groups: Sequence[dist.ProcessGroup], mesh: DeviceMesh) -> DeviceMesh:
    """A mesh that equals `mesh`, over other groups along its axes: `DeviceMesh.from_group`, which wants names."""
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    made = DeviceMesh.from_group(list(groups), mesh.device_type, mesh=mesh.mesh, mesh_dim_names=names)
    made._mesh_dim_names = mesh.mesh_dim_names
    return made


def register_gloo_in_order() -> str:
    """The name of a backend for `torch.distributed.new_group`: gloo with one thread for each group instead of two."""
    name = "gloo_in_order"
    if name not in dist.Backend.backend_list:
        register: Callable[..., None] = dist.Backend.register_backend
        register(name, _gloo_in_order, devices=["cpu", "cuda"])
    return name


def _gloo_in_order(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options = gloo._Options()
    options._threads, options._timeout = 1, timeout
    devices = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    options._devices = devices or [gloo.create_default_device()]
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made
