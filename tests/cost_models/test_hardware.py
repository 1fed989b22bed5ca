"""Profiles: shipped files are whole, wrong ones are refused by name of the field, meshes lie over nodes."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.hardware import (
    HardwareProfile,
    axis_links,
    dtype_bytes,
    load_profile,
    profile_for_device_name,
    profile_names,
)
from autopar.cost_models.links import LINK_KINDS, link_of_kind
from autopar.errors import HardwareProfileError, UnpricedError

SHIPPED = ("a100-40", "a100-80", "b200", "cpu", "h100", "h200", "l4", "mi300x", "rtx4090", "v100")


def test_every_promised_profile_is_shipped() -> None:
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_profile_survives_json_pickle_and_copy(name: str) -> None:
    profile = load_profile(name)
    assert HardwareProfile.from_json(profile.to_json()) == profile
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert copy.deepcopy(profile.device) == profile.device
    axes = axis_links(profile, (2, 8))
    assert pickle.loads(pickle.dumps(axes)) == axes


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_of_a_profile_names_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.device.source
    assert profile.intra.source
    assert profile.inter.source


def test_a_name_a_path_and_a_profile_load_the_same(tmp_path: Path) -> None:
    h100 = load_profile("h100")
    (tmp_path / "mine.json").write_text(h100.to_json())
    assert load_profile(tmp_path / "mine.json") == h100
    assert load_profile(h100) is h100
    assert load_profile("a100") == load_profile("a100-80")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(HardwareProfileError, match="h200"):
        load_profile("h900")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("device", "memory_bytes"), 0, "memory_bytes is not above 0"),
        (("device", "peak_flops"), {}, "peak_flops is empty"),
        (("device", "memory_efficiency"), 1.5, "memory_efficiency is not in"),
        (("device", "matmul", "bfloat16", "efficiency"), 0, "matmul efficiency 0"),
        (("device", "matmul", "bfloat16", "color"), "red", "unknown fields"),
        (("intra", "kind"), "string and cups", "link kind"),
        (("ranks_per_node",), 0, "ranks_per_node is below 1"),
        (("protocols",), [], "no protocol"),
        (("inter",), None, "no section 'inter'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(path: tuple[str, ...], value: object, message: str) -> None:
    data = json.loads((Path(__file__).parents[2] / "cost_models/profiles/h100.json").read_text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(HardwareProfileError, match=message):
        HardwareProfile.from_json(json.dumps(data))


def test_a_missing_field_and_broken_json_are_refused() -> None:
    data = json.loads(load_profile("l4").to_json())
    del data["device"]["launch_s"]
    with pytest.raises(HardwareProfileError, match="launch_s"):
        HardwareProfile.from_json(json.dumps(data))
    with pytest.raises(HardwareProfileError, match="not JSON"):
        HardwareProfile.from_json("{")


def test_a_dtype_without_a_rate_is_unpriced() -> None:
    with pytest.raises(UnpricedError, match="bfloat16"):
        load_profile("v100").device.peak("bfloat16")
    with pytest.raises(UnpricedError, match="complex32"):
        dtype_bytes("complex32")


def test_torch_spellings_of_a_dtype_are_understood() -> None:
    device = load_profile("h100").device
    assert device.peak("torch.float8_e4m3fn") == device.peak("float8")
    assert dtype_bytes("torch.bfloat16") == 2


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("cpu", "cpu"),
    ],
)
def test_a_live_device_finds_its_profile(reported: str, name: str) -> None:
    assert profile_for_device_name(reported) == load_profile(name)


@pytest.mark.parametrize("reported", ["NVIDIA L40S", "Some Future Chip"])
def test_an_unknown_device_finds_none(reported: str) -> None:
    assert profile_for_device_name(reported) is None


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
def test_ranks_of_an_axis_are_its_nodes_times_its_ranks_within(shape: list[int]) -> None:
    profile = load_profile("h100")
    for size, axis in zip(shape, axis_links(profile, tuple(shape)), strict=True):
        assert axis.ranks == size
        assert axis.nodes <= size <= axis.nodes * axis.ranks_per_node
        assert axis.nodes <= math.ceil(math.prod(shape) / profile.ranks_per_node) + 1
        assert axis.node_bytes_per_s <= profile.inter.rails * profile.inter.bytes_per_s * (1 + 1e-12)


def test_the_last_axis_stays_inside_a_node() -> None:
    across, inside = axis_links(load_profile("h100"), (2, 8))
    assert (across.nodes, across.ranks_per_node, across.sharing) == (2, 1, 8)
    assert (inside.nodes, inside.ranks_per_node, inside.sharing) == (1, 8, 1)


def test_groups_that_share_a_node_share_its_rails() -> None:
    profile = load_profile("h100")
    alone = axis_links(profile, (16,))[0].node_bytes_per_s
    shared = axis_links(profile, (4, 2, 4))[0].node_bytes_per_s
    assert shared == pytest.approx(alone / 8)


def test_a_mesh_of_unequal_ranks_has_its_own_speeds_and_memory() -> None:
    profile = replace(load_profile("h100"), rank_speeds=(1.0, 0.5), rank_memory_bytes=(80_000_000_000, 40_000_000_000))
    assert profile.speed(1) == 0.5
    assert profile.speed(7) == 1.0
    assert profile.memory_bytes(1) == 40_000_000_000
    assert profile.memory_bytes(7) == profile.device.memory_bytes
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("kind", sorted(LINK_KINDS))
def test_no_kind_of_link_beats_its_label(kind: str) -> None:
    assert link_of_kind(kind, 1e9).bytes_per_s <= 1e9
