"""The command `completion`: a script that completes autopar's commands, options and files in a shell."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shtab

from autopar.cost_models.hardware import profile_names
from autopar.planner.hand_plans import HAND_PLANS
from autopar.search.registry import strategy_names

FILES = {
    "plan",
    "left",
    "right",
    "output",
    "export_problem",
    "trace",
    "recording",
}  # by destination; Paths are files too
NAMES = {
    "search": lambda: (*strategy_names(), *HAND_PLANS),
    "strategy": strategy_names,
    "hardware": profile_names,
    "on": profile_names,
}


def add_commands(subparsers: Any) -> None:
    """Add `completion`."""
    completion = subparsers.add_parser(
        "completion",
        help="print a script that completes commands, options and files in a shell",
        description="bash: write it to ~/.local/share/bash-completion/completions/autopar. "
        "zsh: write it to a file _autopar in a folder of $fpath. tcsh: source it.",
        epilog="example: autopar completion bash > ~/.local/share/bash-completion/completions/autopar",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=run_completion)


def run_completion(chosen: argparse.Namespace) -> int:
    """Print the script of the whole command line."""
    parser = chosen.parser
    for action in _actions(parser):
        if action.type is Path or action.dest in FILES:
            vars(action)["complete"] = shtab.FILE  # where shtab looks for it
        elif action.dest in NAMES:
            action.choices = NAMES[action.dest]()
    script = shtab.complete(parser, chosen.shell)
    print(json.dumps({"shell": chosen.shell, "script": script}) if chosen.json else script)
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
