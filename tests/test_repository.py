"""The repository around the code keeps its promises: README, CI, documents, package metadata."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import errors
from docs import make_api
from tests.source_tree import ROOT, text_files

README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def command_under(heading: str) -> str:
    """The first shell block of the README below a heading."""
    match = re.search(rf"^#+ {re.escape(heading)}\n.*?^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert match is not None, f"README.md has no bash block under {heading!r}"
    return match[1]


def test_ci_runs_exactly_the_test_command_of_the_readme() -> None:
    assert command_under("Run the tests") in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("heading", ["Sixty seconds", "Run the tests"])
def test_a_readme_command_starts_from_nothing_and_pins_torch_before_the_package(heading: str) -> None:
    command = command_under(heading)
    order = [command.index(part) for part in ("python3 -m venv", "pip install torch==", "pip install -e")]
    assert order == sorted(order)
    assert (ROOT / "examples/quickstart.py").exists()


def test_the_readme_installs_a_torch_that_the_package_accepts() -> None:
    wanted = re.search(r"torch==([\d.]+)", README)
    least = re.search(r"torch>=([\d.]+)", " ".join(project()["dependencies"]))
    assert wanted and least
    assert version_numbers(wanted[1]) >= version_numbers(least[1])


def test_ci_is_a_strict_shell_script() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_of_a_document_leads_to_a_file_and_a_heading(document: Path) -> None:
    wrong = []
    for path, anchor in LINK.findall(FENCED.sub("", document.read_text())):
        target = document.parent / path if path else document
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{path}#{anchor}")
    assert not wrong


def anchors(document: Path) -> set[str]:
    """The headings of a document as GitHub names them."""
    headings = HEADING.findall(FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_of_the_docs_names_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text()
    others = [path for path in (ROOT / "docs").glob("**/*.md") if path.name != "README.md"]
    assert not [path.name for path in others if f"({path.relative_to(ROOT / 'docs')})" not in index]


def test_the_api_reference_is_that_of_the_docstrings() -> None:
    assert (ROOT / "docs/api.md").read_text() == make_api.page(), "run python -m docs.make_api"


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert f"`autopar.{name}`" in (ROOT / "docs/api.md").read_text()
    value = getattr(autopar, name)
    assert isinstance(value, str) or (value.__doc__ or "").strip(), f"autopar.{name} has no docstring"


@pytest.mark.parametrize("name", [name for name, it in vars(errors).items() if isinstance(it, type)])
def test_every_error_is_in_the_page_on_troubleshooting(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs/troubleshooting.md").read_text().replace("autopar.errors.", "")


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"## {autopar.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_python_versions_agree_in_every_tool() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    least = project()["requires-python"].removeprefix(">=")
    assert settings["tool"]["mypy"]["python_version"] == least
    assert settings["tool"]["ruff"]["target-version"] == f"py{least.replace('.', '')}"


def test_the_two_links_of_the_package_lead_to_the_top_level_folders() -> None:
    for name in ("passes", "cost_models"):
        link = ROOT / "autopar" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name


def test_no_path_of_one_machine_is_in_the_tree() -> None:
    roots = "|".join(("work", "opt", "root", "home", "Users"))
    absolute = re.compile(rf"(?<![\w./~$}}-])/(?:{roots})/[\w.-]+")
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if absolute.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}")
    assert not found, "\n".join(found)


def project() -> dict[str, Any]:
    """The `[project]` table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def version_numbers(text: str) -> tuple[int, ...]:
    """`2.13.0` as numbers that compare."""
    return tuple(int(part) for part in text.split("."))
