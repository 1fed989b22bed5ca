"""Device-independent, functional custom ops of the namespace `autopar`; importing this package registers them.

Each has a fake kernel, a sharding rule (`autopar/sharding/rules/custom.py`) and a local form
(`passes/local_forms/custom.py`).
"""

from autopar.ops import (
    attention,
    balanced_assignment,
    batch_norm,
    ctc,
    dispatch,
    experts,
    grouped,
    packing,
    random_bits,
    recurrent,
)

__all__ = [
    "attention",
    "balanced_assignment",
    "batch_norm",
    "ctc",
    "dispatch",
    "experts",
    "grouped",
    "packing",
    "random_bits",
    "recurrent",
]
