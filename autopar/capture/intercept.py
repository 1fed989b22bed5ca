"""The torch functions that the tracer replaces by functional, shardable ops, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from autopar.capture.replacements.attention import ATTENTION_REPLACEMENTS
from autopar.capture.replacements.checks import CHECK_REPLACEMENTS
from autopar.capture.replacements.draw import Draw
from autopar.capture.replacements.experts import EXPERT_REPLACEMENTS
from autopar.capture.replacements.loss import LOSS_REPLACEMENTS
from autopar.capture.replacements.normalization import NORMALIZATION_REPLACEMENTS
from autopar.capture.replacements.overloads import OVERLOAD_REPLACEMENTS
from autopar.capture.replacements.randomness import RANDOM_REPLACEMENTS
from autopar.capture.replacements.recurrent import RECURRENT_REPLACEMENTS

REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    **RANDOM_REPLACEMENTS,
    **ATTENTION_REPLACEMENTS,
    **NORMALIZATION_REPLACEMENTS,
    **RECURRENT_REPLACEMENTS,
    **LOSS_REPLACEMENTS,
    **EXPERT_REPLACEMENTS,
    **CHECK_REPLACEMENTS,
    **OVERLOAD_REPLACEMENTS,
}


class Interceptor:
    """Answers calls of torch functions while a model is traced.

    `seed` is an int64 scalar tensor, the step's random seed; `draw_key` gives a new key per random op (from torch's CPU
    generator, so that `torch.utils.checkpoint` replays the same keys).
    """

    def __init__(self, seed: Tensor, draw_key: Callable[[], int]) -> None:
        self._draw = Draw(seed, draw_key)

    def replace(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of `func(*args, **kwargs)`, or NotImplemented: then the function itself is to be called."""
        replacement = REPLACEMENTS.get(func)
        return NotImplemented if replacement is None else replacement(self._draw, *args, **kwargs)
