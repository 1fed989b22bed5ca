"""The built-in rules, one table per op family, each keyed by the name of the op overload."""

from __future__ import annotations

from autopar.sharding.rules import (
    convolution,
    creation,
    custom,
    embedding,
    images,
    indexing,
    loss,
    matmul,
    norms,
    pointwise,
    reductions,
    softmax,
    views,
)
from autopar.sharding.rules.placing import RuleTable

TABLES: tuple[RuleTable, ...] = (
    convolution.RULES,
    creation.RULES,
    custom.RULES,
    embedding.RULES,
    images.RULES,
    indexing.RULES,
    loss.RULES,
    matmul.RULES,
    norms.RULES,
    pointwise.RULES,
    reductions.RULES,
    softmax.RULES,
    views.RULES,
)
