"""Decisions: from the evidence of an interval to an option for each layer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .options import Options
from .pipeline import StepModel
from .statistics import Sums, kept_back

#: What is summed up as error: squared norms of what error feedback will hold at the next decision,
#: or of one step's error, or norms of that, as the paper's code has them.
METRICS = ("residual", "squared", "lgreco")


@dataclass(frozen=True)
class Evidence:
    """What a policy may see; rank 0 has it, and no other rank decides.

    Attributes:
        interval: how many intervals came before.
        step: how many steps were completed.
        options: the layers that have a choice, by name in order.
        sums: their statistics, by layer name.
        current: the option in force, by layer name.
        other_bytes: what the layers without a choice put on the link, and what all share.
        dense_bytes: what all layers would put on the link uncompressed.
        steps: how many until the next decision.
        model: predicts a step's time; None unless the controller was asked to measure time, and
            before it could.
        measured_seconds: a step's time in the interval, the median; NaN likewise.
    """

    interval: int
    step: int
    options: Sequence[Options]
    sums: Mapping[str, Sums]
    current: Mapping[str, int]
    other_bytes: float
    dense_bytes: float
    steps: int = 1
    model: StepModel | None = None
    measured_seconds: float = math.nan

    def codec_places(self, codec: str) -> np.ndarray | None:
        """Every layer's first option of one codec; its dense one where it has none.

        None if no layer has one.
        """
        found = [
            next((i for i, a in enumerate(each.assignments) if a.codec == codec), each.dense)
            for each in self.options
        ]
        some = any(a.codec == codec for each in self.options for a in each.assignments)
        return np.array(found) if some else None

    def table(self, values: Mapping[str, Sequence[float] | np.ndarray]) -> np.ndarray:
        """Numbers of all options as ``[layers, options]``, inf where a layer has fewer."""
        most = max(len(each.assignments) for each in self.options)
        table = np.full((len(self.options), most), np.inf)
        for row, each in zip(table, self.options, strict=True):
            row[: len(each.assignments)] = values[each.layer.name]
        return table

    @property
    def bytes(self) -> np.ndarray:
        """Bytes on the link of every option, ``[layers, options]``."""
        return self.table({each.layer.name: each.bytes for each in self.options})

    @property
    def errors(self) -> np.ndarray:
        """Squared error of every option, likewise, summed over samples and ranks."""
        return self.table({name: sums.errors for name, sums in self.sums.items()})

    @property
    def residuals(self) -> np.ndarray:
        """Squared norm of what error feedback will hold at the next decision, likewise."""
        return self.table({name: kept_back(sums, self.steps) for name, sums in self.sums.items()})

    def measure(self, metric: str) -> np.ndarray:
        """What a budget limits, ``[layers, options]``: one of :data:`METRICS`."""
        if metric == "residual":
            return self.residuals
        return self.errors if metric == "squared" else np.sqrt(self.errors)

    @property
    def defaults(self) -> np.ndarray:
        """The uniform default's option of each layer."""
        return np.array([each.default for each in self.options])

    @property
    def choice(self) -> np.ndarray:
        """The option in force of each layer."""
        return np.array([self.current[each.layer.name] for each in self.options])


@dataclass(frozen=True)
class Decision:
    """What shall be in force from the next step on.

    Attributes:
        choice: option of each layer, in the order of the evidence.
        reason: why, in words, for the log: of the decision as a whole.
        reasons: of single layers, by name, where there is more to say.
        figures: numbers that led to it, for the log (predicted bytes, budgets, ...).
        seconds: what a step is expected to take, for the log; NaN: as the model says.
    """

    choice: np.ndarray
    reason: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = math.nan


class Policy(ABC):
    """Chooses an option for every layer, once an interval.

    A policy runs on rank 0 only and needs no communication; what it decides is broadcast. It may
    keep what it likes between decisions.
    """

    #: Short name, for the log.
    name: str

    @abstractmethod
    def decide(self, evidence: Evidence) -> Decision:
        """The options from the next step on.

        Raises:
            GrecoError: ends the job on all ranks, with this message.
        """

    def describe(self) -> str:
        """Name and options, as text; all ranks must agree on it."""
        return self.name
