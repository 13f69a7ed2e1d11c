"""Runs compressors on simulated ranks: the whole path that stock Horovod would drive."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hvd_greco.buffers import Buffers
from hvd_greco.codecs.base import Level, Work
from hvd_greco.compressor import Compressor
from hvd_greco.exchange.local import LocalGroup, LocalMember
from hvd_greco.layers import Layer, LayerState

Build = Callable[[list[tuple[str, torch.Tensor]], LocalMember], Compressor]
#: Gradients[step][rank][layer]; None: this rank has no gradient for the layer in this step.
Gradients = Sequence[Sequence[dict[str, torch.Tensor | None]]]


@dataclass
class Outcome:
    """What one rank saw.

    ``results``, ``residuals`` and ``states`` (all that persists, by name) are indexed by step and
    layer, ``announced`` (``wire_bytes()`` before the step), ``reports`` by step.
    """

    compressor: Compressor
    results: list[dict[str, torch.Tensor]] = field(default_factory=list)
    residuals: list[dict[str, torch.Tensor | None]] = field(default_factory=list)
    states: list[dict[str, dict[str, torch.Tensor]]] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)


def run(
    gradients: Gradients,
    build: Build,
    *,
    average: bool = True,
    shuffle: bool = False,
    stall: float = 20.0,
    hosts: int | None = None,
    rate: float = 0.0,
    in_place: bool = False,
) -> list[Outcome]:
    """Reduce ``gradients`` on simulated ranks, one outcome for each.

    Gradients are written through a backward pass, so that the compressor's hooks run as they do
    in training. With ``shuffle``, every rank submits its layers in another order in every step.

    Args:
        gradients: what each rank's backward pass gives.
        build: makes a rank's compressor.
        average: op Average, or Sum.
        shuffle: see above.
        stall: seconds after which a rank that waits fails.
        hosts: ranks on each host.
        rate: step of plain SGD on the parameters, which start from zero.
        in_place: zero gradients in place between steps, and update through ``p.data``, so that
            neither addresses nor versions tell one step from another.
    """
    size = len(gradients[0])

    def rank_program(member: LocalMember) -> Outcome:
        shapes = {
            name: next(
                ranks[r][name]
                for ranks in gradients
                for r in range(size)
                if ranks[r][name] is not None
            )
            for name in gradients[0][0]
        }
        parameters = {
            name: torch.nn.Parameter(torch.zeros_like(like)) for name, like in shapes.items()
        }
        compressor = build(list(parameters.items()), member)
        outcome = Outcome(compressor, parameters=parameters)
        order = list(parameters)
        for step, ranks in enumerate(gradients):
            for name, parameter in parameters.items():
                if in_place and parameter.grad is not None:
                    parameter.grad.detach_().zero_()
                else:
                    parameter.grad = None
                wanted = ranks[member.rank][name]
                if wanted is not None:
                    # d/dp sum(p * g) = g, bitwise: one product with 1.
                    (parameter * wanted).sum().backward()
            if shuffle:
                random.Random(f"{step}/{member.rank}").shuffle(order)
            outcome.announced.append(compressor.wire_bytes())
            member.reduce_gradients(
                [(name, parameters[name]) for name in order], compressor, average
            )
            outcome.results.append({n: p.grad.clone() for n, p in parameters.items()})
            outcome.residuals.append({n: compressor.residual(n) for n in parameters})
            outcome.states.append(
                {
                    slot.layer.name: {n: t.clone() for n, t in slot.state.slots.items()}
                    for slot in compressor._directory.slots
                }
            )
            outcome.reports.append(compressor.last_report)
            for parameter in parameters.values() if rate else ():
                with torch.no_grad():
                    target = parameter.data if in_place else parameter
                    target.add_(parameter.grad, alpha=-rate)
        return outcome

    return LocalGroup(size, stall, hosts).run(rank_program)


def gaussian(
    shapes: dict[str, tuple[int, ...]],
    size: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[list[dict[str, torch.Tensor | None]]]:
    """Independent normal gradients for every step, rank and layer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
            for _ in range(size)
        ]
        for _ in range(steps)
    ]


#: Stands for the layer until :func:`at` names one.
_NOWHERE = Layer(0, "nowhere", (), torch.float32)


def context(step: int = 0, rank: int = 0, size: int = 1, seed: int = 0) -> Work:
    """A step as one rank sees it, without a layer; for codecs on their own."""
    return Work(_NOWHERE, None, LayerState(), step, rank, size, seed, Buffers())


def at(where: Work, layer: Layer, level: Level, state: LayerState | None = None) -> Work:
    """The work on a layer in that step (in the same buffers)."""
    return replace(where, layer=layer, level=level, state=state or LayerState())
