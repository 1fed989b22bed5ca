"""Values for a model on the meta device: each module initialises itself alone, and only the shards are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.parameters import local_part, owned
from autopar.runtime.twins import twin_of
from autopar.sharding.dtensors import as_dtensor
from autopar.sharding.layout import Layout

RESET_NAMES = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True)
class Initialised:
    """The distributed tensors of a model by name; `missing` are those that no module knows how to initialise."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    missing: frozenset[str]


def is_meta(model: nn.Module) -> bool:
    """Whether any tensor of the model has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def initialise(model: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Layout], seed: int) -> Initialised:
    """Allocate and fill this rank's shards of the meta tensors, one module at a time.

    A module is filled by its own `reset_parameters()`, then by the `_init_weights(module)` of the nearest module above
    it that has one (as Hugging Face models do): what its constructor would have done. Every rank runs every module's
    initialisation on the full tensors, from the same seed, so the values depend on the device but not on the mesh.
    The model itself stays on meta.
    """
    found = Initialised({}, {}, frozenset())
    missing: set[str] = set()
    device = mesh.device_type
    devices = [] if device == "cpu" else [torch.get_device_module(device).current_device()]
    with torch.random.fork_rng(devices, device_type="cuda" if device == "cpu" else device):
        torch.manual_seed(seed)
        for prefix, module, initialiser in _owners(model):
            made = _filled(module, initialiser, device)
            for name, (tensor, known) in made.items():
                _keep(found, mesh, layouts, prefix + name, tensor)
                if not known:
                    missing.add(prefix + name)
    first = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return Initialised(found.parameters, found.buffers, frozenset(missing & first))


def _keep(found: Initialised, mesh: DeviceMesh, layouts: Mapping[str, Layout], name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, nn.Parameter) and name not in layouts:
        found.buffers[name] = tensor.detach()
    elif name in layouts:
        local = owned(local_part(tensor.detach(), mesh, layouts[name]), tensor)
        value = as_dtensor(local, mesh, layouts[name], tensor.shape)
        found.parameters[name] = nn.Parameter(value, requires_grad=tensor.requires_grad)


Initialiser = Callable[[nn.Module], object]


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Initialiser | None]]:
    """(prefix, module, its initialiser) of every module that itself holds meta tensors."""
    above: dict[str, Initialiser] = {}
    for path, module in model.named_modules():
        inherited = above.get(path.rpartition(".")[0]) if path else None
        general = getattr(module, "_init_weights", None) or inherited
        if general is not None:
            above[path] = general
        own = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and tensor.is_meta for tensor in own):
            yield f"{path}." if path else "", module, general


def _resetting(module: nn.Module) -> None:
    for name in RESET_NAMES:
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _filled(module: nn.Module, initialiser: Initialiser | None, device: str) -> dict[str, tuple[Tensor, bool]]:
    """The module's own meta tensors with values, and whether something was written into every element."""
    twin = _twin(module, device)
    marks = {name: _mark(tensor) for name, tensor in _own_tensors(twin).items()}
    _resetting(twin)
    if initialiser is not None:
        initialiser(twin)
    names = [name for name, tensor in _own_tensors(module).items() if tensor.is_meta]
    filled = {name: _own_tensors(twin)[name] for name in names}
    return {name: (tensor, not _is_marked(tensor, marks[name])) for name, tensor in filled.items()}


def _twin(module: nn.Module, device: str) -> nn.Module:
    """A copy of the module whose own meta tensors have memory; children are left on meta."""
    twin = twin_of(module)
    for name, parameter in twin._parameters.items():
        if parameter is not None and parameter.is_meta:
            real = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            twin._parameters[name] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    for name, buffer in twin._buffers.items():
        if buffer is not None and buffer.is_meta:
            twin._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return twin


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    pairs = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in pairs if tensor is not None}


def _mark(tensor: Tensor) -> int:
    """Fill with a value that no initialisation writes; the version by which to tell for types that have none."""
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor._version


def _is_marked(tensor: Tensor, version: int) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    if tensor.dtype == torch.bool:
        return tensor._version == version
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())
