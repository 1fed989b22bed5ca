"""Branches and loops that data decides, taken all the same: what they write is masked by whether they would be taken.

That is sound where a branch can do nothing but write rows back. Of its source it must be plain: it gives values to
names that nothing else reads, calls functions, writes into tensors, and runs to its end. Of what it writes, while it
runs, only rows written back may go into tensors that were there before.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

from torch import Tensor

from autopar.capture.rows.plain_code import is_plain, written_names
from autopar.source import is_user_file

Lines = tuple[int, int]
TRUTHS = (ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)  # ask for truth values


@dataclass(frozen=True)
class Branch:
    """Lines of a function that run in a program on one device only where `predicate` holds.

    `start`: how many nodes there were before. `about`: names what holds nowhere if the predicate does not.
    """

    frame: FrameType
    lines: Lines
    predicate: Tensor  # bool, of no dim
    start: int
    about: Hashable = None

    def holds_now(self, frame: FrameType) -> bool:
        """Whether a frame of the stack is in these lines."""
        return frame is self.frame and self.lines[0] <= frame.f_lineno <= self.lines[1]


class Branches:
    """Those that were entered in a trace; asked of the stack, which is where the program is."""

    def __init__(self) -> None:
        self._entered: list[Branch] = []

    def enter(self, branch: Branch) -> None:
        """In the place of an earlier turn of the same."""
        self.leave(branch.frame, branch.lines)
        self._entered.append(branch)

    def leave(self, frame: FrameType, lines: Lines) -> None:
        """Forget one."""
        self._entered = [item for item in self._entered if item.frame is not frame or item.lines != lines]

    def current(self) -> list[Branch]:
        """Those that the program is in, the innermost first."""
        if not self._entered:
            return []
        return [branch for frame in _stack() for branch in self._entered if branch.holds_now(frame)]


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_frame() -> FrameType | None:
    """The innermost frame of the user's."""
    return next((frame for frame in _stack() if is_user_file(frame.f_code.co_filename)), None)


def loop_at(frame: FrameType) -> Lines | None:
    """The lines of the body of the loop whose head runs in the frame, if it is plain."""
    for loop, function in _parts(frame.f_code):
        if not isinstance(loop, ast.For) or loop.orelse or not _has_line(loop.iter, frame.f_lineno):
            continue
        if is_plain(loop.body, function, given=loop.target) and _into_tensors(loop.body, frame):
            return _lines(loop.body)
    return None


def branch_at(frame: FrameType) -> tuple[bool, Lines] | None:
    """(the truth that leads into the branch that is asked for in the frame, the lines that only then run).

    `if there are rows: ...`, or `if there are none: continue`, where what is skipped is plain.
    """
    for part, function in _parts(frame.f_code):
        for branch, after in _ifs(part):
            negations = _negations(branch.test)
            if not _has_line(branch.test, frame.f_lineno) or branch.orelse or negations is None:
                continue
            is_skip = len(branch.body) == 1 and isinstance(branch.body[0], ast.Continue) and isinstance(part, ast.For)
            block = after if is_skip else branch.body
            is_below = bool(block) and _lines(block)[0] > (branch.test.end_lineno or branch.test.lineno)
            if is_below and is_plain(block, function) and _into_tensors(block, frame):
                return is_skip == bool(negations % 2), _lines(block)
    return None


def _negations(test: ast.expr) -> int | None:
    """How often `not` stands before the one truth value that a test asks for; None if it may ask for others."""
    count = 0
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, count = test.operand, count + 1
    for node in ast.walk(test):
        is_function = isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute)
        is_chain = isinstance(node, ast.Compare) and len(node.ops) > 1
        is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if is_function or is_chain or is_negation or isinstance(node, TRUTHS):
            return None
    return count


def _into_tensors(block: Sequence[ast.stmt], frame: FrameType) -> bool:
    """Whether what the block writes into are tensors, as far as they are there yet."""
    return all(isinstance(frame.f_locals.get(name), Tensor) for name in written_names(block))


def _ifs(part: ast.AST) -> Iterator[tuple[ast.If, list[ast.stmt]]]:
    """Every `if` among the statements of a block, with those after it in the block."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(part, field, [])
        if isinstance(block, list):
            for index, statement in enumerate(block):
                if isinstance(statement, ast.If):
                    yield statement, block[index + 1 :]


@lru_cache(maxsize=256)
def _parts(code: CodeType) -> tuple[tuple[ast.AST, ast.AST], ...]:
    """Every node of a function's source, with the function; line numbers as in its file. Empty without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return ()
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name]
    return tuple((node, functions[0]) for node in ast.walk(functions[0])) if functions else ()


def _has_line(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lines(block: Sequence[ast.stmt]) -> Lines:
    return block[0].lineno, block[-1].end_lineno or block[-1].lineno
