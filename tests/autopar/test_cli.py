"""The command line: one exit code for each kind of ending, errors without a traceback, JSON when asked."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
from autopar import cli
from autopar.errors import MeshError
from autopar.model_source import parse_mesh_shape
from tests.source_tree import ROOT

Run = Callable[[argparse.Namespace], int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Makes `autopar probe` the only command, with a given body."""

    def install(run: Run) -> None:
        def add_commands(subparsers: cli.SubParsers) -> None:
            subparsers.add_parser("probe").set_defaults(run=run)

        monkeypatch.setattr(cli, "COMMAND_ROOMS", (add_commands,))

    return install


def failing(_: argparse.Namespace) -> int:
    """Ends as a command on a bad mesh does."""
    raise MeshError("the mesh is larger than the world", where="train.py:3 in main", fix="start more processes")


@pytest.mark.parametrize("code", [cli.OK, cli.CHECK_FAILED])
def test_the_exit_code_is_what_the_command_returns(command: Callable[[Run], None], code: int) -> None:
    command(lambda _: code)
    assert cli.main(["probe"]) == code


def test_an_error_is_printed_without_traceback_and_ends_with_2(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(failing)
    assert cli.main(["probe"]) == cli.BAD_USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "MeshError: the mesh is larger than the world\n  at train.py:3 in main\n  fix: start more processes\n"
    )


def test_an_error_is_one_json_object_when_json_is_asked_for(
    command: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(failing)
    assert cli.main(["probe", "--json"]) == cli.BAD_USAGE
    assert json.loads(capsys.readouterr().out) == {
        "error": "MeshError",
        "what": "the mesh is larger than the world",
        "where": "train.py:3 in main",
        "fix": "start more processes",
    }


def test_a_malformed_argument_of_our_own_type_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_commands(subparsers: cli.SubParsers) -> None:
        subparsers.add_parser("probe").add_argument("--mesh", type=parse_mesh_shape)

    monkeypatch.setattr(cli, "COMMAND_ROOMS", (add_commands,))
    assert cli.main(["probe", "--mesh", "2*2"]) == cli.BAD_USAGE
    assert capsys.readouterr().err.startswith("MeshError: '2*2' is not a mesh shape")


def test_our_own_mistake_keeps_its_traceback(command: Callable[[Run], None]) -> None:
    command(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_interrupt_ends_with_the_shells_code_for_it(command: Callable[[Run], None]) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["probe"]) == cli.INTERRUPTED


def test_a_command_without_a_name_gets_the_help_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.BAD_USAGE
    assert "usage: autopar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["no-such-command"], "invalid choice: 'no-such-command'"),
        (["plan", "my_models:gpt"], "the following arguments are required: --mesh"),
        (["diff", "a.json", "b.json", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["schedule", "--stages", "many", "--microbatches", "8"], "argument --stages: invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_ends_with_2_and_says_so_in_json_too(
    capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert cli.main(words) == cli.BAD_USAGE
    output = capsys.readouterr()
    assert output.out == "" and what in output.err and "--help, which has an example" in output.err
    assert cli.main([*words, "--json"]) == cli.BAD_USAGE
    assert what in json.loads(capsys.readouterr().out)["what"]


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command, by name."""
    parser = cli.make_parser(cli.COMMAND_ROOMS)
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("name", commands())
def test_every_command_has_json_a_body_and_help_with_an_example_that_can_be_parsed(name: str) -> None:
    command = commands()[name]
    assert "--json" in command.format_help()
    assert callable(command.get_default("run"))
    assert command.epilog is not None and command.epilog.startswith("example: ")
    words = shlex.split(command.epilog.partition(" > ")[0].removeprefix("example: "))
    words = words[words.index("autopar") + 1 :]
    assert words[0] == name
    assert cli.make_parser(cli.COMMAND_ROOMS).parse_args(words).run == command.get_default("run")
    assert f"`{name}`" in (ROOT / "docs/command_line.md").read_text()


def test_modules_of_the_current_folder_can_be_named(
    command: Callable[[Run], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command(lambda _: cli.OK if str(tmp_path) in sys.path else cli.CHECK_FAILED)
    assert cli.main(["probe"]) == cli.OK
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    "program",
    [
        pytest.param([sys.executable, "-X", "importtime", "-m", "autopar"], id="python -m autopar"),
        pytest.param([str(Path(sys.executable).parent / "autopar")], id="autopar"),
    ],
)
def test_the_command_prints_its_version(program: list[str]) -> None:
    ended = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"autopar {autopar.__version__}\n"
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"pandas", "scipy.optimize", "transformers", "matplotlib"}  # few commands need them


CHATTY = """
import sys
from autopar import cli
def talk(_):
    for number in range(100_000): print(number)
    return 0
cli.COMMAND_ROOMS = (lambda subparsers: subparsers.add_parser("talk").set_defaults(run=talk),)
sys.exit(cli.main(["talk"]))
"""


def test_a_reader_that_closes_early_is_no_error() -> None:
    talker = subprocess.Popen([sys.executable, "-c", CHATTY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with talker:
        assert talker.stdout is not None and talker.stderr is not None
        assert talker.stdout.readline() == "0\n"
        talker.stdout.close()
        assert talker.stderr.read() == ""
    assert talker.returncode == cli.OK


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "schedule",
        "--name",
        "1f1b",
        "--stages",
        "2",
        "--microbatches",
        "2",
        "--trace",
        str(tmp_path / "no/t.json"),
    ]
    assert cli.main(words) == cli.BAD_USAGE
    assert "t.json" in capsys.readouterr().err
