"""The same checks on real processes: gloo ranks on this machine, compiled models, their own collectives."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.api import verify
from autopar.mesh import Mesh
from autopar.model_source import parse_mesh_shape
from autopar.torch_compat import join_ranks, start_ranks
from autopar.zoo.checking import Cells, Outcome, Verdict, attempted, judged, make_model

GLOO = "gloo "  # before the mesh, in an outcome
POLL_S = 0.5


def check_on_ranks(cells: Cells, *, hardware: str) -> Iterator[Outcome]:
    """The outcome of every cell on gloo ranks, as they come; the processes of a mesh check all of its cells."""
    for mesh in dict.fromkeys(mesh for meshes in cells.values() for mesh in meshes):
        plans = {name: tuple(meshes[mesh]) for name, meshes in cells.items() if mesh in meshes}
        ranks = Mesh(parse_mesh_shape(mesh)).size
        with tempfile.TemporaryDirectory() as folder:
            running = start_ranks(_rank, ranks, folder, mesh, plans, hardware, ranks)
            seen, ended = 0, False
            while not ended:
                ended = join_ranks(running, POLL_S)
                lines = _lines(Path(folder))
                yield from (Outcome(**json.loads(line)) for line in lines[seen:])
                seen = len(lines)


def _lines(folder: Path) -> list[str]:
    """The complete lines of what the first rank has written."""
    path = folder / "outcomes"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _rank(rank: int, folder: str, mesh: str, plans: Mapping[str, Sequence[str]], hardware: str, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    live = init_device_mesh("cpu", parse_mesh_shape(mesh))
    for name, wanted in plans.items():
        for plan in wanted:
            outcome = Outcome(name, GLOO + mesh, plan, *attempted(partial(_verdict, name, live, plan, hardware)))
            if rank == 0:
                with (Path(folder) / "outcomes").open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _verdict(name: str, live: DeviceMesh, plan: str, hardware: str) -> Verdict:
    model, inputs = make_model(name)
    return judged(verify(model, live, example_inputs=inputs, search=plan, hardware=hardware))
