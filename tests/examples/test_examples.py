"""Every example runs, in its smallest setting, and says what it promises."""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.source_tree import ROOT

EXAMPLES = ROOT / "examples"
PARTS = {"local_ranks", "tiny_gpt"}  # what examples share
SMALLEST = {
    "quickstart": (["--ranks", "2", "--steps", "3"], "largest relative difference over 3 steps"),
    "vit": (["--steps", "3"], "largest relative difference"),
    "resnet": (["--steps", "2"], "running variance, largest difference"),
    "moe": (["--steps", "2"], "tokens by expert"),
    "pipeline": (["--steps", "2"], "bubble"),
    "hf_trainer": (["--steps", "2"], "largest relative difference"),
    "memory_frontier": (["--layers", "2", "--width", "256"], "at most"),
    "inspect_plan": ([], "verified"),
    "research_search_strategy": ([], "best-of-greedy"),
}
BY_TORCHRUN = {"train_on_nodes"}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALLEST, *BY_TORCHRUN, *PARTS}


@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.filterwarnings("default")  # as for a user
def test_an_example_runs_and_prints_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    words, promise = SMALLEST[name]
    example = importlib.import_module(name)
    example.main(words)
    output = capsys.readouterr().out
    assert promise in output
    print(output)  # shown if the next line fails
    for difference in re.findall(r"relative difference[^:]*: (\S+)", output):
        assert float(difference) < 1e-4


def test_a_run_on_two_nodes_goes_on_from_its_checkpoint_on_one_with_the_losses_of_a_single_device(
    tmp_path: Path,
) -> None:
    first = losses_of(tmp_path, nodes=2, steps=3)
    assert (tmp_path / "run/2/.metadata").exists()
    second = losses_of(tmp_path, nodes=1, steps=4)  # the third step was not saved
    assert sorted(first) == [0, 1, 2] and sorted(second) == [2, 3]
    alone = single_device_losses(4)
    for step, loss in {**second, **first}.items():
        assert loss == pytest.approx(alone[step], rel=1e-5)
    assert second[2] == pytest.approx(first[2], rel=1e-5)


def losses_of(folder: Path, *, nodes: int, steps: int) -> dict[int, float]:
    """By step, what rank 0 prints: one launcher for each node, over loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    launchers = []
    for node in range(nodes):
        where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1"]
        meet = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        script = [str(EXAMPLES / "train_on_nodes.py"), "--checkpoint", str(folder / "run"), "--steps", str(steps)]
        words = [sys.executable, "-m", "torch.distributed.run", *where, *meet, *script]
        launchers.append(
            subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )
    outputs = []
    try:
        outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert all(launcher.returncode == 0 for launcher in launchers), "\n".join(outputs)
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", "\n".join(outputs))}


def single_device_losses(steps: int) -> list[float]:
    """The same loop, as a user had it before."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        example = importlib.import_module("train_on_nodes")
    finally:
        sys.path.remove(str(EXAMPLES))
    torch.manual_seed(0)
    model = example.TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(*example.batch_of(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
