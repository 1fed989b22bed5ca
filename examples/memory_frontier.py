"""What does each gigabyte cost? Plan a GPT of 0.4 billion parameters for eight GPUs under ever tighter limits.

    python examples/memory_frontier.py [--layers 8] [--picture frontier.svg]

No device is needed, and no memory for weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from tiny_gpt import TinyGPT

import autopar


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time against memory.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--picture", help="where to draw the frontier, as PNG or SVG")
    chosen = parser.parse_args(arguments)
    with torch.device("meta"):
        model = TinyGPT(width=chosen.width, layers=chosen.layers, heads=16)
    ids = torch.zeros(32, 1024, dtype=torch.long)
    mesh = autopar.Mesh((8,), ("dp",), hardware="h100")
    roomy = autopar.make_plan(model, mesh, example_inputs=(ids, ids), optimizer=torch.optim.AdamW, precision="bf16")
    print(f"as much as it likes: {roomy.peak_bytes / 1e9:.2f} GB, {1e3 * roomy.step_s:.1f} ms")
    limit = int(0.7 * roomy.peak_bytes)
    tight = roomy.what_if(memory_limit_bytes=limit)
    print(f"at most {limit / 1e9:.2f} GB: {tight.peak_bytes / 1e9:.2f} GB, {1e3 * tight.step_s:.1f} ms")
    print(roomy.diff(tight))
    print(tight.frontier_table())
    if chosen.picture:
        tight.save_frontier(chosen.picture)


if __name__ == "__main__":
    main()
