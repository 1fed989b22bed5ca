"""Let the Trainer of transformers train a distributed model, beside the same Trainer on one device.

    python examples/hf_trainer.py [--ranks 2] [--steps 4]          (pip install transformers accelerate)

On every rank the Trainer believes that it is alone: each rank is given the whole batch, and autopar does the rest. So
the variables by which a launcher tells Accelerate of other ranks are taken away, lest it wrap the model a second time.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from local_ranks import compare, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
BATCH, LENGTH = 8, 16


def make_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(128, (number, LENGTH), generator=random)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(model: nn.Module, steps: int) -> list[float]:
    """An ordinary Trainer; the losses that it logs."""
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-3, logging_steps=1,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
            max_grad_norm=0.0,  # or clip in a callback, with autopar.clip_grad_norm_
            remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=options, train_dataset=samples(BATCH * steps))
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(ranks: int, steps: int) -> list[float]:
    """On each rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    for name in LAUNCHER:
        os.environ.pop(name, None)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    pmodel = autopar.compile(make_model(), mesh, example_inputs=inputs, search="fsdp")
    pmodel.accepts_loss_kwargs = False  # the loss is the mean over the batch: the Trainer is to pass no count of tokens
    return train(pmodel, steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train with transformers' Trainer.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    chosen = parser.parse_args(arguments)
    together = launch(run, chosen.ranks, chosen.ranks, chosen.steps)
    compare(train(make_model(), chosen.steps), together)


if __name__ == "__main__":
    main()
