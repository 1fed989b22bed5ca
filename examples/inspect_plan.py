"""Plan a model, ask the plan why, change it in its file, and prove that the changed plan computes the same.

    python examples/inspect_plan.py [--folder .]

All four ranks are virtual: they run in this process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_gpt import gpt

import autopar
from autopar.report.page import report_page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Read, question and edit a plan.")
    parser.add_argument("--folder", type=Path, default=Path())
    folder = parser.parse_args(arguments).folder
    model, inputs = gpt()
    mesh = autopar.Mesh((2, 2), ("dp", "tp"), hardware="h100")
    plan = autopar.make_plan(model, mesh, example_inputs=inputs, optimizer=torch.optim.AdamW)
    print(plan)
    print(plan.explain("blocks.0.up.weight"))

    pinned = plan.what_if(pin={"blocks.*.up.weight": "R,S0", "blocks.*.down.weight": "R,S1"})
    print(plan.diff(pinned))

    file = folder / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    data["parameters"] |= {"blocks.[0-1].up.weight": "R,S0", "blocks.[0-1].down.weight": "R,S1"}  # or in an editor
    file.write_text(json.dumps(data))

    report = autopar.verify(model, mesh, example_inputs=inputs, plan=file)
    print(report)
    (folder / "report.html").write_text(report_page(plan), encoding="utf-8")
    print(f"wrote {folder / 'report.html'}")
    if not report.ok:
        raise SystemExit(report.table)


if __name__ == "__main__":
    main()
