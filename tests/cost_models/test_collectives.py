"""Collective prices: what must hold for any sizes, and the shape that measurements have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import (
    COLLECTIVES,
    collective_lines,
    collective_seconds,
    explain_collective,
)
from autopar.cost_models.hardware import AxisLinks, axis_links, load_profile
from autopar.errors import UnpricedError

kinds = st.sampled_from(COLLECTIVES)
sizes = st.floats(1, 1e11)
profiles = st.sampled_from(["h100", "a100-80", "l4", "cpu", "v100"])
shapes = st.sampled_from([(2,), (8,), (16,), (64,), (2, 8), (4, 4), (3, 5)])


def _on_ten_nodes(ranks_per_node: int) -> AxisLinks:
    profile = load_profile("h100")
    inter = replace(profile.inter, rails=ranks_per_node)
    return axis_links(replace(profile, ranks_per_node=ranks_per_node, inter=inter), (10 * ranks_per_node,))[0]


def axes(profile: str, shape: tuple[int, ...]) -> tuple[AxisLinks, ...]:
    return axis_links(load_profile(profile), shape)


@given(kinds, sizes, sizes, profiles, shapes)
def test_more_bytes_never_take_less_time_but_for_the_step_in_sends(
    kind: str, one: float, other: float, profile: str, shape: tuple[int, ...]
) -> None:
    if kind == "send":  # the library takes more channels from 256 MiB on
        one, other = one % 1e8, other % 1e8
    for axis in axes(profile, shape):
        less, more = sorted((one, other))
        assert collective_seconds(kind, less, axis) <= collective_seconds(kind, more, axis)


@given(kinds, st.lists(sizes, min_size=1, max_size=5), profiles, shapes)
def test_bulk_prices_agree_with_one_at_a_time(
    kind: str, many: list[float], profile: str, shape: tuple[int, ...]
) -> None:
    for axis in axes(profile, shape):
        bulk = collective_seconds(kind, np.array(many), axis)
        single = [collective_seconds(kind, size, axis) for size in many]
        np.testing.assert_allclose(np.asarray(bulk), np.array(single), rtol=1e-12)


@given(sizes, profiles, shapes)
def test_all_reduce_never_costs_more_than_its_two_halves(size: float, profile: str, shape: tuple[int, ...]) -> None:
    for axis in axes(profile, shape):
        halves = collective_seconds("reduce_scatter", size, axis) + collective_seconds("all_gather", size, axis)
        assert collective_seconds("all_reduce", size, axis) <= halves * (1 + 1e-9)


@given(kinds, sizes, profiles)
def test_a_group_of_one_rank_sends_nothing(kind: str, size: float, profile: str) -> None:
    alone = axes(profile, (1,))[0]
    assert collective_seconds(kind, size, alone) == 0.0
    assert not np.any(collective_seconds(kind, np.array([size]), alone))


@given(kinds, profiles, shapes)
def test_no_collective_is_free(kind: str, profile: str, shape: tuple[int, ...]) -> None:
    for axis in axes(profile, shape):
        assert float(collective_seconds(kind, 1, axis)) > 0


def test_an_unknown_collective_is_unpriced() -> None:
    with pytest.raises(UnpricedError, match="all_shuffle"):
        collective_seconds("all_shuffle", 1, axes("h100", (8,))[0])


def test_crossing_nodes_costs_more_than_staying_inside() -> None:
    across, inside = axes("h100", (8, 8))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(kind, 2**28, across) > 3 * collective_seconds(kind, 2**28, inside)


def test_all_reduce_gains_from_rails_and_all_to_all_does_not() -> None:
    """Ten nodes of H100, one or four of their GPUs at work, as measured in nccl_bandwidth.csv."""
    one, four = (_on_ten_nodes(ranks_per_node) for ranks_per_node in (1, 4))
    size = 2**32
    assert collective_seconds("all_reduce", size, four) < collective_seconds("all_reduce", size, one) / 3
    assert collective_seconds("all_to_all", size, four) == pytest.approx(
        float(collective_seconds("all_to_all", size, one)), rel=0.15
    )


def test_in_switch_reduction_engages_from_five_ranks_of_an_h200_node() -> None:
    def algorithms(ranks: int) -> set[str]:
        return {line.formula.name for line in collective_lines("all_reduce", axes("h200", (ranks,))[0])}

    assert "in-switch all_reduce" not in algorithms(4)
    assert "in-switch all_reduce" in algorithms(8)


def test_large_messages_take_another_protocol_than_small_ones() -> None:
    axis = axes("h100", (8,))[0]
    assert "protocol LL:" in explain_collective("all_gather", 64, axis)
    assert "protocol Simple:" in explain_collective("all_gather", 2**30, axis)
    assert "over one rank" in explain_collective("all_gather", 64, axes("h100", (1,))[0])


def test_the_explanation_ends_in_the_price() -> None:
    axis = axes("h100", (16,))[0]
    price = float(collective_seconds("all_reduce", 2**30, axis))
    assert f"= {price * 1e3:.4g} ms" in explain_collective("all_reduce", 2**30, axis)
