"""The object that stock Horovod calls: ``compress`` in its hooks, ``decompress`` at the end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import carrier, registry
from .adapt.controller import Controller, Setup
from .assign import uniform_plan
from .beacon import Beacon
from .codecs.base import Codec, Level
from .codecs.dense import DenseCodec
from .config import check_callable, check_count, check_name, check_patterns
from .errors import ConfigError
from .exchange.base import Group
from .identity import Directory, calling_optimizer
from .layers import Layer, check_named_parameters
from .memories.base import Memory
from .payload import Kind
from .plan import Plan
from .reduction import Reduction
from .rounds import Rounds
from .routes import check_allgather, routed
from .telemetry import StepReport

_log = logging.getLogger(__package__)

#: Layers with fewer elements go dense by default: their payloads save less than they cost.
MIN_NUMEL = 1024

#: (group, rank) -> compressors made so far; ranks may be threads of one process.
_counts: dict[tuple[str, int], int] = {}


class Compressor:
    """Compresses the gradients of one model for ``hvd.DistributedOptimizer(compression=...)``.

    Usually made through :class:`~hvd_greco.TopK`, :class:`~hvd_greco.RandomK` or
    :class:`~hvd_greco.Dense`; this class takes any codec. One compressor serves one model; several
    optimizers may share it.

    Args:
        named_parameters: the model's ``named_parameters()``.
        codec: method for the layers that are compressed.
        level: its level, for all of them.
        memory: what happens to what was not sent: ``"ef"`` (error feedback: added to the next
            gradient), ``"none"``, ``"ef21"``, ``"ef21-sgdm"``, or a ``Memory`` with options of its
            own. None: what the codec is meant to be used with.
        exchange: how payloads travel. None: the codec's own way. ``"allgather"``: every rank's to
            every rank. ``"scatter"``: each rank averages one shard and codes it once more, so
            that the cost per rank does not grow with their number. ``"hierarchical"``: dense
            inside a host, compressed between hosts (Horovod must be able to form process sets:
            ``hvd.init(process_sets="dynamic")``).
        schedule: level as a function of the step (warm-ups); the same on all ranks.
        min_numel: layers with fewer elements go dense.
        exclude: shell-style patterns of layer names that go dense (``("*.bias", "embed*")``).
        process_set: what ``hvd.DistributedOptimizer`` gets as ``process_set``.
        loss_scale: with AMP, a callable that returns the current loss scale (``scaler.get_scale``):
            residuals are kept without it, so that they stay right when it changes.
        seed: decides random choices; the same on all ranks.
        name: prefix of our collectives; needed only if ranks make different numbers of compressors.
        group: ranks to use in place of Horovod's (a ``LocalGroup`` member), for tests.
        controller: makes an adaptive controller of what it is told (``greco.LGreco`` brings one).

    Attributes:
        plan: the :class:`~hvd_greco.plan.Plan` in force.
        last_report: :class:`~hvd_greco.telemetry.StepReport` of the last completed step. None
            before it, and always in a job of one rank: Horovod calls no compressor there.

    Raises:
        ConfigError: an argument cannot work.
        NotInitializedError: ``hvd.init()`` was not called.
        LaunchError: Horovod and MPI do not see the same ranks.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        codec: Codec,
        level: Level = None,
        *,
        memory: str | Memory | None = None,
        exchange: str | None = None,
        schedule: Callable[[int], Level] | None = None,
        min_numel: int = MIN_NUMEL,
        exclude: Sequence[str] = (),
        process_set: Any = None,
        loss_scale: Callable[[], float] | None = None,
        seed: int = 0,
        name: str | None = None,
        group: Group | None = None,
        controller: Callable[[Setup], Controller] | None = None,
    ) -> None:
        self._group = group or _horovod_group(type(self).__name__, process_set)
        self._loss_scale = check_callable("loss_scale", loss_scale, "scaler.get_scale")
        self._seed = check_count("seed", seed)
        pairs = check_named_parameters(named_parameters)
        sizes = {layer: parameter.numel() for layer, parameter in pairs}
        codec, self._memory = routed(exchange, codec, _memory(memory, codec), self._group, sizes)
        self._codec = codec
        codec.adapt_to(self._memory.name)
        self._dense = DenseCodec()
        self._codecs: dict[str, Codec] = {self._dense.name: self._dense, codec.name: codec}
        self._memory.bind(dict(pairs), max(1, self._group.size))
        # What never keeps a residual need not know which gradients are new.
        self._directory = Directory(pairs, watch=not isinstance(codec, DenseCodec))
        self._schedule = check_callable("schedule", schedule, "lambda step: 0.01")
        self._min_numel = check_count("min_numel", min_numel)
        self._exclude = check_patterns("exclude", exclude)
        self._level = codec.check_level(schedule(0) if schedule else level)
        if exchange == "allgather":
            check_allgather(codec)
        self.plan = self._uniform_plan(epoch=0)
        prefix = f"greco/{check_name('name', name) or _next_name(self._group)}"
        self._reduction = Reduction(self._group, self._memory, prefix, self._seed)
        self._lock = threading.RLock()
        self.last_report: StepReport | None = None
        self._controller: Controller | None = None
        if controller is not None:
            self._controller = controller(
                Setup(
                    self._group, prefix, self._memory, self._dense, self._min_numel,
                    self._exclude, Beacon.NBYTES + Rounds.NBYTES,
                )
            )  # fmt: skip
            self._codecs.update((each.name, each) for each in self._controller.codecs)
            self._reduction.always_checked = True
            self._begin_control(epoch=0)

    # -- what users may ask ------------------------------------------------------------------

    def wire_bytes(self) -> int:
        """Bytes this rank will hand to collectives in the next step, if it has every gradient.

        Exact for the plan in force, but where the data decides (``selection="sampled"``): there
        it is the most that can be.
        """
        total, private = 0, False
        checked = self._memory.serves_dense or self._reduction.always_checked
        for slot in self._directory.slots:
            if slot.layer.name not in self._directory.trainable:
                continue
            assignment = self.plan[slot.layer]
            codec = self._codecs[assignment.codec]
            total += codec.step_bytes(self._reduction.work(slot, assignment.level))
            if not isinstance(codec, DenseCodec):
                total += carrier.LENGTH * slot.layer.work_dtype.itemsize
                checked = True
            private = private or codec.kind is not Kind.CARRIED
        checked = checked and total > 0
        return total + (Beacon.NBYTES if checked else 0) + (Rounds.NBYTES if private else 0)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held on top of the model: ``state`` (residuals), ``buffers`` (reused each step)."""
        slots = self._directory.slots
        held = 0 if self._controller is None else self._controller.nbytes()
        return {
            "state": sum(slot.state.nbytes() for slot in slots) + held,
            "buffers": self._reduction.scratch_bytes()
            + sum(slot.buffers.nbytes() for slot in slots),
        }

    def residual(self, name: str) -> torch.Tensor | None:
        """A copy of this rank's residual of a layer, in its shape; None before its first step."""
        slot = next((s for s in self._directory.slots if s.layer.name == name), None)
        if slot is None:
            known = ", ".join(s.layer.name for s in self._directory.slots[:5])
            raise ConfigError(f"name: there is no layer {name!r}; layers are {known}, ...")
        held = slot.state.residual
        return None if held is None else held.clone().view(slot.layer.shape)

    def close(self) -> None:
        """Take our hooks off the parameters; the compressor cannot be used afterwards."""
        self._directory.close()

    # -- what Horovod calls ------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Start one layer's exchange; called by Horovod's hook, or at the start of synchronize().

        Args:
            tensor: a parameter's gradient.

        Returns:
            What Horovod's own allreduce shall carry, and the context for :meth:`decompress`.

        A gradient that no backward pass has written since it was last compressed is one of three:
        zeros that Horovod made up for a parameter without a gradient (this rank takes part and
        contributes nothing; its residual stays), the gradient that we returned (synchronize() ran
        twice in one step: nothing is exchanged again), or one the user wrote by hand (compressed
        like any other).
        """
        if tensor is None:
            # Called on the class: Horovod's own compressors are classes, and ours are easily
            # passed as one.
            raise ConfigError(
                "compression: got the class; pass an object, for instance "
                "compression=greco.TopK(model.named_parameters())"
            )
        with self._lock:
            slot = self._directory.find(tensor)
            layer = slot.layer
            if self._reduction.unfinished(layer.name):
                # load_state_dict in mid-step leaves a step behind that was never finished.
                self.last_report = self._reduction.abandon()
                self._directory.forget()
            if not self._reduction.seen:
                self._open_step()
            parameter = slot.parameter
            if parameter.shape != layer.shape or parameter.dtype != layer.dtype:
                self._reshape()
                layer = slot.layer
            assignment = self.plan[layer]
            codec = self._codecs[assignment.codec]
            if self._controller is not None:
                self._controller.enter(layer.name)
            carried, pending = self._reduction.start(slot, tensor, codec, assignment.level)
            seen, trainable = self._reduction.seen, self._directory.trainable
            self._reduction.advance(complete=len(seen) == len(trainable))
            if self._controller is not None:
                self._controller.leave()
            return carried, pending

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Finish one layer: the mean gradient, times whatever dense Horovod would have applied.

        Args:
            tensor: what came back of the tensor that :meth:`compress` returned.
            context: what :meth:`compress` returned beside it; None for a sparse gradient that
                Horovod reduced by itself.

        Returns:
            The gradient's own tensor, overwritten in place; it shares no memory with our state.
        """
        if context is None:
            return tensor
        with self._lock:
            result = self._reduction.finish(context, tensor)
            if self._reduction.idle:
                self.last_report = self._reduction.close()
                self._directory.forget()
                # A step in which a rank had joined does not count, and nobody may wait for it.
                if self._controller is not None and self._reduction.counted:
                    self._retune(self.last_report)
            return result

    # -- one step ----------------------------------------------------------------------------

    def _uniform_plan(self, epoch: int) -> Plan:
        if not isinstance(self._codec, DenseCodec):
            self._memory.check(self._codec, self._level)
        return uniform_plan(
            [slot.layer for slot in self._directory.slots],
            self._codec,
            self._level,
            self._dense,
            size=max(1, self._group.size),
            shared_bytes=Beacon.NBYTES + Rounds.NBYTES,
            min_numel=self._min_numel,
            exclude=self._exclude,
            context={"memory": self._memory.describe(), "seed": str(self._seed)},
            epoch=epoch,
        )

    def _begin_control(self, epoch: int) -> None:
        """The controller's first plan for the layers as they are now."""
        assert self._controller is not None
        layers = [slot.layer for slot in self._directory.slots]
        assignments = self._controller.start(layers, self._reduction.step)
        facts = {**self.plan.context, **self._controller.describe()}
        self.plan = Plan(assignments, epoch, facts)

    def _retune(self, report: StepReport) -> None:
        """Between two steps: let the controller decide, if it is time to."""
        assert self._controller is not None
        assignments = self._controller.after_step(self._reduction.step, report)
        if assignments is not None:
            self.plan = Plan(assignments, self.plan.epoch + 1, self.plan.context)

    def _open_step(self) -> None:
        self._memory.check_optimizer(calling_optimizer())
        if self._schedule is not None:
            level = self._codec.check_level(self._schedule(self._reduction.step))
            if level != self._level:
                self._level = level
                self.plan = self._uniform_plan(self.plan.epoch + 1)
        scale = 1.0 if self._loss_scale is None else float(self._loss_scale())
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"loss_scale: returned {scale}, which is not a positive number")
        looking = self._controller is not None and self._controller.looks_at(self._reduction.step)
        observer = self._controller.observe if looking and self._controller else None
        self._reduction.open(1.0 / scale, observer)
        self._reduction.adopt(self.plan, self._codecs)

    def _reshape(self) -> None:
        """Take up new shapes of parameters (pruning, growth), as every rank does in this step.

        Layers are assigned one by one, so what was compressed before in this step is not touched.
        """
        for old, new in self._directory.reshape():
            if self._group.rank == 0:
                _log.warning(
                    "layer %r went from %s to %s: its residual and warm start begin anew",
                    old.name, _described(old), _described(new),
                )  # fmt: skip
        epoch = self.plan.epoch + 1
        self.plan = self._uniform_plan(epoch)
        if self._controller is not None:
            self._begin_control(epoch)
        self._reduction.adopt(self.plan, self._codecs)


def _described(layer: Layer) -> str:
    return f"shape {layer.shape} {layer.dtype}"


def _memory(memory: str | Memory | None, codec: Codec) -> Memory:
    """The memory that was asked for, or the one that the codec's registration names."""
    if isinstance(memory, Memory):
        return memory
    if memory is None:
        entry = next((e for e in registry.codecs().values() if isinstance(codec, e.factory)), None)
        memory = entry.memory if entry else "ef"
    if not isinstance(memory, str):
        raise ConfigError(
            f"memory: needs one of {', '.join(registry.memories())}, or a Memory, got {memory!r}"
        )
    made: Memory = registry.find_memory(memory).make()
    return made


def _horovod_group(what: str, process_set: Any) -> Group:
    from .exchange.horovod import HorovodGroup, require_initialized
    from .exchange.preflight import check_launch

    require_initialized(f"greco.{what}")
    check_launch()
    return HorovodGroup(process_set)


def _next_name(group: Group) -> str:
    """Counts compressors within a process set: the ranks of a set make theirs in one order."""
    key = (group.identity, group.global_rank)
    _counts[key] = _counts.get(key, -1) + 1
    return f"{group.identity}.{_counts[key]}"
