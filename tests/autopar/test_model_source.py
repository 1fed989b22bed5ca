"""`package.module:factory` finds a model, or says exactly why it does not."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autopar.errors import MeshError, ModelSourceError
from autopar.model_source import load_model, parse_mesh_shape

Write = Callable[[str], str]
_NUMBERS = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes an importable module and gives its name: a new one each time, since Python keeps what it imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_module(body: str) -> str:
        name = f"model_source_case_{next(_NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        return name

    return write_module


def test_a_factory_that_returns_a_model_gives_a_model_without_inputs() -> None:
    source = load_model("torch.nn:Identity")
    assert isinstance(source.model, torch.nn.Identity)
    assert source.example_inputs is None


@pytest.mark.parametrize("inputs", ["torch.ones(2, 4)", "(torch.ones(2, 4),)", "{'input': torch.ones(2, 4)}"])
def test_a_factory_may_return_example_inputs_of_every_form(write: Write, inputs: str) -> None:
    name = write(f"import torch\ndef make(): return torch.nn.Linear(4, 4), {inputs}")
    assert load_model(f"{name}:make").require_inputs() is not None


def test_a_factory_may_be_an_attribute_of_a_class(write: Write) -> None:
    name = write("import torch\nclass Zoo:\n    @staticmethod\n    def linear(): return torch.nn.Linear(2, 2)")
    assert isinstance(load_model(f"{name}:Zoo.linear").model, torch.nn.Linear)


def test_an_exported_program_is_a_model(write: Write) -> None:
    name = write(
        """
        import torch
        def make():
            return torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        """
    )
    assert isinstance(load_model(f"{name}:make").model, torch.export.ExportedProgram)


def test_the_factory_runs_under_the_callers_default_device() -> None:
    with torch.device("meta"):
        source = load_model("torch.nn:Identity")
    assert not list(source.model.parameters())


def test_missing_inputs_are_asked_for() -> None:
    with pytest.raises(ModelSourceError, match=r"(?s)without example inputs.*return \(model, example_inputs\)"):
        load_model("torch.nn:Identity").require_inputs()


@pytest.mark.parametrize("text", ["", "torch.nn", "torch.nn:", ":Identity", "torch/nn.py:Identity", "a:b:c", "a b:c"])
def test_text_that_names_no_model_is_told_the_form(text: str) -> None:
    with pytest.raises(ModelSourceError, match=r"package\.module:factory"):
        load_model(text)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelSourceError, match=r"(?s)there is no module no_such_package_here.*run from the folder"):
        load_model("no_such_package_here.models:make")


def test_a_module_that_lacks_a_dependency_is_not_called_missing(write: Write) -> None:
    name = write("import no_such_dependency_here\ndef make(): ...")
    with pytest.raises(ModelSourceError, match=rf"(?s){name} cannot be imported.*no_such_dependency_here.*{name}.py:1"):
        load_model(f"{name}:make")


def test_a_module_that_is_not_python_is_told_its_line(write: Write) -> None:
    name = write("x = 1\ndef make(: pass")
    with pytest.raises(ModelSourceError, match=rf"(?s)SyntaxError.*at {name}.py:2"):
        load_model(f"{name}:make")


def test_a_misspelled_factory_is_told_the_near_names(write: Write) -> None:
    name = write("def make_model(): ...")
    with pytest.raises(ModelSourceError, match=r"(?s)has no make_modle.*did you mean make_model"):
        load_model(f"{name}:make_modle")


def test_a_factory_with_required_parameters_is_told_which(write: Write) -> None:
    name = write("def make(layers, width, heads=2): ...")
    with pytest.raises(ModelSourceError, match="it needs layers, width"):
        load_model(f"{name}:make")


def test_a_factory_that_fails_shows_the_users_line(write: Write) -> None:
    name = write("def make():\n    return 1 // 0  # here")
    with pytest.raises(ModelSourceError, match=rf"(?s)ZeroDivisionError.*at {name}.py:2 in make: return 1 // 0"):
        load_model(f"{name}:make")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("make = 3", "is of type int: it cannot be called"),
        ("import torch\nmake = torch.nn.Identity()", "is a model, not a function"),
        ("def make(): return 3", "returned a value of type int, not a model"),
        ("import torch\ndef make(): return torch.nn.Identity(), [1]", "returned example inputs of type list"),
        ("import torch\ndef make(): return torch.nn.Identity(), 1, 2", "returned a value of type tuple, not a model"),
    ],
)
def test_what_is_not_a_model_is_refused(write: Write, body: str, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message):
        load_model(f"{write(body)}:make")


@pytest.mark.parametrize(("text", "shape"), [("1", (1,)), ("8", (8,)), ("2x4", (2, 4)), ("2x2x16", (2, 2, 16))])
def test_a_mesh_shape_is_sizes_with_x_between(text: str, shape: tuple[int, ...]) -> None:
    assert parse_mesh_shape(text) == shape


@pytest.mark.parametrize("text", ["", "0", "2x0", "x2", "2x", "2X4", "2*4", "2,4", "-2", "2.5", " 2", "two"])
def test_what_is_not_a_mesh_shape_is_told_the_form(text: str) -> None:
    with pytest.raises(MeshError, match="2x4"):
        parse_mesh_shape(text)
