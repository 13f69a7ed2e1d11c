"""Solvers against every choice there is, and against each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_greco.adapt import solve
from hvd_greco.adapt.solve import InfeasibleError, Problem
from hvd_greco.errors import ConfigError


def brute_force(problem: Problem) -> float:
    """The least objective of all choices; inf if none fits."""
    best = np.inf
    options = [np.flatnonzero(row) for row in problem.present]
    for choice in itertools.product(*options):
        objective, constraint = problem.sums(np.array(choice))
        if constraint <= problem.limit:
            best = min(best, objective)
    return best


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to six layers with up to five options, some missing, many alike; budgets of all kinds."""
    layers, options = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        objective = rng.integers(0, 6, (layers, options)).astype(float)
        constraint = rng.integers(0, 6, (layers, options)).astype(float)
    else:
        objective = rng.lognormal(0, 2, (layers, options))
        constraint = rng.lognormal(0, 2, (layers, options))
    gone = rng.random((layers, options)) < 0.2
    gone[:, 0] = False
    objective[gone] = np.inf
    least = np.where(gone, np.inf, constraint).min(axis=1).sum()
    most = np.where(gone, -np.inf, constraint).max(axis=1).sum()
    share = draw(st.sampled_from([-0.1, 0.0, 0.1, 0.3, 0.5, 0.9, 1.0, 2.0]))
    return Problem(objective, constraint, max(0.0, least + share * (most - least)))


@given(problems())
@settings(max_examples=400, deadline=None)
def test_against_every_choice(problem: Problem) -> None:
    best = brute_force(problem)
    if not np.isfinite(best):
        for solver in (solve.hull, solve.exact, solve.rounding_up):
            with pytest.raises(InfeasibleError) as caught:
                solver(problem)
            assert caught.value.least > problem.budget
        return
    for solver, worst in ((solve.exact, 1e-9), (solve.hull, 0.01)):
        choice = solver(problem)
        objective, constraint = problem.sums(choice)
        assert constraint <= problem.limit
        assert best <= objective * (1 + 1e-12) <= best * (1 + worst) + 1e-12


def curves(layers: int, options: int, seed: int) -> Problem:
    """Falling curves as compression has them: bytes and errors of layers of unlike sizes."""
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(10, 2, layers)
    densities = np.geomspace(0.001, 1, options)
    decay = rng.uniform(0.5, 4, (layers, 1))
    bytes_ = np.ceil(sizes[:, None] * densities * 6)
    errors = sizes[:, None] * rng.lognormal(0, 2, (layers, 1)) * (1 - densities**0.3) ** decay
    budget = errors[:, options // 3].sum()
    return Problem(bytes_, errors, budget)


@pytest.mark.parametrize("layers", [20, 60, 200])
def test_hull_is_near_the_best_of_many_layers(layers: int) -> None:
    """And never worse than the rounding-up programme, nor than the uniform choice."""
    for seed in range(5):
        problem = curves(layers, 16, seed)
        hull, best = (problem.sums(solver(problem)) for solver in (solve.hull, solve.exact))
        assert best[0] <= hull[0] <= best[0] * 1.01
        assert max(hull[1], best[1]) <= problem.limit
        rounded = problem.sums(solve.rounding_up(problem))
        assert hull[0] <= rounded[0]
        assert rounded[1] <= problem.limit
        uniform = np.full(layers, 16 // 3)
        assert best[0] <= problem.sums(uniform)[0]


def test_a_thousand_layers() -> None:
    problem = curves(1000, 16, 0)
    choice = solve.hull(problem)
    assert problem.sums(choice)[1] <= problem.limit
    assert problem.sums(choice)[0] <= problem.sums(solve.rounding_up(problem))[0]


def test_roles_can_be_exchanged() -> None:
    """The least error for the bytes that the least bytes for that error take is no more."""
    problem = curves(40, 12, 3)
    bytes_, error = problem.sums(solve.hull(problem))
    back = Problem(problem.constraint, problem.objective, bytes_)
    assert back.sums(solve.hull(back))[0] <= error * (1 + 1e-12)


def test_budget_of_nothing() -> None:
    """All that costs no error."""
    problem = Problem(np.array([[9.0, 4.0, 1.0]] * 3), np.array([[0.0, 0.0, 2.0]] * 3), 0.0)
    for solver in (solve.hull, solve.exact, solve.rounding_up):
        assert solver(problem).tolist() == [1, 1, 1]


def test_what_cannot_be() -> None:
    ones = np.ones((2, 2))
    with pytest.raises(ConfigError, match=r"shapes \(2, 2\) and \(2,\)"):
        Problem(ones, np.ones(2), 1.0)
    with pytest.raises(ConfigError, match="objective has entries that are negative or NaN"):
        Problem(-ones, ones, 1.0)
    with pytest.raises(ConfigError, match="constraint has entries"):
        Problem(ones, np.full((2, 2), np.nan), 1.0)
    with pytest.raises(ConfigError, match="no option that is finite"):
        Problem(np.full((2, 2), np.inf), ones, 1.0)
    with pytest.raises(ConfigError, match="budget: -1"):
        Problem(ones, ones, -1.0)
    with pytest.raises(InfeasibleError, match=r"budget: 1 cannot be kept.* reach is 2"):
        solve.hull(Problem(ones, ones, 1.0))
