"""Where the planner gets its rules: those that somebody wrote, and for other ops those that are discovered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from autopar.sharding.discovery.cache import DiskCache, key_of
from autopar.sharding.discovery.finder import Finding, confirm, find
from autopar.sharding.discovery.fingerprint import BUILT_IN_NAMESPACES, fingerprint, identity, is_in_python
from autopar.sharding.op_call import OpCall, TensorSpec, walk
from autopar.sharding.registry import USER_RULES, UserRules, rules_of, source_of
from autopar.sharding.rule import Rule, replicate_rule
from autopar.sharding.rules.creation import whole
from autopar.torch_compat import has_kernel

_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_KNOWN_ARGUMENTS = (TensorSpec, int, float, complex, bool, str, type(None), *_TORCH_CONSTANTS)


class Discover(Protocol):
    """What finds the rules of an op that nobody wrote any for."""

    def __call__(self, call: OpCall) -> Finding: ...


class RuleBook:
    """The rules of every call of a program: those that a user wrote, or autopar has, or else those discovered."""

    def __init__(self, discover: Discover | None = None, user_rules: UserRules = USER_RULES) -> None:
        self._discover, self._user_rules = discover, user_rules
        self.findings: dict[OpCall, Finding] = {}  # of the calls without a written rule, or with one that cuts nothing

    def rules_of(self, call: OpCall) -> tuple[Rule, ...]:
        """Every rule, without repeats; the all-replicated one comes first."""
        source = source_of(call, self._user_rules)
        if source is not None:
            if source is whole and call.inputs and self._discover is not None:
                self.findings[call] = Finding((), "every element needs all of it")
            return rules_of(call, self._user_rules)
        return (replicate_rule(call), *self.finding(call).rules)

    def is_random(self, call: OpCall) -> bool:
        """Whether a call was found to give two results for the same inputs."""
        return call in self.findings and self.findings[call].is_random

    def finding(self, call: OpCall) -> Finding:
        """What is known of a call without a written rule."""
        if self._discover is None:
            return Finding()
        if call not in self.findings:
            self.findings[call] = self._discover(call)
        return self.findings[call]


PROCESS_MEMORY: dict[object, Finding] = {}  # of ops whose findings cannot be kept on disk


@dataclass(frozen=True)
class Discovery:
    """Finds rules, and remembers them: on disk where it is known what implements the op, else in this process.

    `device`: the type of device that programs will run on. Trials run on the CPU where the op can, so that a plan made
    without that device is the one made with it.
    """

    cache: DiskCache | None = None
    device: str = "cpu"
    memory: dict[object, Finding] = field(default_factory=lambda: PROCESS_MEMORY, repr=False, compare=False)

    def on(self, device: str) -> Discovery:
        """The same for programs that run on another type of device."""
        return replace(self, device=device)

    def __call__(self, call: OpCall) -> Finding:
        why = why_not(call)
        if why:
            return Finding((), why)
        bench = bench_for(call, self.device)
        if isinstance(bench, str):
            return Finding((), bench)
        op: Any = call.target
        implementation = fingerprint(op)
        if implementation is not None and self.cache is not None:
            return self._from_disk(self.cache, call, bench, implementation)
        key = (call, bench, identity(op))
        if key not in self.memory:
            self.memory[key] = _confirmed(call, _searched(call, bench), bench)
        return self.memory[key]

    @staticmethod
    def _from_disk(cache: DiskCache, call: OpCall, bench: Bench, implementation: str) -> Finding:
        """What is known of these sizes, or else of calls of this kind, or else found now."""
        own, kind = (key_of(call, bench.device, implementation, with_sizes=with_sizes) for with_sizes in (True, False))
        finding = cache.get(own)
        if finding is not None:
            return finding
        general = cache.get(kind)
        if general is None:
            general = _searched(call, bench)
            if general.is_general:
                cache.put(kind, general)
        finding = _confirmed(call, general, bench)
        if not finding.is_random:
            cache.put(own, finding)
        return finding


def _searched(call: OpCall, bench: Bench) -> Finding:
    finding = find(call, bench.device, is_checked=bench.is_checked)
    if finding.is_random and call.name.startswith("aten."):  # such as outputs that are left undefined
        return Finding((), finding.why)
    if _is_tagged_random(call) and not finding.is_random:
        return Finding((), "it is random by its tag")
    return finding


def _confirmed(call: OpCall, finding: Finding, bench: Bench) -> Finding:
    """The finding with the rules that hold in the real sizes."""
    if not finding.rules:
        return finding
    rules = confirm(call, finding.rules, bench.device)
    return replace(finding, rules=rules, why="" if rules else "no way to cut it gives its result in these sizes")


@dataclass(frozen=True)
class Bench:
    """Where trials run, and whether the op checks that its tensors fit together."""

    device: str
    is_checked: bool


def bench_for(call: OpCall, device: str) -> Bench | str:
    """Where a call can be tried; or why it cannot."""
    op: Any = call.target
    if has_kernel(op, "cpu"):
        bench = Bench("cpu", _checks_its_inputs(op))
    elif device == "cuda" and torch.cuda.is_available() and has_kernel(op, device):
        bench = Bench("cuda", is_checked=False)
    else:
        return "it has no kernel here"
    if _is_internal(op):
        return "it trusts its caller: tensors of other sizes may not fit together"
    if not bench.is_checked and any(not (it.dtype.is_floating_point or it.dtype.is_complex) for it in call.inputs):
        return "it may read beyond its tensors, at random integers"
    return bench


def _checks_its_inputs(op: torch._ops.OpOverload) -> bool:
    """Whether tensors that do not fit together are an error, rather than memory read or written beyond their ends."""
    return is_in_python(op) or op.namespace in BUILT_IN_NAMESPACES


def _is_internal(op: torch._ops.OpOverload) -> bool:
    """Whether it is one of PyTorch's that only PyTorch calls: a leading underscore, or a backward.

    Given sizes or indices that do not fit together, `_weight_norm_interface`, `_pdist_backward` and
    `adaptive_max_pool2d_backward` corrupt the heap.
    """
    name = op._schema.name.partition("::")[2]
    is_for_callers = not name.startswith("_") and "_backward" not in name
    return op.namespace in BUILT_IN_NAMESPACES and not is_for_callers and not is_in_python(op)


def why_not(call: OpCall) -> str:
    """Why no rule of a call may be looked for; "" if one may."""
    op = call.target
    if not isinstance(op, torch._ops.OpOverload):
        return "it is no op"
    if op._schema.is_mutable:
        return "it writes into its inputs"
    if any(value.alias_info is not None for value in op._schema.returns):
        return "it gives a view"
    if _is_tagged_random(call) and op.namespace in BUILT_IN_NAMESPACES:
        return "it is random"
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags):
        return "its result depends on data"
    if not call.inputs or None in call.outputs[:1] or not call.outputs:
        return "it does not take and give tensors"
    if any(0 in spec.shape for spec in (*call.inputs, *filter(None, call.outputs[:1]))):
        return "its tensors are empty"
    leaves = walk((call.args, tuple(value for _, value in call.kwargs)))
    return "" if all(isinstance(leaf, _KNOWN_ARGUMENTS) for leaf in leaves) else "its arguments are not plain values"


def _is_tagged_random(call: OpCall) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
