"""The style that a tool cannot check: sizes, booleans, TODOs, test names."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import autopar
from tests.source_tree import CODE_FOLDERS, PACKAGE_FOLDERS, ROOT, functions, modules, python_files, text_files

LONGEST_FILE, LONGEST_FUNCTION = 500, 50


def test_every_file_stays_under_500_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in python_files(*CODE_FOLDERS)}
    assert not _listed(lengths, LONGEST_FILE)


def test_every_function_stays_under_50_lines() -> None:
    lengths = {}
    for path in python_files(*CODE_FOLDERS):
        for name, function in functions(ast.parse(path.read_text())):
            lengths[f"{path.relative_to(ROOT)}:{function.lineno} {name}"] = _length(function)
    assert not _listed(lengths, LONGEST_FUNCTION)


def test_no_public_function_has_a_boolean_parameter() -> None:
    """Only the names of `autopar.__all__` are public; inside, a function may mirror one of PyTorch's."""
    wrong = [
        f"autopar.{name}({parameter.name})"
        for name, value in public_callables()
        for parameter in inspect.signature(value).parameters.values()
        if str(parameter.annotation) in ("bool", "<class 'bool'>", "bool | None")
    ]
    assert not wrong, "make two functions, an Enum or a policy object:\n" + "\n".join(wrong)


def test_every_module_with_code_says_what_it_is() -> None:
    silent = [
        str(module.path) for module in modules().values() if module.tree.body and not ast.get_docstring(module.tree)
    ]
    assert not silent, "\n".join(silent)


def test_every_todo_names_its_issue() -> None:
    mark = "TO" + "DO"
    wrong = []
    for path in text_files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if (
                re.search(rf"\b{mark}\b(?!\(#\d+\))", line)
                and path.suffix == ".py"
                and path != Path(__file__).resolve()
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert not wrong, f"write {mark}(#issue):\n" + "\n".join(wrong)


def test_what_silences_a_type_checker_or_catches_everything_says_why() -> None:
    broad = re.compile(r"type: ignore(\[[\w, -]+\])?|except (Base)?Exception( as \w+)?:")
    wrong = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in python_files(*CODE_FOLDERS)
        if ROOT / "tests" not in path.parents
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := broad.search(line)) and not re.match(r"\s+# \w", line[found.end() :])
    ]
    assert not wrong, "type it, or narrow it; else say on the line why it is right:\n" + "\n".join(wrong)


def test_every_test_name_is_a_sentence() -> None:
    short = []
    for path in python_files("tests"):
        for name, function in functions(ast.parse(path.read_text())):
            if function.name.startswith("test_") and function.name.count("_") < 3:
                short.append(f"{path.relative_to(ROOT)}:{function.lineno} {name}")
    assert not short, "say what holds, in at least three words:\n" + "\n".join(short)


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in python_files(*PACKAGE_FOLDERS)}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _listed(lengths: dict[Path, int] | dict[str, int], limit: int) -> list[str]:
    return [f"{name}: {length} lines" for name, length in lengths.items() if length >= limit]


def public_callables() -> Iterator[tuple[str, Callable[..., object]]]:
    """Every public function, and every public method that a public class of autopar defines itself."""
    for name in autopar.__all__:
        value = getattr(autopar, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            methods = inspect.getmembers_static(value, inspect.isfunction)
            yield from ((f"{name}.{method}", body) for method, body in methods if _is_own_and_public(body))


def _is_own_and_public(method: Callable[..., object]) -> bool:
    return method.__module__.startswith("autopar.") and not method.__name__.startswith("_")
