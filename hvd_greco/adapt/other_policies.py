"""Policies beside L-GreCo's: Accordion's two levels, and a fixed schedule."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ConfigError
from .options import Options
from .policy import Decision, Evidence, Policy


class AccordionPolicy(Policy):
    """Two levels: the fine one for layers whose gradient changes fast, the strong one for others.

    Source: Agarwal et al., "Accordion: Adaptive gradient compression" (MLSys 2021): a layer is in a
    critical phase while its gradient's norm changes by ``threshold`` or more from one interval to
    the next, relative to what it was.

    Args:
        codec: whose levels.
        strong: level of fewer bytes; ``fine``: level of more.
        threshold: the paper's eta, 0.5.
    """

    name = "accordion"

    def __init__(self, codec: str, strong: float, fine: float, threshold: float = 0.5) -> None:
        if not threshold > 0:
            raise ConfigError(f"threshold: {threshold} is not positive; 0.5 is the paper's")
        self.codec, self.strong, self.fine = codec, strong, fine
        self.threshold = threshold
        self._norms: dict[str, float] = {}

    def describe(self) -> str:
        levels = f"strong={self.strong:g} fine={self.fine:g} threshold={self.threshold:g}"
        return f"accordion {self.codec} {levels}"

    def decide(self, evidence: Evidence) -> Decision:
        choice, reasons = [], {}
        for options in evidence.options:
            name, sums = options.layer.name, evidence.sums[options.layer.name]
            norm = float(np.sqrt(sums.gradient_energy / max(1, sums.samples)))
            before = self._norms.get(name)
            self._norms[name] = norm
            change = abs(before - norm) / before if before else np.inf
            critical = change >= self.threshold
            level = self.fine if critical else self.strong
            choice.append(nearest(options, self.codec, level))
            said = "first interval" if before is None else f"gradient norm changed by {change:.0%}"
            reasons[name] = f"{said}: {'fine' if critical else 'strong'}"
        fine = sum(reason.endswith("fine") for reason in reasons.values())
        return Decision(
            np.array(choice), f"{fine} of {len(choice)} layers in a critical phase", reasons
        )


class SchedulePolicy(Policy):
    """A level for all layers that follows from the step.

    Args:
        codec: whose level.
        schedule: step -> level.
    """

    name = "schedule"

    def __init__(self, codec: str, schedule: Callable[[int], float]) -> None:
        if not callable(schedule):
            raise ConfigError(f"schedule: {schedule!r} cannot be called; lambda step: 0.01 can")
        self.codec = codec
        self.schedule = schedule

    def decide(self, evidence: Evidence) -> Decision:
        level = float(self.schedule(evidence.step))
        choice = [nearest(options, self.codec, level) for options in evidence.options]
        return Decision(np.array(choice), f"schedule: {level:g}")


def nearest(options: Options, codec: str, level: float) -> int:
    """The layer's option of that codec whose level is nearest (by ratio); else its default."""
    found = [
        (abs(np.log(float(assignment.level) / level)), place)
        for place, assignment in enumerate(options.assignments)
        if assignment.codec == codec and assignment.level
    ]
    return min(found)[1] if found else options.default
