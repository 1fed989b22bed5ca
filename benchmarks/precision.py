"""Mixed precision on whole models: every plan against the same policy on one device, and the bytes that it gathers.

    python -m benchmarks.precision [--models llama,vit] [--searches fsdp] [--mesh 2x2] [--precision bf16]

Prints a row per model and search: the worst relative error with the tensor, the bytes that the plan moves in all, and
those that it moves without the policy.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import autopar
from autopar.errors import AutoparError
from tests.autopar.models import MODELS


def moved_bytes(plan: autopar.Plan) -> int:
    """Of all collectives of a step."""
    return sum(move.bytes for entry in plan.entries for move in entry.moves if move.collective != "slice")


def row(name: str, mesh: autopar.Mesh, search: str, precision: str) -> tuple[str, bool]:
    """The columns of one model and search as text, and whether the result is right."""
    model, inputs = MODELS[name]()
    given: dict[str, Any] = {"example_inputs": inputs, "search": search}
    try:
        report = autopar.verify(model, mesh, precision=precision, **given)
        wide = autopar.make_plan(model, mesh, **given)
    except AutoparError as error:
        return f"{type(error).__name__}: {error.what}", False
    assert report.plan is not None
    moved = f"{moved_bytes(report.plan):,} | {moved_bytes(wide):,}"
    worst = f"{report.worst_relative_error:.1e} ({report.worst_tensor})"
    return f"{worst} | {moved} | {'ok' if report.ok else 'WRONG'}", report.ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--searches", default="fsdp,ilp")
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    mesh = autopar.Mesh(tuple(int(size) for size in options.mesh.split("x")))
    wrong = 0
    print(f"| model | search | worst relative error | bytes moved in {options.precision} | as it is | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.models.split(","):
        for search in options.searches.split(","):
            text, is_right = row(name, mesh, search, options.precision)
            wrong += not is_right
            print(f"| {name} | {search} | {text} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
