"""The forms that fit what the backward needs: by op of the forward, which of its outputs may be packed, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

from autopar.errors import PlanError
from autopar.passes.packings import Form, Saved, form_for
from autopar.planner.decisions import Decision
from autopar.planner.residency import Residency
from autopar.planner.saved_values import is_view, late_decisions, roots_of
from autopar.sharding.op_call import OpCall

Reader = tuple[OpCall, int] | None


class SavedForms:
    """Of the ops of one program."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self.decisions = decisions
        self.late, self.roots = late_decisions(decisions), roots_of(decisions)
        self._known: dict[tuple[int, str], Mapping[int, Form]] = {}

    @cached_property
    def _readers(self) -> dict[int, dict[int, list[Reader]]]:
        """By root and output: what of the backward reads it."""
        found: dict[int, dict[int, list[Reader]]] = {}
        for index, decision in enumerate(self.decisions):
            if not self.late[index] or is_view(decision):
                continue
            for place, source in enumerate(decision.sources):
                root, output = self._origin(source.decision, source.output)
                if not self.late[root]:
                    reader = None if decision.call is None else (decision.call, place)
                    found.setdefault(root, {}).setdefault(output, []).append(reader)
        return found

    def _origin(self, index: int, output: int) -> tuple[int, int]:
        while is_view(self.decisions[index]):
            source = self.decisions[index].sources[0]
            index, output = source.decision, source.output
        return index, output

    def of(self, index: int, word: str) -> Mapping[int, Form]:
        """By output of an op of the forward: the form that a residency gives it, where one fits."""
        if (index, word) not in self._known:
            decision, found = self.decisions[index], dict[int, Form]()
            is_value = decision.kind == "op" and not self.late[index] and self.roots[index] == index
            readers = self._readers.get(index, {}) if is_value else {}
            for output, spec in enumerate(decision.specs if is_value else ()):
                if spec is not None and spec.numel:
                    assert decision.call is not None
                    saved = Saved(decision.call, output, tuple(readers.get(output, ())))
                    form = form_for(word, saved)
                    if form is not None:
                        found[output] = form
            self._known[index, word] = found
        return self._known[index, word]

    def is_whole(self, index: int, word: str) -> bool:
        """Whether what is unpacked stands for the value, whoever reads it."""
        return all(form.is_whole for form in self.of(index, word).values())

    def packed(self, residency: Residency) -> dict[tuple[str, int], str]:
        """What the passes are told: the form of each output that is packed, by key."""
        return {
            (self.decisions[index].key, output): form.name
            for index, word in sorted(residency.packed)
            for output, form in self.of(index, word).items()
        }

    def why_not(self, index: int, word: str) -> str:
        """Why an op's value cannot be packed so; nothing where it can."""
        decision = self.decisions[index]
        if decision.kind != "op" or self.late[index]:
            return "it is no op of the forward"
        if self.roots[index] != index:
            return f"it is a view of {self.decisions[self.roots[index]].key}: name that"
        if self.of(index, word):
            return ""
        kinds = ", ".join(str(spec.dtype).removeprefix("torch.") for spec in decision.specs if spec is not None)
        read = sorted(
            {it[0].name if it else "the result" for many in self._readers.get(index, {}).values() for it in many}
        )
        return f"its value ({kinds}) has no such form for what reads it in the backward: {', '.join(read) or 'nothing'}"

    def check(self, residency: Residency) -> None:
        """Raise PlanError where a value is packed that cannot be, or where what it lost is read by recomputation."""
        for index, word in sorted(residency.packed):
            why = self.why_not(index, word)
            if why:
                raise PlanError(f"{self.decisions[index].key} cannot have the residency {word!r}: {why}", fix=_FIX)
        lossless = {index for index, word in residency.packed if self.is_whole(index, word)}
        self._check_sources(residency, residency.words.keys() - lossless)

    def _check_sources(self, residency: Residency, partial: Set[int]) -> None:
        for reader in sorted(residency.recomputed):
            if is_view(self.decisions[reader]):
                continue
            for source in self.decisions[reader].sources:
                root = self.roots[source.decision]
                if root in partial:
                    raise PlanError(
                        f"{self.decisions[reader].key} cannot be recomputed: of {self.decisions[root].key} only signs "
                        "are held",
                        fix=_FIX,
                    )


_FIX = "keep or recompute it, or offload it"
