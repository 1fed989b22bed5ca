"""`as_strided` and its inverse: what they are given was contiguous when it was captured, so it is made so here."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.local_call import LocalCall, LocalForm, LocalValue
from autopar.passes.moves import packed


def of_contiguous(local: LocalCall) -> LocalValue:
    return local.build.op(local.call.target, packed(local.build, local.args[0]), *local.args[1:], **local.kwargs)


FORMS: Mapping[str, LocalForm] = {
    "aten.as_strided.default": of_contiguous,
    "aten.as_strided_copy.default": of_contiguous,
    "aten.as_strided_scatter.default": of_contiguous,
}
