"""Capture: every kind of model and of call becomes a joint graph that computes what eager PyTorch computes."""

from __future__ import annotations

import functools
import heapq
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import (
    CaptureError,
    DataDependentError,
    MeshError,
    MutatedInputError,
    NoParametersError,
    OmittedOutputError,
)
from autopar.verification import compare, eager_values, traced_values


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids) * self.frozen)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Counting(nn.Module):
    """A buffer changed in place, one set by assignment, batch norm's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.norm(self.linear(x)).sin()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = (
            nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4)),
            nn.Linear(4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(checkpoint(self.inner, x, use_reentrant=False)).sum()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any], scale: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
        y = self.linear(batch["x"][0]) * scale
        return y, {"twice": [2 * y, "name"], "count": 3}


class HalfInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).float().pow(2).mean()


class Call(NamedTuple):
    make: Callable[[], nn.Module]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never written


def ids() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4)


CALLS = {
    "tied, frozen and unused parameters, a loss beside logits": Call(Tied, (ids(),), {"labels": ids()}),
    "buffers changed in place and by assignment": Call(Counting, (torch.arange(24.0).reshape(6, 4).sin(),)),
    "nested inputs and outputs, a float argument": Call(Nested, ({"x": [torch.ones(3, 4)]},), {"scale": 2.0}),
    "autocast inside the model": Call(HalfInside, (torch.arange(16.0).reshape(2, 8).cos(),)),
    "loss outside": Call(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(3, 4),)),
}


def traced(call: Call) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = call.make()
    return model, capture(model, call.args, call.kwargs)


@pytest.mark.parametrize("name", CALLS)
def test_the_captured_program_computes_what_the_model_computes(name: str) -> None:
    call = CALLS[name]
    model, program = traced(call)
    expected = eager_values(model, program, call.args, call.kwargs)
    actual = traced_values(model, program, tensor_leaves(call.args, call.kwargs), seed=0)
    report = compare(actual, expected, reference="eager")
    assert report.ok, report.table
    assert {item.kind for item in report.comparisons} >= {"output", "gradient"}


@pytest.mark.parametrize("name", CALLS)
def test_capture_leaves_the_model_and_the_random_state_as_they_were(name: str) -> None:
    torch.manual_seed(0)
    model = CALLS[name].make()
    before = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    random_state = torch.get_rng_state()
    capture(model, CALLS[name].args, CALLS[name].kwargs)
    assert torch.equal(torch.get_rng_state(), random_state)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for key, (same, copy) in before.items():
        assert after[key] is same
        assert torch.equal(same, copy)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_checkpointed_region_draws_the_same_mask_when_it_is_recomputed() -> None:
    torch.manual_seed(0)
    _, program = traced(Call(Checkpointed, (torch.ones(5, 4),)))
    masks = [node for node in program.graph_module.graph.nodes if "random_mask" in str(node.target)]
    assert [node.meta["phase"] for node in masks] == ["forward", "backward"]
    assert masks[0].args[1:] == masks[1].args[1:]


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        _, program = traced(CALLS["loss outside"])
    assert {output.kind for output in program.outputs} == {OutputKind.OUTPUT}
    assert all(node.meta["phase"] == "forward" for node in program.graph_module.graph.nodes)
    assert not program.named_inputs(InputKind.TANGENT)


def test_eval_and_train_are_different_programs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    kinds = [
        {output.kind for output in capture(model.train(mode), (torch.ones(3, 4),), {}).outputs}
        for mode in (True, False)
    ]
    assert OutputKind.BUFFER in kinds[0]
    assert OutputKind.BUFFER not in kinds[1]


def test_an_exported_program_and_a_graph_module_capture_like_the_module() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.ones(3, 4)
    programs = [capture(m, (x,), {}) for m in (model, torch.fx.symbolic_trace(model), torch.export.export(model, (x,)))]
    names = [[output.name for output in program.outputs if output.kind is OutputKind.GRADIENT] for program in programs]
    assert names[0] == names[1] == names[2] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    counts = [sum(node.op == "call_function" for node in program.graph_module.graph.nodes) for program in programs]
    assert len(set(counts)) == 1


def test_backward_ops_know_the_module_and_the_line_of_their_forward() -> None:
    model, program = traced(CALLS["tied, frozen and unused parameters, a loss beside logits"])
    del model
    backward = [node for node in program.graph_module.graph.nodes if node.meta["phase"] == "backward"]
    matmuls = [node for node in backward if "aten.mm" in str(node.target)]
    assert {node.meta["module"] for node in matmuls} == {"head"}
    assert all("logits = self.head" in node.meta["where"] for node in matmuls)


def test_keys_are_unique_and_do_not_depend_on_node_numbers() -> None:
    programs = [traced(CALLS["loss outside"])[1] for _ in range(2)]
    keys = [
        [node.meta["key"] for node in program.graph_module.graph.nodes if node.op == "call_function"]
        for program in programs
    ]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(keys[0])


def test_inputs_that_require_gradients_get_them() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    program = capture(nn.Linear(4, 2), (x,), {})
    assert "input:0" in {output.name for output in program.outputs if output.kind is OutputKind.GRADIENT}


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Shaping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x[:, 0] > 0]


class Writing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x)


class Choosing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * heapq.nsmallest(1, list(x.sum(1)))[0]  # Python's own code compares them


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entries = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), x[0, :2], (3, 3))
        return torch.sparse.mm(entries, super().forward(x))


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(5, 5))


@pytest.mark.parametrize(
    ("make", "error", "line"),
    [
        (Branching, DataDependentError, "if x.sum() > 0"),
        (Shaping, DataDependentError, "[x[:, 0] > 0]"),
        (Writing, MutatedInputError, "x.mul_(2)"),
        (Sparse, CaptureError, "torch.sparse_coo_tensor"),
        (Choosing, DataDependentError, "heapq.nsmallest"),
        (Failing, CaptureError, "x.reshape(5, 5)"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_users_line(
    make: type[nn.Linear], error: type[CaptureError], line: str
) -> None:
    with pytest.raises(error) as caught:
        capture(make(4, 4), (torch.ones(3, 4),), {})
    assert line in caught.value.where
    assert "test_capture.py" in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize("name", ["", "1"])
def test_torchscript_is_refused_by_name(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), script) if name else script
    with pytest.raises(CaptureError, match=f"{name or 'the model'} is TorchScript"):
        capture(model, (torch.ones(3, 4),), {})


def test_a_device_that_this_pytorch_was_built_without_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(MeshError, match="built without cuda"):
        capture(nn.Linear(4, 4), (torch.ones(3, 4),), {}, device="cuda")


def test_a_sparse_input_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the input '0' is a tensor of layout torch\.sparse_coo"):
        capture(nn.Linear(4, 4), (torch.eye(4).to_sparse(),), {})


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(NoParametersError, match="ReLU has no parameters"):
        capture(nn.ReLU(), (torch.ones(2),), {})


class Remembering(nn.Linear):
    """Keeps tensors in an attribute, a list and a dict, and a flag that they are there."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[torch.Tensor] = []
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.last, self.ready = y, True
        self.seen.append(y)
        self.cache["y"] = y
        return y


def test_no_fake_tensor_stays_in_the_model_and_flags_do() -> None:
    model = Remembering()
    capture(model, (torch.ones(3, 4),), {})
    assert (model.seen, model.cache, model.ready, hasattr(model, "last")) == ([], {}, True, False)


class Caching(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": super().forward(x), "cache": object()}


def test_an_output_that_is_no_tensor_is_left_out_and_says_so_when_it_is_used() -> None:
    program = capture(Caching(4, 4), (torch.ones(3, 4),), {})
    omitted: Any = program.output_leaves[1]
    assert not hasattr(omitted, "anything")
    with pytest.raises(OmittedOutputError, match="'cache', a object, is not carried over"):
        omitted[0]


def remembered(function: Any) -> Any:
    """A cached function in a wrapper, as libraries decorate methods."""
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return cached(*args)

    return wrapper


@functools.lru_cache
def ramp(size: int) -> torch.Tensor:
    return torch.arange(size).float()


class CachingFunctions(nn.Module):
    """Tensors that are made once, behind caches of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.ones = functools.lru_cache(lambda size: torch.ones(size))

    @staticmethod
    @remembered
    def shift(size: int) -> torch.Tensor:
        return torch.linspace(0, 1, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        return self.body(x) * ramp(size) + self.shift(size) * self.ones(size)


def test_no_fake_tensor_stays_in_a_cached_function() -> None:
    model, x = CachingFunctions(), torch.randn(3, 4)
    capture(model, (x,), {})
    expected = model.body(x) * torch.arange(4.0) + torch.linspace(0, 1, 4)
    torch.testing.assert_close(model(x), expected)
