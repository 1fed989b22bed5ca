"""Imports point one way: the table below is the architecture, and each test reads the source against it."""

from __future__ import annotations

import graphlib

import pytest

from autopar.passes.pipeline import PASSES
from tests.source_tree import ROOT, imports, modules

# Who may import whom, by room; a file of a folder is a room of its own where it stands lower or higher than the rest.
# `errors` and `version` are for everyone, and a room may always import itself.
FOR_EVERYONE = {"errors", "version"}
FOUNDATION = {"source", "torch_compat", "fake_calls", "collector", "ops", "written_files"}
PLAN_PARTS = {"plan_details", "plan_entries", "plan_questions"}
VIRTUAL = {"runtime.virtual_groups", "runtime.lockstep"}  # ranks in one process: no graph, no plan
ROOMS_BELOW: dict[str, set[str]] = {
    "errors": set(),
    "collector": set(),
    "version": set(),
    "cost_models": {"torch_compat"},  # numbers: bytes, ranks, links; calibration makes groups as compiled models do
    "written_files": set(),
    "plots": {"written_files"},
    "schedules": {"cost_models", "plots", "collector"},  # action lists: numbers
    "search": {"plots", "collector"},  # problems
    "search.stages": {"search", "schedules", "cost_models"},  # cuts and schedules together
    "folding": set(),
    "torch_compat": set(),
    "source": set(),
    "fake_calls": {"torch_compat"},
    "ops": {"torch_compat", "source"},
    "mesh": {"cost_models"},
    "sharding": FOUNDATION,  # ops and layouts: never prices
    "capture": FOUNDATION | {"sharding"},  # op calls alone
    "report": PLAN_PARTS | {"recording", "folding", "sharding", "mesh", "cost_models", "plots", "schedules"},
    "plan_details": set(),
    "recording": {"written_files"},
    "plan_entries": {"folding", "sharding", "plan_details"},
    "plan_questions": {"plan_entries"},
    "plan": PLAN_PARTS | {"folding", "mesh", "report", "search", "cost_models", "schedules", "written_files"},
    "stages": FOUNDATION | {"capture", "sharding", "passes"},  # a program cut along time and depth: never prices
    "passes": FOUNDATION | {"capture", "sharding", "plan", "mesh"},  # graphs and plans: never costs or the solver
    "runtime.virtual_groups": set(),
    "runtime.lockstep": {"runtime.virtual_groups", "torch_compat", "ops"},
    "sharding.execution": FOUNDATION | VIRTUAL | {"sharding", "passes"},  # an op emitted and run on all ranks
    "sharding.check_rule": VIRTUAL | {"sharding", "sharding.execution"},  # a rule's proof
    "sharding.discovery": VIRTUAL | FOUNDATION | {"sharding", "sharding.execution"},  # rules found by running ops
    "planner": FOUNDATION
    | VIRTUAL
    | PLAN_PARTS
    | {
        "folding",
        "report",
        "capture",
        "sharding",
        "sharding.discovery",
        "mesh",
        "plan",
        "passes",
        "cost_models",
        "search",
        "search.stages",
        "schedules",
        "stages",
        "optim",
    },
    "runtime": FOUNDATION
    | VIRTUAL
    | {"schedules", "capture", "sharding", "sharding.execution", "mesh", "plan", "passes"}
    | {"stages", "recording"},
    "nn": FOUNDATION,
    "optim": FOUNDATION | {"sharding"},  # layouts alone
    "hugging_face": set(),
    "model_source": {"source", "hugging_face"},
    "arguments": {
        "plan_questions",
        "capture",
        "sharding.discovery",
        "mesh",
        "plan",
        "passes",
        "planner",
        "cost_models",
        "schedules",
    },
    "auto_stages": {"mesh", "plan", "planner", "runtime"},
    "verification": FOUNDATION | {"capture", "sharding", "plan", "report", "runtime"},
    "compiler": FOUNDATION
    | {"capture", "sharding", "sharding.discovery", "mesh", "plan", "planner", "passes", "runtime", "schedules"}
    | {"stages"},
}
# The front door: it may import every room, and no room may import it.
FRONT_DOOR = {"__init__", "__main__", "api", "cli", "commands", "completion_commands", "plan_commands", "zoo"}


def room_of(module: str) -> str:
    """The first part of the name below `autopar`, or more of it where the table names a file of a folder."""
    parts = module.split(".")[1:]
    while parts[1:] and ".".join(parts) not in ROOMS_BELOW:
        parts.pop()
    return ".".join(parts) or "__init__"


@pytest.mark.parametrize("name", sorted(modules()))
def test_a_module_imports_only_the_rooms_below_it(name: str) -> None:
    room = room_of(name)
    assert room in ROOMS_BELOW or room in FRONT_DOOR, f"{name}: put the new room {room!r} into ROOMS_BELOW"
    if room in FRONT_DOOR:
        return
    allowed = ROOMS_BELOW[room] | FOR_EVERYONE | {room}
    targets = sorted(set(imports(modules()[name])))
    wrong = [f"{target} (line {line})" for target, line in targets if room_of(target) not in allowed]
    assert not wrong, f"{modules()[name].path} imports {', '.join(wrong)}; {room} may import {sorted(allowed)}"


def test_no_circle_of_modules() -> None:
    graph = {name: {target for target, _ in imports(module)} - {name} for name, module in modules().items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_no_circle_of_rooms() -> None:
    graphlib.TopologicalSorter(ROOMS_BELOW).prepare()


def test_every_room_with_commands_is_in_the_table_of_the_cli() -> None:
    known = {target for target, _ in imports(modules()["autopar.cli"])}
    rooms = {name for name in modules() if name.endswith((".commands", "_commands"))}
    assert rooms <= known, f"add to COMMAND_ROOMS in autopar/cli.py: {sorted(rooms - known)}"


def test_a_pass_its_file_and_its_test_share_one_name() -> None:
    for step in PASSES:
        assert f"autopar.passes.{step.name}" in modules()
        assert (ROOT / f"tests/passes/test_{step.name}.py").exists(), f"no test file for the pass {step.name}"
