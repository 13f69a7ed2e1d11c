"""The contract of a memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs.base import Codec, Level, Work
from ..errors import ConfigError
from ..layers import Addends, Given, Layer, LayerState
from ..payload import Payload


@dataclass(frozen=True)
class Own:
    """This rank's own contribution to one layer's step, C(vector)."""

    codec: Codec
    work: Work
    sent: Payload
    #: What was not sent, shape ``[d]``, where the codec left it and it is still there.
    rest: torch.Tensor | None = None

    def add_to(self, vector: torch.Tensor, alpha: float) -> None:
        """``vector += alpha * C``, in place; shape ``[d]``."""
        self.codec.add_own(self.work, self.sent, vector, alpha)

    def clear(self, vector: torch.Tensor) -> None:
        """Zero ``vector`` wherever something was sent; sparse codecs only."""
        self.codec.clear_own(self.sent, vector)


class Memory(ABC):
    """Makes the vector to encode, and settles accounts once the step is accepted.

    Attributes:
        name: short name.
        copies: copies of the compressed layers, in the work dtype, that it keeps.
        absent_is_zero: a rank without a gradient goes through the whole step with a zero one,
            instead of contributing nothing and keeping its state.
        serves_dense: :meth:`deliver_dense` does something.
    """

    name: str
    copies: int = 0
    absent_is_zero: bool = False
    serves_dense: bool = False

    def describe(self) -> str:
        """Name and options, as text: all ranks must agree on it."""
        return self.name

    def check(self, codec: Codec, level: Level) -> None:
        """Raise :class:`ConfigError` if theory does not allow this memory with that codec."""
        if not codec.contractive(level):
            raise ConfigError(
                f"memory: {self.name!r} does not go with {codec.name!r} at level {level}: what "
                "the codec leaves out may be larger than its input, so a residual could grow "
                "without bound. Use memory='none', or another level"
            )

    def bind(self, parameters: Mapping[str, torch.Tensor], size: int) -> None:
        """Learn the parameters (by layer name; read only) and the number of ranks, once."""
        return

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer that would do again what the memory does.

        Called at the start of every step, since schedules may change an optimizer's options.

        Args:
            optimizer: the Horovod optimizer whose gradients are compressed; None if unknown.

        Raises:
            ConfigError: what must be changed.
        """
        return

    def addends(self, given: Given) -> Addends | None:
        """What :meth:`compensate` adds up, if it is a plain sum: codecs may then form it
        themselves, in the pass in which they encode it. None: it is not.
        """
        return None

    @abstractmethod
    def compensate(self, given: Given, out: torch.Tensor) -> None:
        """Write the vector to encode into ``out`` (shape ``[d]``, work dtype).

        Must give the same bits when called again in the same step, and change no value in
        ``given.state`` (it may allocate zeros there).
        """

    @abstractmethod
    def commit(self, given: Given, own: Own) -> None:
        """Store what was not sent. ``given`` is what it was in :meth:`compensate`."""

    def owed(self, state: LayerState) -> torch.Tensor | None:
        """What a layer that goes dense from now on has kept back; None: nothing.

        It is then sent with its gradient, as :meth:`compensate` adds them up, and once the step is
        accepted :meth:`settle` forgets it.
        """
        return None

    def settle(self, state: LayerState) -> None:
        """Forget what was :meth:`owed`."""
        return

    def deliver(self, layer: Layer, state: LayerState, mean: torch.Tensor) -> None:
        """Turn the mean of what was sent into what the optimizer gets, in place.

        Called on every rank when the step is accepted. What it stores must be the same on all.
        """
        return

    def deliver_dense(
        self, layer: Layer, state: LayerState, mean: torch.Tensor, scale: float
    ) -> None:
        """:meth:`deliver` for a layer that went dense in this step, if ``serves_dense``.

        Called once the step is accepted, on every rank.

        Args:
            layer: which.
            state: may be changed, alike on all ranks.
            mean: shape ``[d]``, the gradient's dtype: ``scale`` times the mean over all ranks.
            scale: loss scale times the factor that the user's ``op`` asks for.
        """
        return


def kept(state: LayerState, name: str, layer: Layer, like: torch.Tensor) -> torch.Tensor:
    """The state's tensor of that name, shape ``[d]`` in the work dtype; zeros at first."""
    held = state.slots.get(name)
    if held is None:
        held = torch.zeros(layer.numel, dtype=layer.work_dtype, device=like.device)
        state.slots[name] = held
    return held
