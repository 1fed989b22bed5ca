"""From a program and a mesh to a plan: decisions, problem, search, emission of one rank for the exact memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.capture.precision import Precision, Reduction
from autopar.capture.program import Program
from autopar.errors import ConstraintError, InfeasibleProblemError, PlanError
from autopar.mesh import Mesh
from autopar.passes.pipeline import LocalProgram
from autopar.plan import Plan
from autopar.plan_entries import PlanEntry
from autopar.planner.bounds import is_relaxed, with_copies_kept, with_limit, without_limit
from autopar.planner.budget import Budget
from autopar.planner.build import PlanningProblem, build_problem
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import Constraint, apply_constraints, residency_pins
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.fit import Fit, Fitted
from autopar.planner.hand_plans import HAND_PLANS, hand_plan
from autopar.planner.hosting import Hosting, SharedParameters
from autopar.planner.in_flight_fit import saving_less
from autopar.planner.joint import Joint, joint_problem
from autopar.planner.measure import ops_without_rule, plan_entries, predicted_step_s
from autopar.planner.move_buffers import peak_with_moves
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.packed_values import Packing
from autopar.planner.prices import Prices
from autopar.planner.program_hash import program_hash
from autopar.planner.recomputation import with_gathers
from autopar.planner.reductions import reduced_after_casts
from autopar.planner.residency import Residency
from autopar.planner.shortfall import does_not_fit
from autopar.search import FORBIDDEN, Problem, Solution, evaluate, peak_usage, solve, solve_again
from autopar.sharding.assignment import Assignment
from autopar.sharding.discovery.book import Discovery, RuleBook
from autopar.sharding.layout import Layout

MEMORY_FRACTION = 0.92  # of the device: the rest is for the CUDA context, NCCL's buffers and fragmentation
CLOSE = 1.05  # candidates foreseen up to this much above the fastest simulated one are simulated too
ROUNDS = 4  # how often the limit is tightened when the emitted program needs more than the problem foresaw
NEAR = 0.01  # of the whole step: layouts that take so much more than the best are not worth a joint search
JOINT_ROUNDS = 2  # the same for the joint problem: `Fit` does the rest
JOINT_GAP = 1e-3  # of the joint problem: what `Fit` then finds under these layouts differs by more
JOINT_LEAST_S = 10.0  # of one joint search, however late: without it there may be no plan; most end long before
BOUND_GAP = 1e-3  # of the problem whose optimum bounds all plans

GATHERS = {"fsdp": "recompute", "zero2": "keep"}
"""What hand plans do with the gathered copies of parameters between the phases."""

Search = str | Callable[..., Solution]


@dataclass(frozen=True)
class Options:
    """How to search. `memory_limit_bytes` None: the profile's memory less a margin.

    `discovery`: finds the rules of ops that nobody wrote any for; None replicates them.
    """

    search: Search = "ilp"
    memory_limit_bytes: int | None = None
    optimizer: Optimizer = NO_OPTIMIZER
    constraints: tuple[Constraint, ...] = ()
    precision: Precision | None = None
    parameter_layouts: Mapping[str, Layout] | None = None  # fixed already: a plan for other shapes
    boundary_layouts: Mapping[str, Layout] = field(default_factory=dict)  # of what other pipeline stages send or expect
    time_limit_s: float = 30.0  # processor time of all searches; a fraction of it where no memory limit binds
    seed: int = 0
    discovery: Discovery | None = None
    compress: str = ""  # the residency that loses precision and may be chosen, if any
    microbatches: int = 1  # of a step; the program is that of one of them
    hosted: frozenset[str] | None = None  # the parameters that lie on the host, where that is fixed already
    kept_on_device: Mapping[str, str] = field(default_factory=dict)  # by name, why a parameter is never on the host
    shared: SharedParameters = field(default_factory=SharedParameters)  # those of other programs of the step, too

    @property
    def of_stages(self) -> Options:
        """For the stages of a pipeline: gradients lie as their parameters do."""
        return replace(self, optimizer=replace(self.optimizer, scatters_gradients=False))

    @property
    def search_name(self) -> str:
        return self.search if isinstance(self.search, str) else getattr(self.search, "__name__", "custom")

    @property
    def text(self) -> str:
        """One line per option that the caller gave: what ranks compare."""
        given = {
            "search": self.search_name,
            "memory_limit_bytes": self.memory_limit_bytes,
            "optimizer": self.optimizer,
            "constraints": self.constraints,
            "precision": self.precision,
            "compress": self.compress,
        }
        return "\n".join(f"{name} {value}" for name, value in given.items())

    def rule_book(self, mesh: Mesh) -> RuleBook:
        """The rules of a program on a mesh; on one rank there is nothing to cut, and nothing to discover."""
        return RuleBook(self.discovery.on(mesh.device_type) if self.discovery and mesh.size > 1 else None)

    @property
    def sums_wide(self) -> bool:
        """Whether gradients are summed over the ranks in the dtype of their parameters."""
        return self.precision is not None and self.precision.reduction is Reduction.WIDE

    def limit(self, mesh: Mesh) -> int:
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        return int(mesh.profile.least_memory_bytes(mesh.size) * MEMORY_FRACTION)


@dataclass(frozen=True)
class Planned:
    """A plan, its assignment to the program that it was made for, and the problem that it answers."""

    plan: Plan
    choice: tuple[int, ...]
    assignment: Assignment
    planning: PlanningProblem
    solution: Solution
    rules: RuleBook
    planner: Planner
    best: Candidate

    @property
    def local(self) -> LocalProgram:
        """The program of the busiest rank."""
        return self.best.measured.local


def plan_program(program: Program, mesh: Mesh, options: Options) -> Planned:
    """The plan of least predicted time that fits. Raises MemoryLimitError, ConstraintError or PlanError."""
    return Planner(program, mesh, options).run()


@dataclass
class Planner:
    program: Program
    mesh: Mesh
    options: Options
    candidates: list[Candidate] = field(default_factory=list)
    tried: set[tuple[tuple[int, ...], str]] = field(default_factory=set)  # choices and names that were made to fit
    fastest: float = float("inf")  # foreseen seconds of the best plan that recomputes and fits

    def __post_init__(self) -> None:
        self.budget = Budget(self.options.time_limit_s)
        slowest = self.mesh.profile.slowest_speed(self.mesh.size)  # all wait for it
        self.prices = Prices(self.mesh, slowest, self.options.microbatches)
        self.limit = self.options.limit(self.mesh)
        self.rules = self.options.rule_book(self.mesh)
        decisions = DecisionList(self.program, self.prices, self.options.optimizer, self.rules).build()
        planning = build_problem(self.program, decisions, self.prices, usage_limit=float(self.limit))
        if self.options.sums_wide:
            planning = reduced_after_casts(planning)
        self.planning = apply_constraints(
            planning, self.options.constraints, self.options.parameter_layouts, self.options.boundary_layouts
        )
        self.planning = replace(self.planning, gradients_stay=self.options.shared.names)
        where = self.options.hosted, self.options.kept_on_device, self.options.shared
        self.hosting = Hosting(decisions, self.prices, self.options.optimizer, *where)
        self.packing = Packing.of(decisions, self.prices, self.options.compress, self.hosting)

    def run(self) -> Planned:
        if self.options.search in HAND_PLANS:
            name = str(self.options.search)
            choice = self._hand_plan(name)
            self.add(name, choice, self.checked(name, choice))
        else:
            self._search()
        self._recompute()
        return self.planned(self._best())

    def again(self, constraints: tuple[Constraint, ...], memory_limit_bytes: int | None) -> Planner:
        """A planner of the same decisions under further constraints, and under another limit if one is given."""
        fresh = copy(self)
        fresh.options = replace(self.options, constraints=(*self.options.constraints, *constraints))
        if memory_limit_bytes is not None:
            fresh.options = replace(fresh.options, memory_limit_bytes=memory_limit_bytes)
        fresh.limit = fresh.options.limit(self.mesh)
        limited = replace(self.planning, problem=with_limit(self.planning.problem, float(fresh.limit)))
        fresh.planning = apply_constraints(limited, constraints, None)
        fresh.candidates, fresh.tried, fresh.fastest = [], set(), float("inf")
        fresh.budget = Budget(fresh.options.time_limit_s)
        return fresh

    def under(self, memory_limit_bytes: int) -> Planned:
        """As `run` under another limit, from the candidates that were found under this one."""
        fresh = self.again((), memory_limit_bytes)
        fresh.candidates = list(self.candidates)
        if self.options.search not in HAND_PLANS:
            fresh._search_within(next((it for it in self.candidates if it.name == self.options.search_name), None))
        fresh._recompute()
        return fresh.planned(fresh._best())

    def saving_less(self, candidate: Candidate, less_bytes: int) -> Planned | None:
        """The layouts of a candidate, so much recomputed that every microbatch saves less; None where nothing does."""
        fitted = saving_less(self._fit(candidate), candidate.fitted, less_bytes)
        return None if fitted is None else self.planned(self._refitted(candidate, fitted))

    def foreseen_entries(self) -> tuple[PlanEntry, ...]:
        """What a plan makes of each op, as foreseen: nothing is emitted where the best layouts seem to fit."""
        free = self._solve(None) if self.options.search not in HAND_PLANS else None
        if free is None or free.least_bytes > self.limit:
            return self.run().plan.entries
        return plan_entries(self.planning, free.choice, self.prices, free.residency)

    def run_from(self, choice: Sequence[int], changed: Sequence[int]) -> Planned:
        """As `run`, from a choice that was the best before the decisions `changed` were; without the hand plans."""
        first = self.solved_again(choice, changed)
        if first.peak_bytes > self.limit and not self._search_jointly():
            self._search_tightened()
        self._recompute()
        return self.planned(self._best())

    def solved_again(self, choice: Sequence[int], changed: Sequence[int]) -> Candidate:
        """The best layouts, memory aside. Raises ConstraintError where none meet the constraints."""
        problem, seconds = without_limit(self.planning.problem), self.options.time_limit_s
        try:
            solution = solve_again(problem, choice, changed, time_limit_s=seconds, seed=self.options.seed)
        except InfeasibleProblemError as error:
            raise ConstraintError("no layouts meet these pins together", fix="remove one of them") from error
        return self.add(self.options.search_name, solution.choice, solution)

    def _hand_plan(self, name: str) -> tuple[int, ...]:
        """A recipe's choice, whatever it needs: the problem's memory is an upper bound, the emitted program decides."""
        if name == "zero1" and not self.options.optimizer.shards_replicas:
            raise PlanError(
                "'zero1' needs an optimizer that divides its state among the replicas of a parameter",
                fix="optimizer=functools.partial(autopar.optim.ShardedState, optimizer=torch.optim.AdamW)",
            )
        free = replace(self.planning, problem=without_limit(self.planning.problem))
        if name == "zero2" and self.options.optimizer.scatters_gradients:
            name = "ddp"  # whose gradients and state are the optimizer's to divide
        return hand_plan(free, name, time_limit_s=self.budget.share_s, seed=self.options.seed)

    def as_solution(self, name: str, choice: tuple[int, ...]) -> Solution:
        cost = evaluate(without_limit(self.planning.problem), choice)
        return Solution(choice, cost, strategy=name)

    def checked(self, name: str, choice: tuple[int, ...]) -> Solution:
        """The choice as a solution. Raises ConstraintError if it does not meet the constraints, or the precision."""
        solution = self.as_solution(name, choice)
        if solution.cost < FORBIDDEN:
            return solution
        if self.options.constraints:
            raise ConstraintError(
                f"the plan {name!r} does not meet the constraints", fix="use search='ilp', or no pins"
            )
        if self.options.sums_wide:
            raise ConstraintError(
                f"the plan {name!r} sums gradients before they are widened", fix="plan again under this precision"
            )
        return solution

    def add(self, name: str, choice: tuple[int, ...], solution: Solution) -> Candidate:
        seconds = predicted_step_s(self.planning, choice, self.prices)
        candidate = Candidate(choice, solution, name, seconds, self.planning, self.prices, self.options.optimizer)
        fit = self._fit(candidate)
        candidate = candidate.with_residency(fit.fastest, fit.least_s)
        self.candidates.append(candidate)
        return candidate

    def recomputation(self, candidate: Candidate) -> Problem:
        """What becomes of values under a candidate's layouts, as a search problem without a limit."""
        return self._fit(candidate).problem(candidate.fitted)

    def _fit(self, candidate: Candidate) -> Fit:
        pins = residency_pins(self.planning, self.options.constraints, self.hosting)
        gathers = GATHERS.get(candidate.name)
        if gathers is not None:
            own = {index: gathers for index, item in enumerate(self.planning.decisions) if item.kind == "parameter"}
            pins = own | pins
        step_s = candidate.foreseen_s - candidate.residency_s
        choice, residency, seed = candidate.choice, candidate.residency, self.options.seed
        return Fit(self.planning, choice, self.prices, step_s, pins, self.budget, self.packing, residency, seed)

    def _refitted(self, candidate: Candidate, fitted: Fitted) -> Candidate:
        """The candidate with another residency, measured."""
        return candidate.with_residency(fitted.residency, fitted.seconds, fitted.measured)

    def with_residency(self, candidate: Candidate, residency: Residency) -> Candidate:
        """The same layouts, and what becomes of values."""
        return self._refitted(candidate, self._fit(candidate).measured(residency))

    def _recompute(self) -> None:
        """Make candidates fit that are faster than any that fits as it is; all of them as long as none is known to."""
        for candidate in sorted(self.candidates, key=lambda item: item.foreseen_s):
            if candidate.foreseen_s >= self.fastest or candidate.fits(self.limit):
                return
            is_known = (candidate.choice, candidate.name) in self.tried
            if not is_known and (not np.isfinite(self.fastest) or self._may_fit(candidate)):
                self._fitted(candidate)

    def _fitted(self, candidate: Candidate) -> tuple[bool, int]:
        """Add the candidate with as little recomputed as makes it fit; (whether it does, the least bytes found)."""
        self.tried.add((candidate.choice, candidate.name))
        fitted, thriftiest = self._fit(candidate).under(self.limit, candidate.fitted)
        if fitted is not None:
            self.candidates.append(self._refitted(candidate, fitted))
            self.fastest = min(self.fastest, self.candidates[-1].foreseen_s)
        return fitted is not None, thriftiest.measured.peak_bytes

    def _search(self) -> None:
        """The hand plans that apply, then the search from the best of them, under a limit that is tightened."""
        same = "ddp" if self.options.optimizer.shards_replicas else "zero1"  # as the other of the two
        for name in (name for name in HAND_PLANS if name != same):
            try:
                choice = self._hand_plan(name)
            except (PlanError, InfeasibleProblemError):
                continue
            if np.isfinite(evaluate(without_limit(self.planning.problem), choice)):
                self.add(name, choice, self.as_solution(name, choice))
        self._search_within(self._solve(None))

    def _search_within(self, free: Candidate | None) -> None:
        """The search under the limit, where the best without one neither fits nor comes near once it is made to."""
        if free is None or free.fits(self.limit) or self._is_near_once_fitted(free):
            return
        if not self._search_jointly():
            self._search_tightened()

    def _with(self, candidate: Candidate, residency: Residency) -> Candidate:
        """The candidate with a residency, and with all that is gathered for the forward gathered again."""
        fit = self._fit(candidate)
        residency = with_gathers(residency, fit.moves.gathers, set())
        return candidate.with_residency(residency, fit.seconds(residency))

    def _may_fit(self, candidate: Candidate) -> bool:
        """Whether little enough is held with all recomputed but what crosses narrow cuts, by a bound from below."""
        return self._checkpointed(candidate).least_bytes <= self.limit

    def _checkpointed(self, candidate: Candidate) -> Candidate:
        return self._with(candidate, self._fit(candidate).checkpointed)

    def _is_near_once_fitted(self, free: Candidate) -> bool:
        """Whether recomputing under the layouts that are best without a limit comes near that best."""
        if not self._may_fit(free):
            return False
        fits, _ = self._fitted(free)
        return fits and self.candidates[-1].solution.cost <= (1 + NEAR) * free.solution.bound

    def _search_jointly(self) -> bool:
        """Layouts and recomputation in one problem; whether what came of it fits."""
        pins = residency_pins(self.planning, self.options.constraints, self.hosting)
        joint = joint_problem(self.planning, pins, self.packing, float(self.limit))
        allowance = float(self.limit)
        for _ in range(JOINT_ROUNDS if joint is not None else 0):
            assert joint is not None
            solution = self._joint_solution(joint, allowance)
            if solution is None:
                return False
            choice = joint.choice(solution.choice)
            own = self.add(self.options.search_name, choice, self.as_solution(self.options.search_name, choice))
            fits, thriftiest = self._fitted(self._with(own, joint.residency(solution.choice)))
            if fits:
                return True
            allowance -= 1.05 * (thriftiest - self.limit)
            if allowance <= 0:
                return False
        return False

    def _joint_solution(self, joint: Joint, allowance: float) -> Solution | None:
        """The best of the joint problem; with room for moved copies too, where that costs next to nothing."""
        least_s = JOINT_LEAST_S * self.budget.slowdown
        solution = self._solution(with_limit(joint.problem, allowance), None, JOINT_GAP, least_s)
        if solution is None:
            return None
        foreseen = peak_with_moves(self.planning, joint.problem, solution.choice, joint.choice(solution.choice))
        room = allowance - (foreseen - self.limit)
        if not 0 < room < allowance:
            return solution
        roomy = self._solution(with_limit(joint.problem, room), None, JOINT_GAP, least_s)
        return roomy if roomy is not None and roomy.cost <= (1 + NEAR) * solution.cost else solution

    def _search_tightened(self) -> None:
        """Layouts alone, under a limit that is tightened until the emitted program meets it."""
        allowance = float(self.limit)
        for _ in range(ROUNDS):
            candidate = self._solve(allowance)
            if candidate is None or candidate.peak_bytes <= self.limit:
                return
            foreseen = peak_usage(self.planning.problem, candidate.choice)
            allowance = foreseen - 1.05 * (candidate.peak_bytes - self.limit)
            if allowance <= 0:
                return

    def _solve(self, allowance: float | None) -> Candidate | None:
        problem = with_limit(self.planning.problem, allowance)
        starts = sorted((evaluate(problem, item.choice), item.choice) for item in self.candidates)
        solution = self._solution(problem, starts[0][1] if starts and np.isfinite(starts[0][0]) else None)
        if solution is None:
            return None
        return self.add(self.options.search_name, solution.choice, solution)

    def _solution(
        self, problem: Problem, start: Sequence[int] | None, gap: float = 0.0, least_s: float = 0.0
    ) -> Solution | None:
        try:
            solution = solve(
                problem,
                strategy=self.options.search,
                time_limit_s=max(least_s, self.budget.share_s),
                seed=self.options.seed,
                start=start,
                gap=gap,
            )
        except InfeasibleProblemError:
            return None
        return solution if np.isfinite(solution.cost) else None

    @property
    def bound(self) -> float:
        """Below the cost of every plan under the constraints, memory aside; minus infinity where nothing was searched.

        The first search has no limit, so its bound holds whatever fits; kept copies may cost less (`with_copies_kept`).
        """
        searched = [item for item in self.candidates if item.name == self.options.search_name]
        if not searched or not np.isfinite(searched[0].solution.bound):
            return -np.inf
        relaxed = with_copies_kept(self.planning)
        if not is_relaxed(relaxed, self.planning.problem):
            return searched[0].solution.bound
        start, gap = searched[0].choice, BOUND_GAP
        return solve(relaxed, time_limit_s=self.budget.share_s, seed=self.options.seed, start=start, gap=gap).bound

    def _best(self) -> Candidate:
        """The fastest that fits, by the simulator, of the candidates that are foreseen to come close to the best."""
        fitting: dict[tuple[tuple[int, ...], Residency], Candidate] = {}  # each program is emitted once
        close_s = float("inf")
        for candidate in sorted(self.candidates, key=lambda item: item.foreseen_s):
            if candidate.foreseen_s > close_s:
                break
            program = candidate.choice, candidate.residency
            if program not in fitting and candidate.fits(self.limit):
                fitting[program] = candidate
                close_s = min(close_s, CLOSE * candidate.step_s)
        if fitting:
            return min(fitting.values(), key=lambda item: item.step_s)
        if not self.candidates and self._solve(None) is None:  # for a message that says by how much
            raise PlanError("no layouts of this program fit together on this mesh", fix="use another mesh shape")
        thrifty = self._thriftiest()
        if thrifty.peak_bytes <= self.limit:
            return thrifty
        raise does_not_fit(thrifty.measured.memory, self.limit, self.mesh.size)

    def _thriftiest(self) -> Candidate:
        """The first candidate that fits once it holds as little as it can, or else the one that then holds least.

        Of all layouts, as they were first met: what a refusal names has to fit.
        """
        first = {(item.choice, item.name): item for item in reversed(self.candidates)}.values()
        found: list[Candidate] = []
        for item in sorted(first, key=lambda it: min(it.peak_bytes, self._checkpointed(it).peak_bytes)):
            found.append(self._refitted(item, self._fit(item).thriftiest(item.fitted)))
            if found[-1].peak_bytes <= self.limit:
                return found[-1]
        return min(found, key=lambda it: it.peak_bytes)

    def planned(self, best: Candidate) -> Planned:
        """The plan of a candidate, emitted and measured."""
        plan = self.foreseen(best, best.step_s, best.peak_bytes).repriced(
            recompute_s=self._fit(best).recompute_s(best.residency),
            memory=best.measured.memory,
            host_bytes=sum(best.host_memory.values()),
            host_memory=best.host_memory,
            step_ops=best.step_ops,
            details=best.measured.details(self.prices, self.limit),
        )
        assignment = self.planning.assignment(best.choice, best.residency)
        return Planned(plan, best.choice, assignment, self.planning, best.solution, self.rules, self, best)

    def foreseen(self, best: Candidate, step_s: float, peak_bytes: int, *notes: str) -> Plan:
        """The plan of a candidate that is not emitted, with the time and memory that are given."""
        return Plan(
            mesh_shape=self.mesh.shape,
            axis_names=self.mesh.axis_names,
            hardware=self.mesh.profile.name,
            search=best.name,
            model_hash=program_hash(self.program),
            entries=plan_entries(self.planning, best.choice, self.prices, best.residency),
            step_s=step_s,
            residency_s=best.residency_s,
            peak_bytes=peak_bytes,
            memory_limit_bytes=self.limit,
            optimizer=self.options.optimizer.name,
            cost=best.solution.cost,
            bound=max(0.0, min(best.solution.cost, self.bound)),  # rounding alone puts it above a proven optimum
            notes=notes,
            without_rule=ops_without_rule(self.planning, self.rules),
            alternatives={item.name: item.best_known_s for item in self.candidates},
            problem=self.planning.problem,
        )
