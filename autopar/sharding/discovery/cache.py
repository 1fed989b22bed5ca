"""What was found out, kept on disk: one JSON file per kind of call. A file that cannot be used is as good as none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanFormatError
from autopar.sharding.discovery.finder import Finding
from autopar.sharding.discovery.scaling import Naming, size_classes
from autopar.sharding.layout import format_placement, parse_placement
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule

FORMAT = "autopar discovered rules"
VERSION = 2  # of discovery: to be raised when it would find something else, or the file is written otherwise
Key = Mapping[str, Any]


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """AUTOPAR_CACHE_DIR, or `autopar` in XDG_CACHE_HOME, or in ~/.cache; None where there is no home."""
    own = environment.get("AUTOPAR_CACHE_DIR")
    if own:
        return Path(own)
    shared = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "autopar"
    try:
        return Path.home() / ".cache" / "autopar"
    except RuntimeError:
        return None


def key_of(call: OpCall, device: str, implementation: str, *, with_sizes: bool) -> Key:
    """What a finding depends on: the op and its implementation, dtypes, ranks, which sizes are equal, other arguments.

    `with_sizes`: of these very sizes, rather than of the kind of call.
    """
    classes = size_classes(call, Naming.ALL)
    order = list(dict.fromkeys(size for spec in (*call.inputs, *filter(None, call.outputs)) for size in spec.shape))
    names = {size: f"d{index}" for index, size in enumerate(order) if size > 1}

    def text(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return [str(value.dtype), *(names.get(size, size) for size in value.shape)]
        if isinstance(value, tuple):
            return [text(item) for item in value]
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, int) and not isinstance(value, bool) and value in names:
            return f"{value} = {names[value]}"
        return value if isinstance(value, (int, bool, str, type(None))) else repr(value)

    return {
        "op": call.name,
        "schema": str(getattr(call.target, "_schema", "")),
        "implementation": implementation,
        "arguments": text(call.args),
        "keywords": {name: text(value) for name, value in call.kwargs},
        "outputs": [None if spec is None else text(spec) for spec in call.outputs],
        "sizes": list(classes) if with_sizes else None,
        "device": device,
        "torch": torch.__version__,
    }


class DiskCache:
    """Findings by key, in a folder that several processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"discovery-{VERSION}"

    def path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"{key['op']}-{digest}.json"

    def get(self, key: Key) -> Finding | None:
        """What is known; None if nothing is, or if the file is damaged or of another version."""
        try:
            data = json.loads(self.path(key).read_text(encoding="utf-8"))
            if (data["format"], data["version"], data["key"]) != (FORMAT, VERSION, json.loads(json.dumps(key))):
                return None
            rules, why = tuple(map(_read_rule, data["rules"])), data["why"]
            return Finding(rules, why) if isinstance(why, str) else None
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, PlanFormatError):
            return None

    def put(self, key: Key, finding: Finding) -> None:
        """Write a file in one step; where the folder cannot be written, nothing is kept."""
        data = {"format": FORMAT, "version": VERSION, "key": key, "why": finding.why}
        data["rules"] = [_rule_json(rule) for rule in finding.rules]
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    json.dump(data, file, indent=1)
                os.replace(name, self.path(key))
            except OSError:
                os.unlink(name)


def _rule_json(rule: Rule) -> dict[str, Any]:
    sides = {"inputs": rule.inputs, "outputs": rule.outputs}
    return {**{side: list(map(format_placement, placed)) for side, placed in sides.items()}, "even": rule.even}


def _read_rule(data: Any) -> Rule:
    inputs, outputs = (tuple(map(parse_placement, data[side])) for side in ("inputs", "outputs"))
    if not isinstance(data["even"], bool):
        raise TypeError("even is no bool")
    return Rule(inputs, outputs, even=data["even"])
