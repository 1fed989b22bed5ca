"""How long the stage search takes for a 175B-parameter transformer: 96 layers, embedding and head, on 1,024 devices.

    python benchmarks/stage_planning.py [--devices 1024] [--batch 1536]

Sizes as in Brown et al., arXiv:2005.14165, Table 2.1 (hidden 12,288, sequence 2,048, vocabulary 50,257). A device does
150 TFLOP/s and holds 80 GB; 8 share 300 GB/s, the rest of the network gives 25 GB/s to each. Activations as in
Korthikanti et al., arXiv:2205.05198, with selective recomputation: 34 bytes for each element of the hidden state.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence

from autopar.search.stages import Cluster, DeviceKind, Layer, Level, search_stages

HIDDEN, SEQUENCE, VOCABULARY, LAYERS = 12_288, 2_048, 50_257, 96
FLOPS = 150e12


def chain(batch: int) -> list[Layer]:
    """The model's layers, for one step of `batch` sequences: 6 FLOPs a parameter and token, and those of attention."""
    tokens = batch * SEQUENCE
    hidden_bytes = 2.0 * tokens * HIDDEN
    block, table = 12.0 * HIDDEN**2, float(VOCABULARY * HIDDEN)
    block_s = tokens * (6 * block + 12 * SEQUENCE * HIDDEN) / FLOPS
    blocks = [Layer(f"block {nth}", block_s, 2 * block, 18 * block, 17 * hidden_bytes, hidden_bytes, 4 * hidden_bytes)
              for nth in range(LAYERS)]  # fmt: skip
    embedding = Layer("embedding", 0.0, 2 * table, 18 * table, hidden_bytes, hidden_bytes, hidden_bytes)
    head = Layer("head", 6 * tokens * table / FLOPS, 2 * table, 18 * table, 2 * hidden_bytes, 0.0, hidden_bytes)
    return [embedding, *blocks, head]


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, and print the choice and the seconds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1536)
    options = parser.parse_args(arguments)
    cluster = Cluster((DeviceKind("gpu", options.devices, 80e9),), (Level(8, 300e9, 5e-6), Level(1 << 20, 25e9, 10e-6)))
    began = time.perf_counter()
    choice = search_stages(chain(options.batch), cluster, batch=options.batch)
    seconds = time.perf_counter() - began
    sizes = [end - first for first, end, _ in choice.cut.spans()]
    print(f"{options.devices} devices, batch {options.batch}, {platform.machine()}: {seconds:.1f} s of search")
    print(f"tensor {choice.tensor_parallel} x data {choice.data_parallel} x pipeline {len(sizes)}, "
          f"{choice.microbatches} microbatches, {choice.schedule}")  # fmt: skip
    print(f"layers of each stage: {sizes}")
    print(
        f"step {choice.step_s:.3f} s simulated, {choice.formula_s:.3f} s by the formula; {choice.considered} meshes cut"
    )


if __name__ == "__main__":
    main()
