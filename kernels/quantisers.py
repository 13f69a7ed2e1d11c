"""The table's entries for quantisers: fewer bits for each element, all elements kept.

Codes of ``bits`` bits stand for the ``2 s + 1`` multiples of ``scale / s`` from ``-scale`` to
``scale``, with ``s = 2**(bits-1) - 1``; code ``s`` is zero, so no bucket has two zeros and the
largest code of the width is never used.

Rounding is part of the contract, so that backends agree: with ``f = trunc(x / scale * (s *
2**23))``, an integer, the code is ``(f + noise + s * 2**23) >> 23``, where noise is a uniform
23-bit integer, or ``2**22`` for rounding to nearest. Noise is a function of ``key`` and of the
element's position: the low 23 bits of its word (:mod:`.scalar`). A bucket whose scale is 0 gets
code ``s`` throughout; codes of non-finite buckets are valid but mean nothing.
"""

from __future__ import annotations

import torch

from ..errors import ConfigError, WireError
from .dispatch import call, need_flat

_FLOATS = (torch.float32, torch.float64)
NORMS = ("max", "l2")


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of ``numel`` codes of ``bits`` bits."""
    return -(-numel * bits // 8)


def bucket_scales(vector: torch.Tensor, bucket: int, norm: str) -> torch.Tensor:
    """The norm of every ``bucket`` elements; the last bucket has what is left.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        bucket: elements of a bucket.
        norm: ``"max"`` (largest magnitude) or ``"l2"`` (Euclidean, never below the largest
            magnitude and never infinite for finite elements).

    Returns:
        Shape ``[ceil(d / bucket)]``, the vector's dtype. Norms below the smallest normal number
        come out as 0; those of buckets with NaN or infinity are not finite.
    """
    need_flat("bucket_scales", vector, *_FLOATS)
    _check_norm("bucket_scales", norm)
    _check_bucket("bucket_scales", bucket)
    scales: torch.Tensor = call("bucket_scales", vector, bucket, norm)
    return scales


def quantise_pack(
    vector: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    """Codes of ``bits`` bits, packed without gaps, lowest bits first.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        scales: one for each bucket, same dtype; at least the bucket's largest magnitude.
        bucket: elements of a bucket.
        bits: 2 to 8.
        key: two 64-bit words for random, unbiased rounding; None rounds to nearest.
        out: uint8, shape ``[packed_bytes(d, bits)]``; bits beyond the last code are 0.
    """
    need_flat("quantise_pack", vector, *_FLOATS)
    need_flat("quantise_pack", out, torch.uint8)
    _check_bits("quantise_pack", bits)
    _check_scales("quantise_pack", scales, vector, bucket)
    _check_packed("quantise_pack", out, vector.numel(), bits)
    call("quantise_pack", vector, scales, bucket, bits, key, out)


def quantise(
    vector: torch.Tensor,
    bucket: int,
    norm: str,
    bits: int,
    key: tuple[int, int] | None,
    scales: torch.Tensor,
    out: torch.Tensor,
    leave: bool = False,
) -> None:
    """:func:`bucket_scales` and :func:`quantise_pack` in one pass.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        bucket: as for :func:`bucket_scales`.
        norm: as for :func:`bucket_scales`.
        bits: as for :func:`quantise_pack`.
        key: as for :func:`quantise_pack`.
        scales: shape ``[ceil(d / bucket)]``, the vector's dtype; written.
        out: as for :func:`quantise_pack`.
        leave: subtract from ``vector`` what the codes stand for: what error feedback keeps.
            Buckets with a scale of 0 keep all of it.
    """
    _check_quantise("quantise", vector, bucket, norm, bits, scales, out)
    call("quantise", vector, bucket, norm, bits, key, scales, out, leave)


def accumulate_quantise(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scale: float,
    vector: torch.Tensor,
    bucket: int,
    norm: str,
    bits: int,
    key: tuple[int, int] | None,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """``vector = residual + scale * gradient``, :func:`quantise`, and ``vector`` keeps the rest.

    The sum is rounded as in ``accumulate``; ``vector`` may be ``residual`` or ``gradient``.
    """
    _check_quantise("accumulate_quantise", vector, bucket, norm, bits, scales, out)
    need_flat("accumulate_quantise", residual, vector.dtype)
    need_flat("accumulate_quantise", gradient, torch.float16, torch.bfloat16, *_FLOATS)
    if not gradient.numel() == residual.numel() == vector.numel():
        raise ConfigError(
            f"accumulate_quantise: gradient, residual and vector have {gradient.numel()}, "
            f"{residual.numel()} and {vector.numel()} elements"
        )
    call(
        "accumulate_quantise", vector, gradient, residual, scale, bucket, norm, bits, key, scales,
        out,
    )  # fmt: skip


def dequantise_mean(
    buffer: torch.Tensor,
    starts: list[int],
    scale_bytes: int,
    bucket: int,
    bits: int,
    ranks: int,
    out: torch.Tensor,
) -> None:
    """The mean over ``ranks`` ranks of what some of them sent, in one pass over ``out``.

    Args:
        buffer: uint8, what was gathered.
        starts: where in it each payload begins, multiples of 8: the scales, and ``scale_bytes``
            further on the codes of :func:`quantise`. Payloads are added in this order.
        scale_bytes: bytes of the scales, in the dtype of ``out``.
        bucket: as for :func:`quantise`.
        bits: as for :func:`quantise`.
        ranks: what the sum is divided by.
        out: fp32 or fp64, shape ``[d]``; overwritten.

    Raises:
        WireError: payloads that do not fit in the buffer, the code that is never used, or a
            negative scale.
    """
    need_flat("dequantise_mean", buffer, torch.uint8)
    need_flat("dequantise_mean", out, *_FLOATS)
    _check_bits("dequantise_mean", bits)
    _check_bucket("dequantise_mean", bucket)
    end = scale_bytes + packed_bytes(out.numel(), bits)
    if scale_bytes != -(-out.numel() // bucket) * out.element_size():
        raise ConfigError(f"dequantise_mean: {scale_bytes} bytes of scales in buckets of {bucket}")
    for start in starts:
        if start % 8 or not 0 <= start <= buffer.numel() - end:
            raise WireError(f"a payload of {end} bytes at {start} of {buffer.numel()}")
        scales = buffer[start : start + scale_bytes].view(out.dtype)
        if bool((scales < 0).any()):
            raise WireError(f"scale {float(scales.min())} received, scales are not negative")
    call("dequantise_mean", out, buffer, starts, scale_bytes, bucket, bits, ranks)


def dequantise_add(
    packed: torch.Tensor,
    scales: torch.Tensor,
    bucket: int,
    bits: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    """``out += alpha * values`` of what :func:`quantise_pack` wrote; ``out`` in the scales' dtype.

    The product is rounded before it is added, so that every backend gives the same bits.

    Raises:
        WireError: the wrong number of bytes, the code that is never used, or a negative scale.
    """
    need_flat("dequantise_add", packed, torch.uint8)
    need_flat("dequantise_add", out, *_FLOATS)
    _check_bits("dequantise_add", bits)
    _check_scales("dequantise_add", scales, out, bucket)
    _check_length("codes", packed, packed_bytes(out.numel(), bits))
    if bool((scales < 0).any()):
        raise WireError(f"scale {float(scales.min())} received, scales are not negative")
    call("dequantise_add", packed, scales, bucket, bits, alpha, out)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes below ``2**bits``, packed without gaps: ``packed_bytes(d, bits)`` bytes.

    Code i takes bits ``bits * i`` and up of the buffer, counted from each byte's lowest bit.
    """
    need_flat("pack_bits", codes, torch.uint8)
    _check_bits("pack_bits", bits, least=1)
    out = torch.empty(packed_bytes(codes.numel(), bits), dtype=torch.uint8, device=codes.device)
    call("pack_bits", codes, bits, out)
    return out


def unpack_bits(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """Inverse of :func:`pack_bits`: uint8, shape ``[numel]``; may share memory with ``packed``."""
    need_flat("unpack_bits", packed, torch.uint8)
    _check_bits("unpack_bits", bits, least=1)
    _check_length("codes", packed, packed_bytes(numel, bits))
    codes: torch.Tensor = call("unpack_bits", packed, bits, numel)
    return codes


def quantise_lanes(
    vector: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    key: tuple[int, int] | None,
    out: torch.Tensor,
) -> None:
    """Signed codes ``-s..s`` in int32 words that may be added over ranks like numbers.

    A word is ``sum(code_i << (width * i))`` over its ``32 // width`` lanes. With
    ``width >= bits + ceil(log2 N)``, no partial sum of N such words leaves int32, in any order,
    and :func:`lanes_add` gets the sum of every lane back. A word of 0 is zero in every lane.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        scale: 0-dim, same dtype; at least the largest magnitude.
        bits: 2 to 8.
        width: bits of a lane.
        key: as for :func:`quantise_pack`.
        out: int32, shape ``[lane_words(d, width)]``. Lane i of word w holds element
            ``i * lane_words + w`` of the vector; lanes beyond the last element hold 0.
    """
    need_flat("quantise_lanes", vector, *_FLOATS)
    need_flat("quantise_lanes", out, torch.int32)
    _check_lanes("quantise_lanes", scale, vector, bits, width)
    if out.numel() != lane_words(vector.numel(), width):
        raise ConfigError(f"quantise_lanes: out has {out.numel()} words for {vector.numel()}")
    call("quantise_lanes", vector, scale, bits, width, key, out)


def lane_words(numel: int, width: int) -> int:
    """int32 words for ``numel`` lanes of ``width`` bits."""
    return -(-numel // (32 // width))


def lanes_add(
    words: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    width: int,
    ranks: int,
    alpha: float,
    out: torch.Tensor,
) -> None:
    """``out += alpha * (sum over ranks)`` of what ``ranks`` ranks' :func:`quantise_lanes` gave.

    Raises:
        WireError: the wrong number of words, or a sum that so many ranks cannot reach.
    """
    need_flat("lanes_add", words, torch.int32)
    need_flat("lanes_add", out, *_FLOATS)
    _check_lanes("lanes_add", scale, out, bits, width)
    if ranks < 1 or ranks << bits > 1 << width:
        raise ConfigError(
            f"lanes_add: {ranks} ranks with {bits} bits do not fit lanes of {width} bits"
        )
    _check_length("lanes", words, lane_words(out.numel(), width))
    call("lanes_add", words, scale, bits, width, ranks, alpha, out)


def natural_pack(
    vector: torch.Tensor, exponent: torch.Tensor, key: tuple[int, int], out: torch.Tensor
) -> None:
    """Magnitudes rounded at random, without bias, to a power of two next to them.

    A code is ``sign << 7 | c``: c = 0 is zero, any other is ``2**(exponent + c - 127)``. With
    ``y = fp32(x * 2**-exponent)``, c is the exponent field of y's bit pattern plus noise, as a
    pattern: what is below ``2**(exponent - 126)`` becomes that or zero, in proportion.

    Args:
        vector: fp32 or fp64, shape ``[d]``, contiguous.
        exponent: 0-dim int32, at least -126 for fp32 and -1022 for fp64, with no magnitude above
            ``2**exponent``.
        key: two 64-bit words.
        out: uint8, shape ``[d]``.
    """
    need_flat("natural_pack", vector, *_FLOATS)
    need_flat("natural_pack", out, torch.uint8)
    if out.numel() != vector.numel():
        raise ConfigError(f"natural_pack: out has {out.numel()} of {vector.numel()} bytes")
    call("natural_pack", vector, exponent, key, out)


def natural_add(codes: torch.Tensor, factor: float, out: torch.Tensor) -> None:
    """``out += factor * 2**(c - 127)``, signed, of what :func:`natural_pack` wrote."""
    need_flat("natural_add", codes, torch.uint8)
    need_flat("natural_add", out, *_FLOATS)
    _check_length("codes", codes, out.numel())
    call("natural_add", codes, factor, out)


def mean_magnitude(vector: torch.Tensor) -> torch.Tensor:
    """``sum |x| / d``, 0-dim, the vector's dtype; added up in fp64, so that it never overflows.

    In an order that depends on the number of threads (last bits only).
    """
    need_flat("mean_magnitude", vector, *_FLOATS)
    mean: torch.Tensor = call("mean_magnitude", vector)
    return mean


def sign_pack(vector: torch.Tensor, out: torch.Tensor) -> None:
    """One bit for each element, lowest first: 1 where it is negative. ``out`` is uint8."""
    need_flat("sign_pack", vector, *_FLOATS)
    need_flat("sign_pack", out, torch.uint8)
    if out.numel() != packed_bytes(vector.numel(), 1):
        raise ConfigError(f"sign_pack: out has {out.numel()} bytes for {vector.numel()} elements")
    call("sign_pack", vector, out)


def sign_add(packed: torch.Tensor, scale: torch.Tensor, alpha: float, out: torch.Tensor) -> None:
    """``out += alpha * scale`` where :func:`sign_pack` wrote 0, ``-= alpha * scale`` elsewhere."""
    need_flat("sign_add", packed, torch.uint8)
    need_flat("sign_add", out, *_FLOATS)
    _check_length("signs", packed, packed_bytes(out.numel(), 1))
    call("sign_add", packed, scale, alpha, out)


def _check_quantise(
    name: str,
    vector: torch.Tensor,
    bucket: int,
    norm: str,
    bits: int,
    scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    need_flat(name, vector, *_FLOATS)
    need_flat(name, out, torch.uint8)
    _check_bits(name, bits)
    _check_norm(name, norm)
    _check_scales(name, scales, vector, bucket)
    _check_packed(name, out, vector.numel(), bits)


def _check_norm(name: str, norm: str) -> None:
    if norm not in NORMS:
        raise ConfigError(f"{name}: norm {norm!r} is none of {', '.join(NORMS)}")


def _check_packed(name: str, out: torch.Tensor, numel: int, bits: int) -> None:
    if out.numel() != packed_bytes(numel, bits):
        raise ConfigError(
            f"{name}: out has {out.numel()} bytes, {numel} codes of {bits} bits take "
            f"{packed_bytes(numel, bits)}"
        )


def _check_bits(name: str, bits: int, least: int = 2) -> None:
    if not least <= bits <= 8:
        raise ConfigError(f"{name}: bits={bits} is outside {least}..8")


def _check_bucket(name: str, bucket: int) -> None:
    if bucket < 1:
        raise ConfigError(f"{name}: bucket={bucket} is not positive")


def _check_scales(name: str, scales: torch.Tensor, values: torch.Tensor, bucket: int) -> None:
    need_flat(name, scales, values.dtype)
    _check_bucket(name, bucket)
    if scales.numel() != -(-values.numel() // bucket):
        raise ConfigError(
            f"{name}: {scales.numel()} scales for {values.numel()} elements in buckets of {bucket}"
        )


def _check_lanes(
    name: str, scale: torch.Tensor, values: torch.Tensor, bits: int, width: int
) -> None:
    _check_bits(name, bits)
    if not bits <= width <= 31:
        raise ConfigError(f"{name}: lanes of {width} bits, {bits}..31 can be")
    if scale.dim() != 0 or scale.dtype != values.dtype:
        raise ConfigError(f"{name}: scale needs shape () and dtype {values.dtype}, got {scale!r}")


def _check_length(what: str, received: torch.Tensor, expected: int) -> None:
    if received.numel() != expected:
        raise WireError(f"{what}: {expected} expected, got {received.numel()}")
