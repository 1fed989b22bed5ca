"""Do the search's objective and the simulator rank plans alike? Fifty random valid plans of each model and mesh.

    python -m benchmarks.rank_plans [--plans 50] [--cases 0,1] [--results FILE] [--write-docs]

A random plan is the best one under prices that were changed at random, a little for some plans and beyond recognition
for others; ddp, fsdp and megatron are among the fifty where they apply. Printed is Spearman's rank correlation of the
search's objective with the simulated seconds of the emitted program: over all plans, and over those within half again
of the fastest, which are harder to tell apart. "Lost" is how much slower than the fastest plan the one is that the
objective likes best. Rows that are in the results file already are not made again, so it can run in parts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from autopar.arguments import call_arguments
from autopar.capture.trace import capture
from autopar.errors import InfeasibleProblemError, PlanError
from autopar.mesh import Mesh
from autopar.planner.build import PlanningProblem, build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.hand_plans import HAND_PLANS, hand_plan
from autopar.planner.measure import measured_program
from autopar.planner.prices import Prices
from autopar.search import FORBIDDEN, Problem, evaluate, solve
from benchmarks.tables import ROOT, line, write_table

DOCS = ROOT / "docs" / "cost_models.md"
TARGET = 0.9
SOLVE_S = 1.0  # for one random plan: any valid choice will do
HEAD = ("model", "mesh", "hardware", "plans", "slowest / fastest", "Spearman", "within 1.5x", "lost")
NEAR, FEW = 1.5, 5  # times the fastest; plans without which a correlation says nothing


def mlp() -> tuple[torch.nn.Module, Any]:
    layers = [torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(2048, 2048)), torch.zeros(1024, 2048)


def gpt2() -> tuple[torch.nn.Module, Any]:
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, n_layer=3))
    ids = torch.zeros(32, 512, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def llama() -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(16, 1024, dtype=torch.long)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[torch.nn.Module, Any]:
    import transformers

    config = transformers.ViTConfig(num_hidden_layers=3)
    pixels, labels = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.long)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": labels}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[], tuple[torch.nn.Module, Any]]
    mesh_shape: tuple[int, ...]
    hardware: str


CASES = (
    Case("mlp", mlp, (8,), "h100"),
    Case("mlp", mlp, (2, 4), "cpu"),
    Case("gpt2, 3 layers", gpt2, (8,), "h100"),
    Case("gpt2, 3 layers", gpt2, (2, 8), "h100"),
    Case("llama, 3 layers", llama, (4, 4), "a100-80"),
    Case("llama, 3 layers", llama, (8,), "h100"),
    Case("vit, 3 layers", vit, (2, 4), "v100"),
)


def planning_of(case: Case) -> tuple[PlanningProblem, Prices]:
    with torch.device("meta"):
        model, inputs = case.make()
    prices = Prices(Mesh(case.mesh_shape, hardware=case.hardware))
    program = capture(model.train(), *call_arguments(inputs))
    decisions = DecisionList(program, prices, NO_OPTIMIZER).build()
    return build_problem(program, decisions, prices, usage_limit=None), prices


def random_choices(planning: PlanningProblem, count: int, seed: int) -> Iterator[tuple[int, ...]]:
    """Different valid choices: the hand plans that apply, then the best under prices changed more and more."""
    seen: set[tuple[int, ...]] = set()
    for name in HAND_PLANS:
        try:
            choice = hand_plan(planning, name, time_limit_s=10, seed=seed)
        except (PlanError, InfeasibleProblemError):  # a recipe that does not apply
            continue
        if choice not in seen:
            seen.add(choice)
            yield choice
    random = np.random.default_rng(seed)
    attempt = 0
    while len(seen) < count:
        problem = disturbed(planning.problem, 0.3 * 1.12 ** (attempt % count), random)
        attempt += 1
        try:
            choice = solve(problem, time_limit_s=SOLVE_S, seed=attempt).choice
        except InfeasibleProblemError:
            continue
        if choice not in seen and evaluate(planning.problem, choice) < FORBIDDEN:
            seen.add(choice)
            yield choice


def disturbed(problem: Problem, strength: float, random: np.random.Generator) -> Problem:
    """Every price times e to the power of a normal number of this strength; what is forbidden stays so."""

    def times_noise(prices: Any) -> Any:
        noise = np.exp(strength * random.standard_normal(prices.shape))
        return np.where(prices >= FORBIDDEN, prices, np.minimum(prices * noise, 1e6))

    return replace(
        problem,
        costs=tuple(times_noise(item) for item in problem.costs),
        edge_costs=tuple(times_noise(item) for item in problem.edge_costs),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the objective ranks the plans of one case."""

    case: Case
    objective: tuple[float, ...]
    simulated: tuple[float, ...]

    def cells(self) -> list[str]:
        """A row of the table."""
        near = [pair for pair in zip(self.objective, self.simulated, strict=True)
                if pair[1] <= NEAR * min(self.simulated)]  # fmt: skip
        among = f"{_spearman(*zip(*near, strict=True)):.3f} ({len(near)})" if len(near) >= FEW else f"({len(near)})"
        liked = self.simulated[int(np.argmin(self.objective))]
        mesh = "x".join(map(str, self.case.mesh_shape))
        spread = max(self.simulated) / min(self.simulated)
        return [
            self.case.name, mesh, self.case.hardware, str(len(self.simulated)), f"{spread:.1f}",
            f"{self.correlation:.3f}", among, f"{liked / min(self.simulated) - 1:.1%}",
        ]  # fmt: skip

    @property
    def correlation(self) -> float:
        """Spearman's, over all plans."""
        return _spearman(self.objective, self.simulated)


def outcome(case: Case, count: int) -> tuple[list[float], list[float]]:
    """Objective and simulated seconds of `count` plans."""
    planning, prices = planning_of(case)
    choices = list(random_choices(planning, count, seed=0))
    simulated = [measured_program(planning, choice).step_ops(prices, NO_OPTIMIZER).step_s for choice in choices]
    return [evaluate(planning.problem, choice) for choice in choices], simulated


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
    return float(spearmanr(left, right).statistic)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every correlation reaches the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--cases", help="numbers of cases, as 0,1 (default: all)")
    parser.add_argument("--results", type=Path, help="a file that keeps the plans' seconds from run to run")
    parser.add_argument("--write-docs", action="store_true", help="refresh the table in docs/cost_models.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = range(len(CASES)) if options.cases is None else map(int, options.cases.split(","))
    known = json.loads(options.results.read_text()) if options.results and options.results.is_file() else {}
    lines, worst = [line(HEAD), line("---" for _ in HEAD)], 1.0
    print("\n".join(lines))
    for case in (CASES[number] for number in chosen):
        key = f"{case.name} {case.mesh_shape} {case.hardware}"
        if key not in known:
            known[key] = outcome(case, options.plans)
            if options.results:
                options.results.write_text(json.dumps(known))
        found = Outcome(case, *map(tuple, known[key]))
        worst = min(worst, found.correlation)
        lines.append(line(found.cells()))
        print(lines[-1], flush=True)
    if options.write_docs:
        write_table(DOCS, "ranks", lines)
    return 0 if worst >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
