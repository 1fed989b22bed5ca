"""Bad input: one error of autopar.errors with what, where and what to do; the model stays as it was; nothing hangs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    AutoparError,
    CaptureError,
    ConstraintError,
    DataDependentError,
    FileWriteError,
    HardwareProfileError,
    MemoryLimitError,
    MeshError,
    MutatedInputError,
    NoParametersError,
    NotDivisibleError,
    PlanError,
    PlanFormatError,
    UnknownStrategyError,
    UnsupportedOptionError,
)
from tests.autopar.models import MODELS


class Layer(nn.Module):
    """What the modules below vary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        result: Tensor = self.layer(x)
        return result


class Branches(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class ReadsItem(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.max().item()


class PicksRows(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x.sum(1) > 0]


class WritesInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return super().forward(x)


class WritesPartOfInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x[0, 1:] = 0
        return super().forward(x)


class WritesParameter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return super().forward(x)


class Breaks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last.no_such_thing()  # type: ignore[no-any-return, operator]  # wrong on purpose


class Remembers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def plan(model: Any = None, mesh: Any = (2,), inputs: Any = None, **options: Any) -> autopar.Plan:
    model = nn.Linear(4, 4) if model is None else model
    return autopar.make_plan(model, mesh, example_inputs=batch() if inputs is None else inputs, **options)


def error_of(action: Callable[[], Any]) -> AutoparError:
    """The error that `action` raises, which must be one of autopar's and say what to do."""
    with pytest.raises(AutoparError) as caught:
        action()
    assert caught.value.what and caught.value.fix, str(caught.value)
    return caught.value


def snapshot(model: nn.Module) -> Any:
    """All that a user can see of a model, copied."""
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    modes = {name: module.training for name, module in model.named_modules()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    tensors = {name: (id(tensor), tensor.detach().clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    return attributes, modes, hooks, tensors


def assert_untouched(model: nn.Module, before: Any) -> None:
    now = snapshot(model)
    assert now[:3] == before[:3]
    for name, (identity, value) in before[3].items():
        assert now[3][name][0] == identity and torch.equal(now[3][name][1], value), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "kind, expected, line",
    [
        (Branches, DataDependentError, "return y * 2 if y.sum() > 0 else y"),
        (ReadsItem, DataDependentError, "x.max().item()"),
        (PicksRows, DataDependentError, "[x.sum(1) > 0]"),
        (WritesInput, MutatedInputError, "x.add_(1)"),
        (WritesPartOfInput, MutatedInputError, "x[0, 1:] = 0"),
        (WritesParameter, MutatedInputError, "self.layer.weight.mul_(0.5)"),
        (Breaks, CaptureError, "self.last.no_such_thing()"),
    ],
)
@pytest.mark.parametrize("function", [autopar.make_plan, autopar.verify, autopar.run_virtual])
def test_a_model_that_cannot_be_captured_is_refused_with_its_line_and_left_as_it_was(
    function: Callable[..., Any], kind: type[Layer], expected: type[AutoparError], line: str
) -> None:
    model, inputs = kind(), batch()
    before, state = snapshot(model), torch.get_rng_state()
    error = error_of(lambda: function(model, (2,), example_inputs=inputs))
    assert type(error) is expected
    assert "test_bad_input.py:" in error.where and line in error.where
    assert_untouched(model, before)
    assert torch.equal(inputs, batch()) and torch.equal(torch.get_rng_state(), state)


def test_a_model_that_keeps_a_tensor_of_its_forward_is_left_without_it() -> None:
    model = Remembers()
    before = snapshot(model)
    plan(model)
    assert_untouched(model, before)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Sequential()])
def test_a_model_without_parameters_is_refused(model: nn.Module) -> None:
    assert type(error_of(lambda: plan(model))) is NoParametersError
    assert type(error_of(lambda: autopar.verify(model, (2,), example_inputs=batch()))) is NoParametersError


@pytest.mark.parametrize("model", ["a model", nn.Linear, lambda x: x])
def test_what_is_no_model_is_refused(model: Any) -> None:
    assert type(error_of(lambda: plan(model))) is CaptureError


@pytest.mark.parametrize("inputs", [3, "text", {1, 2}, (), {"y": batch()}, (batch(), batch()), torch.zeros(8, 5)])
def test_inputs_that_the_model_does_not_take_are_refused(inputs: Any) -> None:
    assert type(error_of(lambda: plan(inputs=inputs))) is CaptureError


@pytest.mark.parametrize("mesh", [0, -1, (), (2, 0), "24", (2, "a"), 2.5, (2, 2.5), None, torch.ones(2, 2)])
def test_a_mesh_that_has_no_shape_is_refused(mesh: Any) -> None:
    assert type(error_of(lambda: plan(mesh=mesh))) is MeshError


def test_a_virtual_mesh_cannot_be_compiled_for() -> None:
    error = error_of(lambda: autopar.compile(nn.Linear(4, 4), autopar.Mesh((2,))))  # type: ignore[arg-type]  # wrong on purpose
    assert type(error) is MeshError and "init_device_mesh" in error.fix


@pytest.mark.parametrize("search, ranks", [("ddp", 4), ("fsdp", 4), ("ddp", 5)])
def test_a_batch_that_does_not_divide_is_refused_by_a_plan_that_cuts_it(search: str, ranks: int) -> None:
    error = error_of(lambda: plan(mesh=(ranks,), inputs=batch(6), search=search))
    assert type(error) is NotDivisibleError and f"6 does not divide over {ranks} ranks" in error.what
    assert autopar.verify(nn.Linear(4, 4), (ranks,), example_inputs=batch(6)).ok  # the search finds another way


@pytest.mark.parametrize("rows", [8, 7])
def test_a_memory_limit_that_cannot_be_met_says_by_how_much_and_what_dominates(rows: int) -> None:
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 4))
    for hardware, dominant in (("cpu", "parameter"), ("h100", "gathered")):  # a GPU has a host for its parameters
        options = {"memory_limit_bytes": 2000, "hardware": hardware}
        error = error_of(lambda options=options: plan(model, (4,), batch(rows), **options))
        assert type(error) is MemoryLimitError
        for part in ("2000 bytes per rank", "needs", "too much", dominant):
            assert part in error.what


def test_a_memory_limit_that_a_hand_plan_meets_is_met() -> None:
    model, inputs = MODELS["mlp"]()
    hand = plan(model, (2,), inputs, search="megatron", hardware="cpu")
    limit = int(1.1 * hand.peak_bytes)
    assert plan(model, (2,), inputs, hardware="cpu", memory_limit_bytes=limit).peak_bytes <= limit


@pytest.mark.parametrize(
    "options, expected, said",
    [
        ({"search": "quantum"}, UnknownStrategyError, "ilp"),
        ({"search": 3}, UnknownStrategyError, "ilp"),
        ({"memory_limit_bytes": "16 GB"}, UnsupportedOptionError, "'16 GB'"),
        ({"memory_limit_bytes": True}, UnsupportedOptionError, "True"),
        ({"memory_limit_bytes": -1}, MemoryLimitError, "-1"),
        ({"memory_limit_bytes": float("nan")}, MemoryLimitError, "nan"),
        ({"hardware": "abacus"}, HardwareProfileError, "h100"),
        ({"hardware": 3}, HardwareProfileError, "int"),
        ({"optimizer": "adam"}, UnsupportedOptionError, "'adam'"),
        ({"optimizer": lambda parameters: 3}, UnsupportedOptionError, "factory"),
        ({"precision": "fp7"}, UnsupportedOptionError, "precision"),
        ({"stages": 3}, MeshError, "3 stages"),
        ({"stages": 0}, UnsupportedOptionError, "from 1 on"),
        ({"schedule": "1f1b"}, UnsupportedOptionError, "schedule"),
        ({"microbatches": 4}, UnsupportedOptionError, "microbatches"),
        ({"backend": "inductor"}, UnsupportedOptionError, "backend"),
        ({"plan": 3}, PlanError, "int"),
        ({"plan": "no_such_file.json"}, PlanFormatError, "no_such_file.json"),
        ({"constraints": {"nothing": "R"}}, ConstraintError, "'nothing'"),
        ({"constraints": {"weight": "S7"}}, ConstraintError, "S0"),
        ({"constraints": {"weight": "P"}}, ConstraintError, "S0"),
        ({"constraints": {"weight": "Q"}}, ConstraintError, "'Q'"),
        ({"constraints": {"weight": "R,R"}}, ConstraintError, "1 axes"),
        ({"constraints": {"weight": ""}}, ConstraintError, "weight"),
        ({"constraints": {"weight": None}}, ConstraintError, "None"),
        ({"constraints": {3: "R"}}, ConstraintError, "3"),
        ({"constraints": [("weight",)]}, ConstraintError, "('weight',)"),
        ({"constraints": "weight"}, ConstraintError, "str"),
        ({"constraints": 3}, ConstraintError, "int"),
        ({"constraints": [("weight", "R"), ("wei*", "S0")]}, ConstraintError, "disagree"),
        ({"constraints": {"weight": "S0"}, "search": "ddp"}, ConstraintError, "'ddp'"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_by_name(
    options: dict[str, Any], expected: type[AutoparError], said: str
) -> None:
    error = error_of(lambda: plan(**options))
    assert type(error) is expected and said in str(error)


def test_a_plan_of_another_model_or_mesh_is_refused() -> None:
    made = plan(search="ddp")
    for model, mesh, inputs in (
        (nn.Linear(4, 5), (2,), batch()),
        (nn.Linear(4, 4), (4,), batch()),
        (nn.Linear(4, 4), (2, 1), batch()),
        (nn.Sequential(nn.Linear(4, 4)), (2,), batch()),
    ):
        untouched = copy.deepcopy(model).state_dict()
        error = error_of(lambda model=model, mesh=mesh, inputs=inputs: plan(model, mesh, inputs, plan=made))
        assert type(error) is PlanError and "plan again" in error.fix
        assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())


def test_a_plan_of_another_batch_is_followed_at_prices_of_its_own() -> None:
    made = plan(search="ddp")
    report = autopar.verify(nn.Linear(4, 4), (2,), example_inputs=batch(16), plan=made)
    assert report.ok and report.plan is not None and report.plan.peak_bytes > made.peak_bytes
    assert any("other shapes of inputs" in note for note in report.plan.notes)


def test_a_plan_that_breaks_a_constraint_is_refused() -> None:
    error = error_of(lambda: plan(plan=plan(search="ddp"), constraints={"weight": "S0"}))
    assert type(error) is ConstraintError


def test_what_cannot_be_written_is_told_with_the_place(tmp_path: Path) -> None:
    made, run = plan(), autopar.Recording("", (1,), "cpu")
    missing = str(tmp_path / "no_such_folder" / "out")
    writers: dict[str, Callable[[str], object]] = {
        ".json": made.save,
        ".svg": lambda path: made.plot("memory", path),
        ".png": made.save_frontier,
        ".gz": made.export_problem,
        ".run": run.save,
        ".trace": run.save_trace,
    }
    for ending, write in writers.items():
        error = error_of(lambda write=write, ending=ending: write(missing + ending))
        assert type(error) is FileWriteError and "No such file" in error.what and error.where == missing + ending
    error = error_of(lambda: made.plot("memory", tmp_path / "picture.no_such_format"))
    assert type(error) is FileWriteError and ".png" in error.fix
