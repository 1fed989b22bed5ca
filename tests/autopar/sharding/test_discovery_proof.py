"""A sample of what `benchmarks/discovery.py` does for all of PyTorch's ops: claims hold where nobody tried them."""

from __future__ import annotations

from tests.autopar.sharding.discovery_proof import wrong_claims
from tests.autopar.sharding.rules.recording import op_db_samples

NAMES = frozenset(("cumsum", "flip", "gather", "mm", "searchsorted", "softmax"))


def test_what_discovery_claims_of_ops_of_pytorch_holds_on_other_values_and_sizes() -> None:
    searched, found, runs = 0, 0, 0
    for calls in op_db_samples(NAMES).values():
        sample = max(calls.values(), key=lambda sample: sum(spec.numel for spec in sample.call.inputs))
        finding, wrong, count = wrong_claims(sample)
        assert not wrong, "\n".join(wrong)
        searched, found, runs = searched + 1, found + bool(finding.rules), runs + count
    assert found > 4 and runs > 40, (searched, found, runs)
