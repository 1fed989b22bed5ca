"""Folded names: exact both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanFormatError
from autopar.folding import expand_key, fold_in_order, fold_keys, name_matches, ranges_text


def test_keys_that_differ_in_one_number_and_agree_in_their_decision_fold() -> None:
    keys = {f"h.{layer}.mlp/mm#0": "S0" for layer in range(4)} | {"h.4.mlp/mm#0": "R", "head/mm#0": "S0"}
    folded = fold_keys(keys)
    assert list(folded) == ["h.[0-3].mlp/mm#0", "h.4.mlp/mm#0", "head/mm#0"]


def test_occurrence_numbers_do_not_fold() -> None:
    assert list(fold_keys({"a/mm#0": 1, "a/mm#1": 1})) == ["a/mm#0", "a/mm#1"]


@given(st.dictionaries(st.sampled_from([f"h.{a}.b.{b}.w" for a in range(5) for b in range(3)]), st.integers(0, 2)))
def test_expanding_what_was_folded_gives_every_key_once(decisions: dict[str, int]) -> None:
    folded = fold_keys(decisions)
    expanded = [(key, decisions[members[0]]) for text, members in folded.items() for key in expand_key(text)]
    assert sorted(expanded) == sorted(decisions.items())


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_name_the_numbers_they_were_made_of(numbers: set[int]) -> None:
    assert [int(key) for key in expand_key(f"[{ranges_text(sorted(numbers))}]")] == sorted(numbers)


@pytest.mark.parametrize("text", ["h.[3-1].w", "h.[1,,2].w", "h.[-1].w", "h.[0-999999].w"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanFormatError):
        expand_key(text)


def test_texts_in_order_keep_the_order_within_each_group_even_where_groups_contradict() -> None:
    keys = ["h.0/a#0", "h.0/c#0", "h.1/a#0", "h.1/b#0", "h.1/c#0", "h.2/c#0", "h.2/a#0"]
    groups = {key: key.partition("/")[0] for key in keys}
    agreeing = fold_in_order(dict.fromkeys(keys[:5], "S0"), groups)
    assert list(agreeing) == ["h.[0-1]/a#0", "h.1/b#0", "h.[0-1]/c#0"]
    expanded = [key for text in fold_in_order(dict.fromkeys(keys, "S0"), groups) for key in expand_key(text)]
    assert sorted(expanded) == sorted(keys)
    for group in set(groups.values()):
        assert [key for key in expanded if groups[key] == group] == [key for key in keys if groups[key] == group]


@pytest.mark.parametrize(
    ("name", "pattern", "meant"),
    [
        ("h.10.attn/mm#0", "h.[0-11].attn/mm#0", True),  # as plans print it
        ("h.12.attn/mm#0", "h.[0-11].attn/mm#0", False),
        ("h.7.attn/mm#0", "h.[0-2,7].*", True),
        ("h.1.attn", "h.[0-9].*", True),  # a shell's own
        ("blk x.a[0].weight", "blk x.a[0].weight", True),  # a name means itself
        ("blk-2 x.a[0].weight", "blk-[0-2] x.a[0].weight", True),
        ("b*c", "b?c", True),
        ("a", "", False),
        ("a.1", "a.[3-1]", False),
    ],
)
def test_a_pattern_means_what_it_names_what_a_shell_matches_and_what_it_folds(
    name: str, pattern: str, meant: object
) -> None:
    assert name_matches(name, pattern) is meant


@pytest.mark.parametrize("keys", [["a[0].weight"], ["h.0.a[0]", "h.1.a[0]", "h.2.a[1]"], ["x[[]1]", "[]", "y[1,2].3"]])
def test_brackets_of_a_name_are_no_ranges(keys: list[str]) -> None:
    folded = fold_keys(dict.fromkeys(keys, ""))
    assert {text: sorted(expand_key(text)) for text in folded} == {text: sorted(own) for text, own in folded.items()}
