"""Folded names: `h.[0-11].attn/mm#0` stands for twelve keys that differ in one number and share one decision."""

from __future__ import annotations

import fnmatch
import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping

from autopar.errors import PlanFormatError

MAX_EXPANSION = 100_000
_NUMBER = re.compile(r"(?<![\w#])\d+(?=\.|/|$)")
_BRACKET = "[[]"  # that is no range
_RANGE = re.compile(r"\[([\d,\-]+)\]")


def fold_keys(signatures: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Folded text -> the keys that it stands for, in order of first appearance; only keys of one signature fold.

    The first dotted component that is a number folds: in `h.3.mlp.0.weight` that is the 3. Of a key with brackets that
    would be read as folded they are `[[]`.
    """
    buckets: dict[tuple[str, Hashable], list[tuple[int, str]]] = defaultdict(list)
    for key, signature in signatures.items():
        text = _escaped(key)
        match = _NUMBER.search(text)
        if match is None:
            buckets[text, signature].append((-1, key))
        else:
            buckets[f"{text[: match.start()]}\0{text[match.end() :]}", signature].append((int(match[0]), key))
    folded = {}
    for (pattern, _), members in buckets.items():
        if len(members) == 1:
            folded[_escaped(members[0][1])] = [members[0][1]]
        else:
            numbers = ranges_text(sorted(number for number, _ in members))
            folded[pattern.replace("\0", f"[{numbers}]", 1)] = [key for _, key in members]
    return folded


def _escaped(key: str) -> str:
    """A key, with `[[]` for a bracket as a shell has it, where it would be read as folded."""
    return key.replace("[", _BRACKET) if _RANGE.search(key) or _BRACKET in key else key


def fold_in_order(signatures: Mapping[str, Hashable], groups: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """As `fold_keys`, but the texts stand so that the keys of each group come in the order in which they were given.

    Where groups contradict each other, only keys of groups that have the same keys in the same order fold.
    """
    sequences: dict[Hashable, list[str]] = defaultdict(list)
    for key in signatures:
        sequences[groups[key]].append(_NUMBER.sub("[]", key, count=1))
    alike = {key: tuple(sequences[groups[key]]) for key in signatures}
    apart: set[str] = set()
    while True:
        folded = fold_keys({key: (value, alike[key] if key in apart else ()) for key, value in signatures.items()})
        order = _in_order(folded, list(signatures), groups)
        stuck = {key for text in folded.keys() - set(order) for key in folded[text]}
        if not stuck or stuck <= apart:
            return {text: folded[text] for text in (folded if stuck else order)}
        apart |= stuck


def _in_order(folded: Mapping[str, list[str]], keys: list[str], groups: Mapping[str, Hashable]) -> list[str]:
    """The texts, the first to appear first, each after those that are before it in a group; without any in a circle."""
    rank = {text: place for place, text in enumerate(folded)}
    text_of = {key: text for text, members in folded.items() for key in members}
    after: dict[str, set[str]] = defaultdict(set)
    last: dict[Hashable, str] = {}
    for key in keys:
        text = text_of[key]
        if last.get(groups[key], text) != text:
            after[last[groups[key]]].add(text)
        last[groups[key]] = text
    waits_for = Counter(text for later in after.values() for text in later)
    texts, order = list(folded), []
    ready = [rank[text] for text in texts if not waits_for[text]]
    while ready:
        text = texts[heapq.heappop(ready)]
        order.append(text)
        for other in after[text]:
            waits_for[other] -= 1
            if not waits_for[other]:
                heapq.heappush(ready, rank[other])
    return order


def ranges_text(numbers: list[int]) -> str:
    """`0-3,7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def name_matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a name: it is the name, whatever characters that has; it matches as in a shell; or it is
    a folded text, as plans print them, that counts the name (`h.[0-11].attn`)."""
    if name == pattern or fnmatch.fnmatchcase(name, pattern):
        return True
    folded = _RANGE.search(pattern)
    if folded is None:
        return False
    head, tail = pattern[: folded.start()], pattern[folded.end() :]
    numbers = {number for number in re.findall(r"\d+", name) if _counts(folded[1], int(number))}
    return any(name == (way := f"{head}{number}{tail}") or fnmatch.fnmatchcase(name, way) for number in numbers)


def _counts(ranges: str, number: int) -> bool:
    """Whether `0-3,7` has the number."""
    found = (re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in ranges.split(","))
    return any(ends is not None and int(ends[1]) <= number <= int(ends[2] or ends[1]) for ends in found)


def expand_key(text: str) -> list[str]:
    """The keys that a folded text stands for; the text itself if nothing is folded."""
    match = _RANGE.search(text)
    if match is None:
        return [text.replace(_BRACKET, "[")]
    numbers: list[int] = []
    for part in match[1].split(","):
        ends = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if ends is None:
            raise PlanFormatError(f"{match[0]!r} is no list of numbers", where=text, fix="write it as [0-11] or [0,2]")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first or len(numbers) + last - first >= MAX_EXPANSION:
            raise PlanFormatError(f"{match[0]!r} counts backwards, or too far", where=text)
        numbers.extend(range(first, last + 1))
    head, tail = (part.replace(_BRACKET, "[") for part in (text[: match.start()], text[match.end() :]))
    return [f"{head}{number}{tail}" for number in numbers]
