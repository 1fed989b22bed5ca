"""What a plan answers, and how fast: what-if against the first plan, and explained alternatives against fresh solves.

    python -m benchmarks.questions [--write-docs]

CPU seconds of one process, one torch thread; planning without capture. GPT-2 small and an 8B Llama, without weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch

from benchmarks.tables import ROOT, line, write_table

PAGE = ROOT / "docs" / "reading_a_plan.md"
PINS = {
    "gpt2-small (4,2)": [
        "transformer.h.3.mlp.c_fc.weight",
        "transformer.h.*.attn.c_attn.weight",
        "transformer.wte.weight",
    ],
    "llama-8b (32,8)": [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.*.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
    ],
}
COLUMNS = ("model and mesh", "pin", "first plan, s", "what-if, s", "share", "as a fresh solve", "step", "peak")
PAIRS = 10  # names explained, of each model of `small`


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function gives, and the CPU seconds that it took."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def measure(case: str) -> dict[str, Any]:
    """Seconds of the first plan and of what-if with one pin each, and whether a fresh solve with it costs the same."""
    from autopar.capture.trace import capture
    from autopar.compiler import plan_or_follow
    from autopar.mesh import Mesh
    from autopar.planner.bounds import without_limit
    from autopar.planner.constraints import as_constraints
    from autopar.planner.make import Options, Planner
    from autopar.planner.reconsider import Session, with_questions
    from autopar.search import solve
    from benchmarks.planning import CASES, make

    torch.set_num_threads(1)
    name, shape, *_ = CASES[case]
    model, inputs = make(name)
    program, mesh = capture(model, (), inputs), Mesh(shape, hardware="h100")
    options = Options(memory_limit_bytes=10**13)
    planned, first_s = timed(lambda: plan_or_follow(program, mesh, options, None))
    plan = with_questions(planned, lambda _: program)
    assert isinstance(plan.planning, Session)
    rows = []
    for pattern in PINS[case]:
        chosen = plan.matching(pattern)[0].words
        pin = {pattern: next(layout for layout in ("R,S0", "R,R", "S0,R") if layout != chosen)}
        changed, seconds = timed(lambda pin=pin: plan.what_if(pin=pin))
        fresh = Planner(program, mesh, Options(memory_limit_bytes=10**13, constraints=as_constraints(pin)))
        expected = solve(without_limit(fresh.planning.problem), time_limit_s=60).cost
        emitted = changed.emitted()
        cost = changed.cost - changed.residency_s
        row: dict[str, Any] = {"pin": " ".join(f"{key}={value}" for key, value in pin.items()), "seconds": seconds}
        row["same"] = abs(cost - expected) <= 1e-9 * expected
        row["foreseen"] = changed.step_s / emitted.step_s - 1
        row["peak"] = changed.peak_bytes / emitted.peak_bytes - 1
        rows.append(row)
    return {"first_s": first_s, "rows": rows}


def explained() -> tuple[int, int, float]:
    """(Alternatives compared with a fresh solve, those that cost the same, seconds per name) of twenty names."""
    from tests.autopar import test_explain as small

    chosen, same, count, spent = random.Random(11), 0, 0, 0.0
    for model in small.MODELS:
        plan = small.plan("ilp", model)
        for key in chosen.sample([entry.key for entry in plan.entries], PAIRS):
            (found,), seconds = timed(lambda plan=plan, key=key: plan.explanations(key))
            spent += seconds
            for item in found.alternatives:
                expected = small.fresh_cost(model, {key: item.layout})
                count, same = count + 1, same + (abs(item.cost - expected) <= 1e-9 * expected)
    return count, same, spent / (PAIRS * len(small.MODELS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=PINS, help=argparse.SUPPRESS)
    parser.add_argument("--write-docs", action="store_true")
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(chosen.case)))
        return
    lines = [line(COLUMNS), line("---" for _ in COLUMNS)]
    for case in PINS:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.questions", "--case", case], check=True, capture_output=True, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        for row in found["rows"]:
            cells = [case, f"`{row['pin']}`", f"{found['first_s']:.1f}", f"{row['seconds']:.2f}",
                     f"{row['seconds'] / found['first_s']:.0%}", "yes" if row["same"] else "NO",
                     f"{row['foreseen']:+.1%}", f"{row['peak']:+.0%}"]  # fmt: skip
            lines.append(line(cells))
            print(lines[-1], flush=True)
    count, same, seconds = explained()
    lines += [
        "",
        "`step`, `peak`: what was foreseen, against the emitted program.",
        f"Alternatives explained for 20 random names of two small models: {same} of {count} cost what a fresh solve",
        f"with that pin costs (to 1e-9); {seconds:.1f} s per name.",
    ]
    print(*lines[-3:], sep="\n")
    if chosen.write_docs:
        machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
        source = f"`python -m benchmarks.questions`, {date.today()}, one core of a shared {machine}, processor time:"
        write_table(PAGE, "questions", [source, "", *lines])


if __name__ == "__main__":
    main()
