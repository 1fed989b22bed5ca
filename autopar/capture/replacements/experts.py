"""Expert layers of transformers as one op each, through the library's own interface for experts; products in groups.

A layer whose activation is computed element by element becomes `autopar::experts`. Of any other, the products become
`autopar::grouped_mm`, around which the layer's own code runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.replacements.attention import autocast
from autopar.capture.replacements.draw import Draw
from autopar.ops.pointwise_program import SAMPLE_SHAPE, NotPointwiseError, Writer
from autopar.torch_compat import outside_tracing

NAME = "autopar"  # of the implementation, among those of transformers
INTERFACE = "transformers.integrations.moe"
GROUPED = "grouped_mm"  # the implementation of transformers that is traced where ours does not apply
SETTING = "_experts_implementation_internal"  # of a configuration: the chosen implementation
REPLACED = (None, "eager", "grouped_mm", "batched_mm")  # all compute the same; a user's own implementation is kept
MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_is_expert_parallel")


@contextmanager
def traceable_experts(model: nn.Module) -> Iterator[None]:
    """In here the expert layers of transformers run `experts_forward`; the configurations are as before on leaving."""
    interface: Any = sys.modules.get(INTERFACE)
    configs = [] if interface is None else list(_replaced_configs(model))
    if configs:
        interface.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    before = [(config, vars(config)[SETTING]) for config in configs]
    for config in configs:
        vars(config)[SETTING] = NAME
    try:
        yield
    finally:
        for config, implementation in before:
            vars(config)[SETTING] = implementation


def _replaced_configs(model: nn.Module) -> Iterator[Any]:
    seen = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if all(hasattr(module, mark) for mark in MARKS) and id(config) not in seen:
            seen.add(id(config))
            if vars(config).get(SETTING, NAME) in REPLACED:
                yield config


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The layer `module` on tokens [T, H], their choices [T, K] and the weights of these [T, K] -> [T, H]."""
    activation = activation_of(module, hidden_states.dtype)
    if activation is None:
        grouped = sys.modules[INTERFACE].ALL_EXPERTS_FUNCTIONS[GROUPED]
        found: Tensor = grouped(module, hidden_states, top_k_index, top_k_weights)
        return found
    up, up_bias, down, down_bias = _weights(module)
    x, up, down = autocast((hidden_states.to(up.dtype), up, down))
    biases = [None if bias is None else bias.to(x.dtype) for bias in (up_bias, down_bias)]
    out: Tensor = torch.ops.autopar.experts(
        x, top_k_index, top_k_weights, up, biases[0], down, biases[1], activation, 0
    )
    return out.to(hidden_states.dtype)


def _weights(module: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(up [E, G, F, H], its bias [E, G, F], down [E, H, F], its bias [E, H]) however the layer lays them out."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return _by_gate(module, up), None if up_bias is None else _by_gate(module, up_bias), down, down_bias


def _by_gate(module: Any, tensor: Tensor) -> Tensor:
    """Dim 1, which holds the gates one after the other or in turns, as dims [G, F]."""
    gates = 2 if module.has_gate else 1
    if module.is_concatenated:
        return torch.unflatten(tensor, 1, (gates, -1))
    return torch.unflatten(tensor, 1, (-1, gates)).transpose(1, 2)


def activation_of(module: Any, dtype: torch.dtype) -> str | None:
    """The text of what stands between the two products of a layer, if it is elementwise and all that stands there."""
    if module._is_expert_parallel or getattr(module, "has_post_expert_norm", False):
        return None
    gates = 2 if module.has_gate else 1
    with outside_tracing(), torch.no_grad():
        return _ActivationWriter(module, gates, dtype).write()


class _ActivationWriter(Writer):
    """Knows the gates by their values in a sample whose elements all differ, however they are cut from it."""

    def __init__(self, module: Any, gates: int, dtype: torch.dtype) -> None:
        super().__init__()
        rows, columns = SAMPLE_SHAPE
        self._module = module
        self._sample = torch.arange(rows * gates * columns, dtype=dtype).reshape(rows, -1)
        split = _by_gate(module, self._sample)
        self._gates = [split[:, gate].contiguous() for gate in range(gates)]
        self._name(self._sample)

    def write(self) -> str | None:
        """The text; None where the layer's own code does something else."""
        run = self._module._apply_gate if self._module.has_gate else self._module.act_fn
        try:
            run(self._sample.clone())
        except Exception:  # a user's layer may raise anything on such a sample; below, the fault would be ours
            return None
        try:
            with self:
                result = run(self._sample)
            if not isinstance(result, Tensor) or result.shape != SAMPLE_SHAPE:
                return None
            return self.text([result])
        except NotPointwiseError:
            return None

    def is_structure(self, func: Any, args: Any, value: Any) -> bool:
        tensors = [item for item in args if isinstance(item, Tensor)]
        if not tensors or any(id(item) in self.names for item in tensors):
            return False
        for item in value if isinstance(value, (list, tuple)) else [value]:
            self._name(item)
        return True

    def _name(self, item: Tensor) -> None:
        for number, gate in enumerate(self._gates):
            if item.shape == gate.shape and torch.equal(item, gate):
                self.names[id(item)] = f"x{number}"


def grouped_mm(
    draw: Draw,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """F.grouped_mm of either operand in groups, or of both; a bias belongs to no group."""
    if bias is not None or out_dtype not in (None, mat_a.dtype):
        return NotImplemented
    ops = torch.ops.autopar
    if offs is None:
        return torch.bmm(mat_a, mat_b)
    if mat_a.dim() == 2 and mat_b.dim() == 3:
        return ops.grouped_mm(mat_a, mat_b, offs, 0)
    if mat_a.dim() == 3:
        return ops.grouped_mm(mat_b.t(), mat_a.transpose(1, 2), offs, 0).t()
    return ops.grouped_outer(mat_a.t(), mat_b, offs, 0, offs.shape[0])


EXPERT_REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    function: grouped_mm
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
}
