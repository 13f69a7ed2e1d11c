"""``greco.LGreco``: the controller, as a method like the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..codecs.base import Codec, Level
from ..config import check_count
from ..errors import ConfigError
from ..plan import Assignment
from ..registry import find_codec, register_controller
from .budget import parse_budget
from .controller import Controller, Setup
from .journal import Journal
from .lgreco_policy import LGrecoPolicy
from .options import FAMILIES, menu
from .policy import Policy
from .time_policy import TimePolicy

#: The codec whose default level is a family's reference.
_REFERENCE = {"auto": "topk"}
OBJECTIVES = ("bytes", "time")
#: Steps that go dense first where time counts, so that it is known what dense takes.
DENSE_STEPS = 20


def assemble(
    family: str = "topk",
    *,
    default: float | None = None,
    interval: int = 100,
    warmup: int | None = None,
    objective: str = "bytes",
    budget: float | str = "error:1.0",
    solver: str = "hull",
    hysteresis: float = 0.05,
    samples: int = 3,
    metric: str = "residual",
    log: str = "",
    policy: Policy | None = None,
    reference: Policy | None = None,
    codecs: Mapping[str, Codec] | None = None,
    levels: Mapping[str, Sequence[Level]] | None = None,
) -> dict[str, Any]:
    """The codec, level and controller of :class:`LGreco`."""
    if family not in FAMILIES:
        raise ConfigError(f"family: {family!r} is none of {', '.join(FAMILIES)}")
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective: {objective!r} is none of {', '.join(OBJECTIVES)}")
    check_count("interval", interval, minimum=1)
    timed = objective == "time"
    first_dense = (DENSE_STEPS if timed else 0) if warmup is None else check_count("warmup", warmup)
    check_count("samples", samples, minimum=1)
    limit = parse_budget(budget)
    given = dict(codecs or {})
    names = FAMILIES[family]
    if timed and "fp16" not in names:
        names = (*names, "fp16")
    for name in {*given, *(levels or {})} - set(names):
        raise ConfigError(f"codecs: {name!r} is not in family {family!r}: {', '.join(names)}")
    uniform = _REFERENCE.get(family, names[0])
    found: list[tuple[Codec, Sequence[Level]]] = []
    for name in names:
        entry = find_codec(name)
        codec = given.get(name) or entry.make()
        level = default if name == uniform and default is not None else entry.default
        chosen = (levels or {}).get(name)
        own = menu(codec, level) if chosen is None else [codec.check_level(v) for v in chosen]
        if name == uniform:
            start = codec.check_level(level)
            own = sorted({*own, start}, key=float)
            first, at = codec, start
        found.append((codec, own))
    decides = policy
    if decides is None and timed:
        decides = TimePolicy(limit, solver, hysteresis, metric, reference)
    elif decides is None:
        decides = LGrecoPolicy(limit, solver, hysteresis, metric, reference)
    for argument, given_policy in (("policy", decides), ("reference", reference)):
        if given_policy is not None and not isinstance(given_policy, Policy):
            raise ConfigError(f"{argument}: needs a greco.Policy, got {given_policy!r}")

    def controller(setup: Setup) -> Controller:
        return Controller(
            setup, found, Assignment(first.name, at), decides,
            interval=interval, warmup=first_dense, samples=samples, timed=timed,
            journal=lambda: Journal(Path(log) if log else None),
        )  # fmt: skip

    return {"codec": first, "level": at, "memory": "ef", "controller": controller}


@register_controller(
    "lgreco",
    public="LGreco",
    description="every layer's level (or method) retuned each interval, within an error budget",
    assemble=assemble,
)
class LGreco:
    """Layer-adaptive compression (L-GreCo): every layer's level is chosen anew each interval.

    At the end of each interval the errors that every level of every layer would make, on all ranks'
    gradients, are summed over the ranks; rank 0 finds the choice of fewest bytes whose errors
    together are no more than those of the uniform default, and broadcasts it; all ranks follow from
    the same step on. Residuals and warm starts stay (Alimohammadi et al., MLSys 2024; what is
    different here is in docs/lgreco.md).

    Args:
        family: ``"topk"``, ``"qsgd"``, ``"powersgd"`` or ``"acp"``: that method's levels;
            ``"auto"``: those of the first three at once, each layer taking what is cheapest for it.
            Dense and skipping are choices in all of them.
        default: the uniform level whose error is the budget's measure: a density (0.01 unless you
            say otherwise), bits (4) or a rank (4). For ``"auto"``: a density of top-k. Choose what
            you would use without a controller.
        interval: steps between decisions. 100 suits most; what a decision costs is in the log.
        warmup: steps at the start that go dense; the first decision falls at their end. None: 0,
            or 20 for ``objective="time"``, which wants to know what a dense step takes. An epoch
            or two where early training is sensitive.
        objective: ``"bytes"`` on the link, or ``"time"``: the shortest step, by a model of links,
            codecs and overlap that is measured in the job itself (2 s at the first decision).
            Dense and fp16 are plans like others, and taken where compression does not pay.
        budget: ``"error:1.0"`` (or 1.0): that many times the uniform default's error;
            ``"ratio:100"``: the least error at 100 times fewer bytes than dense; ``"step:0.12"``,
            with ``objective="time"``: the least error with steps of 0.12 s.
        solver: ``"hull"``, or ``"dp"``, exact and slower with hundreds of layers.
        hysteresis: share by which a new plan must be better to be taken, or the present one over
            its budget to be left.
        samples: steps of each interval whose gradients are looked at. Each costs a pass or two over
            the gradient for each codec of the family.
        metric: what counts as error: ``"residual"``, the squared norm of what error feedback will
            hold at the next decision; ``"squared"``, that of one step's error; ``"lgreco"``, norms
            of one step's errors, as the paper's code has them. The latter two hardly tell sending
            little from sending nothing.
        log: file for decisions, one JSON object a line, written by rank 0. Empty: none.
        policy: another one in L-GreCo's place (``greco.AccordionPolicy``,
            ``greco.SchedulePolicy``, or your own ``greco.Policy``: ``examples/own_policy.py``).
        reference: a policy whose levels take the uniform default's place in the budget: with
            Accordion's, errors may be larger while gradients change slowly.
        codecs: codec objects with options of their own, by name (``{"topk": TopKCodec("fp16")}``).
        levels: levels to choose from, by codec name.

    Raises:
        ConfigError: an argument that cannot work.

    Memory: error feedback's copy, and for every layer a number for each of its options.
    """
