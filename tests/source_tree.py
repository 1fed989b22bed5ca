"""The repository as data, for the tests that read it: files, modules, functions and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = {"autopar": "autopar", "passes": "autopar.passes", "cost_models": "autopar.cost_models"}
CODE_FOLDERS = (*PACKAGE_FOLDERS, "tests", "examples", "benchmarks")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".cfg", ".txt", ".csv", ""}


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the package: dotted name, path below the root, syntax tree."""

    name: str
    path: Path
    tree: ast.Module
    is_package: bool  # an __init__.py


def python_files(*folders: str) -> list[Path]:
    """The source files below these folders of the repository, links not followed."""
    return sorted(path for folder in folders for path in walk(ROOT / folder) if path.suffix == ".py")


def text_files() -> list[Path]:
    """Every text file that a clone holds."""
    beside = [path for path in sorted(ROOT.iterdir()) if path.is_file()]
    below = [path for folder in (*CODE_FOLDERS, "docs", ".ci") for path in walk(ROOT / folder)]
    return [path for path in (*beside, *below) if path.suffix in TEXT_SUFFIXES]


def walk(folder: Path) -> Iterator[Path]:
    """Files below a folder; a link to a folder is not entered, nor is what tools leave behind."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() or path.name in ("__pycache__", "venv", "work") or path.suffix == ".egg-info":
            continue
        if path.is_dir():
            yield from walk(path)
        else:
            yield path


@cache
def modules() -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, package in PACKAGE_FOLDERS.items():
        for path in python_files(folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join((package, *(parts[:-1] if is_package else parts)))
            found[name] = Module(name, path.relative_to(ROOT), ast.parse(path.read_text()), is_package)
    return found


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """(module of the package, line) of each import in a module, inside functions too; not those for types alone."""
    for node in _run_time_nodes(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _known(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                yield from _known(submodule if submodule in modules() else base, node.lineno)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, definition) of every function and method."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, owner = pending.pop()
        for node in ast.iter_child_nodes(owner):
            name = f"{prefix}{node.name}" if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{node.name}", node
            pending.append((f"{name}." if name != prefix else prefix, node))


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _run_time_nodes(node)


def _known(name: str, line: int) -> Iterator[tuple[str, int]]:
    if name in modules():
        yield name, line
    elif name.split(".")[0] == "autopar":
        raise AssertionError(f"line {line} imports {name}, which is not a module of the package")


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join((*kept, node.module) if node.module else kept)
