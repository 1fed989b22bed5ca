"""Plan, file, editor, file, plan, compiled, verified: on five models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.folding import expand_key
from autopar.sharding.layout import parse_layout
from tests.autopar.models import MODELS

MESH = autopar.Mesh((2, 2), ("dp", "tp"), hardware="cpu")
EDITS = 6  # folded names
OTHER = {"R,R": "S0,R", "S0,R": "R,S0", "R,S0": "S0,R", "S0,S0": "R,S0"}  # what the editor writes in place of what is


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "resnet"])
def test_an_edited_file_is_loaded_compiled_and_verified(name: str, tmp_path: Path) -> None:
    model, inputs = MODELS[name]()
    file = tmp_path / "plan.json"
    autopar.make_plan(model, MESH, example_inputs=inputs, search="fsdp").save(file)
    data = json.loads(file.read_text())
    lengths = {key: len(parameter) for key, parameter in model.named_parameters()}
    edited = {
        names: OTHER[layout]
        for names, layout in data["parameters"].items()
        if layout in OTHER and all(lengths[key] % 4 == 0 for key in expand_key(names))
    }
    edited = dict(list(edited.items())[:EDITS])
    assert len(edited) == EDITS
    data["parameters"] |= edited
    file.write_text(json.dumps(data, indent=1))

    loaded = autopar.Plan.load(file)
    assert "edited since it was priced" in loaded.notes[0] and loaded.step_s == 0
    report = autopar.verify(model, MESH, example_inputs=inputs, plan=loaded)
    assert report.ok, report.table
    assert report.plan is not None and report.plan.step_s > 0  # priced anew
    layouts = {entry.key: entry.outputs[0] for entry in report.plan.entries if entry.kind == "parameter"}
    for names, layout in edited.items():
        assert {layouts[key] for key in expand_key(names)} == {parse_layout(layout, 2)}
