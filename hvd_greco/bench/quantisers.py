"""Operations of quantisers, each with the torch chain beside it."""

from __future__ import annotations

import math

import torch

from .. import kernels
from . import chains
from .case import BUCKET, Case, Operation, Work
from .inputs import make_input

_KEY = (1, 2)


def _scales(case: Case, device: torch.device) -> torch.Tensor:
    return torch.empty(-(-case.numel // BUCKET), device=device)


def _codes(case: Case, device: torch.device) -> torch.Tensor:
    nbytes = kernels.packed_bytes(case.numel, case.bits or 1)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _quantise_ef(case: Case, device: torch.device) -> Work:
    gradient = make_input("gaussian", case.numel, device)
    held = 0.5 * gradient
    residual, bits = held.clone(), case.bits or 4
    scales, out = _scales(case, device), _codes(case, device)

    def ours() -> object:
        kernels.accumulate_quantise(
            gradient, residual, 1.0, residual, BUCKET, "max", bits, None, scales, out
        )
        return scales, out

    return Work(
        ours,
        lambda: chains.quantise_feedback(gradient, residual, BUCKET, bits),
        (residual,),
        lambda: residual.copy_(held),
    )


def _quantise_random(case: Case, device: torch.device) -> Work:
    vector, bits = make_input("gaussian", case.numel, device), case.bits or 4
    scales, out = _scales(case, device), _codes(case, device)

    def ours() -> object:
        kernels.quantise(vector, BUCKET, "max", bits, _KEY, scales, out)
        return scales, out

    return Work(ours, lambda: chains.quantise(vector, BUCKET, bits, random=True, leave=False))


def _dequantise_mean(case: Case, device: torch.device) -> Work:
    out, ranks, bits = torch.empty(case.numel, device=device), case.ranks or 1, case.bits or 4
    scales, codes = _scales(case, device), _codes(case, device)
    payloads, starts = [], []
    scale_bytes = 4 * scales.numel()
    stride = -(-(scale_bytes + codes.numel()) // 8) * 8
    for rank in range(ranks):
        vector = make_input("gaussian", case.numel, device, seed=rank)
        kernels.quantise(vector, BUCKET, "max", bits, None, scales, codes)
        payload = torch.zeros(stride, dtype=torch.uint8, device=device)
        payload[:scale_bytes] = scales.view(torch.uint8)
        payload[scale_bytes : scale_bytes + codes.numel()] = codes
        payloads.append(payload)
        starts.append(rank * stride)
    gathered = torch.cat(payloads)
    common = (gathered, starts, scale_bytes, BUCKET, bits, ranks, out)
    return Work(
        lambda: kernels.dequantise_mean(*common), lambda: chains.dequantise_mean(*common), (out,)
    )


def _natural_pack(case: Case, device: torch.device) -> Work:
    vector = make_input("gaussian", case.numel, device)
    exponent = math.ceil(math.log2(float(vector.abs().max())))
    held = torch.tensor(exponent, dtype=torch.int32, device=device)
    out = torch.empty(case.numel, dtype=torch.uint8, device=device)
    return Work(
        lambda: kernels.natural_pack(vector, held, _KEY, out),
        lambda: chains.natural_pack(vector, 2.0**-exponent, out),
        (out,),
    )


def _natural_add(case: Case, device: torch.device) -> Work:
    vector, out = make_input("gaussian", case.numel, device), torch.zeros(case.numel, device=device)
    codes = torch.empty(case.numel, dtype=torch.uint8, device=device)
    kernels.natural_pack(vector, torch.tensor(3, dtype=torch.int32, device=device), _KEY, codes)
    return Work(
        lambda: kernels.natural_add(codes, 4.0, out),
        lambda: chains.natural_add(codes, 4.0, out),
        (out,),
        out.zero_,
    )


def _sign_pack(case: Case, device: torch.device) -> Work:
    vector, out = make_input("gaussian", case.numel, device), _codes(case, device)

    def ours() -> object:
        kernels.sign_pack(vector, out)
        return out

    return Work(ours, lambda: chains.sign_pack(vector))


def _sign_add(case: Case, device: torch.device) -> Work:
    vector, out = make_input("gaussian", case.numel, device), torch.zeros(case.numel, device=device)
    packed, step = _codes(case, device), torch.tensor(0.5, device=device)
    kernels.sign_pack(vector, packed)
    return Work(
        lambda: kernels.sign_add(packed, step, 1.0, out),
        lambda: chains.sign_add(packed, step, out),
        (out,),
        out.zero_,
    )


def lane_width(case: Case) -> int:
    """Bits of a lane for the sum of the case's ranks, as in :mod:`hvd_greco.codecs.summable`."""
    return (case.bits or 4) + ((case.ranks or 1) - 1).bit_length()


def _lane_bytes(case: Case) -> int:
    return 4 * kernels.lane_words(case.numel, lane_width(case))


def _lanes(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A vector, the largest of its magnitudes, and room for its words."""
    vector = make_input("gaussian", case.numel, device)
    words = torch.empty(_lane_bytes(case) // 4, dtype=torch.int32, device=device)
    return vector, vector.abs().max(), words


def _quantise_lanes(case: Case, device: torch.device) -> Work:
    vector, scale, out = _lanes(case, device)
    bits, width = case.bits or 4, lane_width(case)
    return Work(
        lambda: kernels.quantise_lanes(vector, scale, bits, width, None, out),
        lambda: chains.quantise_lanes(vector, scale, bits, width, out),
        (out,),
    )


def _lanes_add(case: Case, device: torch.device) -> Work:
    vector, scale, words = _lanes(case, device)
    bits, width, ranks = case.bits or 4, lane_width(case), case.ranks or 1
    kernels.quantise_lanes(vector, scale, bits, width, None, words)
    out = torch.zeros_like(vector)
    return Work(
        lambda: kernels.lanes_add(words, scale, bits, width, ranks, 1.0, out),
        lambda: chains.lanes_add(words, scale, bits, width, ranks, out),
        (out,),
        out.zero_,
    )


def _code_bytes(case: Case) -> float:
    return case.numel * (case.bits or 1) / 8


OPERATIONS = (
    Operation(
        "quantise_ef", "accumulate_quantise", ("bits",),
        "(12 + bits / 8) d: gradient and residual read, residual and codes written",
        lambda case: 12.0 * case.numel + _code_bytes(case),
        "add_, abs, amax, divide, round, shifts and ors, multiply, subtract",
        _quantise_ef,
    ),
    Operation(
        "quantise_random", "quantise(key)", ("bits",),
        "(4 + bits / 8) d: the vector read, codes written",
        lambda case: 4.0 * case.numel + _code_bytes(case),
        "abs, amax, divide, rand, floor, shifts and ors",
        _quantise_random,
    ),
    Operation(
        "dequantise_mean", "dequantise_mean", ("bits", "ranks"),
        "(4 + N bits / 8) d: codes of N ranks read, the mean written",
        lambda case: 4.0 * case.numel + (case.ranks or 1) * _code_bytes(case),
        "for each rank shifts and masks, to float, subtract, multiply-add",
        _dequantise_mean,
    ),
    Operation(
        "natural_pack", "natural_pack", (),
        "5 d: the vector read, a byte an element written",
        lambda case: 5.0 * case.numel,
        "multiply, randint, add, shift, masks, to bytes",
        _natural_pack,
    ),
    Operation(
        "natural_add", "natural_add", (),
        "9 d: codes and the target read, the target written",
        lambda case: 9.0 * case.numel,
        "to int32, masks, shifts, add",
        _natural_add,
    ),
    Operation(
        "sign_pack", "sign_pack", (),
        "4.125 d: the vector read, a bit an element written",
        lambda case: 4.125 * case.numel,
        "compare, times powers of two, sum of eight",
        _sign_pack,
    ),
    Operation(
        "sign_add", "sign_add", (),
        "8.125 d: signs and the target read, the target written",
        lambda case: 8.125 * case.numel,
        "shifts, mask, to float, multiply, add, add",
        _sign_add,
    ),
    Operation(
        "quantise_lanes", "quantise_lanes", ("bits", "ranks"),
        "4 d + 4 words: the vector read, 32 // (bits + ceil(log2 N)) elements a word written",
        lambda case: 4.0 * case.numel + _lane_bytes(case),
        "multiply, round, to int32, a shift and an add for each lane",
        _quantise_lanes,
    ),
    Operation(
        "lanes_add", "lanes_add", ("bits", "ranks"),
        "8 d + 4 words: words and the target read, the target written",
        lambda case: 8.0 * case.numel + _lane_bytes(case),
        "add, for each lane shift, mask, subtract, to float, multiply, add",
        _lanes_add,
    ),
)  # fmt: skip
