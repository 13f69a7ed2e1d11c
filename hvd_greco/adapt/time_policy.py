"""L-GreCo for time: the plan with the shortest step, within the same budget of error.

A step's time is no sum over layers: what ends before the backward pass costs nothing. So plans
are proposed for several prices of a second on the link, relative to one of the processor, each the
best for its price by the solver; all of them are simulated, and the best is improved layer by
layer. Sending everything dense, or in fp16, is among the proposals: where compression does not
pay, that is the plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from ..errors import ConfigError
from . import solve
from .budget import Budget
from .pipeline import Prediction, StepModel
from .policy import METRICS, Decision, Evidence, Policy
from .solve import InfeasibleError, Problem

#: What a second on the link costs in the proposals; a second in a codec costs 1.
PRICES = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0)
#: Seconds that improving layer by layer may take.
PATIENCE = 0.03
#: Surcharges are believed up to here: more is no property of plans.
_MOST_TAX, _MOST_FACTOR = 1.0, 1.5
#: Seconds hidden in the backward pass tell of their price if they are this share of the step.
_TELLING = 0.05
#: Halvings of the range of budgets when a step's time is given.
_HALVINGS = 14


@dataclass(frozen=True)
class _Plan:
    """A proposal."""

    name: str
    choice: np.ndarray
    seconds: float


class TimePolicy(Policy):
    """Least seconds for an error, or least error for seconds.

    Args:
        budget: ``error``: a factor of what the uniform default loses; ``step``: seconds of a step.
        solver: a name in ``solve.SOLVERS``.
        hysteresis: a new plan must be faster by this share, and a compressed one than a dense one.
        metric: what errors are, one of :data:`~.policy.METRICS`.
        reference: as for :class:`~.lgreco_policy.LGrecoPolicy`.
    """

    name = "lgreco-time"

    def __init__(
        self,
        budget: Budget,
        solver: str = "hull",
        hysteresis: float = 0.05,
        metric: str = "residual",
        reference: Policy | None = None,
    ) -> None:
        if solver not in solve.SOLVERS:
            raise ConfigError(f"solver: {solver!r} is none of {', '.join(solve.SOLVERS)}")
        if metric not in METRICS:
            raise ConfigError(f"metric: {metric!r} is none of {', '.join(METRICS)}")
        if not 0 <= hysteresis < 1:
            raise ConfigError(f"hysteresis: {hysteresis} is outside 0..1; 0.05 is usual")
        if budget.kind not in ("error", "step"):
            raise ConfigError(
                f"budget: {str(budget)!r} limits bytes, which objective='bytes' knows of"
            )
        self.budget = budget
        self.solver = solver
        self.hysteresis = hysteresis
        self.metric = metric
        self.reference = reference
        self._memory = _Experience()

    def describe(self) -> str:
        text = (
            f"lgreco-time budget={self.budget} solver={self.solver} hysteresis={self.hysteresis:g}"
            f" metric={self.metric}"
        )
        return text if self.reference is None else f"{text} reference=({self.reference.describe()})"

    def decide(self, evidence: Evidence) -> Decision:
        model = evidence.model
        if model is None:
            return Decision(evidence.choice, "kept: no step was timed")
        judge = _Judge(evidence, model, self._memory)
        now = evidence.choice
        if np.isfinite(evidence.measured_seconds):
            judge.learn(now, evidence.measured_seconds)
        dense = judge.plan("dense", np.array([each.dense for each in evidence.options]))
        if self.budget.kind == "error":
            plans, limit = self._within_error(evidence, judge)
        else:
            plans, limit = self._within_seconds(evidence, judge), self.budget.value
        plans.append(dense)
        best = min(plans, key=lambda plan: plan.seconds)
        if self.budget.kind == "step":
            errors = evidence.measure(self.metric)
            able = [plan for plan in plans if plan.seconds <= limit] or [best]
            best = min(able, key=lambda plan: _total(errors, plan.choice))
        figures = {
            "limit": limit,
            "link_slowdown": model.slow,
            "hidden_price": self._memory.tax,
            "surcharge": self._memory.factor,
            "dense_seconds": dense.seconds,
            **{f"{plan.name}_seconds": plan.seconds for plan in plans},
        }
        return self._settle(evidence, judge, best, dense, figures)

    def _settle(
        self,
        evidence: Evidence,
        judge: _Judge,
        best: _Plan,
        dense: _Plan,
        figures: dict[str, float],
    ) -> Decision:
        now = judge.plan("now", evidence.choice)
        figures["now_seconds"] = now.seconds
        if self.budget.kind == "step" and best.seconds > self.budget.value:
            reason = (
                f"no plan is predicted to keep {self.budget.value:.4g} s; the fastest takes "
                f"{best.seconds:.4g} s"
            )
            return Decision(best.choice, reason, figures=figures, seconds=best.seconds)
        fits = self._fits(evidence, now, figures["limit"])
        pays = best.seconds < dense.seconds * (1 - self.hysteresis)
        if self.budget.kind == "error" and not pays:
            reason = (
                f"compression does not pay: {dense.seconds * 1e3:.1f} ms dense, "
                f"{best.seconds * 1e3:.1f} ms with the best plan"
            )
            return Decision(dense.choice, reason, figures=figures, seconds=dense.seconds)
        if (
            self.budget.kind == "error"
            and fits
            and best.seconds > now.seconds * (1 - self.hysteresis)
        ):
            gain = 1 - best.seconds / now.seconds
            reason = f"kept: another plan would gain {gain:.1%} of the step"
            return Decision(evidence.choice, reason, figures=figures, seconds=now.seconds)
        reason = (
            f"{best.name}: {best.seconds * 1e3:.1f} ms a step, {now.seconds * 1e3:.1f} ms as it "
            f"was, {dense.seconds * 1e3:.1f} ms dense"
        )
        return Decision(best.choice, reason, figures=figures, seconds=best.seconds)

    def _fits(self, evidence: Evidence, plan: _Plan, limit: float) -> bool:
        if self.budget.kind == "step":
            return plan.seconds <= limit
        # Samples differ from interval to interval, and so does what a plan is said to use.
        return _total(evidence.measure(self.metric), plan.choice) <= limit * (1 + self.hysteresis)

    def _within_error(self, evidence: Evidence, judge: _Judge) -> tuple[list[_Plan], float]:
        errors = evidence.measure(self.metric)
        reference = evidence.defaults
        if self.reference is not None:
            reference = self.reference.decide(evidence).choice
        limit = self.budget.value * _total(errors, reference)
        plans = [judge.plan("uniform", evidence.defaults)]
        half = evidence.codec_places("fp16")
        if half is not None:
            plans.append(judge.plan("fp16", half))
        for price in PRICES:
            problem = Problem(judge.costs(price), errors, limit)
            plans.append(judge.plan(f"price {price:g}", solve.SOLVERS[self.solver](problem)))
        plans = [plan for plan in plans if _total(errors, plan.choice) <= limit * (1 + solve.SLACK)]
        if plans:
            best = min(plans, key=lambda plan: plan.seconds)
            plans.append(judge.improve(best, errors, limit))
        return plans, limit

    def _within_seconds(self, evidence: Evidence, judge: _Judge) -> list[_Plan]:
        """Plans of least error for several sums of seconds; a step's time decides which may be."""
        errors, found = evidence.measure(self.metric), []
        for price in PRICES[1:]:
            costs = judge.costs(price)
            low, high = 0.0, float(np.where(np.isfinite(costs), costs, 0.0).max(axis=1).sum())
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                try:
                    choice = solve.SOLVERS[self.solver](Problem(errors, costs, middle))
                except InfeasibleError:
                    low = middle
                    continue
                plan = judge.plan(f"price {price:g}", choice)
                if plan.seconds <= self.budget.value:
                    found.append(plan)
                    low = middle
                else:
                    high = middle
            try:
                least = solve.SOLVERS[self.solver](Problem(errors, costs, low))
                found.append(judge.plan(f"price {price:g}", least))
            except InfeasibleError:
                pass
        return found


def _total(errors: np.ndarray, choice: np.ndarray) -> float:
    return float(errors[np.arange(choice.size), choice].sum())


@dataclass
class _Experience:
    """What steps took beside what the model said of them; kept between decisions.

    The model knows links and codecs by themselves. In a job, bytes that overlap with the backward
    pass take the processor from it where there are few cores, and codecs find cold caches. Both
    show in steps of compressed plans only, so dense ones are left out.

    Attributes:
        known: seconds of plans that were in force, by their choice; these are believed.
        tax: by how much a second on the link lengthens the backward pass that hides it.
        factor: on what is predicted, for all else.
    """

    known: dict[bytes, float] = field(default_factory=dict)
    tax: float = 0.0
    factor: float = 1.0

    def learn(self, found: Prediction, seconds: float) -> None:
        """A compressed plan took that long."""
        if found.hidden > _TELLING * seconds:
            tax = float(np.clip((seconds - found.total) / found.hidden, 0.0, _MOST_TAX))
            self.tax = 0.5 * (self.tax + tax)
        rest = seconds / (found.total + self.tax * found.hidden)
        rest = float(np.clip(rest, 1 / _MOST_FACTOR, _MOST_FACTOR))
        # The geometric mean: what is twice as long at first and half of it then is right.
        self.factor = float(np.sqrt(self.factor * rest))


class _Judge:
    """Knows what plans take: as measured if they were in force, else as simulated."""

    def __init__(self, evidence: Evidence, model: StepModel, memory: _Experience) -> None:
        self._evidence = evidence
        self._model = model
        self._memory = memory
        self._dense = np.array([each.dense for each in evidence.options])
        self._names = [each.layer.name for each in evidence.options]
        codec, link = {}, {}
        for each in evidence.options:
            name, nothing = each.layer.name, np.zeros(len(each.assignments))
            # Layers whose gradients did not come in this interval take no part in the model.
            there = name in model.parts
            codec[name], link[name] = model.seconds(name) if there else (nothing, nothing)
        self._codec, self._link = evidence.table(codec), evidence.table(link)
        # Options that a layer lacks are infinite in the one, which is enough.
        self._link[~np.isfinite(self._link)] = 0.0

    def learn(self, choice: np.ndarray, seconds: float) -> None:
        """A plan was in force, and its steps took that long."""
        known, key = self._memory.known, choice.astype("<i8").tobytes()
        before = known.get(key)
        # A share of the old value: machines are noisy, and models grow no faster.
        known[key] = seconds if before is None else 0.5 * (before + seconds)
        if (choice != self._dense).any():
            self._memory.learn(self._simulate(choice), seconds)

    def _simulate(self, choice: np.ndarray) -> Prediction:
        return self._model.predict(dict(zip(self._names, map(int, choice), strict=True)))

    def predict(self, choice: np.ndarray) -> float:
        """Seconds by the model and by experience of what it leaves out."""
        found = self._simulate(choice)
        if (choice == self._dense).all():
            return found.total
        return self._memory.factor * (found.total + self._memory.tax * found.hidden)

    def plan(self, name: str, choice: np.ndarray) -> _Plan:
        """A proposal with its seconds."""
        known = self._memory.known.get(choice.astype("<i8").tobytes())
        return _Plan(name, choice, self.predict(choice) if known is None else known)

    def costs(self, price: float) -> np.ndarray:
        """Seconds of all options, those on the link at a price, shape ``[layers, options]``."""
        # A little of the bytes decides between options that take equally long.
        return self._codec + price * self._link + 1e-15 * self._evidence.bytes

    def improve(self, plan: _Plan, errors: np.ndarray, limit: float) -> _Plan:
        """Change one layer after the other while that makes the step shorter, largest first."""
        until = time.perf_counter() + PATIENCE
        choice, best = plan.choice.copy(), self.predict(plan.choice)
        spare = limit * (1 + solve.SLACK) - _total(errors, choice)
        for row in np.argsort(-self._link.max(axis=1)):
            options = np.flatnonzero(np.isfinite(errors[row]))
            allowed = errors[row, options] - errors[row, choice[row]] <= spare
            for option in options[allowed]:
                if time.perf_counter() > until:
                    break
                old = choice[row]
                if option == old:
                    continue
                choice[row] = option
                seconds = self.predict(choice)
                if seconds < best * (1 - 1e-4):
                    best = seconds
                    spare -= errors[row, option] - errors[row, old]
                else:
                    choice[row] = old
        return self.plan("improved", choice)
