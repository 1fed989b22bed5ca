"""Starts gloo ranks on this machine, so that an example runs with `python` alone; under torchrun it joins that job."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """What `function(*args)` returns on rank 0 of `ranks` processes, each of one thread."""
    if "RANK" in os.environ:  # torchrun has started the ranks
        dist.init_process_group("gloo")
        try:
            return function(*args)
        finally:
            dist.destroy_process_group()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "autopar"])
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, ranks, Path(folder), function, args) for rank in range(ranks)]
        processes = [context.Process(target=_run, args=items, daemon=True) for items in given]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed: its traceback is above")
        return pickle.loads(Path(folder, "result").read_bytes())


def _run(rank: int, ranks: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if Path("/sys/class/net/lo").exists() else "lo0")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    result = function(*args)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def compare(alone: list[float], together: list[float], *, limit: float = 1e-5) -> None:
    """Print two loss curves and their largest relative difference; end the program if it is too large."""
    for step, (one, many) in enumerate(zip(alone, together, strict=True)):
        print(f"step {step:2d}   one device {one:.6f}   distributed {many:.6f}")
    worst = max(abs(one - many) / abs(one) for one, many in zip(alone, together, strict=True))
    print(f"largest relative difference: {worst:.1e}")
    if worst > limit:
        raise SystemExit(f"the curves differ by more than {limit}")
