"""The second core: a forest search in a process of its own, ordered and answered round by round.

The process runs this file without importing autopar's front door, because a search knows numbers only and PyTorch takes
seconds to import. It is no fork (the parent may hold threads) and no `multiprocessing` child (that would run the user's
script again). Orders and answers are pickled through its standard input and output.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autopar.search.forest_search import ForestSearch
from autopar.search.network import Array
from autopar.search.pricing import Pricing
from autopar.search.tables import Tables

Start = tuple[Pricing, Tables, Array, Array, int]
"""What a `ForestSearch` begins with: its arguments."""

_BOOT = """\
import sys, types
package = types.ModuleType("autopar")
package.__path__ = [sys.argv[1]]
sys.modules["autopar"] = package
package = types.ModuleType("autopar.search")
package.__path__ = [sys.argv[1] + "/search"]
sys.modules["autopar.search"] = package
from autopar.search.helper import serve
serve()
"""


@dataclass(frozen=True, slots=True)
class Order:
    """One round of walking."""

    moves: int
    seconds: float  # the most that it may take
    suggestion: Array | None  # positions to start a descent from
    prices: Array
    bound: float  # quanta
    best: Array | None  # positions of a choice that fits, if it is better than the walker's own
    cost: float  # quanta


@dataclass(frozen=True, slots=True)
class Answer:
    """The best choice that fits, where one was seen."""

    best: Array | None
    cost: float  # quanta


class Walker(Protocol):
    """Somebody who walks while the caller does something else: first `order`, later `answer`."""

    def order(self, order: Order) -> None: ...

    def answer(self) -> Answer: ...

    def close(self) -> None: ...


def follow(search: ForestSearch, order: Order) -> Answer:
    """Do what an order says."""
    deadline = time.monotonic() + order.seconds
    search.bound = order.bound
    if order.suggestion is not None:
        search.suggest(order.suggestion, order.prices)
    if order.best is not None:
        search.take(order.best, order.cost)
    search.run(order.moves, deadline)
    return Answer(search.best, search.cost)


class OwnWalker:
    """Walks in this process, when the answer is asked for: same answers as a helper, no second core."""

    def __init__(self, search: ForestSearch) -> None:
        self.search = search
        self._order: Order | None = None

    def order(self, order: Order) -> None:
        """Keep the order until the answer is asked for."""
        self._order = order

    def answer(self) -> Answer:
        """Walk now."""
        assert self._order is not None
        return follow(self.search, self._order)

    def close(self) -> None:
        """Nothing to end."""


class Helper:
    """Walks in another process. Where that process ends too early, `OSError` or `EOFError`: the caller walks itself."""

    def __init__(self, start: Start) -> None:
        command = [sys.executable, "-c", _BOOT, str(Path(__file__).parent.parent)]
        self.process = subprocess.Popen(  # its own session: Ctrl-C in a terminal is the parent's to handle
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._send(start)

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self.process.stdin.flush()

    def order(self, order: Order) -> None:
        """Start a round."""
        self._send(order)

    def answer(self) -> Answer:
        """Wait for the round's end."""
        assert self.process.stdout is not None
        answer: Answer = pickle.load(self.process.stdout)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def serve() -> None:
    """What the helper process does until its input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    search = ForestSearch(*pickle.load(source))
    while True:
        try:
            order = pickle.load(source)
        except EOFError:
            return
        pickle.dump(follow(search, order), target, protocol=pickle.HIGHEST_PROTOCOL)
        target.flush()


class Fallback:
    """A helper, or, from the moment it fails, a walker of our own that starts over from what it is ordered."""

    def __init__(self, start: Start) -> None:
        self._own: Callable[[], OwnWalker] = lambda: OwnWalker(ForestSearch(*start))
        self._last: Order | None = None
        try:
            self.walker: Walker = Helper(start)
        except OSError:
            self.walker = self._own()

    def order(self, order: Order) -> None:
        """Start a round, here where the helper cannot."""
        self._last = order
        try:
            self.walker.order(order)
        except OSError:
            self._replace()

    def answer(self) -> Answer:
        """The end of the round, walked here where the helper is gone."""
        try:
            return self.walker.answer()
        except (OSError, EOFError, pickle.UnpicklingError):
            self._replace()
            return self.walker.answer()

    def _replace(self) -> None:
        self.close()
        self.walker = self._own()
        assert self._last is not None
        self.walker.order(self._last)

    def close(self) -> None:
        """End what runs."""
        self.walker.close()
