"""The tail of checks that rides Horovod's own allreduce beside, or instead of, a payload.

Horovod always runs one allreduce for each parameter, with the user's ``op``, predivide factor and
process set. A layer that communicates privately returns just this tail for it; a layer whose
payload is carried appends it. What comes back tells, without knowing any of those settings:

* ``SCALE``: 1 went in, so what comes back is the factor that dense Horovod would have applied to
  a mean: 1 for Average, N for Sum.
* ``MEMBER``: a word hashed from the rank went in, so the mean shows which ranks the *optimizer*
  reduces over, and a process set that differs from ours is an error before anything waits.
* ``NONFINITE``: how many ranks had inf or NaN in this layer.
* ``REPEAT`` and ``CHECK``: how many ranks passed a gradient that was already reduced, and its
  sum, which must then be the same on all ranks (see :meth:`Compressor.compress`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from .errors import MismatchError, UnsupportedError
from .exchange.base import Group

SCALE, MEMBER, NONFINITE, REPEAT, CHECK = range(5)
#: Elements of a tail.
LENGTH = 5


def member_word(rank: int) -> int:
    """16-bit word of a global rank; exact in fp32, as are sums of up to 256 of them."""
    return int.from_bytes(hashlib.blake2b(str(rank).encode(), digest_size=2).digest(), "little") + 1


@dataclass(frozen=True)
class Probe:
    """A tail that came back.

    Attributes:
        factor: what the mean must be multiplied by.
        nonfinite: some rank had inf or NaN in this layer.
        repeated: every rank passed a gradient that was already reduced.
    """

    factor: float
    nonfinite: bool
    repeated: bool


@lru_cache(maxsize=64)
def _usual(rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tail with nothing to tell."""
    tail = torch.zeros(LENGTH, dtype=dtype)
    tail[SCALE], tail[MEMBER] = 1.0, float(member_word(rank))
    return tail.to(device)


def fill(
    tail: torch.Tensor, group: Group, finite: torch.Tensor | None, repeated: torch.Tensor | None
) -> None:
    """Write this rank's tail, shape ``[5]``, without waiting for the device.

    Args:
        tail: where to.
        group: our process set.
        finite: 0-dim bool, whether this rank's vector was finite; None counts as finite.
        repeated: 0-dim sum of the gradient if it was already reduced, else None.
    """
    tail.copy_(_usual(group.global_rank, tail.dtype, tail.device))
    if finite is not None and (finite.is_cuda or not finite.item()):
        tail[NONFINITE] = ~finite
    if repeated is not None:
        tail[REPEAT] = 1.0
        tail[CHECK] = repeated


def read(
    tail: torch.Tensor,
    group: Group,
    layer: str,
    own_check: float | None,
    needs_set: bool,
) -> Probe:
    """Check a tail that came back.

    Args:
        tail: shape ``[5]``, as Horovod returned it.
        group: our process set.
        layer: name, for errors.
        own_check: this rank's ``CHECK`` if it passed a repeated gradient.
        needs_set: both process sets must be one, with every rank present. Always so for private
            payloads; for carried ones from the second step on, a rank may have joined.

    Raises:
        MismatchError: the optimizer reduces over other ranks than we do, or ranks disagree on
            whether the gradient was already reduced.
        UnsupportedError: a rank has joined, and ``needs_set``.
    """
    scale, member, nonfinite, repeat, check = tail.tolist()
    if not scale > 0:
        raise MismatchError(f"layer {layer!r}: the scale probe came back as {scale}, not positive")
    if needs_set:
        _check_set(scale, member / scale, group, layer)
    share = repeat / scale
    if own_check is not None or share > 0.5 / group.size:
        _check_repeat(layer, share, check / scale, own_check)
    return Probe(_snap(scale, group.size), nonfinite > 0, own_check is not None)


def joined(absent: int, size: int) -> UnsupportedError:
    """The error that says that ``absent`` of ``size`` ranks ran out of data."""
    return UnsupportedError(
        f"{absent} of {size} ranks called hvd.join() and take no part. Horovod cannot gather while "
        "a rank has joined: give all ranks the same number of steps (drop_last, or a sampler that "
        "pads), or use a method whose payload rides the allreduce (greco.RandomK, greco.Dense)"
    )


@lru_cache(maxsize=64)
def _expected_word(members: tuple[int, ...]) -> float:
    return sum(member_word(rank) for rank in members) / len(members)


def _check_set(scale: float, mean: float, group: Group, layer: str) -> None:
    inside = group.rank >= 0
    if inside and math.isclose(mean, _expected_word(group.members), rel_tol=2e-5):
        return
    # Horovod divides by the full size even when a rank has joined: less than 1 comes back.
    if inside and scale < 1 - 0.5 / group.size:
        raise joined(group.size - round(scale * group.size), group.size)
    raise MismatchError(
        f"layer {layer!r}: the optimizer reduces over other ranks than the compressor, whose "
        f"process set is {list(group.members)} (this is rank {group.global_rank}). Pass the same "
        "process_set= to hvd.DistributedOptimizer and to the compressor. (With op=Sum, a rank "
        "that called hvd.join() looks the same.)"
    )


def _check_repeat(layer: str, share: float, check: float, own_check: float | None) -> None:
    if own_check is None or abs(share - 1) > 1e-3:
        raise MismatchError(
            f"layer {layer!r}: on some ranks the gradient had already been reduced and on others "
            "not. Call optimizer.synchronize() equally often on all ranks, and wrap step() in "
            "optimizer.skip_synchronize() after it"
        )
    if not math.isclose(check, own_check, rel_tol=1e-3, abs_tol=1e-6) and math.isfinite(check):
        raise MismatchError(
            f"layer {layer!r}: the gradient was changed in place since it was reduced, differently "
            f"on different ranks (sum {own_check:g} here, {check:g} on average). Change it alike "
            "on all ranks, or assign a new tensor to .grad"
        )


def _snap(scale: float, size: int) -> float:
    """The factor without the rounding of predivide: exactly 1 or N where it is meant to be."""
    for exact in (1.0, float(size)):
        if math.isclose(scale, exact, rel_tol=1e-6):
            return exact
    return scale
