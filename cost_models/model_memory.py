"""Memory of a transformer's training state from its parallel sizes: activations by mode, model states by ZeRO stage.

Closed formulas with their sources; the planner itself uses exact liveness (`memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy

from autopar.cost_models.formula import Formula, symbols
from autopar.cost_models.hardware import dtype_bytes
from autopar.cost_models.transformer import TransformerPlan, TransformerShape
from autopar.errors import UnpricedError

KORTHIKANTI = "Korthikanti et al., arXiv:2205.05198, Table 2 (fp16 activations, 1-byte masks, ffn of 4 hidden)"
RAJBHANDARI = "Rajbhandari et al., arXiv:1910.02054, Figure 1 (fp16 parameters and gradients, fp32 Adam)"
_s, _b, _h, _a, _t = symbols("seq batch hidden heads tensor")
_psi, _d = symbols("parameters data")
_LAYER_UNITS = {"seq": "", "batch": "", "hidden": "", "heads": "", "tensor": ""}


def _activation(name: str, expression: sympy.Expr) -> Formula:
    used = {str(item) for item in expression.free_symbols}
    units = {key: unit for key, unit in _LAYER_UNITS.items() if key in used}
    return Formula(f"activations of a layer, {name}", expression, units, KORTHIKANTI, "B")


_scores = 5 * _a * _s / _h
LAYER_ACTIVATIONS: Mapping[str, Formula] = MappingProxyType(
    {
        "single": _activation("one device", _s * _b * _h * (34 + _scores)),
        "tensor": _activation("tensor parallel", _s * _b * _h * (10 + 24 / _t + _scores / _t)),
        "sequence": _activation("tensor and sequence parallel", _s * _b * _h / _t * (34 + _scores)),
        "selective": _activation("tensor parallel, selective recomputation", _s * _b * _h * (10 + 24 / _t)),
        "sequence_selective": _activation("sequence parallel, selective", 34 * _s * _b * _h / _t),
        "full": _activation("full recomputation", 2 * _s * _b * _h),
    }
)


def _state(name: str, expression: sympy.Expr) -> Formula:
    units = {"parameters": "", "data": ""} if _d in expression.free_symbols else {"parameters": ""}
    return Formula(f"model states, {name}", expression, units, RAJBHANDARI, "B")


MODEL_STATES: Mapping[str, Formula] = MappingProxyType(
    {
        "replicated": _state("replicated", 16 * _psi),
        "zero1": _state("ZeRO-1", 4 * _psi + 12 * _psi / _d),
        "zero2": _state("ZeRO-2", 2 * _psi + 14 * _psi / _d),
        "zero3": _state("ZeRO-3", 16 * _psi / _d),
    }
)


def layer_activation_bytes(mode: str, *, seq: int, batch: int, hidden: int, heads: int, tensor: int = 1) -> float:
    """Bytes that one block saves for its backward, by mode: a key of `LAYER_ACTIVATIONS`."""
    formula = LAYER_ACTIVATIONS.get(mode)
    if formula is None:
        raise UnpricedError(f"activation mode {mode!r} is unknown", fix=f"use one of {sorted(LAYER_ACTIVATIONS)}")
    sizes = {"seq": seq, "batch": batch, "hidden": hidden, "heads": heads, "tensor": tensor}
    return float(formula.value(**sizes))


def model_state_bytes(storage: str, parameters: float, data: int = 1) -> float:
    """Bytes of parameters, gradients and Adam states of one rank: a key of `MODEL_STATES`."""
    formula = MODEL_STATES.get(storage)
    if formula is None:
        raise UnpricedError(f"storage {storage!r} is unknown", fix=f"use one of {sorted(MODEL_STATES)}")
    return float(formula.value(parameters=parameters, data=data))


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """What a framework's block keeps for its backward, in tensors of (tokens, hidden) size.

    `gathered` ones are whole on every rank of the tensor axis; `sharded` ones are split over it. The head keeps
    `head_bytes` for each logit.
    """

    gathered: float
    sharded: float
    head_bytes: float
    source: str
    state_bytes: float = 6.0  # per parameter, on every rank: 16-bit copy and fp32 gradient
    sharded_state_bytes: float = 12.0  # per parameter, over the data ranks: fp32 master and two Adam states


def stage_layers(shape: TransformerShape, plan: TransformerPlan) -> int:
    """Blocks of the first stage when stages are balanced by parameters and the head counts as its own size."""
    if plan.pipeline == 1:
        return shape.layers
    head_layers = shape.vocab * shape.hidden / shape.layer_parameters
    return min(shape.layers, math.ceil((shape.layers + head_layers) / plan.pipeline))


def first_stage_peak_bytes(
    shape: TransformerShape, plan: TransformerPlan, saved: SavedTensors, dtype: str = "bfloat16"
) -> float:
    """Peak bytes of the first pipeline rank under 1F1B: states, the microbatches in flight, one block at work.

    Without a pipeline the same rank holds the head, and the peak is at the loss.
    """
    layers = stage_layers(shape, plan)
    tables = shape.vocab * shape.hidden
    parameters = (layers * shape.layer_parameters + tables) / plan.tensor
    states = parameters * (saved.state_bytes + saved.sharded_state_bytes / plan.data)
    tokens = plan.microbatch * shape.seq / plan.context
    tensor_bytes = tokens * shape.hidden * dtype_bytes(dtype)
    block = (saved.gathered + saved.sharded / plan.tensor) * tensor_bytes
    in_flight = min(plan.pipeline, plan.microbatches)
    head = saved.head_bytes * tokens * shape.vocab / plan.tensor if plan.pipeline == 1 else 0.0
    return states + in_flight * layers * block + max(head, block)
