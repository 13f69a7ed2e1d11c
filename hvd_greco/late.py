"""Small layers on a GPU wait for each other, and are encoded several in each launch.

There a kernel takes longer to be launched than to run over a small layer, and selecting entries
takes half a dozen launches, whether for one layer or for sixty. So a layer may wait until enough
of them are there, or until no further one will come. On the CPU nothing is gained by waiting.
"""

from __future__ import annotations

import torch

from .rounds import Pending

#: Device types on which layers wait.
DEVICES = frozenset({"cuda"})
#: A layer of more elements keeps a GPU busy by itself.
MOST_ELEMENTS = 1 << 20
#: Together they are encoded once they are that many elements, or that many layers.
ENOUGH_ELEMENTS, ENOUGH_LAYERS = 1 << 22, 64


class Late:
    """Layers of one step that were started and not encoded yet."""

    def __init__(self) -> None:
        self._waiting: list[Pending] = []
        self._streams: set[torch.cuda.Stream] = set()

    def suits(self, pending: Pending) -> bool:
        """Whether a layer may wait: its payload is private, and its gradient's memory is ours."""
        layer = pending.slot.layer
        return (
            pending.codec.encodes_many
            and pending.gradient.device.type in DEVICES
            and layer.numel <= MOST_ELEMENTS
        )

    def add(self, pending: Pending) -> None:
        """Let a layer wait; from here on its gradient must not change."""
        self._waiting.append(pending)
        if pending.gradient.is_cuda:
            self._streams.add(torch.cuda.current_stream(pending.gradient.device))

    @property
    def enough(self) -> bool:
        """There are as many as a launch should have."""
        elements = sum(pending.slot.layer.numel for pending in self._waiting)
        return elements >= ENOUGH_ELEMENTS or len(self._waiting) >= ENOUGH_LAYERS

    def take(self) -> list[Pending]:
        """All that wait, which do so no longer; gradients may be read on the current stream."""
        waiting, self._waiting = self._waiting, []
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._streams = set()
        return waiting
