"""`view_as_real` and `view_as_complex` of a shard, which may lie in memory as the full tensor never did."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.complex_pairs import as_pairs, from_pairs
from autopar.passes.local_call import LocalCall, LocalForm, LocalValue


def view_as_real(local: LocalCall) -> LocalValue:
    return as_pairs(local.build, local.args[0])


def view_as_complex(local: LocalCall) -> LocalValue:
    return from_pairs(local.build, local.args[0])


FORMS: Mapping[str, LocalForm] = {
    "aten.view_as_real.default": view_as_real,
    "aten.view_as_complex.default": view_as_complex,
}
