"""One option for each layer: the least sum of one quantity, the sum of another within a budget.

Minimise ``sum_l objective[l, j_l]`` subject to ``sum_l constraint[l, j_l] <= budget``: bytes under
a budget of error, or error under a budget of bytes or time. This is a multiple-choice knapsack.
Pure functions of their arguments, the same on every machine for the same numbers.

:func:`hull` is the default: only options on the lower convex hull of a layer's curve can be best
for some price of the constrained quantity, and going down all hulls in order of steepness is the
solution for every price in turn: at most one layer stands between two vertices. What is left of the
budget is then filled, and where that layer is a large one, a small search helps. :func:`exact` is
the oracle.
:func:`rounding_up` is the dynamic programme of L-GreCo's published code (Alimohammadi et al., MLSys
2024), for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError

#: Layers that :func:`hull` searches beyond their hulls, partial choices of them that it keeps, and
#: complete ones that it tries.
CORE, BEAM, TRIES = 16, 512, 4
#: Share of a budget that rounding may be off.
SLACK = 1e-12
#: Partial solutions that :func:`exact` may keep.
MOST_STATES = 4_000_000


class InfeasibleError(ConfigError):
    """No choice keeps within the budget.

    Attributes:
        least: the smallest sum that a choice can have.
    """

    def __init__(self, budget: float, least: float) -> None:
        super().__init__(
            f"budget: {budget:.6g} cannot be kept, the least that any choice of levels can "
            f"reach is {least:.6g}"
        )
        self.least = least


@dataclass(frozen=True)
class Problem:
    """What is to be chosen.

    Attributes:
        objective: fp64, shape ``[layers, options]``, not negative; inf where a layer has fewer
            options.
        constraint: the same for what the budget limits.
        budget: not negative.
    """

    objective: np.ndarray
    constraint: np.ndarray
    budget: float

    def __post_init__(self) -> None:
        if self.objective.shape != self.constraint.shape or self.objective.ndim != 2:
            raise ConfigError(
                f"problem: objective and constraint of shapes {self.objective.shape} and "
                f"{self.constraint.shape}, one shape [layers, options] is needed"
            )
        for name in ("objective", "constraint"):
            values = getattr(self, name)
            if not (values >= 0).all():
                raise ConfigError(f"problem: {name} has entries that are negative or NaN")
        if not self.present.any(axis=1).all():
            raise ConfigError("problem: a layer has no option that is finite")
        if not self.budget >= 0:
            raise ConfigError(f"budget: {self.budget} is not a number from 0 up")

    @property
    def present(self) -> np.ndarray:
        """Which options there are."""
        return np.isfinite(self.objective) & np.isfinite(self.constraint)

    @property
    def limit(self) -> float:
        """The budget with what rounding may add."""
        return self.budget * (1 + SLACK)

    def sums(self, choice: np.ndarray) -> tuple[float, float]:
        """Objective and constraint of a choice, int, shape ``[layers]``."""
        rows = np.arange(choice.size)
        return float(self.objective[rows, choice].sum()), float(self.constraint[rows, choice].sum())


@dataclass(frozen=True)
class _Steps:
    """Edges of all layers' hulls, steepest first; those of one layer come in their order."""

    start: np.ndarray
    row: np.ndarray
    option: np.ndarray
    more: np.ndarray
    less: np.ndarray


def _least_constrained(objective: np.ndarray, constraint: np.ndarray) -> np.ndarray:
    """Of each layer the option of least constraint, and of several the one of least objective."""
    least = constraint.min(axis=1, keepdims=True)
    return np.where(constraint == least, objective, np.inf).argmin(axis=1)


def _steps(problem: Problem) -> _Steps:
    present = problem.present
    objective = np.where(present, problem.objective, np.inf)
    constraint = np.where(present, problem.constraint, np.inf)
    rows = np.arange(objective.shape[0])
    at = start = _least_constrained(objective, constraint)
    found: list[tuple[np.ndarray, ...]] = []
    while rows.size:
        # Along all hulls at once: the next vertex is the one to which the way is steepest.
        more = constraint[rows] - constraint[rows, at[rows]][:, None]
        less = objective[rows, at[rows]][:, None] - objective[rows]
        ahead = (more > 0) & (less > 0) & present[rows]
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = np.where(ahead, less / more, -1.0)
        steepest = slope.max(axis=1, keepdims=True)
        # Of equally steep ones the farthest: no vertex lies between.
        to = np.where(slope == steepest, more, -np.inf).argmax(axis=1)
        going = steepest[:, 0] > 0
        rows, to = rows[going], to[going]
        place = np.flatnonzero(going)
        found.append((slope[place, to], rows, to, more[place, to], less[place, to]))
        at = at.copy()
        at[rows] = to
    slope, row, option, more, less = map(np.concatenate, zip(*found, strict=True))
    # Stable: slopes of one layer fall, and where rounding makes two alike, order decides.
    order = np.argsort(-slope, kind="stable")
    return _Steps(start, row[order], option[order], more[order], less[order])


def _start(problem: Problem) -> tuple[_Steps, float]:
    """The steps, and the constraint before the first of them."""
    steps = _steps(problem)
    base = problem.sums(steps.start)[1]
    if base > problem.limit:
        raise InfeasibleError(problem.budget, base)
    return steps, base


def hull(problem: Problem) -> np.ndarray:
    """The choice by convex hulls, where the few layers that are large are chosen together.

    A layer that is large beside all others may have its hull's vertices so far apart that none of
    them uses the budget well. So the :data:`CORE` layers with the longest way between vertices are
    searched as :func:`exact` does it, but with :data:`BEAM` partial choices at most, and then the
    others go down their hulls with what is left, and fill it greedily.

    Returns:
        Option of each layer: int, shape ``[layers]``.

    Raises:
        InfeasibleError: no choice keeps within the budget.
    """
    steps, base = _start(problem)
    best = _descend(problem, steps, base, steps.start, np.zeros(steps.start.size, dtype=bool))
    longest = np.zeros(best.size)
    np.maximum.at(longest, steps.row, steps.less)
    core = np.argsort(-longest, kind="stable")[:CORE]
    fixed = np.zeros(best.size, dtype=bool)
    fixed[core] = True
    for _, choice in _search(problem, steps, core, problem.sums(best)[0], BEAM)[:TRIES]:
        found = steps.start.copy()
        found[core] = choice
        found = _descend(problem, steps, problem.sums(found)[1], found, fixed)
        if problem.sums(found)[0] < problem.sums(best)[0]:
            best = found
    return best


def _descend(
    problem: Problem, steps: _Steps, base: float, choice: np.ndarray, fixed: np.ndarray
) -> np.ndarray:
    """From ``choice``, whose constraint is ``base``, all but ``fixed`` layers down their hulls."""
    free = ~fixed[steps.row]
    row, option, more = steps.row[free], steps.option[free], steps.more[free]
    taken = int(np.searchsorted(base + more.cumsum(), problem.limit, side="right"))
    choice = choice.copy()
    # Later steps of a layer overwrite earlier ones.
    choice[row[:taken]] = option[:taken]
    return _fill(problem, choice)


def _fill(problem: Problem, choice: np.ndarray) -> np.ndarray:
    """Spend what is left: again and again the change of one layer that gains most and fits."""
    present, rows = problem.present, np.arange(choice.size)
    objective = np.where(present, problem.objective, np.inf)
    constraint = np.where(present, problem.constraint, np.inf)
    rest = problem.limit - problem.sums(choice)[1]
    gain = objective[rows, choice][:, None] - objective
    more = constraint - constraint[rows, choice][:, None]
    for _ in range(4 * choice.size):
        fits = np.where(more <= rest, gain, 0.0)
        place = int(fits.argmax())
        row, option = divmod(place, choice.shape[0] and objective.shape[1])
        if not fits[row, option] > 0:
            break
        rest -= more[row, option]
        choice[row] = option
        gain[row] = objective[row, option] - objective[row]
        more[row] = constraint[row] - constraint[row, option]
    return choice


def exact(problem: Problem) -> np.ndarray:
    """The best choice there is, by dynamic programming over partial choices.

    Of the partial choices for some layers those stay that no other one beats in both sums, and
    that could still lead to something better than the hull's solution: the relaxed problem of the
    remaining layers, solved by their hulls, says how good they can get. Sums are not rounded.

    Raises:
        InfeasibleError: no choice keeps within the budget.
        ConfigError: too many partial choices remain (never seen with measured curves).
    """
    best, steps = hull(problem), _steps(problem)
    # Layers with the most to gain first: then bounds are sharp early.
    gain = np.zeros(best.size)
    np.add.at(gain, steps.row, steps.less)
    order = np.argsort(-gain, kind="stable")
    found = _search(problem, steps, order, problem.sums(best)[0], None)
    if found:
        best = np.empty_like(best)
        best[order] = found[0][1]
    return best


def _search(
    problem: Problem, steps: _Steps, order: np.ndarray, incumbent: float, most: int | None
) -> list[tuple[float, np.ndarray]]:
    """Partial choices for the layers in ``order`` that may lead below ``incumbent``, best first.

    Args:
        problem: the problem.
        steps: its hulls.
        order: which layers.
        incumbent: the objective to beat.
        most: partial choices that are kept, those with the best bounds; None: all.

    Returns:
        The bound that each can reach with the other layers, and its options in that order.
    """
    bounds = _bounds(problem, steps, order)
    cost, used = np.zeros(1), np.zeros(1)
    bound = np.zeros(1)
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for place, row in enumerate(order):
        options = np.flatnonzero(problem.present[row])
        costs = (cost[:, None] + problem.objective[row, options]).ravel()
        uses = (used[:, None] + problem.constraint[row, options]).ravel()
        levels, values = bounds[place]
        # Beyond what the relaxed problem can use, more budget gains nothing.
        reachable = costs + np.interp(problem.limit - uses, levels, values, left=np.inf)
        keep = np.flatnonzero(reachable < incumbent * (1 - SLACK))
        by = keep[np.lexsort((costs[keep], uses[keep]))]
        first = np.ones(by.size, dtype=bool)
        first[1:] = costs[by][1:] < np.minimum.accumulate(costs[by])[:-1]
        by = by[first]
        if most is None and by.size > MOST_STATES:
            raise ConfigError(f"solver: {by.size} partial choices remain; use solver='hull'")
        if most is not None and by.size > most:
            by = by[np.argsort(reachable[by], kind="stable")[:most]]
        history.append((by // options.size, options[by % options.size]))
        cost, used, bound = costs[by], uses[by], reachable[by]
    found = []
    for last in np.argsort(bound, kind="stable")[: TRIES if most else 1]:
        at, choice = int(last), np.empty(order.size, dtype=np.int64)
        for place in reversed(range(order.size)):
            parents, chosen = history[place]
            choice[place] = chosen[at]
            at = int(parents[at])
        found.append((float(bound[last]), choice))
    return found


def _bounds(
    problem: Problem, steps: _Steps, order: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """After each layer of ``order``: the least objective of all others, by what they may use.

    As corners of a falling convex line: constraint, objective.
    """
    place_of = np.full(steps.start.size, order.size)
    place_of[order] = np.arange(order.size)
    rows = np.arange(steps.start.size)
    objective, constraint = (
        values[rows, steps.start] for values in (problem.objective, problem.constraint)
    )
    found = []
    for place in range(order.size):
        later = place_of > place
        mine = later[steps.row]
        level = constraint[later].sum() + np.concatenate(([0.0], steps.more[mine].cumsum()))
        value = objective[later].sum() - np.concatenate(([0.0], steps.less[mine].cumsum()))
        # Rounding must not make a bound too high.
        slack = objective[later].sum() * 1e-13
        found.append((level * (1 - SLACK), np.maximum(value - slack, 0.0)))
    return found


def rounding_up(problem: Problem, parts: int = 10_000) -> np.ndarray:
    """The published programme: the budget cut into parts, every layer's share rounded up.

    Args:
        problem: ``constraint`` is the error in the paper's problem.
        parts: D, into how many.

    Raises:
        InfeasibleError: no choice keeps within the budget so rounded, though one may without.
    """
    # Of nothing all parts are nothing: then only what costs nothing fits.
    unit = problem.budget / parts or np.finfo(np.float64).tiny
    present = problem.present
    with np.errstate(over="ignore"):
        weights = np.where(present, np.ceil(problem.constraint / unit), parts + 1.0)
    weights = np.minimum(weights, parts + 1).astype(np.int64)
    best = np.zeros(parts + 1)
    chosen = np.zeros((problem.objective.shape[0], parts + 1), dtype=np.int64)
    for row in range(problem.objective.shape[0]):
        found = np.full(parts + 1, np.inf)
        for option in np.flatnonzero(present[row] & (weights[row] <= parts)):
            weight = int(weights[row, option])
            with_it = best[: parts + 1 - weight] + problem.objective[row, option]
            better = with_it < found[weight:]
            found[weight:][better] = with_it[better]
            chosen[row, weight:][better] = option
        best = found
    if not np.isfinite(best[parts]):
        rows = np.arange(weights.shape[0])
        least = problem.sums(
            _least_constrained(
                np.where(present, problem.objective, np.inf),
                np.where(present, problem.constraint, np.inf),
            )
        )[1]
        raise InfeasibleError(problem.budget, max(least, unit * weights[rows].min(axis=1).sum()))
    left, choice = parts, np.empty(chosen.shape[0], dtype=np.int64)
    for row in reversed(range(chosen.shape[0])):
        choice[row] = chosen[row, left]
        left -= int(weights[row, choice[row]])
    return choice


#: By the name that users give.
SOLVERS = {"hull": hull, "dp": exact}
