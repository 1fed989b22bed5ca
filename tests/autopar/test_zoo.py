"""The zoo's command, on a few of its models; `autopar zoo --family all` runs them all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cli import main
from autopar.errors import MeshError
from autopar.zoo import commands
from autopar.zoo.checking import FAMILIES, Outcome, Verdict, attempted, names_of
from autopar.zoo.models import TABLE, make
from autopar.zoo.page import write_page


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["zoo", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)["outcomes"]


def test_the_table_says_verified_for_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    code, outcomes = run(capsys, "--only", "qwen2,sparse_coder", "--mesh", "2", "--plans", "ilp,megatron")
    assert code == 0
    assert [outcome["verdict"] for outcome in outcomes] == ["verified"] * 4


def test_a_mixture_of_experts_is_verified_with_its_experts_as_one_op(capsys: pytest.CaptureFixture[str]) -> None:
    code, outcomes = run(capsys, "--only", "gpt_oss", "--mesh", "2", "--plans", "megatron")
    assert (code, outcomes[0]["verdict"]) == (0, "verified")


def test_an_unknown_architecture_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "--only", "nosuch", "--mesh", "2", "--plans", "ddp"]) == 2
    assert "the zoo has no 'nosuch'" in capsys.readouterr().err


def test_cells_of_a_file_of_results_are_not_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--only", "adapters", "--mesh", "2", "--results", str(tmp_path / "results.jsonl"))
    _, first = run(capsys, *words, "--plans", "ddp")
    ran: list[Any] = []
    monkeypatch.setattr(commands, "check_virtually", lambda cells, hardware: ran.append(cells) or ())
    code, again = run(capsys, *words, "--plans", "ddp,fsdp")
    assert (code, again, ran) == (0, first, [{"adapters": {"2": ["fsdp"]}}])


def test_a_result_that_is_not_equal_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Outcome("adapters", "2", "ddp", "wrong", "1.0e+00 base.weight")
    monkeypatch.setattr(commands, "check_virtually", lambda *_, **__: [wrong])
    assert run(capsys, "--only", "adapters", "--mesh", "2", "--plans", "ddp")[0] == 1


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MeshError("no such mesh", fix="name another"), Verdict("refused", "MeshError: no such mesh")),
        (KeyError("relu"), Verdict("wrong", "KeyError: 'relu'")),
    ],
)
def test_what_a_stage_raises_is_shown_and_is_a_refusal_only_in_our_own_words(
    error: Exception, verdict: Verdict
) -> None:
    def stage() -> str:
        raise error

    assert attempted(stage) == verdict
    assert attempted(lambda: "a report") == "a report"


@pytest.mark.slow
def test_the_same_checks_hold_on_processes(capsys: pytest.CaptureFixture[str]) -> None:
    code, outcomes = run(capsys, "--only", "adapters", "--gloo", "--plans", "ddp,megatron")
    assert code == 0
    assert [(outcome["mesh"], outcome["verdict"]) for outcome in outcomes] == [("gloo 2", "verified")] * 2


def test_the_page_has_a_section_per_family_and_the_reason_of_every_refusal(tmp_path: Path) -> None:
    outcomes = [
        Outcome("gpt2", "4", "ilp", "verified", "1e-7 loss"),
        Outcome("gpt2", "4", "ddp", "verified", "1e-7 loss"),
        Outcome("adapters", "2x2", "ilp", "refused", "DataDependentError: the shape depends on data"),
    ]
    write_page(outcomes, tmp_path / "zoo.md")
    text = (tmp_path / "zoo.md").read_text()
    assert "| gpt2 | ✓ | ✓ |" in text and "2 of 2 cells verified" in text
    assert "Not run: gpt_neo, " in text and "Not run: gpt2" not in text
    assert "- adapters: refused: DataDependentError: the shape depends on data (2x2 ilp)" in text


def test_every_architecture_has_inputs_that_its_model_takes() -> None:
    assert len(TABLE) >= 28
    names = [name for family in FAMILIES for name in names_of(family)]
    assert len(set(names)) == len(names)
    model, inputs = make("gpt_neo")
    assert model(**inputs).logits.shape[:2] == inputs["input_ids"].shape
    assert torch.isfinite(model(**inputs).logits).all()
