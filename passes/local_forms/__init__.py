"""Local forms: how an op runs on shards where calling it as it stands would be wrong. One table per op family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from autopar.passes.local_call import LocalForm
from autopar.passes.local_forms import (
    attention,
    complex_views,
    convolution,
    creation,
    custom,
    elementwise_losses,
    embedding,
    embedding_bag,
    exchange,
    experts,
    indexing,
    layer_norm,
    loss,
    matmul,
    norms,
    reductions,
    sizes,
    sliding,
    softmax,
    statistics,
    strided,
)
from autopar.sharding.op_call import op_name

TABLES: tuple[Mapping[str, LocalForm], ...] = (
    attention.FORMS,
    complex_views.FORMS,
    convolution.FORMS,
    creation.FORMS,
    custom.FORMS,
    elementwise_losses.FORMS,
    embedding.FORMS,
    embedding_bag.FORMS,
    exchange.FORMS,
    experts.FORMS,
    indexing.FORMS,
    layer_norm.FORMS,
    loss.FORMS,
    matmul.FORMS,
    norms.FORMS,
    reductions.FORMS,
    sizes.FORMS,
    sliding.FORMS,
    softmax.FORMS,
    statistics.FORMS,
    strided.FORMS,
)
LOCAL_FORMS: Mapping[str, LocalForm] = MappingProxyType(dict(chain.from_iterable(table.items() for table in TABLES)))


def local_form_of(target: Callable[..., Any]) -> LocalForm | None:
    """The local form of an op; None where the op is called as it stands."""
    return LOCAL_FORMS.get(op_name(target))
