"""One step of all layers: payloads out, means back, accounts settled in between."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from . import carrier, kernels
from .beacon import Beacon
from .buffers import Buffers
from .codecs.base import Codec, Level, Work
from .codecs.dense import DenseCodec
from .exchange.base import Group
from .identity import Slot
from .late import Late
from .layers import GRADIENT_DTYPES, Addends, Given, Layer
from .memories.base import Memory, Own
from .payload import Kind, Payload, Reduced
from .plan import Plan
from .rounds import Pending, Rounds
from .telemetry import Ledger, StepReport

Observer = Callable[[Work, torch.Tensor, float], None]
#: The payload of a layer that is not encoded yet.
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Reduction:
    """Takes layers through the steps of one compressor; it is told which codec serves which.

    Args:
        group: our ranks.
        memory: what happens to what was not sent.
        prefix: start of the names of our collectives.
        seed: decides random choices.

    Attributes:
        step: how many steps were completed; the same on all ranks.
        seen: layers that took part in the present step: codec, level and dense bytes.
        always_checked: every step has a beacon, even if all of its layers go dense.
        counted: all ranks took part in the last step.
    """

    def __init__(self, group: Group, memory: Memory, prefix: str, seed: int) -> None:
        self._group = group
        self._memory = memory
        self._seed = seed
        self._ledger = Ledger()
        self._rounds = Rounds(group, prefix, self._ledger, self._vector)
        self._late = Late()
        self._beacon = Beacon(group, prefix)
        self._scratch = Buffers()
        self.step = 0
        self.seen: dict[str, tuple[str, Level, int]] = {}
        self.always_checked = False
        self.counted = True
        self._observe: Observer | None = None
        self._unscale = 1.0
        #: What the user's op multiplies means by, as the last layer's carrier showed it.
        self._factor = 1.0
        #: Finished dense layers of this step that the memory shall see if it is accepted.
        self._dense: list[Pending] = []
        #: Some layers' state depends on whether the whole step is accepted.
        self._mixed = False
        #: A layer of this step has such state, so the step needs a beacon.
        self._checked = False
        #: Dense layers of this step whose gradient was reduced before.
        self._repeated: set[str] = set()

    def scratch_bytes(self) -> int:
        """Bytes of buffers that all layers share."""
        return self._scratch.nbytes()

    def work(self, slot: Slot, level: Level) -> Work:
        """A layer in the present step, or the next one if none has begun."""
        group = self._group
        return Work(
            slot.layer, level, slot.state, self.step, group.rank, group.size, self._seed,
            slot.buffers,
        )  # fmt: skip

    # -- one step ----------------------------------------------------------------------------

    def open(self, unscale: float, observe: Observer | None = None) -> None:
        """Begin a step.

        Args:
            unscale: 1 / loss scale.
            observe: is shown each layer before it is encoded: its work, the vector (valid during
                the call) and the squared norm of its gradient.
        """
        self._beacon.reset()
        self._rounds.reset()
        self._checked = self.always_checked
        self._observe = observe
        self._repeated = set()
        self._unscale = unscale

    def adopt(self, plan: Plan, codecs: Mapping[str, Codec]) -> None:
        """Follow a plan from here on. What was started under another one is finished as it is."""
        self._plan = plan
        compresses = any(not isinstance(codecs[name], DenseCodec) for name in plan.codecs)
        self._mixed = self._checked or compresses or self._memory.serves_dense

    def unfinished(self, name: str) -> bool:
        """Whether a layer is between :meth:`start` and :meth:`finish`."""
        return name in self._rounds.pending

    def start(
        self, slot: Slot, gradient: torch.Tensor, codec: Codec, level: Level
    ) -> tuple[torch.Tensor, Pending]:
        """Send one layer's payload on its way.

        Returns:
            What Horovod's allreduce shall carry, and what :meth:`finish` wants to see again.
        """
        layer = slot.layer
        pending = Pending(slot, gradient, codec, self._unscale)
        self._rounds.pending[layer.name] = pending
        self.seen[layer.name] = (codec.name, level, layer.dense_bytes)
        if isinstance(codec, DenseCodec):
            return self._start_dense(pending, codec), pending
        self._checked = True
        began = time.perf_counter()
        carried = self._start(pending, level)
        self._ledger.spend(layer.name, time.perf_counter() - began)
        return carried, pending

    def advance(self, complete: bool) -> None:
        """Move on whatever can be, without waiting; ``complete``: no layer is still to start."""
        if complete or self._late.enough:
            self._encode_late()
        if complete:
            self._launch_beacon()
        self._rounds.advance()

    def finish(self, pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for a layer, and write the mean into its gradient, which is returned.

        Args:
            pending: what :meth:`start` returned.
            tensor: what came back of the carried tensor.
        """
        self._encode_late()
        self._launch_beacon()
        if isinstance(pending.codec, DenseCodec):
            result = self._finish_dense(pending, tensor)
        else:
            result = self._finish(pending, tensor)
        # From here on a dense layer's memory works on what the optimizer gets.
        result = pending.gradient = _laid_out(result, pending.slot.parameter)
        pending.slot.mark_reduced(result)
        self._rounds.pending.pop(pending.slot.layer.name, None)
        return result

    @property
    def idle(self) -> bool:
        """No layer is between :meth:`start` and :meth:`finish`."""
        return not self._rounds.pending

    def close(self) -> StepReport:
        """End the step, and say what was sent in it."""
        # In a step of dense layers alone nobody has asked for the answer yet.
        self._beacon.settle(self._plan, self.step)
        if not (self._checked and self._beacon.nonfinite):
            for pending in self._dense:
                self._deliver_dense(pending)
        self._dense = []
        report = self._ledger.close(self.step, self.seen, self._beacon.nonfinite)
        # While a rank has joined, the others do not count: afterwards all are at one step again.
        if self._beacon.complete:
            self.step += 1
        self.seen = {}
        self.counted = self._beacon.complete
        return report

    def abandon(self) -> StepReport:
        """Drop a step that was begun and never finished.

        Every rank does the same, so what was submitted completes, and its names can be used again.
        """
        for late in self._late.take():
            # The other ranks may have submitted theirs. The gradient may be the next step's by now.
            late.sent = late.codec.encode_absent(late.work, late.gradient)
            self._rounds.submit(late)
        self._rounds.abandon()
        self._beacon.abandon()
        self._dense = []
        return self.close()

    def _launch_beacon(self) -> None:
        if not self._checked:
            return
        repeated = frozenset(self._repeated)
        if self._beacon.launch(self._plan, self.step, repeated) and self._group.rank >= 0:
            self._ledger.add(None, Kind.SUM, Beacon.NBYTES, self._group.size)

    # -- one layer ---------------------------------------------------------------------------

    def _start_dense(self, pending: Pending, codec: DenseCodec) -> torch.Tensor:
        slot, gradient = pending.slot, pending.gradient
        if self._memory.serves_dense:
            # Reduced a second time, a mean stays what it is, but the memory must not see it
            # again; on that, all ranks must be of one mind. Zeros are what Horovod made up for a
            # missing gradient, or was left after zero_grad(set_to_none=False): never "reduced
            # before", whatever version and address say.
            self._checked = True
            if not slot.fresh and slot.already_reduced(gradient) and bool(gradient.any()):
                pending.fresh = False
                self._repeated.add(slot.layer.name)
        owed = self._memory.owed(slot.state) if slot.fresh and pending.fresh else None
        if self._observe is not None and slot.fresh:
            pending.work = self.work(slot, None)
            self._show(pending)
        slot.fresh = False
        if self._mixed or self._observe is not None:
            # Its overflow makes a scaler skip the step, so compressed layers must not move on.
            self._beacon.note(kernels.all_finite(gradient))
        dtype = codec.wire_dtype(gradient.dtype)
        sent = gradient if gradient.dtype == dtype else gradient.to(dtype)
        if owed is not None:
            # What the layer kept while it was compressed: it is sent now, and kept no longer.
            pending.owes = True
            total = self._vector(pending).div_(pending.unscale)
            sent = total.view(gradient.shape).to(dtype, copy=True)
        if not sent.is_contiguous():
            sent = sent.contiguous()
        nbytes = sent.nbytes
        self._ledger.add(slot.layer.name, Kind.CARRIED, nbytes, self._group.size)
        return sent

    def _finish_dense(self, pending: Pending, tensor: torch.Tensor) -> torch.Tensor:
        # Stock Horovod reduced the gradient itself unless it had to be converted or laid out anew.
        if tensor is not pending.gradient:
            pending.gradient.copy_(tensor)
        accepted = True
        if self._memory.serves_dense or pending.owes:
            accepted = self._beacon.wait(self._plan, self.step)
        if pending.owes and accepted:
            self._memory.settle(pending.slot.state)
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

    def _start(self, pending: Pending, level: Level) -> torch.Tensor:
        slot, codec, gradient = pending.slot, pending.codec, pending.gradient
        layer = slot.layer
        work = pending.work = self.work(slot, level)
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
        if self._observe is not None and pending.fresh:
            self._show(pending)
        late = pending.fresh and self._late.suits(pending) and self._addends(pending) is not None
        if late:
            # A sum that is not finite although its addends are is selected and sent, so that all
            # ranks see it; whether the step is accepted, the beacon says, which comes later still.
            sent = Payload(codec.kind, _NOTHING, finite=kernels.all_finite(gradient))
            self._late.add(pending)
        elif pending.fresh:
            sent = self._encode(pending)
        else:
            sent = codec.encode_absent(work, gradient)
        if sent.finite is not None:
            self._beacon.note(sent.finite)
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
        if pending.private and not late:
            self._rounds.submit(pending)
        return carried

    def _addends(self, pending: Pending) -> Addends | None:
        """The sum to encode, if there is one and it may be formed in the gradient's memory.

        Nobody needs the gradient once it is in the sum, and the mean will overwrite it, as stock
        Horovod's allreduce does from here on.
        """
        if pending.codec.leaves_rest and _is_workspace(pending.gradient, pending.slot.layer):
            return self._memory.addends(_given(pending))
        return None

    def _encode_late(self) -> None:
        """Encode and submit the layers that waited."""
        waiting = self._late.take()
        by_codec: dict[Codec, list[Pending]] = {}
        for pending in waiting:
            by_codec.setdefault(pending.codec, []).append(pending)
        for codec, layers in by_codec.items():
            began = time.perf_counter()
            addends = [self._memory.addends(_given(pending)) for pending in layers]
            vectors = [pending.gradient.view(-1) for pending in layers]
            sums = [given for given in addends if given is not None]
            works = [pending.work for pending in layers]
            for pending, vector, sent in zip(
                layers, vectors, codec.encode_many(works, sums, vectors), strict=True
            ):
                pending.sent = sent
                pending.rest = vector if sent.rest else None
                assert sent.finite is not None
                self._beacon.note(sent.finite)
            spent = (time.perf_counter() - began) / len(layers)
            for pending in layers:
                self._ledger.spend(pending.slot.layer.name, spent)
        for pending in waiting:
            self._rounds.submit(pending)

    def _show(self, pending: Pending) -> None:
        """Let the observer see a layer."""
        assert self._observe is not None
        energy = kernels.squared_norm(pending.gradient) * pending.unscale**2
        if isinstance(pending.codec, DenseCodec) and pending.slot.state.residual is None:
            # A memory would begin to keep something for a layer that owes nothing.
            vector = self._room(pending)
            vector.copy_(pending.gradient.contiguous().view(-1)).mul_(pending.unscale)
        else:
            vector = self._vector(pending)
        self._observe(pending.work, vector, energy)

    def _encode(self, pending: Pending) -> Payload:
        """Form the vector and encode it, in one pass if memory and codec can."""
        codec, gradient = pending.codec, pending.gradient
        in_place = self._addends(pending)
        addends = in_place or self._memory.addends(_given(pending))
        if addends is None:
            vector = self._vector(pending)
            sent = codec.encode(pending.work, vector)
        else:
            vector = gradient.view(-1) if in_place else self._room(pending)
            sent = codec.encode_sum(pending.work, addends, vector)
            if in_place and sent.rest:
                pending.rest = vector
        if sent.finite is None:
            sent.finite = kernels.all_finite(vector)
        return sent

    def _room(self, pending: Pending) -> torch.Tensor:
        """Memory for a vector that all layers share."""
        layer, device = pending.slot.layer, pending.gradient.device
        return self._scratch.get(f"vector/{device}", layer.numel, layer.work_dtype, device)

    def _vector(self, pending: Pending) -> torch.Tensor:
        """The vector to encode, formed anew in memory that all layers share."""
        vector = self._room(pending)
        if pending.fresh:
            self._memory.compensate(_given(pending), vector)
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
            needs_set=pending.private or self.step == 0,
        )
        self._factor = probe.factor
        accepted = self._beacon.wait(self._plan, self.step)
        if pending.private:
            reduced = self._rounds.finish(pending)
        else:
            reduced = Reduced(Kind.CARRIED, tensor[:body], self._group.size)
        if probe.repeated:
            return gradient
        began = time.perf_counter()
        in_place = _is_workspace(gradient, layer)
        work, sent = pending.work, pending.sent
        if accepted:
            if pending.fresh:
                self._memory.commit(_given(pending), Own(codec, work, sent, pending.rest))
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
        self._ledger.spend(layer.name, time.perf_counter() - began)
        return gradient


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in its parameter's memory layout: itself, but where they differ.

    A rank without a gradient gets contiguous zeros from Horovod, while autograd follows the
    parameter (channels-last). Of equal values in unlike layouts torch's half-precision updates
    make weights that differ in the last bit.
    """
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    if gradient.shape != parameter.shape or all(n == 1 or a == b for n, a, b in strides):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _is_workspace(gradient: torch.Tensor, layer: Layer) -> bool:
    """Vectors of the layer may be formed in the gradient's own memory."""
    return gradient.is_contiguous() and gradient.dtype == layer.work_dtype


def _given(pending: Pending) -> Given:
    """What the memory gets to see, the same when the vector is formed and when it is settled."""
    flat = pending.gradient.contiguous().view(-1)
    return Given(pending.slot.layer, pending.slot.state, flat, pending.unscale)
