"""What discovery finds for the ops of PyTorch's samples, whether it holds elsewhere, and how long it takes.

    python -m benchmarks.discovery [--only NAME]

Each op overload that can stand in a joint graph is searched as if nobody had written rules for it, once for the sample
with most tensor elements and once for one from the middle. Every strategy that is claimed then runs, as the passes emit
it, on the sample's own values and (where the claim is of any sizes) in sizes that no trial had, on 2, 3 and 2x2 ranks.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections import Counter
from datetime import date

import torch

from autopar.sharding.op_call import OpCall
from benchmarks.ops_table import can_stand_in_a_joint_graph
from tests.autopar.sharding.discovery_proof import finding_of, wrong_claims
from tests.autopar.sharding.rules.recording import Sample, has_defined_values, op_db_samples


def chosen(samples: dict[OpCall, Sample]) -> list[Sample]:
    """The largest sample, and one from the middle."""
    ranked = sorted(samples, key=lambda call: -sum(spec.numel for spec in call.inputs))
    return [samples[call] for call in dict.fromkeys((ranked[0], ranked[len(ranked) // 2]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="op overloads whose name starts so")
    only = parser.parse_args().only or ""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = op_db_samples()
    names = [name for name in sorted(samples) if can_stand_in_a_joint_graph(name) and name.startswith(only)]
    reasons: Counter[str] = Counter()
    wrong: list[str] = []
    times, runs, with_rules = [], 0, 0
    for name in names:
        if not has_defined_values(name):
            continue
        for sample in chosen(samples[name]):
            started = time.process_time()
            finding_of(sample.call)
            times.append(time.process_time() - started)
            finding, found, count = wrong_claims(sample)
            runs += count
            with_rules += bool(finding.rules)
            wrong += found
            reasons[finding.why] += not finding.rules
            for line in found:
                print(line, flush=True)
    times.sort()
    print(f"PyTorch {torch.__version__}, {platform.machine()} CPU, one thread, {date.today().isoformat()}")
    print(f"op overloads: {len(names)}, calls searched: {len(times)}, with rules: {with_rules}")
    print(f"strategies run elsewhere: {runs}, wrong: {len(wrong)}")
    for why, number in reasons.most_common():
        if number:
            print(f"  none found for {number} calls: {why}")
    print(f"CPU time of a search: median {times[len(times) // 2] * 1e3:.0f} ms, ", end="")
    print(f"90 % below {times[len(times) * 9 // 10] * 1e3:.0f} ms, longest {times[-1] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
