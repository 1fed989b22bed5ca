"""The built-in rules, one table per op family, each keyed by the name of the op overload."""

from __future__ import annotations

from autopar.sharding.rules import (
    convolution,
    creation,
    custom,
    elementwise_losses,
    embedding,
    embedding_bag,
    experts,
    images,
    indexing,
    linear_algebra,
    loss,
    matmul,
    norms,
    pointwise,
    reductions,
    softmax,
    statistics,
    views,
)
from autopar.sharding.rules.placing import RuleTable

TABLES: tuple[RuleTable, ...] = (
    convolution.RULES,
    creation.RULES,
    custom.RULES,
    elementwise_losses.RULES,
    embedding.RULES,
    embedding_bag.RULES,
    experts.RULES,
    images.RULES,
    indexing.RULES,
    linear_algebra.RULES,
    loss.RULES,
    matmul.RULES,
    norms.RULES,
    pointwise.RULES,
    reductions.RULES,
    softmax.RULES,
    statistics.RULES,
    views.RULES,
)
