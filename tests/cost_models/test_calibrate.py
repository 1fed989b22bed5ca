"""Calibration: fits recover the machine that made the samples; the command writes a profile that loads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autopar.cost_models.collectives import COLLECTIVES, collective_seconds
from autopar.cost_models.commands import add_commands
from autopar.cost_models.compute import (
    Direction,
    Mask,
    attention_seconds,
    convolution_seconds,
    kernel_price,
    matmul_seconds,
    memory_bound_seconds,
)
from autopar.cost_models.fitting import (
    AttentionSample,
    CollectiveSample,
    ComputeSamples,
    ConvolutionSample,
    KernelSample,
    MatmulSample,
    MoveSample,
    OverlapSample,
    ViewSample,
    axis_residuals,
    device_residuals,
    fit_axis,
    fit_device,
    fit_overlap,
)
from autopar.cost_models.hardware import CONVOLUTIONS, Device, KernelCost, axis_links, load_profile

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
MASKS: tuple[Mask, ...] = ("none", "causal")
SHAPES = ((64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (2048, 256, 512))


def samples_of(device: Device, noise: float) -> ComputeSamples:
    random = np.random.default_rng(0)

    def timed(seconds: Any) -> float:
        return float(seconds) * float(np.exp(noise * random.standard_normal()))

    matmuls = tuple(
        MatmulSample("float32", *shape, timed(matmul_seconds(device, "float32", 1, *shape))) for shape in SHAPES
    )
    moves = tuple(
        MoveSample(size, timed(memory_bound_seconds(device, size)))
        for size in (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
    )
    return ComputeSamples(matmuls, moves)


def test_a_fit_recovers_the_device_that_made_the_samples() -> None:
    cpu = load_profile("cpu").device
    curve = replace(cpu.matmul["float32"], efficiency=0.5, ramp_s=2e-5)
    real = replace(cpu, memory_bytes_per_s=7e9, launch_s=2e-5, matmul={**cpu.matmul, "float32": curve})
    samples = samples_of(real, noise=0.02)
    fitted = fit_device(cpu, samples)
    assert all(error < 0.1 for error in device_residuals(fitted, samples).values())
    assert matmul_seconds(fitted, "float32", 1, 4096, 512, 512) == pytest.approx(
        float(matmul_seconds(real, "float32", 1, 4096, 512, 512)), rel=0.1
    )


def test_dtypes_that_were_not_measured_lose_their_price() -> None:
    fitted = fit_device(load_profile("cpu").device, samples_of(load_profile("cpu").device, noise=0.0))
    assert set(fitted.peak_flops) == {"float32"}


@pytest.mark.parametrize(("profile", "shape"), [("cpu", (4,)), ("h100", (16,))])
def test_a_fit_recovers_the_link_that_made_the_samples(profile: str, shape: tuple[int, ...]) -> None:
    start = axis_links(load_profile(profile), shape)[0]
    link = start.inter if start.nodes > 1 else start.intra
    changed = replace(link, latency_s=3 * link.latency_s, bytes_per_s=0.4 * link.bytes_per_s)
    real = replace(start, inter=changed) if start.nodes > 1 else replace(start, intra=changed)
    samples = [
        CollectiveSample(kind, size, float(np.asarray(collective_seconds(kind, size, real))))
        for kind in COLLECTIVES
        for size in (2**8, 2**16, 2**22, 2**28)
    ]
    fitted = fit_axis(start, samples)
    assert all(error < 0.1 for error in axis_residuals(fitted, samples).values())
    assert fit_axis(start, []) == start


def test_a_collective_that_seems_to_take_no_time_still_gives_a_profile() -> None:
    start = axis_links(load_profile("cpu"), (2,))[0]
    samples = [
        CollectiveSample(kind, size, 1e-5 if kind == "broadcast" else float(collective_seconds(kind, size, start)))
        for kind in COLLECTIVES
        for size in (2**8, 2**16, 2**20, 2**24)
    ]
    fitted = fit_axis(start, samples)
    assert 1 < fitted.intra.broadcast_fraction <= 50
    assert axis_residuals(fitted, samples)["all_reduce"] < 0.1


def test_a_fit_recovers_the_cost_of_an_op_and_prices_it_by_its_name() -> None:
    cpu = load_profile("cpu").device
    real = replace(cpu, kernels={"aten.gelu": KernelCost(3e-5, 2e9)})
    sizes = (2**11, 2**18, 2**22)
    samples = [KernelSample("aten.gelu", size, float(kernel_price(real, "aten.gelu", size).value)) for size in sizes]
    fitted = fit_device(cpu, ComputeSamples.of([*samples_of(cpu, noise=0.0).matmuls, *samples]))
    assert fitted.kernels["aten.gelu"].bytes_per_s == pytest.approx(2e9, rel=0.1)
    assert fitted.kernels["aten.gelu"].launch_s == pytest.approx(3e-5, rel=0.1)
    assert kernel_price(fitted, "aten.relu", 2**20).value == memory_bound_seconds(fitted, 2**20)
    assert "measured op" in kernel_price(fitted, "aten.gelu", 2**20).explain()


def test_a_fit_finds_out_whether_a_causal_mask_saves_time() -> None:
    cpu = load_profile("cpu").device
    shapes = ((4, 4, 128, 64), (2, 8, 512, 64))
    for fraction in (0.5, 1.0):
        real = replace(
            cpu, causal_fraction=fraction, attention_forward_efficiency=0.6, attention_backward_efficiency=0.7
        )
        samples = [
            AttentionSample("float32", direction, sizes, float(
                attention_seconds(real, "float32", *sizes[:3], *sizes[2:], direction=direction, mask=mask)), mask)
            for sizes in shapes for direction in DIRECTIONS for mask in MASKS
        ]  # fmt: skip
        fitted = fit_device(cpu, ComputeSamples.of([*samples_of(cpu, noise=0.0).matmuls, *samples]))
        assert fitted.causal_fraction == pytest.approx(fraction, rel=0.1)
        assert fitted.attention_forward_efficiency == pytest.approx(0.6, rel=0.1)
        assert fitted.attention_backward_efficiency == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize(
    ("late_s", "after", "expected"),
    [
        (4.0, ((1.0, 4.0), (2.0, 4.0)), (0.0, 0.0)),
        (1.0, ((1.0, 4.0), (2.0, 4.0), (4.0, 1.0)), (0.75, 3.0)),
        (1.0, ((1.0, 1.0), (2.0, 1.0)), (0.75, 0.5)),
        (1.0, ((1.0, 5.0), (2.0, 4.0)), (0.75, 2.0)),
        (-1.0, ((1.0, 2.0),), (1.0, 1.0)),
    ],
)
def test_what_waiting_late_saves_of_collectives_is_hidden(
    late_s: float, after: tuple[tuple[float, float], ...], expected: tuple[float, float]
) -> None:
    assert fit_overlap(OverlapSample(4.0, late_s, after)) == pytest.approx(expected)


def test_collectives_that_add_nothing_hide_nothing() -> None:
    assert fit_overlap(OverlapSample(-0.1, -0.2, ((1.0, 0.0),))) == (0.0, 0.0)


def test_a_fit_tells_kinds_of_convolutions_apart() -> None:
    cpu = load_profile("cpu").device
    shares = {"forward": 1.0, "backward": 0.8, "grouped forward": 0.2, "grouped backward": 0.05,
              "wide grouped forward": 0.3, "wide grouped backward": 0.02}  # fmt: skip
    real = replace(cpu, convolution_efficiency=0.7, convolution_shares=shares)
    samples = [
        ConvolutionSample("float32", flops, 1000, float(convolution_seconds(real, "float32", flops, 1000, kind)), kind)
        for kind in CONVOLUTIONS
        for flops in (1e8, 1e9)
    ]
    fitted = fit_device(cpu, ComputeSamples.of([*samples_of(cpu, noise=0.0).matmuls, *samples]))
    assert fitted.convolution_efficiency == pytest.approx(0.7, rel=0.1)
    assert dict(fitted.convolution_shares) == pytest.approx(shares, rel=0.05)
    assert convolution_seconds(fitted, "float32", 1e9, 0, "grouped backward") > 10 * convolution_seconds(
        fitted, "float32", 1e9, 0
    )


def test_a_fit_takes_the_price_of_a_view() -> None:
    cpu = load_profile("cpu").device
    samples = [*samples_of(cpu, noise=0.0).matmuls, ViewSample(3e-6), ViewSample(5e-6)]
    assert fit_device(cpu, ComputeSamples.of(samples)).view_s == pytest.approx(4e-6)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    return parser.parse_args(["calibrate", *arguments])


@pytest.mark.slow
def test_the_command_writes_a_profile_with_its_residuals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed("--output", str(tmp_path / "here.json"), "--seconds", "1")
    assert options.run(options) == 0
    profile = load_profile(tmp_path / "here.json")
    assert "calibrate" in profile.source
    assert {"matmul float32", "memory-bound", "attention forward", "convolution", "single ops"} <= set(
        profile.residuals
    )
    assert "written to" in capsys.readouterr().out
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_launched_world_measures_its_collectives(tmp_path: Path) -> None:
    script = tmp_path / "calibrate.py"
    script.write_text(
        "import argparse\n"
        "from autopar.cost_models.commands import add_commands\n"
        "parser = argparse.ArgumentParser()\n"
        "add_commands(parser.add_subparsers())\n"
        "options = parser.parse_args()\n"
        "raise SystemExit(options.run(options))\n"
    )
    output = tmp_path / "two.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launch, str(script), "calibrate", "--output", str(output), "--seconds", "1"], check=True, capture_output=True
    )
    profile = load_profile(output)
    assert {"all_reduce", "all_gather", "send"} <= set(profile.residuals)
    assert "2 ranks" in profile.intra.source
    assert json.loads(profile.to_json())["ranks_per_node"] == 2
