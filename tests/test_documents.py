"""The examples in documents and docstrings are true: they run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import cli
from tests.gloo import run_on_ranks
from tests.source_tree import ROOT, modules

EXAMPLES = sorted(module.name for module in modules().values() if ">>> " in (ROOT / module.path).read_text())
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MADE = "api.md"  # of docstrings, whose examples are run where they stand
WITH_EXAMPLES = [page for page in PAGES if ">>> " in page.read_text() and page.name != MADE]
BLOCK = r"^```{language}\n(.*?)^```"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks_of(page: Path, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return re.findall(BLOCK.format(language=language), page.read_text(), re.MULTILINE | re.DOTALL)


def scripts_of(page: Path) -> list[str]:
    """Blocks of Python that are no session."""
    return [block for block in blocks_of(page, "python") if not block.startswith(">>> ")]


def commands_of(page: Path) -> list[str]:
    """The commands of autopar in a page's text that name what they work on, but for those that leave something out."""
    text = re.sub(BLOCK.format(language=r"\w*"), "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text))
    found = [re.fullmatch(r"(?:python -m )?autopar ([a-z][a-z-]* [^-].*)", span) for span in spans]
    return [match[1] for match in found if match and "..." not in match[1]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_a_modules_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in autopar.__all__ if inspect.isfunction(getattr(autopar, name))])
def test_every_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(autopar, name).__doc__ or "")


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes, it writes there
    result = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("page", [page for page in PAGES if scripts_of(page)], ids=lambda page: page.name)
def test_the_scripts_of_a_page_run_as_they_stand_on_two_ranks(page: Path, tmp_path: Path) -> None:
    """One after the other, with the model and the loader that a reader is told to have."""
    run_on_ranks(run_scripts, 2, page.name, scripts_of(page), tmp_path)


def run_scripts(page: str, scripts: list[str], folder: Path) -> None:
    """On each rank, in a folder of its own; meshes that the scripts ask for have both ranks along their first axis."""
    own = folder / str(dist.get_rank())
    own.mkdir()
    os.chdir(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_mesh, "init_device_mesh", mesh_of_two)
        names = given_to_scripts(own)
        for number, script in enumerate(scripts):
            exec(compile(script, f"{page}, script {number}", "exec"), names)


def mesh_of_two(_device: str, shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None) -> Any:
    """As many axes as were asked for, on the CPU."""
    return init_device_mesh("cpu", (2, *[1] * (len(shape) - 1)), mesh_dim_names=mesh_dim_names)


def given_to_scripts(folder: Path) -> dict[str, Any]:
    """What the text around a script takes for granted: a model, its data, a plan, a problem's file."""
    torch.manual_seed(0)
    ids = torch.randint(256, (32, 8))
    model = TinyModel()
    batch = ids, ids.clone()
    plan = autopar.make_plan(model, (2,), example_inputs=batch, search="ddp")
    plan.export_problem(folder / "problem.json.gz")
    names = {"model": model, "ids": ids, "labels": batch[1], "batch": batch, "loader": [batch] * 2, "plan": plan}
    mesh = init_device_mesh("cpu", (2,))
    pmodel = autopar.compile(model, mesh, example_inputs=batch)
    optim = torch.optim.SGD(pmodel.parameters(), lr=0.1)
    return (
        names
        | {"torch": torch, "autopar": autopar, "mesh": mesh, "pmodel": pmodel, "optim": optim}
        | {"init_device_mesh": mesh_of_two}
    )


class TinyModel(torch.nn.Module):
    """A language model of one layer; `forward(ids, labels)` is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_the_commands_in_a_pages_text_are_commands(page: Path) -> None:
    """Parsed; those in blocks are run by `test_shell_blocks`."""
    for command in commands_of(page):
        words = shlex.split(command)
        assert hasattr(cli.make_parser(cli.COMMAND_ROOMS).parse_args(words), "run"), command
