"""Real gloo ranks for tests: `run_on_ranks(function, 4, ...)` runs `function(...)` on four local processes."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120.0
MODELS = ["bert", "gpt2", "llama", "resnet", "t5", "vit"]
PRELOADED = [  # slow imports, done once
    *("torch.distributed.tensor", "torch._dynamo", "autopar.compiler"),
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
]


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """What `function(*args)` returns on each rank of a gloo world, in rank order.

    `function` is a module-level function; its result is pickled. An error on any rank is raised here with the rank's
    traceback; after the timeout all ranks are killed. The processes fork from a server that has imported torch once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            given = (function, args, rank, world_size, f"{folder}/store", theirs, timeout_s)
            process = context.Process(target=_run_rank, args=given, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + timeout_s
        try:
            return _collect([ours for _, ours in ranks], deadline)
        finally:
            for process, _ in ranks:
                process.join(max(0.0, deadline - time.monotonic()) if sys.exception() is None else 0.0)
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"no answer from ranks {silent}")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            results[rank] = _received(pipe, rank)  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(pipes))]


def _received(pipe: Connection, rank: int) -> Any:
    try:
        error, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RuntimeError(f"rank {rank} died") from None
    if error is not None:
        raise RuntimeError(f"rank {rank} failed\n{error}")
    return result


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    timeout_s: float,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    faulthandler.enable()  # a rank that dies says where
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send_bytes(pickle.dumps((None, function(*args))))  # by value: a shared tensor would die with its process
        dist.barrier()  # none leaves while another still talks to it
        dist.destroy_process_group()
    except Exception:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
