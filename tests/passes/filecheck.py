"""Golden checks of emitted graphs, in the manner of LLVM's FileCheck: the fewest lines that carry the claim.

CHECK: text        a later line holds the text
CHECK-NEXT: text   the next line does
CHECK-NOT: text    no line does between the last match and the next one (or the end)
"""

from __future__ import annotations

from torch import fx

from autopar.sharding.op_call import op_name


def check(gm: fx.GraphModule, expected: str) -> None:
    """Compare a graph's lines, `name = target(arguments)`, with the directives of `expected`."""
    lines = [line_of(node) for node in gm.graph.nodes]
    position, forbidden = 0, list[str]()
    for directive in filter(None, map(str.strip, expected.splitlines())):
        kind, _, text = directive.partition(": ")
        if kind == "CHECK-NOT":
            forbidden.append(text)
            continue
        assert kind in ("CHECK", "CHECK-NEXT"), f"{directive!r} is no directive"
        found = next((at for at in range(position, len(lines)) if text in lines[at]), None)
        assert found is not None, _message(f"nothing holds {text!r}", lines, position)
        assert kind == "CHECK" or found == position, _message(f"the next line lacks {text!r}", lines, position)
        _check_absent(forbidden, lines, position, found)
        position, forbidden = found + 1, []
    _check_absent(forbidden, lines, position, len(lines))


def line_of(node: fx.Node) -> str:
    """A node as code."""
    if node.op == "call_function":
        return f"{node.name} = {op_name(node.target)}({', '.join(map(str, node.args))})"  # type: ignore[arg-type]
    return f"return {node.args[0]}" if node.op == "output" else f"{node.name} = {node.op}"


def _check_absent(forbidden: list[str], lines: list[str], start: int, end: int) -> None:
    for text in forbidden:
        for line in lines[start:end]:
            assert text not in line, _message(f"{text!r} should not be in {line!r}", lines, start)


def _message(what: str, lines: list[str], position: int) -> str:
    marked = [("> " if at == position else "  ") + line for at, line in enumerate(lines)]
    return "\n".join([f"{what} from the marked line on:", *marked])
