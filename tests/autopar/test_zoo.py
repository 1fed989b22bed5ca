"""The zoo's command, on a few of its architectures; `autopar zoo` runs them all."""

from __future__ import annotations

import json

import pytest

from autopar.cli import main
from autopar.zoo.models import TABLE, make


def test_the_table_says_verified_for_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["zoo", "--only", "qwen2,convnext", "--mesh", "2x2", "--plans", "fsdp,megatron", "--json"])
    outcomes = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [outcome["verdict"] for outcome in outcomes] == ["verified"] * 4


def test_an_unknown_architecture_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "--only", "nosuch", "--mesh", "2", "--plans", "ddp"]) == 2
    assert "the zoo has no 'nosuch'" in capsys.readouterr().err


def test_every_architecture_has_inputs_that_its_model_takes() -> None:
    assert len(TABLE) >= 28
    model, inputs = make("gpt_neo")
    assert model(**inputs).logits.shape[:2] == inputs["input_ids"].shape
