"""The decisions of a plan, one by one, and reading them from JSON: the first thing that is wrong is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from autopar.errors import PlanFormatError
from autopar.folding import expand_key
from autopar.plan_details import EntryCosts, MoveCost, PlanDetails, read_costs, read_details
from autopar.sharding.layout import Layout, format_layout, parse_layout

SCHEMA = 4
RESIDENCIES = ("keep", "recompute", "offload", "compress", "compress-bf16", "compress-fp8", "compress-int8")
PIPELINE_NUMBERS = ("axis", "microbatches", "virtual_stages", "bubble")
STAGE_NUMBERS = (
    "number", "rank", "forward_s", "backward_input_s", "backward_weight_s", "in_flight", "activation_bytes",
    "sent_bytes",
)  # fmt: skip
SECTIONS = ("parameters", "inputs", "ops")


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One decision: the layouts of its inputs and outputs, and what it costs on one rank.

    A gradient has no entry: it takes its parameter's layout.
    """

    key: str  # a parameter's name, `input:0`, or `module/op#occurrence`
    kind: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    module: str = ""
    where: str = ""  # the user's line
    seconds: float = 0.0
    bytes: int = 0  # of its outputs on the largest shard
    moves: tuple[MoveCost, ...] = ()
    residency: str = (
        ""  # of a value that the backward needs, one of RESIDENCIES; keep: also a parameter's gathered copy
    )

    @property
    def costs(self) -> EntryCosts:
        """What it costs, moves included."""
        return EntryCosts(self.seconds, self.bytes, self.moves, self.where)

    @property
    def total_s(self) -> float:
        """Seconds, moves included."""
        return self.seconds + sum(move.seconds for move in self.moves)

    def priced(self, costs: EntryCosts) -> PlanEntry:
        """The same decision at other costs."""
        return replace(self, seconds=costs.seconds, bytes=costs.bytes, moves=costs.moves, where=costs.where)

    @property
    def words(self) -> str:
        """What is decided as a saved plan writes it: a layout, or `inputs -> outputs` of an op."""
        if self.kind == "op":
            return f"{' '.join(_texts(self.inputs))} -> {' '.join(_texts(self.outputs))}".strip()
        return format_layout(self.outputs[0])

    def signature(self) -> tuple[str, ...]:
        """What it decides as text: what two entries must share to be folded into one line."""
        usual = "" if self.kind == "parameter" else "keep"
        again = () if self.residency in ("", usual) else (self.residency,)
        return (self.kind, *_texts(self.inputs), "->", *_texts(self.outputs), *again)


@dataclass(frozen=True, slots=True)
class OpWithoutRule:
    """An op for which nobody wrote a rule: the rules that were discovered for it, or why it runs replicated."""

    op: str
    uses: int
    rules: tuple[str, ...] = ()  # as `S0, R -> P`
    why: str = ""  # there are none
    where: str = ""  # the user's line of the first use


WHOLE, ACCUMULATED = "whole", "accumulated"
SEMANTICS = (WHOLE, ACCUMULATED)  # of a pipeline's microbatches


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages of a plan run. `axis`: of the mesh, along which they lie. `bubble`: the share of the step, over
    all ranks, in which none computes, as simulated. `batch_semantics`: a microbatch is a part of the `whole` batch, or
    a batch by itself whose gradients are `accumulated`."""

    axis: int
    schedule: str
    microbatches: int
    virtual_stages: int = 1  # of each rank
    bubble: float = 0.0
    batch_semantics: str = WHOLE


def plan_json_text(data: dict[str, Any]) -> str:
    """JSON with one line per decision, of every stage too, and the lists of numbers on one line each."""
    return _plan_text(data, "") + "\n"


def _plan_text(data: dict[str, Any], margin: str) -> str:
    lines = {name: _section_text(value, f"{margin} ") for name, value in data.items() if name != "pipeline"}
    if "pipeline" in data:
        lines["pipeline"] = _pipeline_text(data["pipeline"], f"{margin} ")
    return _block({name: lines[name] for name in data}, margin)


def _section_text(value: Any, margin: str) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return _block({name: json.dumps(item) for name, item in value.items()}, margin)


def _pipeline_text(data: dict[str, Any], margin: str) -> str:
    stages = []
    for stage in data["stages"]:
        texts = {name: json.dumps(value) for name, value in stage.items() if name != "plan"}
        stages.append(_block({**texts, "plan": _plan_text(stage["plan"], f"{margin}  ")}, f"{margin} "))
    texts = {name: json.dumps(value) for name, value in data.items() if name != "stages"}
    return _block({**texts, "stages": f"[{', '.join(stages)}]"}, margin)


def _block(texts: Mapping[str, str], margin: str) -> str:
    """A dict of what is JSON already, one line or block per name."""
    lines = (f"{margin} {json.dumps(name)}: {text}" for name, text in texts.items())
    return "{\n" + ",\n".join(lines) + f"\n{margin}}}"


def _texts(layouts: tuple[Layout, ...]) -> list[str]:
    return [format_layout(layout) for layout in layouts]


class PlanReader:
    """Reads plan JSON field by field; the first thing that is wrong is a PlanFormatError that names it."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict) or data.get("format") != "autopar plan":
            raise PlanFormatError('this is not a plan: no "format": "autopar plan"', fix="write one with plan.save")
        schema = data.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or not 1 <= schema <= SCHEMA:
            raise PlanFormatError(
                f"plan schema {schema!r}, this version reads 1 to {SCHEMA}", fix="plan again with this version"
            )
        for step in range(schema, SCHEMA):
            data = MIGRATIONS[step](data)
        self.data: dict[str, Any] = data

    def field(self, holder: Any, name: str, *kinds: type) -> Any:
        value = holder.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise PlanFormatError(f"{name!r} is {value!r}, expected {' or '.join(kind.__name__ for kind in kinds)}")
        return value

    def number(self, holder: Any, name: str) -> float:
        value = self.field(holder, name, int, float)
        if not 0 <= value <= sys.float_info.max:
            raise PlanFormatError(f"{name!r} is {value!r}, expected a finite number")
        return float(value)

    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """(shape, axis names)."""
        mesh = self.field(self.data, "mesh", dict)
        shape = self.field(mesh, "shape", list)
        names = self.field(mesh, "axes", list)
        if not shape or not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in shape):
            raise PlanFormatError(f"mesh shape {shape!r} is not a list of sizes")
        if not all(isinstance(name, str) for name in names):
            raise PlanFormatError(f"mesh axes {names!r} are not names")
        return tuple(shape), tuple(names)

    def hardware(self) -> str:
        """The name of the hardware profile."""
        name: str = self.field(self.field(self.data, "mesh", dict), "hardware", str)
        return name

    def memory(self, predicted: dict[str, Any], name: str) -> dict[str, int]:
        """Bytes by kind."""
        found = self.field(predicted, name, dict)
        return {kind: int(self.number(found, kind)) for kind in found}

    def without_rule(self) -> tuple[OpWithoutRule, ...]:
        """The ops without a written rule; a file may leave them out."""
        found: list[OpWithoutRule] = []
        if "without_rule" not in self.data:
            return ()
        for item in self.field(self.data, "without_rule", list):
            if not isinstance(item, dict):
                raise PlanFormatError(f"'without_rule' holds {item!r}, expected dicts")
            rules = self.field(item, "rules", list)
            if not all(isinstance(rule, str) for rule in rules):
                raise PlanFormatError(f"'rules' is {rules!r}, expected a list of texts")
            texts = [self.field(item, name, str) for name in ("op", "why", "where")]
            found.append(OpWithoutRule(texts[0], int(self.number(item, "uses")), tuple(rules), *texts[1:]))
        return tuple(found)

    def entries(self, axes: int) -> list[PlanEntry]:
        found: dict[str, PlanEntry] = {}
        for section in SECTIONS:
            for text, value in self.field(self.data, section, dict).items():
                for key in expand_key(text):
                    if key in found:
                        raise PlanFormatError(f"{key!r} is decided twice", where=f"{section}: {text}")
                    found[key] = self.entry(section, text, key, value, axes)
        return list(found.values())

    def with_residency(self, entries: list[PlanEntry]) -> tuple[PlanEntry, ...]:
        """The entries with what happens to their values."""
        said: dict[str, str] = {}
        for text, value in self.field(self.data, "residency", dict).items():
            if value not in RESIDENCIES:
                raise PlanFormatError(
                    f"{value!r} is no residency", where=f"residency: {text}", fix=f"write {' or '.join(RESIDENCIES)}"
                )
            said.update(dict.fromkeys(expand_key(text), value))
        unknown = said.keys() - {entry.key for entry in entries if entry.kind in ("op", "parameter")}
        if unknown:
            raise PlanFormatError(f"{sorted(unknown)[0]!r} is no op or parameter of this plan", where="residency")
        return tuple(replace(entry, residency=said.get(entry.key, "")) for entry in entries)

    def with_costs(self, entries: tuple[PlanEntry, ...], axes: int) -> tuple[PlanEntry, ...]:
        """The entries with what they were priced at; what is not listed was not priced."""
        costs: dict[str, EntryCosts] = {}
        for text, value in self.field(self.data, "costs", dict).items():
            costs |= dict.fromkeys(expand_key(text), read_costs(value, axes, f"costs: {text}"))
        return tuple(entry.priced(costs.get(entry.key, EntryCosts())) for entry in entries)

    def frontier(self) -> tuple[tuple[int, float], ...] | None:
        """(bytes, seconds), if they were asked for before the plan was saved."""
        if self.data.get("frontier") is None:
            return None
        points = self.field(self.data, "frontier", list)
        if not all(isinstance(point, list) and len(point) == 2 for point in points):
            raise PlanFormatError("the frontier is no list of [bytes, seconds]")
        pairs = [{"bytes": point[0], "seconds": point[1]} for point in points]
        return tuple((int(self.number(pair, "bytes")), self.number(pair, "seconds")) for pair in pairs)

    def alternatives(self, predicted: dict[str, Any]) -> dict[str, float]:
        """Seconds of the plans that were compared."""
        found = self.field(predicted, "alternatives", dict)
        return {name: self.number(found, name) for name in found}

    def details(self) -> PlanDetails | None:
        """What was measured of the emitted program."""
        return None if self.data.get("details") is None else read_details(self.data["details"])

    def pipeline(self, axes: int) -> Pipeline | None:
        """How the stages run, if there are any."""
        if "pipeline" not in self.data:
            return None
        found = self.field(self.data, "pipeline", dict)
        numbers = {name: self.number(found, name) for name in PIPELINE_NUMBERS}
        whole = {name: int(numbers[name]) for name in PIPELINE_NUMBERS if name != "bubble"}
        if whole["axis"] >= axes or whole["microbatches"] < 1 or whole["virtual_stages"] < 1:
            raise PlanFormatError(f"a pipeline of {whole} on a mesh of {axes} axes", where="pipeline")
        if not self.field(found, "stages", list):
            raise PlanFormatError("a pipeline without stages", where="pipeline")
        semantics = self.field({"batch_semantics": WHOLE, **found}, "batch_semantics", str)
        if semantics not in SEMANTICS:
            raise PlanFormatError(f"batch_semantics {semantics!r:.40}", where="pipeline")
        schedule = self.field(found, "schedule", str)
        return Pipeline(schedule=schedule, bubble=numbers["bubble"], batch_semantics=semantics, **whole)

    def stages(self) -> list[tuple[dict[str, Any], Any]]:
        """Of each stage its numbers and where it starts, and its plan, not read yet."""
        found = self.data["pipeline"]["stages"] if "pipeline" in self.data else []
        return [self._stage(number, item) for number, item in enumerate(found)]

    def _stage(self, number: int, item: Any) -> tuple[dict[str, Any], Any]:
        if not isinstance(item, dict):
            raise PlanFormatError(f"stage {number} is {item!r}, expected a dict", where="pipeline")
        numbers = {name: self.number(item, name) for name in STAGE_NUMBERS}
        exact: dict[str, Any] = {name: value if name.endswith("_s") else int(value) for name, value in numbers.items()}
        if exact["number"] != number:
            raise PlanFormatError(f"stage {exact['number']} stands at place {number}", where="pipeline")
        names = self.field(item, "parameters", list)
        if not all(isinstance(name, str) for name in names):
            raise PlanFormatError(f"'parameters' is {names!r}, expected a list of names", where=f"stage {number}")
        return {**exact, "parameters": tuple(names), "starts": self.field(item, "starts", str)}, item.get("plan")

    def entry(self, section: str, text: str, key: str, value: Any, axes: int) -> PlanEntry:
        try:
            if section == "ops":
                sides = _word(value).split("->")
                if len(sides) != 2:
                    raise PlanFormatError(
                        f"{value!r} has no '->'", fix='write inputs -> outputs, as "S0,R R,S1 -> S0,S1"'
                    )
                layouts = [tuple(parse_layout(word, axes) for word in side.split()) for side in sides]
                return PlanEntry(key, "op", layouts[0], layouts[1], key.rpartition("/")[0])
            module = key.rpartition(".")[0] if section == "parameters" else ""
            return PlanEntry(key, _kind(section, key), (), (parse_layout(_word(value), axes),), module)
        except PlanFormatError as error:
            raise PlanFormatError(error.what, where=f"{section}: {text}", fix=error.fix) from error


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise PlanFormatError(f"{value!r} is not a layout", fix='write placements by axis, as "S0,R"')
    return value


def _kind(section: str, key: str) -> str:
    return "parameter" if section == "parameters" else key.partition(":")[0]


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    """Plans without residency: everything was kept."""
    predicted = data.get("predicted")
    if isinstance(predicted, dict):
        predicted = {"recompute_s": 0.0, **predicted}
    return {**data, "predicted": predicted, "residency": {}}


def _from_2(data: dict[str, Any]) -> dict[str, Any]:
    """Plans without costs by decision, without what was measured of the emitted program."""
    predicted = data.get("predicted")
    if isinstance(predicted, dict):
        predicted = {"alternatives": {}, **predicted}
    return {"without_rule": [], **data, "predicted": predicted, "costs": {}, "frontier": None, "details": None}


def _from_3(data: dict[str, Any]) -> dict[str, Any]:
    """Plans that do not say what it is that lies on the host; the first of them nothing of the host at all."""
    predicted = data.get("predicted")
    if isinstance(predicted, dict):
        predicted = {"host_bytes": 0, **predicted, "host_memory": {}}
    return {**data, "predicted": predicted}


Migration = Callable[[dict[str, Any]], dict[str, Any]]
MIGRATIONS: Mapping[int, Migration] = MappingProxyType({1: _from_1, 2: _from_2, 3: _from_3})
"""By schema: what makes a file of the next schema of one of this."""
