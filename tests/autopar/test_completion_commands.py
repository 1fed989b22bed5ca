"""The scripts complete what a user would type: asked of bash itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from autopar import cli

BASH = shutil.which("bash")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == cli.OK
    return capsys.readouterr().out


@pytest.mark.skipif(BASH is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pl"], ["place-experts", "plan"]),
        (["plan", "--mem"], ["--memory", "--memory-limit"]),
        (["plan", "--search", "meg"], ["megatron"]),
        (["verify", "--hardware", "h"], ["h100", "h200"]),
        (["completion", "b"], ["bash"]),
        (["explain", "pl"], ["plan.json"]),
    ],
    ids=" ".join,
)
def test_bash_offers_commands_options_names_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str], offered: list[str]
) -> None:
    (tmp_path / "plan.json").touch()
    (tmp_path / "completion.sh").write_text(script("bash", capsys))
    words = " ".join(f"'{word}'" for word in ["autopar", *typed])
    ask = f"""source completion.sh
        COMP_WORDS=({words}); COMP_CWORD={len(typed)}
        set -- $(complete -p autopar); while [ "$1" != -F ]; do shift; done
        "$2" autopar '{typed[-1]}' '{["autopar", *typed][-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(
        [str(BASH), "--norc", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20
    )
    assert sorted(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(name in text for name in ("plan", "what-if", "bench-search", "completion"))


def test_the_script_comes_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash", "--json"]) == cli.OK
    assert "_shtab_autopar" in json.loads(capsys.readouterr().out)["script"]
