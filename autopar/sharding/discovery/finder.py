"""find(): the rules that hold for a call in every trial, on shards of small tensors."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.discovery.samples import INTEGER_KINDS, REAL_KINDS, Kind, draw
from autopar.sharding.discovery.scaling import (
    MOST_ELEMENTS,
    MOST_REAL_ELEMENTS,
    Precision,
    Setting,
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
    fakes_agree,
    fits,
    holds,
    outputs_that_hold,
    same_bits,
    same_values,
    shares_memory,
    varies,
)
from autopar.sharding.execution import run_sharded, trace_op
from autopar.sharding.layout import REPLICATE, format_placement, shard_dim
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy, mixes_partials
from autopar.torch_compat import outside_tracing

# (length of the dims that are cut, ranks). The boundaries between shards have no common divisor, so that what repeats
# along a dim (windows, pairs, alternating signs) fits some of them and never all.
EVEN_CUTS = ((6, 3), (6, 2), (10, 2), (15, 3)) * 3
LONG_CUTS = ((62, 2), (93, 3))
UNEVEN_CUTS = ((5, 2), (7, 3), (11, 2), (5, 2), (7, 3))
SUMMED_RANKS = (2, 3) * 4
PAIR_LENGTHS = (12, 20)  # of dims that two axes of two ranks cut
MOST_CANDIDATES = 96  # placements that are tried for one size, or for addends
MOST_ADDENDS = 3  # inputs that are partial sums together
MOST_RULES = 16
SUM = Partial()
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
    devices = [] if device == "cpu" else [torch.cuda.current_device()]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - ops may draw from the legacy generator
    try:
        with (
            outside_tracing(),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            torch.random.fork_rng(devices),
            warnings.catch_warnings(action="ignore"),
        ):
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


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
        shift: int = 0,
        limit: int = MOST_ELEMENTS,
    ) -> Trial | None:
        """The op on the whole, in small sizes; None where it does not run in them on such values."""
        return self.run(setting, small_sizes(self.call, setting, given or {}, shift=shift), ranks, kind, limit)

    def run(
        self, setting: Setting, sizes: Mapping[int, int], ranks: int, kind: Kind, limit: int = MOST_ELEMENTS
    ) -> Trial | None:
        """The op on the whole, in these sizes. Raises _Nothing if it writes into its inputs, or returns them."""
        problem = scaled(self.call, setting, sizes, self.device)
        if len(set(sizes.values())) < len(sizes) or problem.numel > limit:
            return None
        tensors = draw(problem, kind, next(self.seeds))
        copies = [tensor.clone() for tensor in tensors]
        try:
            outputs = problem.run(tensors)
        except Exception:  # whatever an op says to inputs that it cannot take
            return None
        if not has_form(self.call, sizes, outputs, setting.precision):
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
        self.setting = self._first_setting()
        self.kinds = self._kinds()
        self._refuse_unrepeatable()
        self.others = self._other_settings()
        found: list[Rule] = []
        for size in size_classes(self.call, self.setting.naming):
            if size not in self.setting.kept:
                found += self._sharded(size)
        found += self._summed()
        emitted = [rule for rule in list(dict.fromkeys(found))[:MOST_RULES] if self._can_be_emitted(rule)]
        kept = self._without_conflicts(emitted)
        why = "" if kept else "no way to cut it gives its result"
        return Finding(tuple(kept), why, is_general=not self.setting.kept)

    def _first_setting(self) -> Setting:
        """The first in which the op runs and its result has the form of the real one."""
        for setting in settings(self.call):
            if any(self.bench.takes(setting, kind) for kind in FIRST_KINDS):
                return setting
        raise _Nothing("it does not run on small tensors of random values")

    def _kinds(self) -> list[Kind]:
        """The kinds of values that the op takes: every kind of reals, with the kinds of integers in turn."""
        takes = self.bench.takes
        integers = [
            kind for kind in INTEGER_KINDS if any(takes(self.setting, Kind(real, kind)) for real in ("normal", "unit"))
        ]
        if all(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in self.call.inputs):
            integers = integers[:1]
        pairs = itertools.islice(
            zip(itertools.cycle(REAL_KINDS), itertools.cycle(integers), strict=False), len(REAL_KINDS) * len(integers)
        )
        return [kind for kind in (Kind(*pair) for pair in dict.fromkeys(pairs)) if takes(self.setting, kind)]

    def _refuse_unrepeatable(self) -> None:
        """The same inputs must give the same bits, whatever the state of the random generators."""
        trial = self._main_trial()
        for seed in (1, 2):
            torch.manual_seed(seed)
            again = trial.problem.run(trial.tensors)
            if not all(
                one is None or two is None or same_bits(one, two)
                for one, two in zip(trial.expected, again, strict=True)
            ):
                raise _Nothing("two runs on the same inputs differ", is_random=True)

    def _main_trial(self) -> Trial:
        for kind in (*self.kinds, *FIRST_KINDS):
            trial = self.bench.trial(self.setting, 2, kind)
            if trial is not None:
                return trial
        raise _Nothing("it takes no random values")

    def _other_settings(self) -> list[Setting]:
        """Other readings of the arguments that run too, and the op's own dtypes: a rule must hold in each."""
        main = self.setting
        candidates = [Setting(main.kept, naming, main.precision) for naming in namings(self.call)]
        candidates.append(Setting(main.kept, main.naming, Precision.OWN))
        return [it for it in dict.fromkeys(candidates) if it != main and self.bench.takes(it, self.kinds[0])]

    def _cut_trials(self, size: int, cuts: Sequence[tuple[int, int]]) -> list[Trial]:
        """Trials in which the dims of one size have the lengths to be cut, on every kind of values in turn."""
        found = []
        for setting in (self.setting, *self.others):
            fewer = cuts[:4] if setting.precision is not self.setting.precision else cuts
            for (length, ranks), kind in zip(fewer, itertools.cycle(self.kinds), strict=False):
                trial = self.bench.trial(setting, ranks, kind, {size: length})
                if trial is not None:
                    found.append(trial)
        return found

    def _sharded(self, size: int) -> list[Rule]:
        """Rules that cut dims of one size."""
        even = self._cut_trials(size, EVEN_CUTS)
        if len(even) < len(EVEN_CUTS) // 2 or not varies(even):
            return []
        even += self._cut_trials(size, LONG_CUTS)
        uneven = self._cut_trials(size, UNEVEN_CUTS)
        found = []
        for inputs in self._candidates(size):
            outputs = outputs_that_hold(even, inputs)
            if outputs is not None and any(placement != REPLICATE for placement in outputs):
                any_length = len(uneven) >= len(UNEVEN_CUTS) // 2 and all_hold(uneven, inputs, outputs, is_even=False)
                found.append(Rule(inputs, outputs, even=not any_length))
        return found

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
        kinds = [kind for kind in self.kinds if kind.real != "gaps"]
        made = (
            self.bench.trial(self.setting, ranks, kind, shift=number % 2)
            for number, (ranks, kind) in enumerate(zip(SUMMED_RANKS, itertools.cycle(kinds), strict=False))
        )
        trials = [trial for trial in made if trial is not None]
        if len(trials) < len(SUMMED_RANKS) // 2 or not varies(trials):
            return []
        found = []
        for count in range(1, MOST_ADDENDS + 1):
            for chosen in itertools.islice(itertools.combinations(floats, count), MOST_CANDIDATES):
                inputs = tuple(SUM if index in chosen else REPLICATE for index in range(len(self.call.inputs)))
                outputs = outputs_that_hold(trials, inputs)
                if outputs is not None and SUM in outputs:
                    found.append(Rule(inputs, outputs))
        return found

    def _can_be_emitted(self, rule: Rule) -> bool:
        """Whether a program with the op in that layout, written as the passes write it, gives the op's result."""
        trial = self._trial_cut_by((rule,), (6,))
        if trial is None:
            return False
        args, kwargs = trial.problem.arguments(trial.tensors)
        try:
            gm = trace_op(trial.problem.target, args, kwargs)
            actual = run_sharded(gm, Strategy((rule,)), (2,), trial.tensors)
            foretold = fakes_agree(trial, rule.inputs)
        except Exception:  # whatever the op, or its form on fake tensors, says to shards
            return False
        return foretold and all(map(same_values, actual, trial.expected))

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
        trial = self._trial_cut_by((first, second), PAIR_LENGTHS)
        return trial is not None and holds(trial, strategy.inputs, strategy.outputs, (2, 2))

    def _trial_cut_by(self, rules: Sequence[Rule], lengths: Sequence[int]) -> Trial | None:
        """A trial in which the sizes that rules cut are those of `lengths`, in turn."""
        sizes = [size for rule in rules for size in self._sizes_cut(rule)]
        given = dict(zip(dict.fromkeys(sizes), lengths, strict=False))
        trials = (self.bench.trial(self.setting, 2, kind, given, limit=MOST_REAL_ELEMENTS) for kind in self.kinds)
        return next((trial for trial in trials if trial is not None), None)

    def _sizes_cut(self, rule: Rule) -> list[int]:
        pairs = zip(rule.inputs, self.call.inputs, strict=True)
        return [spec.shape[dim] for placement, spec in pairs if (dim := shard_dim(placement)) is not None]
