"""The command `autopar`: sub-commands from a table of rooms, one exit code for each kind of ending.

A room's `add_commands(subparsers)` adds its sub-commands; each sets `run`, a function from the parsed arguments to
an exit code, by `set_defaults(run=...)`. Every sub-command has `--json`, added here if the room did not.

Exit codes: 0 done and every check held; 1 a check failed; 2 bad usage or an `AutoparError`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from autopar import commands, completion_commands, plan_commands
from autopar.cost_models import commands as cost_model_commands
from autopar.errors import AutoparError, UsageError
from autopar.schedules import commands as schedule_commands
from autopar.search import commands as search_commands
from autopar.search import expert_commands
from autopar.version import __version__
from autopar.zoo import commands as zoo_commands

SubParsers = Any  # argparse's own type for this is private
AddCommands = Callable[[SubParsers], None]

OK, CHECK_FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

COMMAND_ROOMS: tuple[AddCommands, ...] = (  # in the order that --help lists them
    commands.add_commands,
    plan_commands.add_commands,
    search_commands.add_commands,
    expert_commands.add_commands,
    schedule_commands.add_commands,
    cost_model_commands.add_commands,
    zoo_commands.add_commands,
    completion_commands.add_commands,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    age_s = process_age_s() if arguments is None else 0.0
    try:
        with _current_folder_importable():
            code = _run(words, age_s)
        sys.stdout.flush()
    except AutoparError as error:  # also of a parser's `type=`, as a malformed mesh
        _report(error, words)
        return BAD_USAGE
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        where = str(error.filename or "")
        _report(
            UsageError(f"a file cannot be written or read: {error.strerror}", where=where, fix="name another"), words
        )
        return BAD_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed, as `| head` does: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    return code


def _run(words: Sequence[str], age_s: float) -> int:
    """`age_s`: seconds that starting took, which a command with a time limit counts in."""
    parser = make_parser(COMMAND_ROOMS)
    chosen = parser.parse_args(words, argparse.Namespace(age_s=age_s, parser=parser))
    if not hasattr(chosen, "run"):
        parser.print_help(sys.stderr)
        return BAD_USAGE
    return int(chosen.run(chosen))


def process_age_s() -> float:
    """Seconds since this process began; where the system does not tell, the CPU seconds it has used."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # ticks after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()


class _Parser(argparse.ArgumentParser):
    """Tells a wrong command as every other error is told."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see {self.prog} --help, which has an example")


def make_parser(rooms: Sequence[AddCommands]) -> argparse.ArgumentParser:
    """The parser with every room's sub-commands."""
    parser = _Parser(
        prog="autopar",
        description="Turn a single-device PyTorch model into a distributed one.",
        epilog="A model is named as package.module:factory, which returns (model, example_inputs), or as hf:CONFIG. "
        "Exit codes: 0 done, 1 a check failed, 2 an error, told without a traceback. "
        "Example: autopar plan hf:gpt2:8x1024 --mesh 2x4",
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add_commands in rooms:
        add_commands(subparsers)
    for command in subparsers.choices.values():
        with suppress(argparse.ArgumentError):  # the room has its own
            command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _report(error: AutoparError, words: Sequence[str]) -> None:
    kind = type(error).__name__
    if "--json" in words:
        print(json.dumps({"error": kind, "what": error.what, "where": error.where, "fix": error.fix}))
    else:
        print(f"{kind}: {error}", file=sys.stderr)


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Look for the user's modules in the current folder first, as `python -m` does."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
