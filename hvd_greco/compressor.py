"""The object that stock Horovod calls: ``compress`` in its hooks, ``decompress`` at the end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from . import carrier, kernels, registry
from .assign import uniform_plan
from .beacon import Beacon
from .buffers import Buffers
from .codecs.base import Codec, Level, Work
from .codecs.dense import DenseCodec
from .config import check_count
from .errors import ConfigError
from .exchange.base import Group
from .identity import Directory, calling_optimizer
from .layers import GRADIENT_DTYPES, Layer, check_named_parameters
from .memories.base import Memory, Own
from .payload import Kind, Reduced
from .plan import Plan
from .rounds import Pending, Rounds
from .routes import check_allgather, routed
from .telemetry import Ledger, StepReport

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
    ) -> None:
        self._group = group or _horovod_group(type(self).__name__, process_set)
        if loss_scale is not None and not callable(loss_scale):
            raise ConfigError(
                f"loss_scale: needs a callable such as scaler.get_scale, got {loss_scale!r}"
            )
        self._loss_scale = loss_scale
        self._seed = check_count("seed", seed)
        pairs = check_named_parameters(named_parameters)
        sizes = {layer: parameter.numel() for layer, parameter in pairs}
        codec, self._memory = routed(exchange, codec, _memory(memory, codec), self._group, sizes)
        self._codec = codec
        codec.adapt_to(self._memory.name)
        dense = DenseCodec()
        self._codecs: dict[str, Codec] = {dense.name: dense, codec.name: codec}
        self._memory.bind(dict(pairs), max(1, self._group.size))
        # What never keeps a residual need not know which gradients are new.
        self._directory = Directory(pairs, watch=not isinstance(codec, DenseCodec))
        self._schedule = schedule
        self._min_numel = check_count("min_numel", min_numel)
        self._exclude = exclude
        self._level = codec.check_level(schedule(0) if schedule else level)
        if exchange == "allgather":
            check_allgather(codec)
        self.plan = self._uniform_plan(epoch=0)
        prefix = f"greco/{name or _next_name(self._group)}"
        self._ledger = Ledger()
        self._rounds = Rounds(self._group, prefix, self._ledger, self._vector)
        self._beacon = Beacon(self._group, prefix)
        self._scratch = Buffers()
        self._lock = threading.RLock()
        self._step = 0
        self._unscale = 1.0
        #: What the user's op multiplies means by, as the last layer's carrier showed it.
        self._factor = 1.0
        #: Finished dense layers of this step that the memory shall see if it is accepted.
        self._dense: list[Pending] = []
        #: Layers that took part in the present step, for its report.
        self._seen: dict[str, tuple[str, Level, int]] = {}
        #: The plan has layers that are not plainly dense.
        self._mixed = False
        #: A layer of this step is not plainly dense, so the step needs a beacon.
        self._checked = False
        self.last_report: StepReport | None = None

    # -- what users may ask ------------------------------------------------------------------

    def wire_bytes(self) -> int:
        """Bytes this rank will hand to collectives in a step in which every layer takes part."""
        total, checked, private = 0, False, False
        for slot in self._directory.slots:
            if slot.layer.name not in self._directory.trainable:
                continue
            assignment = self.plan[slot.layer]
            codec = self._codecs[assignment.codec]
            total += codec.wire_bytes(slot.layer, assignment.level, self._group.size)
            if not isinstance(codec, DenseCodec):
                total += carrier.LENGTH * slot.layer.work_dtype.itemsize
                checked = True
            private = private or codec.kind is not Kind.CARRIED
        return total + (Beacon.NBYTES if checked else 0) + (Rounds.NBYTES if private else 0)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held on top of the model: ``state`` (residuals), ``buffers`` (reused each step)."""
        slots = self._directory.slots
        return {
            "state": sum(slot.state.nbytes() for slot in slots),
            "buffers": self._scratch.nbytes() + sum(slot.buffers.nbytes() for slot in slots),
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
            if layer.name in self._rounds.pending:
                self._abandon()
            if not self._seen:
                self._open_step()
            parameter = slot.parameter
            if parameter.shape != layer.shape or parameter.dtype != layer.dtype:
                self._reshape()
                layer = slot.layer
            assignment = self.plan[layer]
            codec = self._codecs[assignment.codec]
            pending = Pending(slot, tensor, codec, assignment.level, self._unscale)
            self._rounds.pending[layer.name] = pending
            self._seen[layer.name] = (assignment.codec, assignment.level, layer.dense_bytes)
            if isinstance(codec, DenseCodec):
                carried = self._start_dense(pending, codec)
            else:
                self._checked = True
                carried = self._start(pending)
            if self._checked and len(self._seen) == len(self._directory.trainable):
                self._launch_beacon()
            self._rounds.advance()
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
            pending: Pending = context
            pendings = self._rounds.pending
            if self._checked:
                self._launch_beacon()
            if isinstance(pending.codec, DenseCodec):
                result = self._finish_dense(pending, tensor)
            else:
                result = self._finish(pending, tensor)
            pending.slot.mark_reduced(result)
            pendings.pop(pending.slot.layer.name, None)
            if not pendings:
                self._close_step()
            return result

    # -- one step ----------------------------------------------------------------------------

    def _uniform_plan(self, epoch: int) -> Plan:
        if not isinstance(self._codec, DenseCodec):
            self._memory.check(self._codec, self._level)
        return uniform_plan(
            [slot.layer for slot in self._directory.slots],
            self._codec,
            self._level,
            self._codecs["dense"],
            size=max(1, self._group.size),
            min_numel=self._min_numel,
            exclude=self._exclude,
            context={"memory": self._memory.describe(), "seed": str(self._seed)},
            epoch=epoch,
        )

    def _open_step(self) -> None:
        self._memory.check_optimizer(calling_optimizer())
        if self._schedule is not None:
            level = self._codec.check_level(self._schedule(self._step))
            if level != self._level:
                self._level = level
                self.plan = self._uniform_plan(self.plan.epoch + 1)
        self._beacon.reset()
        self._rounds.reset()
        self._checked = False
        self._mixed = self._compresses()
        if self._loss_scale is not None:
            scale = float(self._loss_scale())
            if not (math.isfinite(scale) and scale > 0):
                raise ConfigError(f"loss_scale: returned {scale}, which is not a positive number")
            self._unscale = 1.0 / scale

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
        self.plan = self._uniform_plan(self.plan.epoch + 1)
        self._mixed = self._mixed or self._compresses()

    def _compresses(self) -> bool:
        """Whether the plan has a layer that is not plainly dense."""
        codecs = {assignment.codec for assignment in self.plan.assignments.values()}
        return any(not isinstance(self._codecs[codec], DenseCodec) for codec in codecs)

    def _close_step(self) -> None:
        if not (self._checked and self._beacon.nonfinite):
            for pending in self._dense:
                self._deliver_dense(pending)
        self._dense = []
        self.last_report = self._ledger.close(self._step, self._seen, self._beacon.nonfinite)
        # While a rank has joined, the others do not count: afterwards all are at one step again.
        if self._beacon.complete:
            self._step += 1
        self._seen = {}
        self._directory.forget()

    def _abandon(self) -> None:
        """Drop a step that was begun and never finished (``load_state_dict`` in mid-step does it).

        Every rank does the same, so what was submitted completes, and its names can be used again.
        """
        self._rounds.abandon()
        self._beacon.abandon()
        self._dense = []
        self._close_step()

    def _launch_beacon(self) -> None:
        if self._beacon.launch(self.plan, self._step) and self._group.rank >= 0:
            self._ledger.add(None, Kind.SUM, Beacon.NBYTES, self._group.size)

    def _start_dense(self, pending: Pending, codec: DenseCodec) -> torch.Tensor:
        slot, gradient = pending.slot, pending.gradient
        # Reduced a second time, a mean stays what it is; only the memory must not see it again.
        pending.fresh = slot.fresh or not slot.already_reduced(gradient)
        slot.fresh = False
        if self._mixed:
            # Its overflow makes a scaler skip the step, so compressed layers must not move on.
            self._beacon.note(kernels.all_finite(gradient))
        dtype = codec.wire_dtype(gradient.dtype)
        sent = gradient if gradient.dtype == dtype else gradient.to(dtype)
        if not sent.is_contiguous():
            sent = sent.contiguous()
        nbytes = sent.nbytes
        self._ledger.add(slot.layer.name, Kind.CARRIED, nbytes, self._group.size)
        return sent

    def _finish_dense(self, pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
        # Stock Horovod reduced the gradient itself unless it had to be converted or laid out anew.
        if tensor is not pending.gradient:
            pending.gradient.copy_(tensor)
        if self._memory.serves_dense and pending.fresh:
            if pending.slot.parameter.grad is not pending.gradient:
                self._deliver_dense(pending)  # Horovod takes a copy (sparse_as_dense)
            else:
                self._dense.append(pending)
        return pending.gradient

    def _deliver_dense(self, pending: Pending) -> None:
        """Let the memory work on a dense layer's mean. All ranks see the same one."""
        gradient, scale = pending.gradient, self._factor / pending.unscale
        flat = gradient.contiguous().view(-1)
        if pending.slot.layer.dtype in GRADIENT_DTYPES and bool(flat.isfinite().all()):
            self._memory.deliver_dense(pending.slot.layer, pending.slot.state, flat, scale)
            if not gradient.is_contiguous():
                gradient.copy_(flat.view(gradient.shape))

    def _start(self, pending: Pending) -> torch.Tensor:
        slot, codec, gradient = pending.slot, pending.codec, pending.gradient
        layer, group = slot.layer, self._group
        work = pending.work = Work(
            layer, pending.level, slot.state, self._step, group.rank, group.size, self._seed,
            slot.buffers,
        )  # fmt: skip
        repeated = None
        if not slot.fresh:
            if not bool(gradient.any()):
                pending.fresh = self._memory.absent_is_zero
            elif slot.already_reduced(gradient):
                pending.fresh = False
                # In fp64: ranks with other thread counts add up in other orders, and what cancels
                # in fp32 leaves a sum that is all rounding.
                repeated = gradient.sum(dtype=torch.float64)
                pending.check = float(repeated)
        slot.fresh = False
        if pending.fresh:
            vector = self._vector(pending)
            sent = codec.encode(work, vector)
            if sent.finite is None:
                sent.finite = kernels.all_finite(vector)
            self._beacon.note(sent.finite)
        else:
            sent = codec.encode_absent(work, gradient)
        pending.sent = sent
        body = 0 if pending.private else sent.buffer.numel()
        carried = slot.buffers.get(
            "carrier", body + carrier.LENGTH, layer.work_dtype, gradient.device
        )
        if body:
            carried[:body].copy_(sent.buffer)
        carrier.fill(carried[body:], self._group, sent.finite, repeated)
        nbytes = carried.numel() * carried.element_size()
        self._ledger.add(layer.name, Kind.CARRIED, nbytes, self._group.size)
        if pending.private:
            self._rounds.submit(pending)
        return carried

    def _vector(self, pending: Pending) -> torch.Tensor:
        """The vector to encode, formed anew in memory that all layers share."""
        layer, gradient = pending.slot.layer, pending.gradient
        vector = self._scratch.get(
            f"vector/{gradient.device}", layer.numel, layer.work_dtype, gradient.device
        )
        if pending.fresh:
            flat = gradient.contiguous().view(-1)
            self._memory.compensate(layer, pending.slot.state, flat, pending.unscale, vector)
        else:
            vector.zero_()
        return vector

    def _finish(self, pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
        slot, codec, gradient = pending.slot, pending.codec, pending.gradient
        layer = slot.layer
        body = tensor.numel() - carrier.LENGTH
        # First of all: is everybody here? Only then may anything wait.
        self._rounds.check_present(wait=False)
        probe = carrier.read(
            tensor[body:],
            self._group,
            layer.name,
            pending.check,
            # A mismatch of process sets shows at once; later, a missing rank may have joined.
            needs_set=pending.private or self._step == 0,
        )
        self._factor = probe.factor
        accepted = self._beacon.wait(self.plan, self._step)
        if pending.private:
            reduced = self._rounds.finish(pending)
        else:
            reduced = Reduced(Kind.CARRIED, tensor[:body], self._group.size)
        if probe.repeated:
            return gradient
        in_place = gradient.is_contiguous() and gradient.dtype == layer.work_dtype
        work, sent = pending.work, pending.sent
        if accepted:
            if pending.fresh:
                flat = gradient.contiguous().view(-1)
                own = Own(codec, work, sent)
                self._memory.commit(layer, slot.state, flat, pending.unscale, own)
            codec.commit(work, sent, reduced)
        # The residual has what it needs of the gradient; now the gradient's memory is free.
        out = (
            gradient.view(-1)
            if in_place
            else self._scratch.get(
                f"out/{gradient.device}", layer.numel, layer.work_dtype, gradient.device
            )
        )
        codec.decode(work, sent, reduced, out)
        if not pending.private and probe.factor != 1.0:
            # Horovod applied its factor on the way; a memory's accounts are in plain means.
            out.div_(probe.factor)
        if accepted:
            self._memory.deliver(layer, slot.state, out)
        factor = probe.factor / pending.unscale
        if factor != 1.0:
            out.mul_(factor)
        if probe.nonfinite:
            # The offending element may not have been sent; every scaler must see it all the same.
            out[:1] = math.nan
        if not in_place:
            gradient.copy_(out.view(layer.shape))
        return gradient


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
