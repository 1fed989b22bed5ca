from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.cli import main

LOAD = [[90, 10, 40, 60], [10, 10, 10, 10]]


def test_experts_are_placed_saved_and_placed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load.json").write_text(json.dumps(LOAD))
    options = ["--mesh", "1x2", "--replicas", "6", "--time-limit", "2"]
    saved = tmp_path / "placement.json"
    assert main(["place-experts", str(tmp_path / "load.json"), *options, "--save", str(saved)]) == 0
    assert "2 layers of 4 experts on 2 devices, 3 slots each" in capsys.readouterr().out
    np.save(tmp_path / "load.npy", np.array(LOAD))
    again = ["place-experts", str(tmp_path / "load.npy"), *options, "--current", str(saved), "--json"]
    assert main(again) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["moved"] == [0, 0]
    assert answer["assignment"] == json.loads(saved.read_text())["assignment"]


@pytest.mark.parametrize(("text", "mesh"), [("[[1, -1]]", "1x2"), ("{}", "1x2"), ("[[1, 1]]", "two"), ("?", "1x2")])
def test_bad_files_and_meshes_have_an_error_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, mesh: str
) -> None:
    (tmp_path / "load.json").write_text(text)
    assert main(["place-experts", str(tmp_path / "load.json"), "--mesh", mesh]) == 2
    assert "ExpertPlacementError" in capsys.readouterr().err
