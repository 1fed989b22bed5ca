"""Whether statements can do nothing but give values to names that nothing else reads, and write into tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

SKIPS = (ast.Pass, ast.Continue)
BINDERS = (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda)  # expressions that do more than compute


def is_plain(block: Sequence[ast.stmt], function: ast.AST, given: ast.expr | None = None) -> bool:
    """Whether a block of a function is plain; `given` is the target of the loop around it.

    Assignments to names, to elements (`out[index] = ...`) and in place; calls of methods that write in place; `if`,
    `with` and `continue`. The names must be read nowhere else in the function, and in the block only after they were
    given a value in the same turn.
    """
    inside = {id(node) for statement in block for node in ast.walk(statement)}
    inside |= {id(node) for node in ast.walk(given)} if given is not None else set()
    bound = {node.id for node in _names(block, ast.Store)} | ({node.id for node in _targets(given)} if given else set())
    for node in ast.walk(function):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            return False
        if isinstance(node, ast.Name) and node.id in bound and id(node) not in inside and _reads(node):
            return False
    return _runs(block, bound, {node.id for node in _targets(given)} if given is not None else set()) is not None


def _reads(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Store)


def _names(block: Sequence[ast.AST], context: type[ast.expr_context]) -> Iterator[ast.Name]:
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, context):
                yield node


def _targets(target: ast.expr | None) -> Iterator[ast.Name]:
    return _names([target], ast.Store) if target is not None else iter(())


def _runs(block: Sequence[ast.stmt], bound: set[str], known: set[str]) -> set[str] | None:
    """The names that have a value of this turn after the block, given those before; None if it is not plain."""
    for statement in block:
        after = _run(statement, bound, known)
        if after is None:
            return None
        known = after
    return known


def _run(statement: ast.stmt, bound: set[str], known: set[str]) -> set[str] | None:
    if isinstance(statement, SKIPS):
        return known
    if isinstance(statement, ast.If):
        if not _computes(statement.test, bound, known):
            return None
        ways = [_runs(way, bound, known) for way in (statement.body, statement.orelse)]
        if ways[0] is None or ways[1] is None:
            return None
        return ways[1] if _ends_in_continue(statement.body) else ways[0] & ways[1]
    if isinstance(statement, ast.With):
        fits = all(
            item.optional_vars is None and _computes(item.context_expr, bound, known) for item in statement.items
        )
        return _runs(statement.body, bound, known) if fits else None
    return _assigned(statement, bound, known)


def _ends_in_continue(block: Sequence[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Continue)


def _assigned(statement: ast.stmt, bound: set[str], known: set[str]) -> set[str] | None:
    if isinstance(statement, ast.Expr):
        return known if _writes(statement.value) and _computes(statement.value, bound, known) else None
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets, value = [statement.target], statement.value
    elif isinstance(statement, ast.AugAssign):
        targets, value = [statement.target], statement.value
        if isinstance(statement.target, ast.Name) and statement.target.id not in known:
            return None
    else:
        return None
    if not _computes(value, bound, known) or not all(_takes(target, bound, known) for target in targets):
        return None
    return known | {node.id for target in targets for node in _targets(target)}


def _takes(target: ast.expr, bound: set[str], known: set[str]) -> bool:
    """A name, names, or elements of something."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(_takes(item, bound, known) for item in target.elts)
    return isinstance(target, ast.Name) or (isinstance(target, ast.Subscript) and _computes(target, bound, known))


def _writes(value: ast.expr) -> bool:
    """A call of a method that writes into its tensor, or a text."""
    is_method = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr.endswith("_")
    return is_method or isinstance(value, ast.Constant)


def _computes(value: ast.expr, bound: set[str], known: set[str]) -> bool:
    """Whether an expression binds no name, and reads only those of the block that have a value."""
    for node in ast.walk(value):
        if isinstance(node, BINDERS):
            return False
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in bound and node.id not in known:
            return False
    return True


def written_names(block: Sequence[ast.stmt]) -> set[str]:
    """The names behind what a plain block writes elements of or calls methods of, without those that it binds."""
    written = [node for statement in block for node in ast.walk(statement) if _is_element(node)]
    written += [statement.value for part in block for statement in ast.walk(part) if isinstance(statement, ast.Expr)]
    bound = {node.id for node in _names(block, ast.Store)}
    return {_behind(node) for node in written if not isinstance(node, ast.Constant)} - bound


def _is_element(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def _behind(node: ast.AST) -> str:
    """`out` of `out[index]`, `out.view(2).add_(1)`; of anything else a text that is no name."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else "?"
