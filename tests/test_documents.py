"""The examples in documents and docstrings are true: they run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import autopar
from tests.source_tree import ROOT, modules

EXAMPLES = sorted(module.name for module in modules().values() if ">>> " in (ROOT / module.path).read_text())
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_in_a_modules_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", [name for name in autopar.__all__ if inspect.isfunction(getattr(autopar, name))])
def test_every_public_function_has_an_example(name: str) -> None:
    assert ">>> " in (getattr(autopar, name).__doc__ or "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_is_python(page: Path) -> None:
    for number, block in enumerate(PYTHON_BLOCK.findall(page.read_text())):
        if not block.startswith(">>> "):
            compile(block, f"{page}, block {number}", "exec")
