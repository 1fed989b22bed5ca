"""Rows: an expert that stays in its group keeps its own, so that nothing moves that need not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.experts.order import inverse, rows_for


@given(before=st.permutations(range(12)), after=st.permutations(range(12)))
def test_every_group_gets_its_experts_and_those_that_stay_keep_their_rows(before: list[int], after: list[int]) -> None:
    groups = [after[:5], after[5:6], after[6:]]
    found = rows_for(before, groups)
    assert [set(found[:5]), set(found[5:6]), set(found[6:])] == list(map(set, groups))
    for start, end, group in ((0, 5, groups[0]), (5, 6, groups[1]), (6, 12, groups[2])):
        assert all(found[row] == before[row] for row in range(start, end) if before[row] in group)


@given(order=st.permutations(range(9)))
def test_the_inverse_says_where_each_stands(order: list[int]) -> None:
    assert [order[place] for place in inverse(order)] == list(range(9))
