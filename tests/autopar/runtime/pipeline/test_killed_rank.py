"""A rank that dies in mid-schedule ends all others with a message, within the timeout of the process group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.pipeline.module import PipelineModule
from tests.autopar.models import MODELS
from tests.gloo import PRELOADED

RANKS, VICTIM, TIMEOUT_S = 3, 1, 60.0


def member(rank: int, folder: str) -> None:
    """One rank: trains until something goes wrong, and writes down what it was told."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    model, (x,) = MODELS["mlp"]()
    model = torch.nn.Sequential(model, torch.nn.Flatten(0))
    pmodel = autopar.compile(Loss(model), mesh, example_inputs=(x,), search="ddp", microbatches=4)
    assert isinstance(pmodel, PipelineModule)
    pmodel(x).backward()
    Path(f"{folder}/ready{rank}").touch()
    if rank == VICTIM:
        links: Any = pmodel._pipeline.place.links
        links.send = lambda *_: os._exit(7)  # in the middle of the schedule, with messages under way
    try:
        pmodel(x).backward()
    except Exception as error:  # the test reads what it was, and of which class
        Path(f"{folder}/said{rank}").write_text(f"{type(error).__name__}: {error}")


class Loss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss


def test_all_ranks_end_with_a_message_when_one_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=member, args=(rank, folder), daemon=True) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        started = time.monotonic()
        for process in ranks:
            process.join(TIMEOUT_S)
            assert process.exitcode is not None, "a rank hangs"
        assert time.monotonic() - started < TIMEOUT_S
        assert ranks[VICTIM].exitcode == 7
        assert all(Path(f"{folder}/ready{rank}").exists() for rank in range(RANKS))
        for rank in range(RANKS):
            if rank != VICTIM:
                said = Path(f"{folder}/said{rank}").read_text()
                assert said.startswith("RankFailedError") and "start" in said, said
