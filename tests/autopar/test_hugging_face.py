"""`hf:CONFIG` makes a language model without weights, or says exactly why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.cli import main
from autopar.errors import ModelSourceError
from autopar.model_source import load_model
from autopar.zoo.models import make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The configuration of a tiny Llama, as a checkpoint has it."""
    model, _ = make("llama")
    model.config.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_folder_with_a_configuration_is_planned_for_the_batch_that_was_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"hf:{folder}:4x16", "--mesh", "2", "--search", "megatron", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert "model.layers.[0-1].mlp.up_proj.weight" in plan["parameters"]


def test_it_is_verified_with_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"hf:{folder}:4x16", "--mesh", "2", "--search", "megatron"]) == 0
    assert "verified: 23 tensors" in capsys.readouterr().out


def test_a_type_of_model_that_transformers_knows_needs_no_file() -> None:
    with torch.device("meta"):
        source = load_model("hf:gpt2")
    assert sum(parameter.numel() for parameter in source.model.parameters()) == 124_439_808
    inputs = source.require_inputs()
    assert isinstance(inputs, dict)
    ids = inputs["input_ids"]
    assert (tuple(ids.shape), ids.device.type) == ((8, 128), "cpu")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("hf:gpt2:8", "names no configuration"),
        ("hf:", "names no configuration"),
        ("hf:gpt2:1x4096", "1024 positions, fewer than 4096"),
        ("hf:vit", "no causal language model of type vit"),
        ("hf:no-such-model-of-any-kind", "no configuration"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_way_out(name: str, what: str) -> None:
    with torch.device("meta"), pytest.raises(ModelSourceError, match=what) as refusal:
        load_model(name)
    assert refusal.value.fix


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ModelSourceError, match="no configuration"):
        load_model(f"hf:{tmp_path}")
