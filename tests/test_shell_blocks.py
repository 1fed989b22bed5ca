"""The shell blocks of the documents run as they stand, page by page, in a folder with the files that a reader has."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.py)\n")  # the first line of a block that is a file
LANGUAGES = {"python", "bash", "text"}  # every block is one; text is not run
LEFT_OUT = {  # the commands that are not run, and why
    "-m venv": "makes an environment",
    "pip install": "fetches packages from a network",
    "activate": "of the environment that was not made",
    "pre-commit install": "writes hooks into the clone",
    "pytest": "is this very suite",
    "examples/quickstart.py": "is run by tests/examples",
}
SHORTER = {
    "calibrate": "calibrate --seconds 1",
    "--time-limit 30": "--time-limit 1",
}  # the same commands, for less long
LIMIT_S = 600.0


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """The language and the text of every block."""
    return BLOCK.findall(page.read_text())


def runs(command: str) -> bool:
    """Whether a command of a block is run here."""
    return bool(command.strip()) and not any(words in command for words in LEFT_OUT)


def script_of(block: str) -> str:
    """A block without what is left out, and shorter where time is all that differs."""
    joined = block.replace("\\\n", " ")
    lines = [" && ".join(filter(runs, line.split("&&"))) for line in joined.splitlines()]
    script = "\n".join(lines)
    for words, instead in SHORTER.items():
        script = script.replace(words, instead)
    return script.strip()


SCRIPTS = {page: [script_of(text) for language, text in blocks_of(page) if language == "bash"] for page in PAGES}
WITH_SCRIPTS = [page for page, scripts in SCRIPTS.items() if any(scripts)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    assert {language for language, _ in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_is_left_out_is_there(words: str) -> None:
    assert any(words in text for page in PAGES for language, text in blocks_of(page) if language == "bash")


@pytest.mark.parametrize("page", WITH_SCRIPTS, ids=lambda page: page.name)
def test_the_shell_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """One after the other: each finds what those before it wrote."""
    write_files(page, tmp_path)
    environment = os.environ | {
        "PATH": f"{programs(tmp_path)}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for script in filter(None, SCRIPTS[page]):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path / "folder",
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


def write_files(page: Path, where: Path) -> None:
    """What a reader has: the files that this page and the one about commands show, and search problems."""
    folder = where / "folder"
    (folder / "problems").mkdir(parents=True)
    (where / "home/.local/share/bash-completion/completions").mkdir(parents=True)
    for source in (ROOT / "docs/command_line.md", page):
        for language, text in blocks_of(source):
            named = FILE.match(text)
            if language == "python" and named:
                (folder / named[1]).write_text(text)
    example = ROOT / "tests/data/iopddl/example.json"
    shutil.copy(example, folder / "problems/example.json")
    shutil.copy(example, folder / "problem.json")


def programs(where: Path) -> Path:
    """A folder of the programs that an installation adds, all of this interpreter's."""
    folder = where / "bin"
    folder.mkdir()
    for name, words in (("python", ""), ("autopar", "-m autopar"), ("torchrun", "-m torch.distributed.run")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder
