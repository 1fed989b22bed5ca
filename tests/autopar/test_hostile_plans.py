"""Broken and hostile plan files: a PlanFormatError or PlanError that says what to do, or a plan that is right."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, PlanError, PlanFormatError

TEXTS = {
    "empty": b"",
    "not JSON": b"{plan",
    "cut short": b'{"format": "autopar plan", "schema": 1, "mesh": {',
    "binary": bytes(range(256)),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
    "a list": b"[1, 2]",
    "null": b"null",
    "nested too deep": b"[" * 100_000,
    "a number too long": b'{"format": "autopar plan", "schema": ' + b"9" * 10_000 + b"}",
    "another format": b'{"format": "autoplan", "schema": 1}',
    "another version": b'{"format": "autopar plan", "schema": 2}',
    "nothing but the format": b'{"format": "autopar plan", "schema": 1}',
}
ODD: tuple[Any, ...] = (None, True, -1, 1e999, float("nan"), "", "R", "\ud800", [], [[]], {}, {"x": {}}, 10**400)
LAYOUTS = (
    "R,S0", "S1,S0",
    "", "R", "R,R,R", "S", "S-1", "S9", "S\u00b2", "S" + "9" * 5000, "P", "P(product)", "Q,R", "R,,R", ",", "R R",
    "S0,R -> R,S0", "__import__('os')", "\x00,R", 3, None, ["R", "R"], {"R": "R"},
)  # fmt: skip
OPS = (
    "", "->", "-> ->", "R,R", "R,R ->", "-> R,R", "R,R R,R R,R R,R -> R,R", "R,R -> R", "S0,S0 -> S9,S9", 7, None, [],
    "P,P -> S0,S0",
)  # fmt: skip


def made() -> dict[str, Any]:
    mesh = autopar.Mesh((2, 2), hardware="cpu")
    plan = autopar.make_plan(model(), mesh, example_inputs=inputs(), search="ddp")
    data: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    return data


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def inputs() -> torch.Tensor:
    return torch.ones(8, 4)


def with_one_value_odd(data: Any) -> Iterator[Any]:
    """Copies of a plan in which one value, at any depth, is another or is not there."""
    for path in list(_paths(data)):
        yield _changed(data, path, None, remove="yes")
        for odd in ODD:
            yield _changed(data, path, odd)


def with_another_decision(data: Any) -> Iterator[Any]:
    """Copies in which one decision is another one, is decided twice, or is of something unknown."""
    for section, values in (("parameters", LAYOUTS), ("inputs", LAYOUTS), ("ops", OPS)):
        first = next(iter(data[section]))
        for value in values:
            yield _changed(data, (section, first), value)
        for key in ("", "[", "[]", "x.[0-99999999999]", "x.[3-1]", "x.[0-99999,0-99999]", "no.such/op#0", "\ud800"):
            yield _changed(data, (section, key), data[section][first])
    yield _changed(data, ("parameters", "[0-2].weight"), "R,R")


def _paths(data: Any, depth: int = 2) -> Iterator[tuple[Any, ...]]:
    for key, value in data.items() if isinstance(data, dict) else ():
        yield (key,)
        if depth > 1:
            yield from ((key, *rest) for rest in _paths(value, depth - 1))


def _changed(data: Any, path: tuple[Any, ...], value: Any, remove: str = "no") -> Any:
    changed = copy.deepcopy(data)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    if remove == "yes":
        del holder[path[-1]]
    return changed


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_a_file_that_is_no_plan_is_refused_with_its_name(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(PlanFormatError) as caught:
        autopar.Plan.load(path)
    assert "plan.json" in caught.value.where and caught.value.fix


@pytest.mark.parametrize("path", ["no/such/file", ".", "a\0b"])
def test_a_path_that_leads_to_no_file_is_refused(path: str) -> None:
    with pytest.raises(PlanFormatError):
        autopar.Plan.load(path)


@pytest.mark.parametrize("mutate", [with_one_value_odd, with_another_decision])
def test_a_changed_plan_is_refused_by_name_or_is_right(mutate: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data, mesh = made(), autopar.Mesh((2, 2), hardware="cpu")
    refused = followed = 0
    loaded: dict[str, autopar.Plan] = {}
    for changed in mutate(data):
        path.write_text(json.dumps(changed))
        try:
            plan = autopar.Plan.load(path)
            loaded[repr((plan.mesh_shape, plan.model_hash, plan.entries))] = plan
        except PlanFormatError as error:
            assert "plan.json" in error.where and error.fix
            refused += 1
    for plan in loaded.values():
        try:
            report = autopar.verify(model(), mesh, example_inputs=inputs(), plan=plan)
        except AutoparError as error:
            assert isinstance(error, PlanError) and error.fix, str(error)
            refused += 1
        else:
            assert report.ok, report.table
            followed += 1
    assert refused > 50 and followed
