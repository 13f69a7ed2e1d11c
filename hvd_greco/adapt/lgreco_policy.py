"""L-GreCo's decision: the cheapest levels whose errors together keep within a budget.

Source: Alimohammadi, Markov, Frantar and Alistarh, "L-GreCo: Layerwise-adaptive gradient
compression for efficient data-parallel deep learning" (MLSys 2024). Other than there, errors are
squared, so that they add up over layers and ranks; all ranks' gradients count; and the problem is
solved by convex hulls, without rounding (:mod:`.solve`).
"""

from __future__ import annotations

import logging

import numpy as np

from ..errors import ConfigError
from . import solve
from .budget import Budget
from .policy import METRICS, Decision, Evidence, Policy
from .solve import InfeasibleError, Problem

_log = logging.getLogger("hvd_greco")


class LGrecoPolicy(Policy):
    """Least bytes for an error, or least error for bytes.

    Args:
        budget: ``error``: a factor of what the uniform default loses, on the same gradients;
            ``ratio``: dense bytes by bytes on the link.
        solver: a name in ``solve.SOLVERS``.
        hysteresis: a new plan must be better by this share, unless the present one passes the
            budget by as much: a change costs warm starts their directions.
        metric: what errors are, one of :data:`~.policy.METRICS`.
        reference: a policy whose choice takes the uniform default's place in the budget (Accordion,
            whose levels follow the phases of training).
    """

    name = "lgreco"

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
        if reference is not None and budget.kind != "error":
            raise ConfigError(f"reference: has no meaning for the budget {str(budget)!r}")
        if budget.kind not in ("error", "ratio"):
            raise ConfigError(
                f"budget: {str(budget)!r} limits a step's time, which objective='time' knows of"
            )
        self.budget = budget
        self.solver = solver
        self.hysteresis = hysteresis
        self.metric = metric
        self.reference = reference
        self._warned = False

    def describe(self) -> str:
        text = f"lgreco budget={self.budget} solver={self.solver} hysteresis={self.hysteresis:g}"
        text += f" metric={self.metric}"
        return text if self.reference is None else f"{text} reference=({self.reference.describe()})"

    def decide(self, evidence: Evidence) -> Decision:
        errors, bytes_ = evidence.measure(self.metric), evidence.bytes
        rows = np.arange(len(evidence.options))
        figures: dict[str, float] = {}
        if self.budget.kind == "error":
            reference = evidence.defaults
            if self.reference is not None:
                reference = self.reference.decide(evidence).choice
            limit = self.budget.value * float(errors[rows, reference].sum())
            objective, constraint, unit = bytes_, errors, "error"
        else:
            limit = evidence.dense_bytes / self.budget.value - evidence.other_bytes
            objective, constraint, unit = errors, bytes_, "bytes"
        figures["limit"] = limit
        try:
            problem = Problem(objective, constraint, max(0.0, limit))
            choice = solve.SOLVERS[self.solver](problem)
        except InfeasibleError as error:
            return self._infeasible(evidence, problem, error, unit)
        now = evidence.choice
        before, used = problem.sums(now)
        after, figures["used"] = problem.sums(choice)
        what = "bytes" if unit == "error" else "error"
        gain = 1 - after / before if before else 0.0
        figures["gain"] = gain
        # Samples differ from interval to interval, and so does what a plan is said to use.
        fits = used <= problem.limit * (1 + self.hysteresis)
        if fits and gain < self.hysteresis:
            reason = f"kept: another plan would gain {gain:.1%} {what}, less than the hysteresis"
            return Decision(now, reason, figures={**figures, "used": used})
        why = f"{gain:.1%} less {what}" if fits else f"the {unit} budget was passed"
        return Decision(choice, why, figures=figures)

    def _infeasible(
        self, evidence: Evidence, problem: Problem, error: InfeasibleError, unit: str
    ) -> Decision:
        """The nearest that can be had. Ending a training for it would help nobody."""
        if not self._warned:
            _log.warning("budget %s: %s; that is what is used", self.budget, error)
            self._warned = True
        present = problem.present
        least = np.where(present, problem.constraint, np.inf).min(axis=1, keepdims=True)
        near = np.where(problem.constraint == least, problem.objective, np.inf).argmin(axis=1)
        return Decision(
            near, f"the {unit} budget cannot be kept", figures={"limit": problem.budget}
        )
