"""Forest moves: exact on what they free, honest about what they save, never over capacity once within it."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import FORBIDDEN, make_problem
from autopar.search.build import build_network
from autopar.search.forest import Forests, State
from autopar.search.forest_search import ForestSearch, fitting
from autopar.search.network import Network
from autopar.search.pricing import Pricing
from autopar.search.sweep import Sweep
from autopar.search.tables import Tables


def network_of(count: int, seed: int, limit: int | None = None) -> Network:
    """A ring with chords, of three strategies a node and a few forbidden pairs; usage up to eight a node."""
    random = np.random.default_rng(seed)
    pairs = sorted({tuple(sorted((a, (a + step) % count))) for a in range(count) for step in (1, 3)})
    matrices = random.integers(0, 30, (len(pairs), 3, 3))
    matrices[:, 1, 2] = np.where(random.random(len(pairs)) < 0.3, FORBIDDEN, matrices[:, 1, 2])
    problem = make_problem(
        random.integers(0, 30, (count, 3)).tolist(),
        random.integers(0, 9, (count, 3)).tolist(),
        [(node, node + 4) for node in range(count)],
        [(int(a), int(b)) for a, b in pairs],
        matrices.tolist(),
        usage_limit=limit,
    )
    return build_network(problem).network


def parts(network: Network, blocks: int) -> tuple[Pricing, Tables, Sweep]:
    pricing = Pricing(network)
    tables = Tables(network, pricing)
    return pricing, tables, Sweep(tables, len(pricing.nodes), blocks)


@given(seed=st.integers(0, 10_000), blocks=st.integers(1, 4))
@settings(max_examples=40)
def test_what_a_move_saves_is_what_the_cost_falls_by(seed: int, blocks: int) -> None:
    network = network_of(9, seed)
    pricing, tables, sweep = parts(network, blocks)
    random = np.random.default_rng(seed)
    state = State(pricing, tables, np.zeros(9, dtype=np.int64))
    proposal = Forests(pricing, tables, sweep).propose(state, pricing.unary, random.random(9) < 0.8)
    before = tables.cost(pricing, state.positions)
    assert (proposal.gain >= 0).all()
    for kept in itertools.product([False, True], repeat=min(3, len(proposal.gain))):
        mask = np.array([*kept, *[False] * (len(proposal.gain) - len(kept))], dtype=bool)
        moved = state.positions.copy()
        taken = mask[proposal.cluster] if len(mask) else np.zeros(0, dtype=bool)
        moved[proposal.places[taken]] = proposal.positions[taken]
        assert tables.cost(pricing, moved) == before - proposal.gain[mask].sum()


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25)
def test_a_free_tree_gets_its_optimum(seed: int) -> None:
    """A ring with one node held fast is a path: one move must find its optimum, given that node."""
    random = np.random.default_rng(seed)
    count = 6
    problem = make_problem(
        random.integers(0, 30, (count, 3)).tolist(),
        [[0] * 3] * count,
        [(0, 0)] * count,
        [(node, (node + 1) % count) for node in range(count)],
        random.integers(0, 30, (count, 3, 3)).tolist(),
    )
    network = build_network(problem).network
    pricing, tables, sweep = parts(network, 1)
    wanted = np.arange(count) != count - 1
    state = State(pricing, tables, np.zeros(count, dtype=np.int64))
    proposal = Forests(pricing, tables, sweep).propose(state, pricing.unary, wanted)
    found = state.positions.copy()
    found[proposal.places] = proposal.positions
    best = min(tables.cost(pricing, np.array([*picks, 0])) for picks in itertools.product(range(3), repeat=count - 1))
    assert tables.cost(pricing, found) == best


def test_a_state_keeps_its_books_over_many_moves() -> None:
    network = network_of(30, 5, limit=20)
    pricing, tables, _ = parts(network, 2)
    state, random = State(pricing, tables, np.zeros(30, dtype=np.int64)), np.random.default_rng(0)
    for _ in range(20):
        places = np.sort(random.choice(30, 5, replace=False))
        moved = state.positions.copy()
        moved[places] = random.integers(0, 3, 5)
        state.move(places, moved[places], pricing.usage(moved))
    fresh = State(pricing, tables, state.positions)
    assert (fresh.given == state.given).all()
    assert fresh.cost() == state.cost()


def test_a_move_never_adds_to_what_is_over_capacity() -> None:
    network = network_of(40, 8, limit=18)
    pricing, tables, sweep = parts(network, 2)
    forests, random = Forests(pricing, tables, sweep), np.random.default_rng(1)
    state = State(pricing, tables, random.integers(0, 3, 40))
    for _ in range(20):
        unary = pricing.unary + random.gumbel(size=len(pricing.unary)) * 10
        proposal = forests.propose(state, unary, random.random(40) < 0.9)
        taken = fitting(pricing, state, proposal)
        ceiling = np.maximum(pricing.capacity, state.usage)
        state.move(proposal.places[taken.kept], proposal.positions[taken.kept], taken.usage)
        assert (pricing.usage(state.positions) == state.usage).all()
        assert (state.usage <= ceiling).all()


def test_a_walk_finds_the_optimum_of_a_small_problem_and_repeats_itself() -> None:
    network = network_of(8, 3, limit=18)
    pricing, tables, _ = parts(network, 1)

    def walk() -> ForestSearch:
        search = ForestSearch(pricing, tables, np.zeros(8, dtype=np.int64), np.zeros(len(pricing.capacity)), seed=4)
        search.run(400)
        return search

    first, second = walk(), walk()
    assert first.best is not None
    assert second.best is not None
    assert first.best.tolist() == second.best.tolist()
    costs = [
        tables.cost(pricing, np.array(picks))
        for picks in itertools.product(range(3), repeat=8)
        if (pricing.usage(np.array(picks)) <= pricing.capacity).all()
    ]
    assert first.cost == min(costs, default=math.inf)
