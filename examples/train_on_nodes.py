"""A plain training loop for several nodes, which saves checkpoints and goes on from the last one.

On each node (here two of them are played by two shells of one machine):

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29400 \\
        examples/train_on_nodes.py --checkpoint run1 --steps 6
    torchrun --nnodes 2 --node-rank 1 ...the same

Run it again, with more steps, or on another number of ranks: it takes up the last checkpoint, whatever the layouts.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny_gpt import TinyGPT
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import autopar

SAVE_EVERY = 2


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step, the same on every rank: a loader seeded by the step goes on where it stopped."""
    ids = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def last_checkpoint(folder: Path) -> int:
    """The step of the last complete checkpoint; 0 if there is none. DCP writes `.metadata` last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def train(pmodel: autopar.ParallelModule, folder: Path, steps: int) -> list[tuple[int, float]]:
    """From the last checkpoint to `steps`; (step, loss)."""
    optimizer = torch.optim.AdamW(pmodel.parameters(), lr=1e-3)
    start, losses = last_checkpoint(folder), []
    if start:
        state = {"model": pmodel.state_dict(), "optimizer": get_optimizer_state_dict(pmodel, optimizer)}
        dcp.load(state, checkpoint_id=folder / str(start))
        pmodel.load_state_dict(state["model"])
        set_optimizer_state_dict(pmodel, optimizer, state["optimizer"])
    for step in range(start, steps):
        loss = pmodel(*batch_of(step))
        loss.backward()
        autopar.clip_grad_norm_(pmodel, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((step, loss.item()))
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": pmodel.state_dict(), "optimizer": get_optimizer_state_dict(pmodel, optimizer)}
            dcp.save(state, checkpoint_id=folder / str(step + 1))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on several nodes, with checkpoints.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder that all nodes see")
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # nccl on GPUs
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("node", "local"))
    torch.manual_seed(0)
    pmodel = autopar.compile(TinyGPT(), mesh, example_inputs=batch_of(0), optimizer=torch.optim.AdamW)
    for step, loss in train(pmodel, chosen.checkpoint, chosen.steps):
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
