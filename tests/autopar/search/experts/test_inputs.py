from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import ExpertPlacementError
from autopar.search.experts.inputs import read_cluster
from autopar.search.experts.place import place_experts

GOOD: dict[str, Any] = {"load": [[4, 3, 2, 1]], "mesh": (1, 2), "replicas": 4}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"load": [[1, -2, 3, 4]]}, r"load\[0, 1\] is -2.0: negative"),
    ({"load": [[1, 2, math.nan, 4]]}, r"load\[0, 2\] is nan: not a finite number"),
    ({"load": [[1, 2, 3, math.inf]]}, r"load\[0, 3\] is inf"),
    ({"load": [[1, 2], [3]]}, "load is no array of numbers"),
    ({"load": [["many"]]}, "load is no array of numbers"),
    ({"load": np.ones((2, 2, 2))}, r"load has the shape \(2, 2, 2\)"),
    ({"load": []}, r"load has the shape \(1, 0\)"),
    ({"replicas": 3}, "3 replicas are fewer than the 4 experts"),
    ({"replicas": 5}, "5 replicas do not divide over 2 devices\n  fix: .* use 4 or 6"),
    ({"mesh": ()}, "without devices"),
    ({"mesh": (2, 0)}, "without devices"),
    ({"mesh": "8x8"}, "has no shape"),
    ({"devices_per_node": 3}, "2 devices do not make nodes of 3"),
    ({"affinity": np.ones((1, 4, 4))}, r"affinity has the shape \(1, 4, 4\)"),
    ({"current": np.zeros((1, 3, 2), dtype=int)}, r"shape \(1, 3, 2\)"),
    ({"current": np.zeros((1, 2, 2))}, "array of float64"),
    ({"current": np.full((1, 2, 2), 4)}, "names an expert outside of 0 to 3"),
    ({"time_limit_s": -1}, "time_limit_s is -1"),
    ({"time_limit_s": None}, "time_limit_s is None"),
    ({"time_limit_s": "3"}, "time_limit_s is '3'"),
    ({"move_cost": math.nan}, "move_cost is nan"),
    ({"replicas": 4.0}, "replicas is 4.0: no whole number"),
    ({"replicas": True}, "replicas is True: no whole number"),
    ({"devices_per_node": "2"}, "devices_per_node is '2': no whole number"),
    ({"load": torch.empty(1, 4, device="meta")}, "load is no array of numbers"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_refused_with_what_is_wrong_and_what_to_do(change: dict[str, Any], message: str) -> None:
    given = {**GOOD, **change}
    with pytest.raises(ExpertPlacementError, match=message):
        place_experts(given.pop("load"), given.pop("mesh"), **given)


@pytest.mark.parametrize(
    ("mesh", "override", "nodes"),
    [
        ((2, 4), None, 2),
        (8, None, 1),
        ((2, 2, 2), None, 4),
        (autopar.Mesh((2, 8), hardware="h100"), None, 2),
        (autopar.Mesh((16,), hardware="h100"), None, 2),
        (autopar.Mesh((2, 2), hardware="h100"), None, 1),
        (autopar.Mesh((2, 2), hardware="h100"), 2, 2),
    ],
)
def test_nodes_are_those_of_the_profile_or_the_last_axis(mesh: Any, override: int | None, nodes: int) -> None:
    assert read_cluster(mesh, override).nodes == nodes


def test_without_replicas_every_device_has_as_few_slots_as_hold_all_experts() -> None:
    assert place_experts([[1] * 10], (1, 4)).assignment.shape == (1, 4, 3)
    assert place_experts([[1] * 8], (1, 4)).assignment.shape == (1, 4, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_loads_may_be_a_tensor_of_any_dtype_that_autograd_knows(dtype: torch.dtype) -> None:
    load = torch.tensor([[4, 3, 2, 1]], dtype=dtype, requires_grad=dtype.is_floating_point)
    expected = place_experts([[4, 3, 2, 1]], (1, 2)).assignment
    assert np.array_equal(place_experts(load, (1, 2)).assignment, expected)


def test_one_row_of_loads_is_one_layer() -> None:
    assert place_experts([3, 2, 1], (1, 3)).device_load.shape == (1, 3)
