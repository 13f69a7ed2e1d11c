"""A step's time for any choice of options, by simulating what overlaps with the backward pass.

Gradients become ready one after the other, each is encoded and submitted; Horovod's thread takes
what has been submitted, fuses what is of one kind, and runs one collective at a time; after the
backward pass every layer is waited for and decoded. What ends before the backward pass costs
nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..payload import Kind
from .links import Links


@dataclass(frozen=True)
class Part:
    """One option of one layer.

    Attributes:
        encode: seconds before it is submitted.
        decode: seconds once it is there.
        kind: of its collectives.
        nbytes: that a rank puts on the link, over all rounds.
        rounds: how many collectives, one after the other.
    """

    encode: float
    decode: float
    kind: Kind
    nbytes: float
    rounds: int = 1

    @property
    def private(self) -> bool:
        """It does not ride Horovod's own allreduce, and waits for the roll call."""
        return self.kind not in (Kind.CARRIED, Kind.NOTHING)


@dataclass(frozen=True)
class Prediction:
    """One step.

    Attributes:
        total: its seconds.
        backward: until the last layer was encoded.
        codec: spent on encoding and decoding.
        link: that Horovod's thread was busy for.
        hidden: of those, the ones within the backward pass.
    """

    total: float
    backward: float
    codec: float
    link: float
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds after the backward pass in which nothing was computed."""
        return max(0.0, self.total - self.backward - self.codec)


def simulate(
    ready: np.ndarray, parts: Sequence[Part], links: Links, slow: float = 1.0
) -> Prediction:
    """One step.

    Args:
        ready: when each layer's gradient is there if nothing is encoded, seconds, ascending.
        parts: what each layer does, in that order.
        links: of the job.
        slow: factor on all times of links.
    """
    spent = 0.0
    submitted = []
    for at, part in zip(ready, parts, strict=True):
        spent += part.encode
        submitted.append(float(at) + spent)
    backward = submitted[-1] if submitted else 0.0
    # The checks go out with the last layer, the roll call with the first private payload.
    queue: list[tuple[float, int, int]] = [(backward, -1, 0)]
    held = [i for i, part in enumerate(parts) if part.private]
    if held:
        queue.append((submitted[held[0]], -2, 0))
    for i, part in enumerate(parts):
        if not part.private and part.kind is not Kind.NOTHING:
            queue.append((submitted[i], i, part.rounds - 1))
    heapq.heapify(queue)
    done = list(submitted)
    checked = backward
    clock = busy = hidden = 0.0
    while queue:
        clock = max(clock, queue[0][0])
        batch = []
        while queue and queue[0][0] <= clock:
            batch.append(heapq.heappop(queue))
        by_kind: dict[Kind, list[tuple[float, int, int]]] = {}
        for item in batch:
            kind = Kind.SUM if item[1] < 0 else parts[item[1]].kind
            # What rides Horovod's allreduces and what we add to them is fused.
            by_kind.setdefault(Kind.SUM if kind is Kind.CARRIED else kind, []).append(item)
        for kind, items in by_kind.items():
            nbytes = sum(parts[i].nbytes / parts[i].rounds for _, i, _ in items if i >= 0)
            took = slow * links[kind].seconds(nbytes)
            hidden += max(0.0, min(clock + took, backward) - clock)
            clock += took
            busy += took
            for _, i, rounds in items:
                if i == -1:
                    checked = clock
                elif i == -2:
                    # Looked at in hooks only, and after the last one all the time.
                    seen = next((t for t in submitted if t >= clock), max(clock, backward))
                    for j in held:
                        heapq.heappush(queue, (max(submitted[j], seen), j, parts[j].rounds - 1))
                elif rounds:
                    seen = next((t for t in submitted if t >= clock), max(clock, backward))
                    heapq.heappush(queue, (seen, i, rounds - 1))
                else:
                    done[i] = clock
    total = backward
    for i, part in enumerate(parts):
        arrived = max(done[i], checked) if part.private else done[i]
        total = max(total, arrived) + part.decode
    total = max(total, checked)
    codec = sum(part.encode + part.decode for part in parts)
    return Prediction(total, backward, codec, busy, hidden)


class StepModel:
    """Predicts a step's time from measured ready times, codec times and links.

    Args:
        ready: by layer name, seconds since the end of the last step.
        parts: by layer name, one for each option (one only where there is no choice).
        links: of the job.
        slow: factor on the links' times; see :meth:`fitted`.
    """

    def __init__(
        self,
        ready: Mapping[str, float],
        parts: Mapping[str, Sequence[Part]],
        links: Links,
        slow: float = 1.0,
    ) -> None:
        self.order = sorted(ready, key=lambda name: ready[name])
        self._ready_of = ready
        self._ready = np.array([ready[name] for name in self.order])
        self.parts = parts
        self.links = links
        self.slow = slow

    def predict(self, choice: Mapping[str, int]) -> Prediction:
        """One step with these options; layers that are not named have none."""
        parts = [self.parts[name][choice.get(name, 0)] for name in self.order]
        return simulate(self._ready, parts, self.links, self.slow)

    def seconds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of the codec, and of the link alone, for each of a layer's options."""
        parts = self.parts[name]
        codec = np.array([part.encode + part.decode for part in parts])
        link = np.array(
            [
                self.slow * part.nbytes * self.links[part.kind].seconds_per_byte
                if part.kind is not Kind.NOTHING
                else 0.0
                for part in parts
            ]
        )
        return codec, link

    def fitted(self, choice: Mapping[str, int], measured: float) -> StepModel:
        """The model with which this choice takes as long as was measured.

        Links are slower in a step than on their own, since computing takes the processor from
        them; never faster, however short a step was that hardly used them. Nothing is changed
        where a step depends on them for a small part only: whatever else it took longer or
        shorter for would be put down to them, and the next plan be chosen by that.
        """
        low, high = 1.0, 4.0
        times = [self._with(slow).predict(choice).total for slow in (low, high)]
        if not times[1] - times[0] > 0.75 * measured:
            return self
        for _ in range(24):
            middle = (low * high) ** 0.5
            if self._with(middle).predict(choice).total < measured:
                low = middle
            else:
                high = middle
        return self._with((low * high) ** 0.5)

    def _with(self, slow: float) -> StepModel:
        return StepModel(self._ready_of, self.parts, self.links, slow)
