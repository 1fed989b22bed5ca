"""find(): the rules that hold for a call in every trial, on shards of small tensors."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.discovery.samples import INTEGER_KINDS, REAL_KINDS, Kind, draw
from autopar.sharding.discovery.scaling import (
    BASE_SIZES,
    MOST_ELEMENTS,
    MOST_REAL_ELEMENTS,
    MOST_SETTINGS,
    Precision,
    Setting,
    Sizes,
    has_form,
    namings,
    reduced_sizes,
    scaled,
    settings,
    size_classes,
    small_sizes,
)
from autopar.sharding.discovery.trials import (
    Trial,
    all_hold,
    fits,
    holds,
    is_foretold,
    outputs_that_hold,
    same_bits,
    shares_memory,
    varies,
)
from autopar.sharding.layout import REPLICATE, format_placement, shard_dim
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy, mixes_partials
from autopar.torch_compat import outside_tracing

# (ranks, sizes of all dims that may be cut). The boundaries between shards have no common divisor, so that what repeats
# along a dim (windows, pairs, alternating signs) fits some of them and never all.
EVEN_ROWS: tuple[tuple[int, Sizes], ...] = (
    (3, (6, 9, 12, 15, 18, 21, 24, 27)),
    (2, (6, 10, 14, 18, 22, 26, 34, 38)),
    (3, (6, 12, 15, 18, 21, 24, 27, 30)),
)
UNEVEN_ROWS: tuple[tuple[int, Sizes], ...] = (
    (3, (7, 8, 10, 11, 13, 14, 16, 17)),
    (2, (5, 7, 9, 11, 13, 15, 17, 19)),
)
# (ranks, length of the dims of one size), where an op does not run in one of those rows. None is of BASE_SIZES.
EVEN_LENGTHS = ((3, 12), (2, 26), (3, 15), (2, 20))
UNEVEN_LENGTHS = ((2, 5), (3, 7), (2, 11))
LONG_LENGTHS = ((3, 93),)
PAIR_SIZES: Sizes = (8, 12, 16, 20, 24, 28, 32, 36)  # that two axes of two ranks cut
PAIR_LENGTHS = (12, 20)
LEAST_TRIALS = 3  # that say anything about addends
OTHER_PRECISION_TRIALS = 1
MOST_KINDS = 12
MOST_CANDIDATES = 96  # placements that are tried for one size, or for addends
MOST_ADDENDS = 3  # inputs that are partial sums together
MOST_RULES = 16
SUM = Partial()
ROW_KINDS = ("wide", "tiny", "ties")  # of values that are tried in the rows, the others in the base sizes
FIRST_KINDS = tuple(Kind(*pair) for pair in itertools.product(("normal", "unit"), INTEGER_KINDS[:2]))


@dataclass(frozen=True)
class Finding:
    """What was found out about an op without a rule: its rules beside the replicated one, or why there are none.

    `is_random`: two runs on the same inputs differ. `is_general`: it is true of calls of this kind in any sizes.
    """

    rules: tuple[Rule, ...] = ()
    why: str = ""
    is_random: bool = False
    is_general: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The rules as a plan shows them: `S0, R -> P`."""
        return tuple(f"{_text(rule.inputs)} -> {_text(rule.outputs)}" for rule in self.rules)


def _text(placements: Sequence[Placement]) -> str:
    return ", ".join(map(format_placement, placements))


class _Nothing(Exception):
    """There is nothing to be found, and why."""

    def __init__(self, why: str, *, is_random: bool = False) -> None:
        super().__init__(why)
        self.finding = Finding((), why, is_random)


@contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """Ops run for real, without gradients; random states are as before afterwards, warnings are not shown."""
    generators = _generators(device)
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - ops may draw from the legacy generator
    own = [generator.get_state() for generator in generators]
    try:
        with (
            outside_tracing(),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            warnings.catch_warnings(action="ignore"),
        ):
            _seed(device, 0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for generator, state in zip(generators, own, strict=True):
            generator.set_state(state)


def _generators(device: str) -> list[torch.Generator]:
    """Those that an op on such a device may draw from."""
    on_cpu = [torch.default_generator]
    return on_cpu if device == "cpu" else [*on_cpu, torch.cuda.default_generators[torch.cuda.current_device()]]


def _seed(device: str, seed: int) -> None:
    """As `torch.manual_seed`, which takes milliseconds."""
    for generator in _generators(device):
        generator.manual_seed(seed)


def find(call: OpCall, device: str, *, is_checked: bool) -> Finding:
    """The rules of a call that hold in every trial; the most useful first.

    `is_checked`: the op raises an error for tensors that do not fit together, rather than read beyond their ends. Other
    ops are only given shards that look like a smaller call of the same kind.
    """
    with undisturbed(device):
        try:
            return _Finder(_Bench(call, device), is_checked).run()
        except _Nothing as nothing:
            return nothing.finding
        except NotImplementedError as error:  # of PyTorch alone, as of the sum of two tensors in a rare dtype
            return Finding((), f"its values cannot be compared ({error})")


def confirm(call: OpCall, rules: Sequence[Rule], device: str) -> tuple[Rule, ...]:
    """Those of the rules that hold in the real sizes too, or in the largest ones that are affordable."""
    with undisturbed(device):
        bench = _Bench(call, device)
        try:
            trials = bench.real_trials()
        except _Nothing:
            return ()
        return tuple(rule for rule in rules if _holds_where_it_fits(rule, trials))


def _holds_where_it_fits(rule: Rule, trials: Sequence[Trial]) -> bool:
    """Whether a rule holds in the first trial whose sizes it allows."""
    fitting = (trial for trial in trials if fits(trial, rule.inputs, rule.outputs, is_even=rule.even))
    first = next(fitting, None)
    return first is None or all_hold([first], rule.inputs, rule.outputs, is_even=rule.even)


@dataclass
class _Bench:
    """Runs one call in other sizes and on random values."""

    call: OpCall
    device: str
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def trial(
        self,
        setting: Setting,
        ranks: int,
        kind: Kind,
        given: Mapping[int, int] | None = None,
        *,
        row: Sizes = BASE_SIZES,
        limit: int = MOST_ELEMENTS,
    ) -> Trial | None:
        """The op on the whole, in small sizes; None where it does not run in them on such values."""
        return self.run(setting, small_sizes(self.call, setting, row, given or {}), ranks, kind, limit)

    def run(
        self, setting: Setting, sizes: Mapping[int, int], ranks: int, kind: Kind, limit: int = MOST_ELEMENTS
    ) -> Trial | None:
        """The op on the whole, in these sizes. Raises _Nothing if it writes into its inputs, or returns them."""
        problem = scaled(self.call, setting, sizes, self.device)
        if len(set(sizes.values())) < len(sizes) or problem.numel > limit:
            return None
        tensors = draw(problem, kind, next(self.seeds))
        copies = [tensor.clone() for tensor in tensors]
        outputs = problem.run(tensors)
        if outputs is None or not has_form(self.call, sizes, outputs, setting.precision):
            return None
        if not all(map(same_bits, tensors, copies)):
            raise _Nothing("it writes into its inputs")
        if shares_memory(outputs, tensors):
            raise _Nothing("its result shares memory with an input")
        return Trial(problem, tensors, outputs, ranks)

    def takes(self, setting: Setting, kind: Kind) -> bool:
        """Whether the op runs on such values."""
        return self.trial(setting, 2, kind) is not None

    def real_trials(self) -> list[Trial]:
        """The call in its own sizes, or in smaller ones if they are large, for two ranks and for three."""
        for naming, kind in itertools.product(namings(self.call), FIRST_KINDS):
            setting = Setting(frozenset(), naming, Precision.OWN)
            trial = self.run(setting, reduced_sizes(self.call, naming), 2, kind, MOST_REAL_ELEMENTS)
            if trial is not None:
                return [trial, Trial(trial.problem, trial.tensors, trial.expected, 3)]
        return []


@dataclass
class _Finder:
    bench: _Bench
    is_checked: bool

    @property
    def call(self) -> OpCall:
        return self.bench.call

    def run(self) -> Finding:
        self.kinds = self._kinds()
        self._refuse_unrepeatable()
        found: list[Rule] = []
        if varies(self.even):
            for size in size_classes(self.call, self.setting.naming):
                if size not in self.setting.kept:
                    found += self._sharded(size)
            found += self._summed()
        kept = self._without_conflicts(self._foretold(list(dict.fromkeys(found))[:MOST_RULES]))
        why = "" if kept else "no way to cut it gives its result"
        return Finding(tuple(kept), why, is_general=not self.setting.kept)

    @cached_property
    def setting(self) -> Setting:
        """The first in which the op runs and its result has the form of the real one."""
        for setting in itertools.islice(settings(self.call), MOST_SETTINGS):
            if any(self.bench.takes(setting, kind) for kind in self._first_kinds()):
                return setting
        raise _Nothing("it does not run on small tensors of random values")

    @cached_property
    def _has_integers(self) -> bool:
        return not all(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in self.call.inputs)

    def _first_kinds(self) -> Sequence[Kind]:
        return FIRST_KINDS if self._has_integers else FIRST_KINDS[::2]

    def _kinds(self) -> list[Kind]:
        """Kinds of values to be tried in the base sizes; where there are integers, of each kind in turn."""
        if not self._has_integers:
            return [Kind(real, INTEGER_KINDS[0]) for real in REAL_KINDS if real not in ROW_KINDS]
        integers = tuple(
            kind
            for kind in INTEGER_KINDS
            if any(self.bench.takes(self.setting, Kind(real, kind)) for real in ("normal", "unit"))
        )
        pairs = zip(itertools.cycle(REAL_KINDS), itertools.cycle(integers), strict=False)
        count = min(MOST_KINDS, len(REAL_KINDS) * len(integers))
        return [Kind(*pair) for pair in dict.fromkeys(itertools.islice(pairs, count))]

    @cached_property
    def _base(self) -> list[Trial]:
        """Trials in the base sizes, on every kind of values that the op takes."""
        trials = {kind: self.bench.trial(self.setting, 2, kind) for kind in self.kinds}
        self.kinds = [kind for kind, trial in trials.items() if trial is not None]
        found = [trial for trial in trials.values() if trial is not None]
        if not found:
            raise _Nothing("it takes no random values")
        return found

    def _refuse_unrepeatable(self) -> None:
        """The same inputs must give the same bits, whatever the state of the random generators."""
        trial = self._base[0]
        for seed in (1, 2):
            _seed(self.bench.device, seed)
            again = trial.problem.run(trial.tensors)
            if again is None or not all(
                one is None or two is None or same_bits(one, two)
                for one, two in zip(trial.expected, again, strict=True)
            ):
                raise _Nothing("two runs on the same inputs differ", is_random=True)

    @cached_property
    def others(self) -> list[Setting]:
        """Other readings of the arguments that run too, and the op's own dtypes: a rule must hold in each."""
        main = self.setting
        candidates = [Setting(main.kept, naming, main.precision) for naming in namings(self.call)]
        candidates.append(Setting(main.kept, main.naming, Precision.OWN))
        return [it for it in dict.fromkeys(candidates) if it != main and self.bench.takes(it, self.kinds[0])]

    def _rows(self, rows: Sequence[tuple[int, Sizes]]) -> list[Trial]:
        """Trials in which all sizes are to be cut; none where the op does not run in one of them."""
        found = []
        for setting, ((ranks, row), real) in self._settings_of(rows):
            trial = self._trial_of(setting, ranks, real, row=row)
            if trial is None:
                return []
            found.append(trial)
        return found

    def _settings_of(self, cuts: Sequence[tuple[int, Any]]) -> Iterator[tuple[Setting, tuple[tuple[int, Any], str]]]:
        """Each cut in each setting, and the kind of reals to try it on."""
        for setting in (self.setting, *self.others):
            fewer = cuts[:OTHER_PRECISION_TRIALS] if setting.precision is not self.setting.precision else cuts
            for pair in zip(fewer, itertools.cycle(ROW_KINDS), strict=False):
                yield setting, pair

    def _trial_of(
        self, setting: Setting, ranks: int, real: str, given: Mapping[int, int] | None = None, row: Sizes = BASE_SIZES
    ) -> Trial | None:
        """A trial on such reals, or where the op does not take them, on those that it is known to take."""
        kinds = dict.fromkeys((Kind(real, self.kinds[0].integer), self.kinds[0]))
        trials = (self.bench.trial(setting, ranks, kind, given, row=row) for kind in kinds)
        return next((trial for trial in trials if trial is not None), None)

    @cached_property
    def _even_rows(self) -> list[Trial]:
        return self._rows(EVEN_ROWS)

    @cached_property
    def _uneven_rows(self) -> list[Trial]:
        return self._rows(UNEVEN_ROWS)

    @property
    def even(self) -> list[Trial]:
        """Trials in which all sizes that may be cut can be cut evenly."""
        return self._base + self._even_rows

    def _cut_trials(self, size: int, cuts: Sequence[tuple[int, int]]) -> list[Trial]:
        """Trials in which the dims of one size have the lengths to be cut."""
        trials = [
            self._trial_of(setting, ranks, real, {size: length})
            for setting, ((ranks, length), real) in self._settings_of(cuts)
        ]
        return [trial for trial in trials if trial is not None]

    def _sharded(self, size: int) -> list[Rule]:
        """Rules that cut dims of one size."""
        even = self.even
        if not self._even_rows:
            cut = self._cut_trials(size, EVEN_LENGTHS)
            if len(cut) < len(EVEN_LENGTHS) // 2:
                return []
            even = even + cut
        found = []
        for inputs in self._candidates(size):
            outputs = outputs_that_hold(even, inputs)
            if outputs is not None and any(placement != REPLICATE for placement in outputs):
                found.append((inputs, outputs))
        if not found:
            return []
        long = self._cut_trials(size, LONG_LENGTHS)
        uneven = self._uneven_rows or self._cut_trials(size, UNEVEN_LENGTHS)
        rules = []
        for inputs, outputs in found:
            if all_hold(long, inputs, outputs, is_even=True):
                has_any = len(uneven) >= len(UNEVEN_LENGTHS) - 1 and all_hold(uneven, inputs, outputs, is_even=False)
                rules.append(Rule(inputs, outputs, even=not has_any))
        return rules

    def _candidates(self, size: int) -> list[tuple[Placement, ...]]:
        """Placements that cut one dim of that size of some inputs; of all of them first."""
        options: list[list[Placement]] = [
            [*(Shard(dim) for dim, length in enumerate(spec.shape) if length == size), REPLICATE]
            for spec in self.call.inputs
        ]
        if not self.is_checked:
            return [tuple(own[0] for own in options)] if all(len(own) <= 2 for own in options) else []
        products = itertools.islice(itertools.product(*options), 16 * MOST_CANDIDATES)
        ranked = sorted(products, key=lambda inputs: sum(placement == REPLICATE for placement in inputs))
        return [inputs for inputs in ranked if any(placement != REPLICATE for placement in inputs)][:MOST_CANDIDATES]

    def _summed(self) -> list[Rule]:
        """Rules under which addends of some inputs give addends of the result."""
        floats = [index for index, spec in enumerate(self.call.inputs) if spec.dtype.is_floating_point]
        if self.setting.precision is Precision.OWN and any(spec.dtype.itemsize < 4 for spec in self.call.inputs):
            return []  # rounding would hide what is not linear
        trials = [trial for trial in self.even if self._may_be_summed(trial)]
        if len(trials) < LEAST_TRIALS or not varies(trials):
            return []
        found = []
        for count in range(1, MOST_ADDENDS + 1):
            for chosen in itertools.islice(itertools.combinations(floats, count), MOST_CANDIDATES):
                inputs = tuple(SUM if index in chosen else REPLICATE for index in range(len(self.call.inputs)))
                outputs = outputs_that_hold(trials, inputs)
                if outputs is not None and SUM in outputs:
                    found.append(Rule(inputs, outputs))
        return found

    def _may_be_summed(self, trial: Trial) -> bool:
        """Whether addends of the inputs are exact: in the precision of the search, and all finite."""
        dtypes = [spec.dtype for spec in trial.problem.inputs]
        own = self._base[0].problem.inputs
        is_same = dtypes == [spec.dtype for spec in own]
        return is_same and all(bool(tensor.isfinite().all()) for tensor in trial.tensors)

    def _foretold(self, rules: list[Rule]) -> list[Rule]:
        """Those with which a program would know the shapes of its results: mostly all, as one look then tells."""
        trial = self._pair_trial if rules else None
        if trial is not None and is_foretold(trial, list(zip(*(rule.inputs for rule in rules), strict=True))):
            return rules
        return [rule for rule in rules if self._is_foretold(rule)]

    def _is_foretold(self, rule: Rule) -> bool:
        rows = self._base if rule.even else [*self._uneven_rows, *self._base]
        fitting = (trial for trial in rows if fits(trial, rule.inputs, rule.outputs, is_even=rule.even))
        trial = next(fitting, None)
        return trial is not None and is_foretold(trial, [(placement,) for placement in rule.inputs])

    def _without_conflicts(self, rules: list[Rule]) -> list[Rule]:
        """Those that hold together on two axes: each with itself, and with those before it."""
        kept: list[Rule] = []
        for rule in rules:
            if all(self._hold_together(other, rule) for other in [*kept, rule]):
                kept.append(rule)
        return kept

    def _hold_together(self, first: Rule, second: Rule) -> bool:
        strategy = Strategy((first, second))
        if any(map(mixes_partials, (*strategy.inputs, *strategy.outputs))):
            return True  # is never chosen
        trial = self._pair_trial or self._trial_cut_by((first, second), PAIR_LENGTHS)
        return trial is not None and holds(trial, strategy.inputs, strategy.outputs, (2, 2))

    @cached_property
    def _pair_trial(self) -> Trial | None:
        """One in which two axes can cut any dim, where the op runs in such sizes."""
        trials = (self.bench.trial(self.setting, 2, kind, row=PAIR_SIZES) for kind in self.kinds[:2])
        return next((trial for trial in trials if trial is not None), None)

    def _trial_cut_by(self, rules: Sequence[Rule], lengths: Sequence[int]) -> Trial | None:
        """A trial in which the sizes that rules cut are those of `lengths`, in turn."""
        sizes = [size for rule in rules for size in self._sizes_cut(rule)]
        given = dict(zip(dict.fromkeys(sizes), lengths, strict=False))
        trials = (self.bench.trial(self.setting, 2, kind, given, limit=MOST_REAL_ELEMENTS) for kind in self.kinds)
        return next((trial for trial in trials if trial is not None), None)

    def _sizes_cut(self, rule: Rule) -> list[int]:
        pairs = zip(rule.inputs, self.call.inputs, strict=True)
        return [spec.shape[dim] for placement, spec in pairs if (dim := shard_dim(placement)) is not None]
