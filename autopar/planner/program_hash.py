"""What tells one program from another: what a plan is valid for."""

from __future__ import annotations

import hashlib

from autopar.capture.program import Program


def program_hash(program: Program) -> str:
    """Of the ops, their arguments and shapes, and of the parameters' names: what a plan is valid for."""
    lines = [f"{item.kind.value} {item.name}" for item in program.inputs]
    for node in program.graph_module.graph.nodes:
        value = node.meta.get("val")
        shape = getattr(value, "shape", None)
        lines.append(f"{node.meta.get('key', node.name)} {tuple(shape) if shape is not None else ''}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
