"""The second process gives the answers that this one would, and nothing is lost where it ends."""

from __future__ import annotations

import math

import numpy as np

from autopar.search.forest_search import ForestSearch
from autopar.search.helper import Answer, Fallback, Helper, Order, OwnWalker, Start, Walker
from autopar.search.pricing import Pricing
from autopar.search.tables import Tables
from tests.autopar.search.test_forests import network_of


def start() -> Start:
    network = network_of(30, 6, limit=22)
    pricing = Pricing(network)
    zeros = np.zeros(30, dtype=np.int64)
    return pricing, Tables(network, pricing), zeros, np.zeros(len(pricing.capacity)), 3


def order(moves: int = 150) -> Order:
    return Order(moves, 60.0, None, np.zeros(0), -math.inf, None, math.inf)


def answers(walker: Walker) -> list[Answer]:
    found = []
    for _ in range(2):
        walker.order(order())
        found.append(walker.answer())
    walker.close()
    return found


def same(one: Answer, other: Answer) -> bool:
    assert one.best is not None
    assert other.best is not None
    return one.cost == other.cost and bool((one.best == other.best).all())


def test_a_process_of_its_own_answers_as_this_one_does() -> None:
    for here, there in zip(answers(OwnWalker(ForestSearch(*start()))), answers(Helper(start())), strict=True):
        assert same(here, there)


def test_a_helper_that_is_killed_is_replaced() -> None:
    expected = answers(OwnWalker(ForestSearch(*start())))[0]
    walker = Fallback(start())
    assert isinstance(walker.walker, Helper)
    walker.walker.process.kill()
    walker.walker.process.wait()
    walker.order(order())
    assert same(walker.answer(), expected)
    walker.close()
