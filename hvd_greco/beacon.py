"""One tiny collective a step: is every rank on the same plan and step, and were all finite?

It is started with the last layer's compression, so it costs no round trip of its own, and read
when the first layer is finished. It answers two questions that no single layer can: whether
*any* layer of *any* rank overflowed (then no state changes anywhere, in any layer), and whether
all ranks run the same plan, codec options and step (else the error names what differs).
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from .errors import MismatchError, WireError
from .exchange.base import Group
from .payload import Kind, Payload
from .plan import Plan, step_words


class _Facts(msgspec.Struct):
    """What a rank believes, sent only when ranks were found to disagree."""

    rank: int
    step: int
    facts: dict[str, str]
    repeated: list[str]


class Beacon:
    """The per-step check of one compressor.

    Args:
        group: our ranks.
        prefix: start of the collective's name.
    """

    #: Four fp64 words: ranks present, non-finite layers, and two that mix plan and step.
    NBYTES = 32

    def __init__(self, group: Group, prefix: str) -> None:
        self._group = group
        self._name = f"{prefix}/beacon"
        self._bad: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self._bad = None
        self._host_bad = 0
        self._ticket: Any = None
        self._accepted: bool | None = None
        #: Layers whose gradient this rank passed a second time, as it said in the collective.
        self._repeated: frozenset[str] = frozenset()
        #: All ranks took part: none has called hvd.join().
        self.complete = True

    def abandon(self) -> None:
        """Let a collective that was started come to its end, so that its name is free again."""
        if self._ticket is not None:
            self._group.wait(self._ticket)
        self.reset()

    @property
    def nonfinite(self) -> bool:
        """Some rank had inf or NaN in some layer of the last step."""
        return self._accepted is False

    def note(self, finite: torch.Tensor) -> None:
        """Count one layer of this rank, without waiting for its device."""
        if not finite.is_cuda:
            self._host_bad += not finite.item()
            return
        bad = (~finite).to(torch.float64)
        if self._bad is None:
            self._bad = bad
        else:
            self._bad = self._bad + bad.to(self._bad.device, non_blocking=True)

    def launch(self, plan: Plan, step: int, repeated: frozenset[str]) -> bool:
        """Start the collective unless it was started already; True if it was now.

        Args:
            plan: the plan in force.
            step: the step's number.
            repeated: dense layers whose gradient this rank has already reduced. Their tensors
                carry no checks of their own, and all ranks must agree on them.
        """
        if self._ticket is not None or self._accepted is not None:
            return False
        if self._group.rank < 0:
            return False
        self._repeated = repeated
        mixed = step_words(plan, step, repeated)
        words = torch.tensor([1.0, self._host_bad, *mixed], dtype=torch.float64)
        if self._bad is not None:
            words = words.to(self._bad.device, non_blocking=True)
            words[1] += self._bad
        self._ticket = self._group.submit(self._name, Payload(Kind.SUM, words))
        return True

    def wait(self, plan: Plan, step: int) -> bool:
        """Whether the step may change state. Every rank gets the same answer.

        Raises:
            MismatchError: ranks disagree on the plan, the step, or which gradients are new.
        """
        if self._accepted is None:
            # A rank that called hvd.join() adds zeros to an allreduce, and does not count.
            present, bad, *sums = self._group.wait(self._ticket).buffer.tolist()
            self._ticket = None
            self.complete = present == self._group.size
            if any(
                total != present * word
                for total, word in zip(sums, step_words(plan, step, self._repeated), strict=True)
            ):
                raise MismatchError(self._difference(plan, step))
            self._accepted = bad == 0
        return self._accepted

    def settle(self, plan: Plan, step: int) -> None:
        """Wait for a collective that was started and never asked for; raises as :meth:`wait`."""
        if self._ticket is not None:
            self.wait(plan, step)

    def _difference(self, plan: Plan, step: int) -> str:
        """What differs between which ranks. Every rank comes here, so a collective is safe."""
        mine = msgspec.json.encode(
            _Facts(self._group.global_rank, step, plan.describe(), sorted(self._repeated))
        )
        framed = len(mine).to_bytes(8, "little") + mine
        payload = Payload(Kind.GATHER, torch.frombuffer(bytearray(framed), dtype=torch.uint8))
        gathered = self._group.wait(self._group.submit(f"{self._name}/facts", payload)).buffer
        ranks = _decode(gathered.numpy().tobytes())
        first = ranks[0]
        for other in ranks[1:]:
            for key in sorted(first.facts.keys() | other.facts.keys(), key=_layers_first):
                ours, theirs = first.facts.get(key, "absent"), other.facts.get(key, "absent")
                if ours != theirs:
                    return (
                        f"ranks disagree on {key}: {ours} on rank {first.rank}, {theirs} on rank "
                        f"{other.rank}. All ranks must build the compressor with the same "
                        "arguments, for the same model, with the same versions installed"
                    )
            if first.step != other.step:
                return (
                    f"rank {first.rank} is at step {first.step}, rank {other.rank} at step "
                    f"{other.step}: every rank must call synchronize() or step() equally often, "
                    "and resume from checkpoints of one step"
                )
            for name in sorted({*first.repeated} ^ {*other.repeated}):
                pair = (first, other) if name in first.repeated else (other, first)
                return (
                    f"layer {name!r}: the gradient had already been reduced on rank "
                    f"{pair[0].rank}, and is new on rank {pair[1].rank}. Call "
                    "optimizer.zero_grad() for all parameters before each backward pass, and "
                    "synchronize() equally often on all ranks"
                )
        return "ranks disagree, but report the same plan and step; please report this as a bug"


def _layers_first(key: str) -> tuple[bool, str]:
    """A layer's name and values say more than the options they follow from."""
    return (not key.startswith("layer "), key)


def _decode(data: bytes) -> list[_Facts]:
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        if size > len(data) - at - 8:
            raise WireError(f"facts of {size} bytes announced, {len(data) - at - 8} received")
        found.append(msgspec.json.decode(data[at + 8 : at + 8 + size], type=_Facts))
        at += 8 + size
    return found
