"""Which codec and level each layer uses, and how ranks notice that they disagree.

A :class:`Plan` is immutable. Whoever controls the job makes a new one with a higher epoch; codecs
and the compressor only read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

from .layers import Layer

#: Raised when bytes on the wire change meaning, so that two versions never mix in one job.
PROTOCOL = 1


@dataclass(frozen=True)
class Assignment:
    """One layer's codec (by its registered name) and level (None: the codec has no levels)."""

    codec: str
    level: float | int | None = None

    def __str__(self) -> str:
        return self.codec if self.level is None else f"{self.codec}({self.level:g})"


@dataclass(frozen=True)
class Plan:
    """Layer name -> :class:`Assignment`, with an epoch that counts plans.

    Attributes:
        assignments: one for each layer.
        epoch: 0 for the first plan, one more for each plan that replaces it.
        context: whatever else all ranks must agree on before they exchange anything (codec
            options, seeds, library versions that decide a random stream).
    """

    assignments: Mapping[str, Assignment]
    epoch: int = 0
    context: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, layer: Layer) -> Assignment:
        return self.assignments[layer.name]

    def describe(self) -> dict[str, str]:
        """Every fact that must be alike on all ranks, as text, in a fixed order."""
        facts = {"protocol": str(PROTOCOL), "plan epoch": str(self.epoch)}
        facts.update(self.context)
        facts.update(
            (f"layer {name}", str(assignment)) for name, assignment in self.assignments.items()
        )
        return dict(sorted(facts.items()))

    @cached_property
    def codecs(self) -> frozenset[str]:
        """Names of the codecs that serve at least one layer."""
        return frozenset(assignment.codec for assignment in self.assignments.values())

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal on two ranks exactly when their plans are."""
        hasher = hashlib.blake2b(digest_size=16)
        for key, value in self.describe().items():
            hasher.update(f"{key}\x1f{value}\x1e".encode())
        return hasher.digest()


def step_words(
    plan: Plan, step: int, repeated: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """Two 40-bit integers, as floats, that mix a plan's digest, the step, and ``repeated``.

    Sums of up to 8,192 of them are exact in fp64. Each rank compares the sum with N times its own
    word: with hashes, that fails on every rank as soon as one rank differs, which is what lets
    all ranks go on together to find out what differs.
    """
    facts = step.to_bytes(8, "little") + "\x1f".join(sorted(repeated)).encode()
    mixed = hashlib.blake2b(facts, key=plan.digest, digest_size=10).digest()
    return float(int.from_bytes(mixed[:5], "little")), float(int.from_bytes(mixed[5:], "little"))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a layer's name matches one of the shell-style patterns (``"*.bias"``)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
