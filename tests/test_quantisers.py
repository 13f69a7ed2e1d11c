"""Quantisers: packed codes, random rounding without bias, and integers that add up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_greco import kernels
from hvd_greco.codecs.base import Codec, Turn
from hvd_greco.codecs.natural import NaturalCodec
from hvd_greco.codecs.qsgd import QSGDCodec
from hvd_greco.codecs.quant_wire import GatheredQuantiser
from hvd_greco.codecs.sign import SignCodec
from hvd_greco.codecs.summable import SummableQuantCodec, lane_width
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError, WireError
from hvd_greco.exchange.local import LocalMember
from hvd_greco.kernels import portable_quant
from hvd_greco.layers import Layer
from hvd_greco.payload import Kind, Payload, Reduced
from simulate import at, context, gaussian, run

KEY = (7, 11)


def layer_of(vector: torch.Tensor, name: str = "w") -> Layer:
    return Layer(0, name, (vector.numel(),), vector.dtype)


def coded(
    codec: Codec, vector: torch.Tensor, level: int | None = None, step: int = 0
) -> tuple[torch.Tensor, Payload]:
    """What one rank alone gets back of ``vector``, and what it sent last."""
    layer, where = layer_of(vector), context(step)
    sent = codec.encode(at(where, layer, level), vector.clone())
    if codec.rounds == 2:
        gathered = Reduced(sent.kind, sent.buffer.clone(), 1)
        turn = Turn(at(where, layer, level), sent, gathered, vector.clone)
        sent = codec.next_round(turn)
    out = torch.full_like(vector, torch.nan)
    codec.decode(at(where, layer, level), sent, Reduced(sent.kind, sent.buffer.clone(), 1), out)
    return out, sent


# -- kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 63, 64, 65, 1001])
def test_codes_are_packed_at_their_width(bits: int, numel: int) -> None:
    """Against one long integer, from which the bytes are cut."""
    draw = random.Random(bits * 1000 + numel)
    codes = [draw.randrange(1 << bits) for _ in range(numel)]
    whole = sum(code << (bits * i) for i, code in enumerate(codes))
    expected = list(whole.to_bytes(-(-bits * numel // 8), "little"))
    packed = kernels.pack_bits(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.tolist() == expected
    assert kernels.unpack_bits(packed, bits, numel).tolist() == codes


def test_packed_lengths_are_checked() -> None:
    with pytest.raises(WireError, match="5 expected, got 4"):
        kernels.unpack_bits(torch.zeros(4, dtype=torch.uint8), 4, 10)
    with pytest.raises(ConfigError, match="bits=9"):
        kernels.pack_bits(torch.zeros(4, dtype=torch.uint8), 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "bucket"), [(1, 512), (10, 4), (1537, 512), (300, 7)])
def test_scales(dtype: torch.dtype, numel: int, bucket: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=dtype)
    pieces = vector.split(bucket)
    largest = torch.stack([piece.abs().max() for piece in pieces])
    assert torch.equal(kernels.bucket_scales(vector, bucket, "max"), largest)
    norms = kernels.bucket_scales(vector, bucket, "l2")
    torch.testing.assert_close(norms, torch.stack([piece.norm() for piece in pieces]))
    assert (norms >= largest).all()


def test_scales_of_odd_buckets() -> None:
    top, tiny = torch.finfo(torch.float32).max, 1e-40
    vector = torch.tensor([0.0, 0.0, tiny, -tiny, top, -top, torch.nan, 1.0, torch.inf, 0.0])
    for norm in ("max", "l2"):
        scales = kernels.bucket_scales(vector, 2, norm)
        assert scales[:3].tolist() == [0.0, 0.0, top], norm
        assert not scales[3:].isfinite().any()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 5, 512, 513, 5000])
def test_rounding_to_nearest(bits: int, dtype: torch.dtype, numel: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(bits), dtype=dtype)
    s, scales = 2 ** (bits - 1) - 1, kernels.bucket_scales(vector, 512, "max")
    packed = torch.empty(kernels.packed_bytes(numel, bits), dtype=torch.uint8)
    kernels.quantise_pack(vector, scales, 512, bits, None, packed)
    out = torch.ones(numel, dtype=dtype)
    kernels.dequantise_add(packed, scales, 512, bits, 2.0, out)
    steps = (scales / s).repeat_interleave(512)[:numel]
    expected = 1 + 2 * torch.round(vector / steps) * steps
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_pieces_do_not_show(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a vector is cut for the cache, bytes and values are the same."""
    vector = torch.randn(3001, generator=torch.Generator().manual_seed(0))
    scales = kernels.bucket_scales(vector, 48, "l2")

    def everything() -> list[torch.Tensor]:
        packed = torch.empty(kernels.packed_bytes(3001, bits), dtype=torch.uint8)
        kernels.quantise_pack(vector, scales, 48, bits, KEY, packed)
        exponent, codes = torch.tensor(4, dtype=torch.int32), packed.new_empty(3001)
        kernels.natural_pack(vector, exponent, KEY, codes)
        signs = packed.new_empty(kernels.packed_bytes(3001, 1))
        kernels.sign_pack(vector, signs)
        words = torch.empty(kernels.lane_words(3001, bits + 2), dtype=torch.int32)
        kernels.quantise_lanes(vector, vector.abs().max(), bits, bits + 2, KEY, words)
        outs = [torch.zeros(3001) for _ in range(4)]
        kernels.dequantise_add(packed, scales, 48, bits, 1.0, outs[0])
        kernels.natural_add(codes, 16.0, outs[1])
        kernels.sign_add(signs, torch.tensor(2.0), 1.0, outs[2])
        kernels.lanes_add(words, vector.abs().max(), bits, bits + 2, 1, 1.0, outs[3])
        return [packed, codes, signs, words, *outs, kernels.bucket_scales(vector, 48, "l2")]

    whole = everything()
    monkeypatch.setattr(portable_quant, "CHUNK", 400)
    for one, other in zip(whole, everything(), strict=True):
        assert torch.equal(one, other)


def test_signs_pack_alike_without_numpy() -> None:
    """The path for other devices packs the bits of the CPU's path."""
    vector = torch.randn(77)
    packed = torch.empty(10, dtype=torch.uint8)
    kernels.sign_pack(vector, packed)
    assert torch.equal(packed, kernels.pack_bits((vector < 0).to(torch.uint8), 1))


@pytest.mark.parametrize("ranks", range(1, 65))
def test_lanes_never_overflow(ranks: int) -> None:
    """The extremes of every width and number of ranks, and partial sums in any order."""
    draw = torch.Generator().manual_seed(ranks)
    for bits in range(2, 9):
        width, s, numel = lane_width(bits, ranks), 2 ** (bits - 1) - 1, 101
        codes = torch.randint(-s, s + 1, (ranks, numel), generator=draw)
        codes[:, 0], codes[:, 1] = s, -s  # all ranks at once, in lanes side by side and alone
        codes[:, 2::9], codes[:, -1] = -s, s
        rows = []
        for row in codes:
            words = torch.empty(kernels.lane_words(numel, width), dtype=torch.int32)
            scale = torch.tensor(float(s))
            kernels.quantise_lanes(row.float(), scale, bits, width, KEY, words)
            rows.append(words.to(torch.int64))
        stacked = torch.stack(rows)
        positive, negative = stacked.clamp(min=0).sum(0), stacked.clamp(max=0).sum(0)
        assert positive.max() < 2**31, "a partial sum may overflow"
        assert negative.min() >= -(2**31), "a partial sum may overflow"
        out = torch.zeros(numel)
        total = stacked.sum(0).to(torch.int32)
        kernels.lanes_add(total, torch.tensor(float(s)), bits, width, ranks, 1.0, out)
        torch.testing.assert_close(out, codes.sum(0).float(), rtol=1e-5, atol=1e-4)


def test_codes_stay_in_range_whatever_the_scale() -> None:
    """A scale that is too small (a corrupt maximum) or 0, and what is not finite."""
    vector = torch.tensor([5.0, -5.0, 0.5, torch.nan, torch.inf, -torch.inf, 1e-40, 0.0])
    for scale in (1.0, 0.0, torch.inf, torch.nan):
        packed = torch.empty(4, dtype=torch.uint8)
        kernels.quantise_pack(vector, torch.tensor([scale]), 8, 4, KEY, packed)
        codes = kernels.unpack_bits(packed, 4, 8).tolist()
        assert max(codes) <= 14
        if scale == 1.0:
            assert codes[:2] == [14, 0]
        elif scale == 0.0:
            assert [codes[i] for i in (0, 1, 2, 6)] == [7, 7, 7, 7]


def test_impossible_sums_are_refused() -> None:
    words = torch.full((2,), 8, dtype=torch.int32)  # a code of 8 in a lane that goes to 7
    with pytest.raises(WireError, match=r"sum of codes 15 .* cannot pass 14"):
        kernels.lanes_add(words, torch.tensor(1.0), 4, 5, 1, 1.0, torch.zeros(12))
    with pytest.raises(WireError, match="2 expected, got 1"):
        kernels.lanes_add(words[:1], torch.tensor(1.0), 4, 5, 1, 1.0, torch.zeros(12))
    with pytest.raises(ConfigError, match="3 ranks"):
        kernels.lanes_add(words, torch.tensor(1.0), 4, 5, 3, 1.0, torch.zeros(12))


# -- without bias -----------------------------------------------------------------------------

UNBIASED: dict[str, tuple[Callable[[], Any], int | None]] = {
    "qsgd-2": (lambda: QSGDCodec(bucket=64), 2),
    "qsgd-4": (lambda: QSGDCodec(bucket=64), 4),
    "qsgd-8": (lambda: QSGDCodec(bucket=64), 8),
    "qsgd-3-l2": (lambda: QSGDCodec(bucket=64, norm="l2"), 3),
    "natural": (NaturalCodec, None),
    "summable-4": (SummableQuantCodec, 4),
}


def spread(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Heavy-tailed, with both signs and exact zeros."""
    generator = torch.Generator().manual_seed(5)
    vector = torch.randn(numel, generator=generator, dtype=dtype) ** 3
    vector[::13] = 0
    return vector


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_unbiased_with_the_predicted_variance(name: str, dtype: torch.dtype) -> None:
    """10,000 draws: 100 steps of a layer that holds the same 64 numbers 100 times."""
    make, level = UNBIASED[name]
    codec, vector = make(), spread(64, dtype)
    tiled, draws = vector.repeat(100), 10_000
    total, squares = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    for step in range(100):
        drawn = coded(codec, tiled, level, step)[0].double().view(100, 64)
        total += drawn.sum(0)
        squares += (drawn - vector.double()).square().sum(0)
    predicted = torch.tensor(
        [codec.expected_error(layer_of(v), v, level) for v in _alone(vector, name)]
    )
    # An error of one part in 2^22 of a step is beyond what fp32 can say of a mean.
    slack = vector.abs().max().double() * 2**-22
    error = (total / draws - vector.double()).abs()
    assert (error <= 5 * (predicted.double() / draws).sqrt() + slack).all()
    whole = codec.expected_error(layer_of(vector), vector, level)
    assert abs(float(squares.sum()) / draws / whole - 1) < 0.1


def _alone(vector: torch.Tensor, name: str) -> list[torch.Tensor]:
    """For each element, a vector of which only that element costs anything (the peak is free)."""
    if name == "qsgd-3-l2":
        # The scale depends on all elements: give each the average cost times their number.
        return [vector] * vector.numel()
    found = []
    for i in range(vector.numel()):
        alone = torch.zeros_like(vector)
        if name != "natural":
            alone[vector.abs().argmax()] = vector.abs().max()
        alone[i] = vector[i]
        found.append(alone)
    return found


@pytest.mark.parametrize("name", UNBIASED)
def test_ranks_of_norms_1_and_1000(name: str) -> None:
    """Case 5: each rank is decoded with its own scale, or with one that all agreed on."""
    make, level = UNBIASED[name]
    vectors = [spread(64), torch.flip(spread(64), (0,))]
    vectors = [vectors[0] / vectors[0].norm(), vectors[1] / vectors[1].norm() * 1000]
    largest = max(float(v.abs().max()) for v in vectors)

    def build(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        return Compressor(pairs, make(), level, group=member, min_numel=0, memory="none")

    gradients = [[{"w": v.repeat(100)} for v in vectors]] * 20
    outcome = run(gradients, build)[0]
    assert outcome.compressor.plan.assignments["w"].codec != "dense"
    means = torch.cat([step["w"].double().view(-1, 64) for step in outcome.results])
    codec = make()
    options = {"scale": largest} if isinstance(codec, SummableQuantCodec) else {}
    variance = sum(codec.expected_error(layer_of(v), v, level, **options) for v in vectors) / 4
    truth = (vectors[0].double() + vectors[1].double()) / 2
    error = means.mean(0) - truth
    # Summed over the elements: chi-square with at least 30 effective degrees of freedom.
    assert float(error.square().sum()) <= 4 * variance / len(means)
    assert abs(float((means - truth).square().sum()) / len(means) / variance - 1) < 0.1
    # And along the small rank's own direction, where a lost rank would show.
    share = float(error @ vectors[0].double())
    deviation = (means - truth) @ vectors[0].double()
    assert abs(share) <= 5 * float(deviation.std()) / len(means) ** 0.5


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_integer_sums_are_scaled_after_decoding(average: bool, size: int) -> None:
    """Case 3: odd and negative sums under Average are not cut to whole numbers on the way."""
    draw = torch.Generator().manual_seed(size)
    gradients = [[{"w": torch.randint(-7, 8, (130,), generator=draw).float()} for _ in range(size)]]
    gradients[0][0]["w"][0] = 7
    gradients[0][0]["w"][1:5] = torch.tensor([-1.0, 1.0, -7.0, 3.0])
    for rank in range(1, size):
        gradients[0][rank]["w"][1:5] = torch.tensor([0.0, 0.0, -7.0, 7.0])

    def build(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        return Compressor(pairs, SummableQuantCodec(), 4, group=member, min_numel=0)

    expected = sum(rank["w"] for rank in gradients[0]) / (size if average else 1)
    for outcome in run(gradients, build, average=average):
        torch.testing.assert_close(outcome.results[0]["w"], expected, rtol=1e-6, atol=1e-6)
        assert outcome.reports[0].layers[0].codec == "summable"


@pytest.mark.parametrize("codec", [QSGDCodec(), NaturalCodec(), SummableQuantCodec()])
def test_random_numbers_are_private_and_repeatable(codec: Codec) -> None:
    vector, level = torch.randn(200), 3
    before = torch.get_rng_state()

    def sent(step: int, rank: int, name: str) -> torch.Tensor:
        layer, where = layer_of(vector, name), context(step, rank)
        payload = codec.encode(at(where, layer, level), vector.clone())
        if codec.rounds == 2:
            got = Reduced(payload.kind, payload.buffer, 1)
            turn = Turn(at(where, layer, level), payload, got, vector.clone)
            payload = codec.next_round(turn)
        return payload.buffer.clone()

    cases = list(itertools.product((0, 1), (0, 1), ("a", "b")))
    first = [sent(*case) for case in cases]
    assert all(torch.equal(one, sent(*case)) for one, case in zip(first, cases, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    assert torch.equal(before, torch.get_rng_state())


# -- error feedback ---------------------------------------------------------------------------


def _worst(numel: int, bits: int) -> torch.Tensor:
    """One large element; all others a quarter of a step, the worst for random rounding."""
    vector = torch.full((numel,), 0.25)
    vector[0] = 2 ** (bits - 1) - 1
    return vector


@pytest.mark.parametrize("bits", range(2, 9))
def test_where_random_rounding_is_no_contraction(bits: int) -> None:
    vector, codec = _worst(512, bits), QSGDCodec()
    error = codec.expected_error(layer_of(vector), vector, bits)
    assert (error < float(vector.square().sum())) == codec.contractive(bits) == (bits > 4)
    # Which is why a memory gets rounding to nearest.
    codec.adapt_to("ef")
    assert codec.contractive(bits)
    assert not codec.unbiased(bits)


CONTRACTIVE = [
    *[(f"max-{b}", lambda: QSGDCodec(bucket=64), b) for b in range(2, 9)],
    *[(f"l2-{b}", lambda: QSGDCodec(bucket=64, norm="l2"), b) for b in range(4, 9)],
    *[(f"summable-{b}", SummableQuantCodec, b) for b in (2, 4)],
    ("sign", SignCodec, None),
]


@pytest.mark.parametrize(("make", "level"), [c[1:] for c in CONTRACTIVE], ids=lambda v: "")
def test_nearest_is_a_contraction(make: Callable[[], Any], level: int | None) -> None:
    """||C(x) - x||^2 < ||x||^2 for vectors of every kind, and as large as was predicted."""
    codec = make()
    codec.adapt_to("ef")
    assert codec.contractive(level)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(256, generator=generator) ** power for power in (1, 3, 9)]
    vectors += [torch.ones(256), -torch.ones(256), _worst(256, level or 2), torch.eye(16).view(-1)]
    for vector in vectors:
        error = float((coded(codec, vector, level)[0] - vector).square().sum())
        assert error < float(vector.square().sum()) * (1 - 1e-4)
        predicted = codec.expected_error(layer_of(vector), vector, level)
        assert error == pytest.approx(predicted, rel=1e-3, abs=1e-6)


def test_natural_is_a_contraction() -> None:
    for vector in (torch.randn(1000), torch.full((1000,), 4 / 3)):
        expected = NaturalCodec().expected_error(layer_of(vector), vector)
        assert expected <= float(vector.square().sum()) / 8 * (1 + 1e-5)


def test_memories_that_theory_forbids_are_refused() -> None:
    def build(codec: Codec, level: int | None, memory: str) -> Callable[..., Compressor]:
        return lambda pairs, member: Compressor(
            pairs, codec, level, group=member, min_numel=0, memory=memory
        )

    gradients = gaussian({"w": (2000,)}, 2, steps=1)
    with pytest.raises(ConfigError, match="'ef' does not go with 'qsgd' at level 4"):
        run(gradients, build(QSGDCodec(norm="l2"), 4, "ef"))
    with pytest.raises(ConfigError, match="'none' does not go with 'sign'"):
        run(gradients, build(SignCodec(), None, "none"))
    for memory in ("ef", "ef21"):
        run(gradients, build(QSGDCodec(norm="l2"), 5, memory))
        run(gradients, build(SummableQuantCodec(), 4, memory))


def test_a_flat_bucket_in_the_l2_norm_shows_why() -> None:
    codec, flat = QSGDCodec(norm="l2"), torch.ones(512)
    codec.adapt_to("ef")
    assert not coded(codec, flat, 4)[0].any()
    assert coded(codec, flat, 5)[0].all()


# -- bytes and bad bytes ------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    large = Layer(0, "w", (1000, 1000), torch.float32)
    dense = 4e6
    assert QSGDCodec().wire_bytes(large, 4, 2) == 500_000 + 4 * 1954
    assert QSGDCodec().wire_bytes(large, 4, 2) <= 0.13 * dense
    assert QSGDCodec().wire_bytes(large, 3, 2) == 375_000 + 4 * 1954
    assert NaturalCodec().wire_bytes(large, None, 2) == 1_000_008
    assert SignCodec().wire_bytes(large, None, 2) == 125_008
    # 6 lanes of 5 bits for two ranks, 4 of 7 bits for eight; 4 bytes of scale.
    assert SummableQuantCodec().wire_bytes(large, 4, 2) == 4 + 4 * 166_667
    assert SummableQuantCodec().wire_bytes(large, 4, 8) == 4 + 4 * 250_000
    # Unlike a gathered payload, it does not grow with the ranks: 64 take 3 lanes of 10 bits.
    assert SummableQuantCodec().network_bytes(large, 4, 64) < 2 * dense / 3
    assert QSGDCodec().network_bytes(large, 4, 64) == 63 * 507_816


def corrupted(codec: GatheredQuantiser, level: int | None, change: Callable[..., None]) -> None:
    vector = torch.randn(700)
    layer, where = layer_of(vector), context()
    sent = codec.encode(at(where, layer, level), vector)
    change(sent.buffer)
    reduced = Reduced(Kind.GATHER, sent.buffer, 1)
    codec.decode(at(where, layer, level), sent, reduced, torch.empty(700))


def test_bytes_that_cannot_be_are_refused() -> None:
    def negative_scale(buffer: torch.Tensor) -> None:
        buffer[:4].view(torch.float32)[0] = -1.0

    def unused_code(buffer: torch.Tensor) -> None:
        buffer[100] = 0xFF

    def exponent(buffer: torch.Tensor) -> None:
        buffer[:4].view(torch.int32)[0] = 300

    with pytest.raises(WireError, match="scale -1"):
        corrupted(QSGDCodec(), 4, negative_scale)
    with pytest.raises(WireError, match="code 15 received, 4 bits go up to 14"):
        corrupted(QSGDCodec(), 4, unused_code)
    with pytest.raises(WireError, match="exponent 300"):
        corrupted(NaturalCodec(), None, exponent)
    layer, out = Layer(0, "w", (700,), torch.float32), torch.empty(700)
    for codec in (QSGDCodec(), NaturalCodec(), SignCodec()):
        short = Payload(Kind.GATHER, torch.zeros(50, dtype=torch.uint8))
        with pytest.raises(WireError, match="gathered 50 bytes"):
            codec.decode(at(context(), layer, 4), short, Reduced(Kind.GATHER, short.buffer, 1), out)


def test_maxima_that_cannot_be_are_refused() -> None:
    codec, vector = SummableQuantCodec(), torch.randn(70)
    sent = codec.encode(at(context(size=2), layer_of(vector), 4), vector)
    received = Reduced(Kind.GATHER, torch.zeros(7, dtype=torch.uint8), 2)
    turn = Turn(at(context(size=2), layer_of(vector), 4), sent, received, vector.clone)
    with pytest.raises(WireError, match="7 bytes of maxima from 2 ranks"):
        codec.next_round(turn)


@pytest.mark.parametrize("bad", [1, 9, 4.5, None, True, "4"])
@pytest.mark.parametrize("codec", [QSGDCodec(), SummableQuantCodec()])
def test_bits_are_checked(codec: Codec, bad: Any) -> None:
    with pytest.raises(ConfigError, match="bits"):
        codec.check_level(bad)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="bucket"):
        QSGDCodec(bucket=0)
    with pytest.raises(ConfigError, match="'l1' is neither 'max' nor 'l2'"):
        QSGDCodec(norm="l1")
    assert QSGDCodec(bucket=64).context() != QSGDCodec().context()


# -- numbers at the edges -----------------------------------------------------------------------

ALL: dict[str, tuple[Callable[[], Any], int | None]] = {**UNBIASED, "sign": (SignCodec, None)}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", ["none", "ef"])
def test_extreme_values(name: str, dtype: torch.dtype, memory: str) -> None:
    make, level = ALL[name]
    codec, limits = make(), torch.finfo(dtype)
    codec.adapt_to(memory)
    zeros = torch.zeros(100, dtype=dtype)
    assert torch.equal(coded(codec, zeros, level)[0], zeros)
    largest = spread(100, dtype).sign() * limits.max
    out, _ = coded(codec, largest, level)
    assert out.isfinite().all()
    if memory == "none" and name not in ("sign", "qsgd-3-l2"):
        # Each is the largest of its bucket, so it is met (natural: but for the top power).
        torch.testing.assert_close(out, largest, rtol=1e-6, atol=0)
    subnormal = spread(100, dtype).sign() * (limits.tiny / 16)
    out, _ = coded(codec, subnormal, level)
    if name in ("natural", "sign"):
        assert out.abs().max() <= limits.tiny  # and no NaN
    else:
        assert not out.any()
    for size in (1, 2, 3, 9):
        assert coded(codec, torch.full((size,), -2.0, dtype=dtype), level)[0].shape == (size,)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_reported(name: str, poison: float) -> None:
    make, level = ALL[name]
    vector = torch.randn(300)
    vector[150] = poison
    codec, layer = make(), layer_of(vector)
    sent = codec.encode(at(context(), layer, level), vector.clone())
    assert sent.finite is not None
    assert not bool(sent.finite)
    out, _ = coded(codec, vector, level)  # raises nothing, writes nowhere else
    assert not out.isfinite().all()
    clean = codec.encode(at(context(), layer, level), torch.randn(300))
    assert clean.finite is not None
    assert bool(clean.finite)


def test_natural_keeps_powers_of_two_and_neighbours() -> None:
    powers = torch.exp2(torch.arange(-120.0, 5.0))
    assert torch.equal(coded(NaturalCodec(), powers)[0], powers)
    for step in range(20):
        out, _ = coded(NaturalCodec(), torch.tensor([-3.0, 5.0, 0.3, 100.0, 0.0]), step=step)
        choices = [(-4, -2), (4, 8), (0.25, 0.5), (64, 128), (0, 0)]
        assert all(v in pair for v, pair in zip(out.tolist(), choices, strict=True))


def test_natural_far_below_the_largest() -> None:
    """2^-140 beside 2^-10: the smallest power is 2^-135, and 1 in 32 becomes that."""
    vector = torch.full((32_000,), 2.0**-140)
    vector[0] = 1.5 * 2.0**-10
    out, _ = coded(NaturalCodec(), vector)
    assert set(out[1:].tolist()) == {0.0, 2.0**-135}
    assert abs(int((out[1:] > 0).sum()) - 1000) < 5 * 31.1


def test_natural_at_the_top() -> None:
    top = torch.finfo(torch.float32).max
    out, _ = coded(NaturalCodec(), torch.tensor([top, -top, 1.5 * 2.0**127] * 50))
    assert out[:2].tolist() == [top, -top]
    assert sorted(set(out[2::3].tolist())) == pytest.approx([2.0**127, top])


def test_sign_by_hand() -> None:
    vector = torch.tensor([3.0, -1.0, 0.0, -0.0, -4.0])
    out, sent = coded(SignCodec(), vector)
    assert out.tolist() == pytest.approx([1.6, -1.6, 1.6, 1.6, -1.6])
    assert sent.buffer[4:].tolist() == [0b10010, 0, 0, 0]


def test_an_absent_rank_adds_zero_to_integer_sums() -> None:
    """And its zero is not counted as a code: three ranks, one of them without a gradient."""

    def build(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        return Compressor(pairs, SummableQuantCodec(), 4, group=member, min_numel=0)

    w = torch.tensor([7.0, -7.0, 1.0, 0.0, -2.0]).repeat(40)
    gradients = [[{"w": w}, {"w": None}, {"w": -3 * w / 7}]]
    outcome = run([*gradients, [{"w": w}] * 3], build)[0]
    truth = (w - 3 * w / 7) / 3
    assert (outcome.results[0]["w"] - truth).abs().max() <= 1 / 3 + 1e-5
    torch.testing.assert_close(outcome.results[1]["w"], w)
