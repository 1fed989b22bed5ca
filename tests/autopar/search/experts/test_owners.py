"""Owners: every expert one, every device equally many, of what it computes wherever that can be."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from autopar.search.experts.owners import ELSEWHERE, MOVED, choose_owners


def price(computed: list[list[int]], owned: list[list[int]], chosen: list[list[int]]) -> float:
    return sum(
        ELSEWHERE * (expert not in computed[device]) + MOVED * (expert not in owned[device])
        for device, group in enumerate(chosen)
        for expert in group
    )


@given(
    order=st.permutations(range(6)),
    computed=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=4), min_size=3, max_size=3),
)
def test_the_owners_are_the_best_of_all(order: list[int], computed: list[list[int]]) -> None:
    owned = [order[:2], order[2:4], order[4:]]
    chosen = choose_owners(computed, owned)
    assert sorted(expert for group in chosen for expert in group) == list(range(6))
    assert [len(group) for group in chosen] == [2, 2, 2]
    best = min(price(computed, owned, [list(it[:2]), list(it[2:4]), list(it[4:])]) for it in permutations(range(6)))
    assert price(computed, owned, chosen) == best


def test_without_copies_every_device_owns_what_it_computes() -> None:
    assert choose_owners([[0, 3], [1, 2]], [[0, 1], [2, 3]]) == [[0, 3], [1, 2]]
