"""When to look, when to decide, and how all ranks come to the same plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from ..codecs.base import Codec, Level, Work
from ..codecs.dense import DenseCodec
from ..codecs.skip import SkipCodec
from ..errors import GrecoError, PolicyError
from ..exchange.base import Group
from ..exchange.control import Control, make_control
from ..layers import Layer
from ..memories.base import Memory
from ..plan import Assignment
from ..telemetry import StepReport
from .journal import Interval, Journal, LayerLine
from .options import Options, layer_options
from .pipeline import StepModel
from .policy import Decision, Evidence, Policy
from .statistics import Statistics, Sums
from .timing import SETTLING, Timing


@dataclass(frozen=True)
class Setup:
    """What a controller learns of the compressor that it controls.

    Attributes:
        group: the ranks.
        prefix: start of the names of collectives.
        memory: what happens to what is not sent.
        dense: the codec of layers that are not compressed.
        min_numel: layers with fewer elements go dense.
        exclude: patterns of names that go dense.
        shared_bytes: what all layers of a step share (beacon, roll call).
    """

    group: Group
    prefix: str
    memory: Memory
    dense: DenseCodec
    min_numel: int
    exclude: Sequence[str]
    shared_bytes: int


class _Verdict(msgspec.Struct):
    """What rank 0 broadcasts: options, or why there are none."""

    choice: list[int] = []
    trouble: str = ""


class Controller:
    """Retunes the layers of one compressor.

    Steps are counted from 0. Decisions fall after ``warmup`` steps and then after every
    ``interval``; before the first one all layers go dense if there is a warm-up, and else have the
    uniform default. Samples of the statistics are spread evenly over an interval.

    Args:
        setup: the compressor.
        codecs: to choose among, with their levels.
        default: the uniform default.
        policy: decides, on rank 0.
        interval: steps between decisions.
        warmup: dense steps before the first decision.
        samples: steps of an interval that are looked at.
        journal: rank 0's log.
        timed: measure links, codecs and steps for the policy.

    Attributes:
        seconds: what all of it has taken on this rank: ``"statistics"``, ``"synchronise"``,
            ``"decide"``.
        codecs: all codecs that a plan may name, beside dense.
    """

    def __init__(
        self,
        setup: Setup,
        codecs: Sequence[tuple[Codec, Sequence[Level]]],
        default: Assignment,
        policy: Policy,
        *,
        interval: int,
        warmup: int,
        samples: int,
        journal: Callable[[], Journal],
        timed: bool = False,
    ) -> None:
        self._setup = setup
        self._menus = codecs
        self._default = default
        self.policy = policy
        self._interval = interval
        self._warmup = warmup
        self._samples = samples
        self._timed = timed
        self._timing: Timing | None = None
        #: Steps until times are worth noting.
        self._settling = SETTLING
        self._skip = SkipCodec()
        self.codecs: list[Codec] = [codec for codec, _ in codecs] + [self._skip]
        for codec in self.codecs:
            if not isinstance(codec, DenseCodec):
                codec.adapt_to(setup.memory.name)
        self._control: Control | None = None
        self._journal = journal() if setup.group.rank == 0 else Journal(None)
        self.seconds = {"statistics": 0.0, "synchronise": 0.0, "decide": 0.0}
        self._counted = dict(self.seconds)
        self._decided = 0
        #: What went wrong on this rank, to be told to all at the next decision.
        self._trouble = ""
        self._begin = 0

    # -- the start -----------------------------------------------------------------------------

    def start(self, layers: Sequence[Layer], step: int) -> dict[str, Assignment]:
        """The first assignments of these layers; also when shapes have changed."""
        setup = self._setup
        found = {
            layer.name: layer_options(
                layer, self._menus, self._default, setup.memory, setup.dense, self._skip,
                size=setup.group.size, min_numel=setup.min_numel, exclude=setup.exclude,
            )
            for layer in layers
        }  # fmt: skip
        options = {name: each for name, each in found.items() if each is not None}
        self._statistics = Statistics(
            list(options.values()), {codec.name: codec for codec in self.codecs}
        )
        if self._timed:
            by_name = {codec.name: codec for codec in self.codecs}
            self._timing = Timing(layers, list(options.values()), by_name, setup.dense)
        dense = Assignment(setup.dense.name)
        first = step < self._warmup
        self._current = {
            name: each.dense if first else each.default for name, each in options.items()
        }
        self._assignments = {
            layer.name: options[layer.name].assignments[self._current[layer.name]]
            if layer.name in options
            else dense
            for layer in layers
        }
        self._others = float(setup.shared_bytes) + sum(
            setup.dense.network_bytes(layer, None, setup.group.size)
            for layer in layers
            if layer.name not in options
        )
        self._dense_bytes = float(
            sum(setup.dense.network_bytes(layer, None, setup.group.size) for layer in layers)
        )
        self._begin = step
        return dict(self._assignments)

    def nbytes(self) -> int:
        """Bytes of the statistics."""
        return self._statistics.nbytes()

    def describe(self) -> dict[str, str]:
        """What all ranks must agree on, as text."""
        facts = {
            "policy": self.policy.describe(),
            "interval": f"{self._interval} steps, {self._warmup} dense, {self._samples} samples",
            "default": str(self._default),
        }
        for codec, levels in self._menus:
            facts.update(codec.context())
            facts[f"levels of {codec.name}"] = ", ".join(map(str, levels))
        return facts

    # -- one step --------------------------------------------------------------------------------

    def _next(self, step: int) -> int:
        """How many steps will be completed at the next decision after ``step`` steps."""
        if step < self._warmup:
            return self._warmup
        return step + self._interval - (step - self._warmup) % self._interval

    def looks_at(self, step: int) -> bool:
        """Whether the step that begins after ``step`` steps is sampled."""
        end = self._next(step)
        begin = max(self._begin, end - self._interval)
        stride = max(1, (end - begin) // self._samples)
        left = end - 1 - step
        return left % stride == 0 and left // stride < self._samples

    def enter(self, layer: str) -> None:
        """A layer's gradient is ready, and encoding begins."""
        if self._timing is not None:
            self._timing.timeline.enter(layer)

    def leave(self) -> None:
        """A layer was encoded."""
        if self._timing is not None:
            self._timing.timeline.leave()

    def observe(self, work: Work, vector: torch.Tensor, gradient_energy: float) -> None:
        """Take a sample of a layer; what goes wrong is told to all ranks at the decision."""
        name = work.layer.name
        if not self._statistics.knows(name) or self._trouble:
            return
        began = time.perf_counter()
        try:
            self._statistics.add(work, vector, gradient_energy)
        except Exception as error:  # whatever a codec of somebody else's raises
            self._trouble = f"layer {name!r}: {type(error).__name__}: {error}"
        self.seconds["statistics"] += time.perf_counter() - began

    def after_step(self, step: int, report: StepReport) -> dict[str, Assignment] | None:
        """Assignments from here on, if they change; all ranks call it after the same steps.

        Args:
            step: how many steps were completed.
            report: of the last one.

        Raises:
            PolicyError: on every rank, if statistics or the decision failed on any.
        """
        if self._timing is None:
            return self._after_step(step, report)
        # Steps that are sampled take longer, and those right after a change too.
        self._timing.timeline.close(usual=not self._settling and not self.looks_at(step - 1))
        self._settling = max(0, self._settling - 1)
        found = self._after_step(step, report)
        if found is not None:
            self._settling = SETTLING
        self._timing.timeline.resume()
        return found

    def _after_step(self, step: int, report: StepReport) -> dict[str, Assignment] | None:
        self._statistics.close(accepted=not report.nonfinite)
        for layer in report.layers:
            if self._statistics.knows(layer.name):
                self._statistics.spend(layer.name, layer.codec_seconds)
        if step != self._next(step - 1) or not self._statistics.options:
            return None
        began = time.perf_counter()
        total = self._synchronise()
        sums = self._statistics.read(total)
        assert self._control is not None
        model, measured = None, math.nan
        if self._timing is not None:
            group = self._setup.group
            self._timing.measure(group, self._setup.prefix, self._setup.memory)
            model, measured = self._timing.model(self._control, sums, self._current, group.size)
            self._timing.timeline.forget()
        synchronised = time.perf_counter()
        verdict, made = None, None
        if self._setup.group.rank == 0:
            verdict, made = self._decide(step, sums, model, measured)
        decided = time.perf_counter()
        sent = None if verdict is None else msgspec.msgpack.encode(verdict)
        received = msgspec.msgpack.decode(self._control.broadcast(sent), type=_Verdict)
        self.seconds["synchronise"] += synchronised - began + time.perf_counter() - decided
        self.seconds["decide"] += decided - synchronised
        if received.trouble:
            raise PolicyError(received.trouble)
        if made is not None:
            self._write(step, *made)
        self._decided += 1
        return self._apply(received.choice)

    def _apply(self, choice: list[int]) -> dict[str, Assignment] | None:
        options = self._statistics.options
        _check_choice(choice, options)
        now = {each.layer.name: place for each, place in zip(options, choice, strict=True)}
        if now == self._current:
            return None
        self._current = now
        for each in options:
            self._assignments[each.layer.name] = each.assignments[now[each.layer.name]]
        return dict(self._assignments)

    def _synchronise(self) -> np.ndarray:
        """The interval's statistics summed over ranks."""
        group = self._setup.group
        if self._control is None:
            self._control = make_control(group, f"{self._setup.prefix}/control")
        mine = np.concatenate(([1.0 if self._trouble else 0.0], self._statistics.take()))
        total = self._control.sum(mine)
        if total[0]:
            told = self._control.gather(self._trouble.encode())
            rank, text = next((r, each.decode()) for r, each in enumerate(told) if each)
            raise PolicyError(f"rank {group.members[rank]}: statistics failed: {text}")
        return total[1:]

    def _decide(
        self, step: int, sums: Mapping[str, Sums], model: StepModel | None, measured: float
    ) -> tuple[_Verdict, tuple[Evidence, Decision] | None]:
        evidence = Evidence(
            self._decided, step, self._statistics.options, sums, dict(self._current),
            self._others, self._dense_bytes, self._interval, model, measured,
        )  # fmt: skip
        if not any(each.samples for each in sums.values()):
            # Overflows in all samples: there is nothing to decide by.
            return _Verdict(evidence.choice.tolist()), None
        try:
            decision = self.policy.decide(evidence)
            choice = [int(place) for place in decision.choice]
            _check_choice(choice, self._statistics.options)
            return _Verdict(choice), (evidence, decision)
        except Exception as error:  # whatever a policy of somebody else's raises
            kind = "" if isinstance(error, GrecoError) else f"{type(error).__name__}: "
            text = f"policy {self.policy.name!r} after {step} steps: {kind}{error}"
            return _Verdict(trouble=text), None

    # -- the log -----------------------------------------------------------------------------------

    def _write(self, step: int, evidence: Evidence, decision: Decision) -> None:
        rows = np.arange(len(evidence.options))
        bytes_, errors = evidence.bytes, evidence.errors
        spent = {what: self.seconds[what] - self._counted[what] for what in self.seconds}
        self._counted = dict(self.seconds)
        now, choice = evidence.choice, decision.choice
        names = [each.layer.name for each in evidence.options]
        predicted = None
        if evidence.model is not None:
            chosen = dict(zip(names, map(int, choice), strict=True))
            predicted = _known(decision.seconds) or _known(evidence.model.predict(chosen).total)
        lines: list[Any] = [
            Interval(
                evidence.interval, step, self.policy.name, decision.reason,
                int((now != choice).sum()),
                bytes=float(bytes_[rows, choice].sum() + self._others),
                bytes_before=float(bytes_[rows, now].sum() + self._others),
                error=float(errors[rows, choice].sum()),
                error_default=float(errors[rows, evidence.defaults].sum()),
                seconds=spent,
                figures={name: float(value) for name, value in decision.figures.items()},
                measured_seconds=_known(evidence.measured_seconds),
                predicted_seconds=predicted,
            )
        ]  # fmt: skip
        for row, each in enumerate(evidence.options):
            name = names[row]
            times = None
            if evidence.model is not None and name in evidence.model.parts:
                codec, link = evidence.model.seconds(name)
                times = float(codec[choice[row]]), float(link[choice[row]])
            lines.append(
                LayerLine(
                    evidence.interval, name, str(each.assignments[now[row]]),
                    str(each.assignments[int(choice[row])]),
                    bytes=float(bytes_[row, choice[row]]), error=float(errors[row, choice[row]]),
                    energy=evidence.sums[name].energy,
                    codec_seconds=evidence.sums[name].codec_seconds,
                    reason=decision.reasons.get(name, ""),
                    predicted_codec_seconds=times and times[0],
                    predicted_link_seconds=times and times[1],
                )
            )  # fmt: skip
        self._journal.write(lines)


def _known(seconds: float) -> float | None:
    """JSON has no NaN."""
    return seconds if math.isfinite(seconds) else None


def _check_choice(choice: Sequence[int], options: Sequence[Options]) -> None:
    """Raise PolicyError unless there is one option for each layer, and the layer has it."""
    if len(choice) != len(options):
        raise PolicyError(f"{len(choice)} options were chosen for {len(options)} layers")
    for place, each in zip(choice, options, strict=True):
        if not 0 <= place < len(each.assignments):
            raise PolicyError(
                f"layer {each.layer.name!r}: option {place} was chosen, of 0 to "
                f"{len(each.assignments) - 1}"
            )
