"""Scatter-reduce-allgather: every rank is the server of one shard, so cost does not grow with N.

The second coding's error is kept where it arises, as by the server of DoubleSqueeze (Tang et al.
2019, arXiv 1905.05957); here each rank is the server of its shard.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import ConfigError, WireError
from ..layers import Layer, LayerState
from ..payload import Kind, Payload, Reduced, network_bytes
from .base import Codec, Level, Turn, Work
from .wrapping import WrapperCodec, has_fixed_size, inner_work, kind_of

_MEMORIES = ("ef", "none")


class ScatterReduceCodec(WrapperCodec):
    """Another codec's payloads by way of the ranks that own the shards, not to everybody at once.

    The vector is cut into N equal shards, each coded as a layer of its own (the last are filled up
    with zeros). A rank gets all N pieces of its shard (alltoall), averages them in rank order,
    codes the mean once more, and all ranks gather the N coded means. A rank puts 2(N-1)/N of one
    payload on the link, where an allgather puts N-1 payloads.

    With error feedback, the owner takes what the second coding left out of its shard's sum into
    its own residual: decoded + sum of e' = sum of g + sum of e still holds. An owner without a
    gradient in this step does so too: its residual then changes only by that. Without a memory an
    unbiased codec stays unbiased, with the variance of both codings.

    Levels are those of the inner codec. Costs one shard in the work dtype beside the wires.

    Args:
        inner: a codec of one round whose payloads are gathered, of a size that follows from
            layer and level, and which keeps nothing between steps: top-k, the quantisers.

    Raises:
        ConfigError: ``inner`` is none of these.
    """

    rounds = 2
    kind = Kind.SCATTER

    def __init__(self, inner: Codec) -> None:
        super().__init__(inner, "scatter")
        if type(inner).commit is not Codec.commit:
            raise ConfigError(
                f"exchange: 'scatter' does not go with {inner.name!r}, which keeps state for whole "
                "layers and cannot code shards of them; leave exchange out"
            )
        self._checked: set[Level] = set()
        self._feedback = False

    def adapt_to(self, memory: str) -> None:
        if memory not in _MEMORIES:
            raise ConfigError(
                f"memory: {memory!r} does not go with exchange='scatter': the mean is coded a "
                "second time, and that error must be repaid by a residual; use memory='ef', or "
                "'none' with an unbiased codec"
            )
        super().adapt_to(memory)
        self._feedback = memory == "ef"

    def check_level(self, level: Level) -> Level:
        level = super().check_level(level)
        if level not in self._checked:
            kind = kind_of(self.inner)
            if kind is not Kind.GATHER:
                raise ConfigError(
                    f"exchange: 'scatter' re-routes payloads that are gathered, but those of "
                    f"{self.inner.name!r} are added up on the way ({kind.value}), at a cost that "
                    "does not grow with the number of ranks either; leave exchange out"
                )
            if not has_fixed_size(self.inner, level):
                raise ConfigError(
                    f"exchange: 'scatter' needs payloads of one size, but with these options the "
                    f"data decides how long those of {self.inner.name!r} are; choose others "
                    "(top-k: selection='exact'), or leave exchange out"
                )
            self._checked.add(level)
        return level

    def _piece_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return self.inner.wire_bytes(_shard_layer(layer, size, "0"), level, size)

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return (size + 1) * self._piece_bytes(layer, level, size)

    def network_bytes(self, layer: Layer, level: Level, size: int) -> int:
        piece = self._piece_bytes(layer, level, size)
        scatter = network_bytes(Kind.SCATTER, size * piece, size)
        return scatter + network_bytes(Kind.GATHER, piece, size)

    def encode(self, work: Work, vector: torch.Tensor) -> Payload:
        size = work.size
        nbytes = self._piece_bytes(work.layer, work.level, size)
        send = work.buffers.get("scatter", size * nbytes, torch.uint8, vector.device)
        finite: torch.Tensor | None = torch.ones((), dtype=torch.bool, device=vector.device)
        for owner in range(size):
            shard = _shard_work(work, str(owner), f"scatter/{owner}")
            piece = self.inner.encode(shard, _shard(vector, owner, size))
            send[owner * nbytes : (owner + 1) * nbytes].copy_(
                _checked(piece.buffer, nbytes, work.layer)
            )
            if finite is not None:
                finite = None if piece.finite is None else finite & piece.finite
        return Payload(Kind.SCATTER, send, splits=(nbytes,) * size, own=send, finite=finite)

    def encode_absent(self, work: Work, like: torch.Tensor) -> Payload:
        nothing = torch.empty(0, dtype=torch.uint8, device=like.device)
        return Payload(Kind.SCATTER, nothing, splits=(0,) * work.size)

    def next_round(self, turn: Turn) -> Payload:
        work, layer = turn.work, turn.work.layer
        size, rank = work.size, work.rank
        length = _length(layer, size)
        mean = work.buffers.get("mean", length, layer.work_dtype, turn.reduced.buffer.device)
        # What came back looks like what an allgather of the shard's payloads would have given.
        pieces = Reduced(Kind.GATHER, turn.reduced.buffer, size)
        self._decode(work, str(rank), f"scatter/{rank}", pieces, mean)
        # A codec may overwrite what it is given, and commit needs the mean.
        shard = _shard_work(work, f"mean {rank}", f"mean/{rank}")
        sent = self.inner.encode(shard, mean.clone())
        nbytes = self._piece_bytes(layer, work.level, size)
        return Payload(Kind.GATHER, _checked(sent.buffer, nbytes, layer), own=turn.sent.own)

    def decode(self, work: Work, sent: Payload, reduced: Reduced, out: torch.Tensor) -> None:
        means = reduced.parts(self._piece_bytes(work.layer, work.level, work.size))
        if len(means) != work.size:
            raise WireError(f"{len(means)} of {work.size} shards of {work.layer.name!r} came back")
        self._join(work, "mean ", means, out)

    def add_own(self, work: Work, sent: Payload, vector: torch.Tensor, alpha: float) -> None:
        if sent.own is None:
            return
        pieces = list(sent.own.split(self._piece_bytes(work.layer, work.level, work.size)))
        own = torch.empty_like(vector)
        self._join(work, "", pieces, own)
        vector.add_(own, alpha=alpha)

    def commit(self, work: Work, sent: Payload, reduced: Reduced) -> None:
        if not self._feedback:
            return
        size, rank = work.size, work.rank
        mean = work.buffers.get(
            "mean", _length(work.layer, size), work.layer.work_dtype, sent.buffer.device
        )
        own = Reduced(Kind.GATHER, sent.buffer, 1)
        decoded = torch.empty_like(mean)
        self._decode(work, f"mean {rank}", f"mean/{rank}", own, decoded)
        error = torch.sub(mean, decoded).mul_(size)
        # All gradients were finite, but their sum may have overflowed: that is lost, not kept.
        error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        if work.state.residual is None:
            work.state.residual = torch.zeros(
                work.layer.numel, dtype=work.layer.work_dtype, device=error.device
            )
        mine = work.state.residual[rank * mean.numel() : (rank + 1) * mean.numel()]
        mine.add_(error[: mine.numel()])

    def _decode(
        self, work: Work, shard: str, label: str, reduced: Reduced, out: torch.Tensor
    ) -> None:
        """One shard's mean over the payloads in ``reduced``."""
        sent = Payload(Kind.GATHER, reduced.buffer)
        self.inner.decode(_shard_work(work, shard, label), sent, reduced, out)

    def _join(self, work: Work, stage: str, parts: list[torch.Tensor], out: torch.Tensor) -> None:
        """Decode one payload for each shard into ``out``."""
        length = _length(work.layer, work.size)
        for owner, part in enumerate(parts):
            reduced = Reduced(Kind.GATHER, part, 1)
            label = f"{'mean' if stage else 'scatter'}/{owner}"
            target = out[owner * length : (owner + 1) * length]
            whole = target if target.numel() == length else out.new_empty(length)
            self._decode(work, f"{stage}{owner}", label, reduced, whole)
            if whole is not target:
                target.copy_(whole[: target.numel()])


def _length(layer: Layer, size: int) -> int:
    """Elements of every shard."""
    return -(-layer.numel // size)


def _shard_layer(layer: Layer, size: int, label: str) -> Layer:
    """A shard as the inner codec sees it."""
    return Layer(layer.index, f"{layer.name}/{label}", (_length(layer, size),), layer.dtype)


def _shard_work(work: Work, shard: str, label: str) -> Work:
    """The work on one shard, in which the inner codec finds no state."""
    layer = _shard_layer(work.layer, work.size, shard)
    return replace(inner_work(work, label), layer=layer, state=LayerState())


def _shard(vector: torch.Tensor, owner: int, size: int) -> torch.Tensor:
    """Shard ``owner`` of ``vector``: a view, or a copy filled up with zeros."""
    length = -(-vector.numel() // size)
    piece = vector[owner * length : (owner + 1) * length]
    if piece.numel() < length:
        piece = torch.nn.functional.pad(piece, (0, length - piece.numel()))
    return piece


def _checked(buffer: torch.Tensor, nbytes: int, layer: Layer) -> torch.Tensor:
    if buffer.numel() != nbytes or buffer.dtype != torch.uint8:
        raise WireError(
            f"layer {layer.name!r}: the codec announced {nbytes} bytes for a shard and gave "
            f"{buffer.numel()} of {buffer.dtype}; 'scatter' needs sizes that do not depend on data"
        )
    return buffer
