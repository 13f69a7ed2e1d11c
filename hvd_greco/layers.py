"""What is known of a layer for ever, and what persists for it between steps: kept apart.

A :class:`Layer` is a frozen record and may be shared, hashed and compared between ranks. A
:class:`LayerState` belongs to one rank, changes only when a step is committed, and survives any
change of codec or level.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from .errors import ConfigError

#: dtypes that gradients may have. Everything inside is computed in fp32, for fp64 in fp64.
GRADIENT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def carried_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype in which Horovod's allreduce takes a gradient: its own, but fp32 for bf16.

    Horovod cannot add up bf16. Other dtypes it refuses by itself, and says so.
    """
    return torch.float32 if dtype == torch.bfloat16 else dtype


@dataclass(frozen=True)
class Layer:
    """One parameter, as every rank sees it.

    Attributes:
        index: position in the name order, the same on all ranks.
        name: the parameter's name in the model.
        shape: the parameter's shape, ``()`` for a scalar.
        dtype: the gradient's dtype.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def numel(self) -> int:
        """Number of elements, d."""
        return math.prod(self.shape)

    @cached_property
    def work_dtype(self) -> torch.dtype:
        """dtype of residuals, selected values and sums: fp32, or fp64 for fp64 gradients."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the uncompressed gradient on the wire: 4 an element for bf16, see there."""
        return self.numel * carried_dtype(self.dtype).itemsize

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the matrix view: ``shape[0]`` by the rest (1 row below 2-D)."""
        if len(self.shape) < 2:
            return (1, self.numel)
        return (self.shape[0], math.prod(self.shape[1:]))


@dataclass
class LayerState:
    """What one rank remembers of one layer between steps.

    Attributes:
        residual: error feedback, shape ``[d]`` in the layer's work dtype and in unscaled units
            (an AMP loss scale is divided out), or None before the first commit.
        slots: what a codec keeps by name (warm starts, momenta).
    """

    residual: torch.Tensor | None = None
    slots: dict[str, torch.Tensor] = field(default_factory=dict)

    def nbytes(self) -> int:
        """Bytes held."""
        tensors = [*self.slots.values(), *([] if self.residual is None else [self.residual])]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Given:
    """What a rank has for one layer in a step.

    Attributes:
        layer: which.
        state: what persists; only a memory's ``commit`` may change its values.
        gradient: shape ``[d]``, the gradient's dtype.
        unscale: 1 / loss scale.
    """

    layer: Layer
    state: LayerState
    gradient: torch.Tensor
    unscale: float


@dataclass(frozen=True)
class Addends:
    """A vector that is still to be formed: ``residual + scale * gradient``.

    Attributes:
        residual: shape ``[d]``, the layer's work dtype.
        gradient: shape ``[d]``, the gradient's dtype.
        scale: 1 / loss scale.
    """

    residual: torch.Tensor
    gradient: torch.Tensor
    scale: float


def check_named_parameters(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor]]:
    """The pairs sorted by name, each name and each parameter once.

    Raises:
        ConfigError: not pairs of a name and a tensor, none at all, a name or a parameter twice.
    """
    if isinstance(named_parameters, torch.nn.Module):
        raise ConfigError(
            "named_parameters: got a module; pass its named parameters: model.named_parameters()"
        )
    pairs = list(named_parameters)
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise ConfigError(
                f"named_parameters: needs (name, parameter) pairs as from "
                f"model.named_parameters(), got an item of type {type(pair).__name__}: {pair!r:.80}"
            )
    if not pairs:
        raise ConfigError(
            "named_parameters: is empty; pass model.named_parameters() itself (a generator that "
            "was already used up looks empty)"
        )
    names: set[str] = set()
    first_name: dict[int, str] = {}
    for name, parameter in pairs:
        if name in names:
            raise ConfigError(f"named_parameters: the name {name!r} occurs twice")
        names.add(name)
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(
                f"named_parameters: {name!r} has no shape yet (a lazy module); run the model on "
                "one batch first, then make the compressor and the optimizer"
            )
        if id(parameter) in first_name:
            raise ConfigError(
                f"named_parameters: {first_name[id(parameter)]!r} and {name!r} are one and the "
                "same parameter (tied weights); list it once, as model.named_parameters() does"
            )
        first_name[id(parameter)] = name
    return sorted(pairs, key=lambda pair: pair[0])
