"""Every operation of the table, on every backend, against the reference.

One table: a row for each operation makes runs of it (arguments from seeded data, fresh for every
backend), and what they give is compared entry by entry: to the last bit, unless the result is in
``reference.TOLERANCES``. An operation without a row fails the suite.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hvd_greco import kernels
from hvd_greco.errors import WireError
from hvd_greco.kernels import dispatch, portable, portable_linalg, portable_quant, reference

cpu = pytest.importorskip("hvd_greco.kernels.cpu")

DTYPES = (torch.float32, torch.float64)
SMALL = (1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 4095, 4096, 4097)
LARGE = (65_535, 65_536, 65_537, 131_073, 300_001)
KINDS = ("gauss", "heavy", "constant", "sparse", "ties", "special", "rare", "subnormal", "huge")
KEY = (0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210)
#: Served by the table itself, the same for every backend, unless it asks one.
PORTABLE = (portable, portable_quant, portable_linalg)


# -- data ------------------------------------------------------------------------------------


def vector_of(kind: str, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Entries of one kind; the same for the same arguments."""
    rng, limits = np.random.default_rng((seed, numel, KINDS.index(kind))), torch.finfo(dtype)
    values = rng.standard_normal(numel)
    if kind == "heavy":
        values = values / rng.uniform(1e-6, 1, numel) ** 2
    elif kind == "constant":
        values = np.full(numel, -3.0)
    elif kind == "sparse":
        values[rng.random(numel) < 0.999] = 0
    elif kind == "ties":
        values = rng.integers(-2, 3, numel).astype(np.float64)
    elif kind == "subnormal":
        values = values * limits.tiny / 4
    elif kind == "huge":
        values = np.clip(values / 3, -1, 1) * limits.max
    elif kind == "special":
        values[rng.random(numel) < 0.2] = np.inf
        values[rng.random(numel) < 0.1] = -np.inf
        values[rng.random(numel) < 0.1] = np.nan
    elif kind == "rare":  # among finite numbers, far apart
        values[rng.random(numel) < 0.003] = np.nan
        values[rng.random(numel) < 0.002] = -np.inf
    return torch.from_numpy(values).to(dtype)


@dataclass
class Data:
    """What a row makes its runs from."""

    kind: str
    numel: int
    dtype: torch.dtype
    seed: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        label = f"{self.kind} {self.numel} {self.dtype} {self.seed}"
        self.rng = random.Random(zlib.crc32(label.encode()))

    def vector(self, which: int = 0, numel: int | None = None) -> torch.Tensor:
        """A vector of the kind; another one for each ``which``."""
        size = self.numel if numel is None else numel
        return vector_of(self.kind, size, self.dtype, self.seed + 97 * which)

    def ks(self) -> list[int]:
        """How many to select: the ends, the middle, and the usual 1 %."""
        numel = self.numel
        if numel >= LARGE[0]:
            return sorted({max(1, numel // 100), self.rng.choice((1, numel // 2 + 1, numel))})
        return sorted({1, max(1, numel // 100), numel // 2 + 1, max(1, numel - 1), numel})

    def some(self, count: int, **options: Any) -> list[Any]:
        """``count`` of the combinations of options, other ones for other data; of large data 1."""
        count = count if self.numel < LARGE[0] else 1
        every = [
            types.SimpleNamespace(**dict(zip(options, values, strict=True)))
            for values in itertools.product(*options.values())
        ]
        return self.rng.sample(every, min(count, len(every)))

    @property
    def buckets(self) -> list[int]:
        """Buckets, down to one element (of little use for large vectors, and slow to check)."""
        return [1, 100, 512, self.numel + 7] if self.numel < 600 else [100, 512, self.numel + 7]


# -- results ---------------------------------------------------------------------------------


@dataclass
class Result:
    """One tensor that an operation gave.

    Attributes:
        value: the tensor.
        bound: with a tolerance: the largest number that went into each entry.
        of: entries that mean something; the others may be anything.
    """

    value: torch.Tensor
    bound: torch.Tensor | float | None = None
    of: torch.Tensor | None = None


Outcome = dict[str, Result]
Run = tuple[str, Callable[[], Outcome]]
Row = Callable[[Data], Iterator[Run]]
ROWS: dict[str, Row] = {}


def row(function: Row) -> Row:
    """Enter a row under the name of its operation."""
    ROWS[function.__name__.removeprefix("runs_of_")] = function
    return function


def pattern(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of all entries; one NaN is like another."""
    if not tensor.is_floating_point():
        return tensor
    whole = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.nan, tensor).view(whole)


def assert_same(found: Result, expected: Result, label: str) -> None:
    """To the last bit, where it means something."""
    a, b = found.value, expected.value
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{label}: {a.dtype} {tuple(a.shape)}"
    if expected.of is not None:
        a, b = a[expected.of], b[expected.of]
    if not torch.equal(pattern(a), pattern(b)):
        at = (pattern(a) != pattern(b)).reshape(-1).nonzero().flatten()
        i = int(at[0])
        first = f"{a.reshape(-1)[i].item()!r}, expected {b.reshape(-1)[i].item()!r}"
        raise AssertionError(f"{label}: {at.numel()} of {a.numel()} differ, [{i}] is {first}")


def assert_near(found: Result, expected: Result, ulps: float, label: str) -> None:
    """Within ``ulps`` units in the last place of ``bound``, and of a subnormal number."""
    assert (found.value.dtype, found.value.shape) == (expected.value.dtype, expected.value.shape)
    limits = torch.finfo(expected.value.dtype)
    a, b = found.value.double(), expected.value.double()
    bound = torch.as_tensor(b.abs() if expected.bound is None else expected.bound).double()
    allowed = bound.clamp(max=limits.max) * ulps * limits.eps + ulps * limits.tiny * limits.eps
    # What is not finite, or may round to what is not, need only be so on both.
    open_ended = ~(bound * (1 + ulps * limits.eps) < limits.max)
    good = ((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()) | open_ended
    if expected.of is not None:
        good |= ~expected.of
    if not bool(good.all()):
        i = int((~good).reshape(-1).nonzero()[0])
        first = f"{a.reshape(-1)[i].item()!r}, expected {b.reshape(-1)[i].item()!r}"
        raise AssertionError(f"{label}: {int((~good).sum())} of {a.numel()}, [{i}] is {first}")


def compare(
    operation: str,
    found: Outcome,
    expected: Outcome,
    label: str,
    tolerances: dict[str, tuple[float, float]] = reference.TOLERANCES,
) -> None:
    """Against the reference: each result as the table of tolerances has it."""
    assert found.keys() == expected.keys()
    for name in expected:
        allowed = tolerances.get(f"{operation}.{name}")
        where = f"{label}: {name}"
        if allowed is None:
            assert_same(found[name], expected[name], where)
        else:
            ulps = allowed[expected[name].value.dtype == torch.float64]
            assert_near(found[name], expected[name], ulps, where)


# -- rows: sparsifiers -----------------------------------------------------------------------


def sums(data: Data) -> Iterator[tuple[str, Callable[[], tuple[Any, ...]]]]:
    """Gradient, residual, scale and out of ``accumulate`` and the like, in all their relations."""
    out_dtype = data.dtype
    for option in data.some(
        3,
        where=("apart", "residual", "gradient", "both"),
        gradient=(torch.float16, torch.bfloat16, *DTYPES),
        scale=(1.0, 1 / 1024, 0.3),
    ):
        # Only a gradient of the same dtype can be the memory of the sum.
        dtype = out_dtype if option.where in ("gradient", "both") else option.gradient

        def make(option: Any = option, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
            gradient, residual = data.vector(1).to(dtype), data.vector(2)
            # Conversion to bf16 makes NaN of several patterns, and which one a sum of two has is
            # the processor's affair.
            gradient[gradient.isnan()] = torch.nan
            residual = gradient if option.where == "both" else residual
            out = {
                "apart": torch.full((data.numel,), 7.0, dtype=out_dtype),
                "residual": residual,
                "gradient": gradient,
                "both": gradient,
            }[option.where]
            return gradient, residual, option.scale, out

        yield f"out={option.where} gradient={dtype} scale={option.scale}", make


@row
def runs_of_accumulate(data: Data) -> Iterator[Run]:
    for label, make in sums(data):

        def run(make: Callable[[], tuple[Any, ...]] = make) -> Outcome:
            gradient, residual, scale, out = make()
            histogram = kernels.accumulate(gradient, residual, scale, out)
            return {
                "out": Result(out),
                "counts": Result(histogram.counts),
                "energies": Result(histogram.energies),
            }

        yield label, run


@row
def runs_of_accumulate_select(data: Data) -> Iterator[Run]:
    for label, make in sums(data):
        for option in data.some(2, k=data.ks(), clear=(False, True)):

            def run(make: Callable[[], tuple[Any, ...]] = make, option: Any = option) -> Outcome:
                gradient, residual, scale, out = make()
                positions, values = kernels.accumulate_select(
                    gradient, residual, scale, out, option.k, option.clear
                )
                return {
                    "positions": Result(positions), "values": Result(values), "out": Result(out)
                }  # fmt: skip

            yield f"{label} k={option.k} clear={option.clear}", run


@row
def runs_of_accumulate_select_many(data: Data) -> Iterator[Run]:
    """Vectors of several lengths, and of one dtype and scale, or not."""
    for option in data.some(
        3, vectors=(1, 3, 7), mixed=(False, True), clear=(False, True), residual=(True, False)
    ):

        def run(option: Any = option) -> Outcome:
            lengths = [max(1, data.numel - 11 * i) for i in range(option.vectors)]
            gradients = [data.vector(2 * i, n) for i, n in enumerate(lengths)]
            if option.mixed:
                gradients[1:2] = [g.half().where(g == g, torch.nan) for g in gradients[1:2]]
            residuals = [data.vector(2 * i + 1, n) for i, n in enumerate(lengths)]
            outs = residuals if option.residual else [torch.empty_like(r) for r in residuals]
            scales = [0.25 if option.mixed and i == 2 else 0.3 for i in range(option.vectors)]
            ks = [max(1, n // (i + 2)) for i, n in enumerate(lengths)]
            found = kernels.accumulate_select_many(
                gradients, residuals, scales, outs, ks, option.clear
            )
            outcome = {f"out {i}": Result(out) for i, out in enumerate(outs)}
            for i, (positions, values) in enumerate(found):
                outcome |= {f"positions {i}": Result(positions), f"values {i}": Result(values)}
            return outcome

        yield str(option), run


@row
def runs_of_take_topk(data: Data) -> Iterator[Run]:
    for k in data.ks():
        for clear in (False, True):

            def run(k: int = k, clear: bool = clear) -> Outcome:
                vector = data.vector()
                positions, values = kernels.take_topk(vector, k, clear)
                return {
                    "positions": Result(positions),
                    "values": Result(values),
                    "vector": Result(vector),
                }

            yield f"k={k} clear={clear}", run


@row
def runs_of_select_topk(data: Data) -> Iterator[Run]:
    for k in data.ks():
        yield f"k={k}", lambda k=k: {"positions": Result(kernels.select_topk(data.vector(), k))}


@row
def runs_of_select_sampled(data: Data) -> Iterator[Run]:
    """How many is up to the sample; these must be the largest, down to some magnitude."""
    for k in data.ks():

        def run(k: int = k) -> Outcome:
            vector = data.vector()
            positions = kernels.select_sampled(vector, k)
            count, nonzero = positions.numel(), int((vector != 0).sum())
            assert min(0.8 * k, nonzero) <= count <= k
            wanted = reference.select_topk(vector, max(1, count))
            same = positions if count else wanted
            return {
                "zeros": Result((vector[positions] == 0).sum()),
                "unlike the largest": Result((same != wanted).sum()),
            }

        yield f"k={k}", run


def positions_of(data: Data, which: int, k: int | None = None) -> torch.Tensor:
    """Distinct positions, ascending; those where a block of 65,536 begins and ends among them."""
    k = data.rng.randint(1, data.numel) if k is None else k
    every = np.random.default_rng((which, data.numel)).permutation(data.numel)
    edge = np.isin((every + 1) % 65_536, (0, 1)) & (every > 0)
    chosen = np.concatenate((every[edge], every[~edge]))[:k]
    return torch.tensor(np.sort(chosen).tolist(), dtype=torch.int64)


@row
def runs_of_scatter_add(data: Data) -> Iterator[Run]:
    for option in data.some(3, payloads=(1, 2, 5), alpha=(1.0, 0.25, 1 / 3)):
        wanted = [positions_of(data, i) for i in range(option.payloads)]

        def run(wanted: list[torch.Tensor] = wanted, alpha: float = option.alpha) -> Outcome:
            out = data.vector()
            payloads = [(p, data.vector(i + 1, p.numel())) for i, p in enumerate(wanted)]
            bound = out.abs().double()
            for p, v in payloads:
                bound[p] += v.abs().double() * alpha
            kernels.scatter_add(out, payloads, alpha)
            return {"out": Result(out, bound)}

        yield f"payloads={option.payloads} alpha={option.alpha}", run


def _packs(form: str) -> Row:
    def runs(data: Data) -> Iterator[Run]:
        for k in {0, *data.ks()}:
            indices = positions_of(data, k, k)
            yield (
                f"k={k}",
                lambda indices=indices: {
                    "bytes": Result(getattr(kernels, f"pack_{form}")(indices, data.numel))
                },
            )

    return runs


def _unpacks(form: str) -> Row:
    def runs(data: Data) -> Iterator[Run]:
        for k in {0, *data.ks()}:
            packed = getattr(reference, f"pack_{form}")(positions_of(data, k, k), data.numel)
            unpack = getattr(kernels, f"unpack_{form}")
            yield (
                f"k={k}",
                lambda packed=packed, k=k, unpack=unpack: {
                    "positions": Result(unpack(packed, data.numel, k))
                },
            )

    return runs


for _form in ("block_offsets", "int32", "bitmap"):
    ROWS[f"pack_{_form}"], ROWS[f"unpack_{_form}"] = _packs(_form), _unpacks(_form)


@row
def runs_of_all_finite(data: Data) -> Iterator[Run]:
    for dtype in (data.dtype, torch.float16, torch.bfloat16):
        vector = data.vector().to(dtype)
        yield str(dtype), lambda vector=vector: {"finite": Result(kernels.all_finite(vector))}


@row
def runs_of_shared_indices(data: Data) -> Iterator[Run]:
    # The reference draws in Python: a few thousand numbers will do.
    for k in {0, *(k for k in data.ks() if k < 5000)}:
        yield (
            f"k={k}",
            lambda k=k: {
                "positions": Result(kernels.shared_indices(KEY, data.numel, k, torch.device("cpu")))
            },
        )


# -- rows: quantisers ------------------------------------------------------------------------


def buffer_of(numel: int, bits: int) -> torch.Tensor:
    """Room for codes, not zero: every byte must be written."""
    return torch.full((kernels.packed_bytes(numel, bits),), 0xA5, dtype=torch.uint8)


def spread(scales: torch.Tensor, bucket: int, numel: int) -> torch.Tensor:
    """The scale of each element."""
    return scales.repeat_interleave(min(bucket, numel))[:numel]


def unpacked(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """Codes, by the reference."""
    return reference.unpack_bits(packed, bits, numel)


def largest(vector: torch.Tensor, bucket: int) -> torch.Tensor:
    """Exact scales, the same whoever takes them."""
    return reference.bucket_scales(vector, bucket, "max")


@row
def runs_of_bucket_scales(data: Data) -> Iterator[Run]:
    for bucket in data.buckets:
        for norm in ("max", "l2"):

            def run(bucket: int = bucket, norm: str = norm) -> Outcome:
                scales = kernels.bucket_scales(data.vector(), bucket, norm)
                finite = largest(data.vector(), bucket).isfinite()
                assert not bool(scales[~finite].isfinite().any())
                assert bool((scales >= largest(data.vector(), bucket))[finite].all())
                return {norm: Result(scales, of=finite), "finite": Result(scales.isfinite())}

            yield f"bucket={bucket} {norm}", run


@row
def runs_of_quantise_pack(data: Data) -> Iterator[Run]:
    def codes(packed: torch.Tensor, scales: torch.Tensor, option: Any) -> Outcome:
        found = unpacked(packed, option.bits, data.numel)
        assert int(found.max()) <= 2**option.bits - 2
        finite = spread(scales, option.bucket, data.numel).isfinite()
        outcome = {"codes": Result(found, of=finite)}
        if bool(finite.all()):
            outcome["bytes"] = Result(packed)  # bits beyond the last code as well
        return outcome

    for option in data.some(4, bucket=data.buckets, bits=range(2, 9), key=(None, KEY)):

        def run(option: Any = option) -> Outcome:
            vector, packed = data.vector(), buffer_of(data.numel, option.bits)
            scales = largest(vector, option.bucket)
            kernels.quantise_pack(vector, scales, option.bucket, option.bits, option.key, packed)
            return codes(packed, scales, option)

        yield f"bucket={option.bucket} bits={option.bits} key={option.key}", run


def quantised(
    data: Data, option: Any, run: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
) -> Outcome:
    """Scales, codes and what is left of a run that writes all of them.

    With l2, scales differ in their last bits, and a code may then too: the law is checked that
    what is left and what was sent add up.
    """
    numel, bits, bucket = data.numel, option.bits, option.bucket
    scales = torch.full((-(-numel // bucket),), torch.nan, dtype=data.dtype)
    packed = buffer_of(numel, bits)
    vector = run(scales, packed, option)
    return outcome_of(vector, scales, packed, option, numel)


def outcome_of(
    vector: torch.Tensor, scales: torch.Tensor, packed: torch.Tensor, option: Any, numel: int
) -> Outcome:
    codes = unpacked(packed, option.bits, numel)
    assert int(codes.max()) <= 2**option.bits - 2
    each = spread(scales, option.bucket, numel)
    finite = each.isfinite()
    outcome = {"finite": Result(scales.isfinite())}
    if option.norm == "max":
        outcome["codes"] = Result(codes, of=finite)
        outcome["scales"] = Result(scales, of=scales.isfinite())
        outcome["vector"] = Result(vector, each.abs(), of=finite)
    else:
        outcome["l2"] = Result(scales, of=scales.isfinite())
        # One bit of a scale may move a value by a whole step: put back what was sent.
        levels = 2 ** (option.bits - 1) - 1
        sent = (codes.double() - levels) / levels * each.double()
        whole = vector.double() + (sent if option.leave else 0)
        bound = torch.where(finite, each.double() * 2, 0).clamp(max=torch.finfo(vector.dtype).max)
        outcome["whole"] = Result(whole.to(vector.dtype), bound, of=finite)
    return outcome


@row
def runs_of_quantise(data: Data) -> Iterator[Run]:
    for option in data.some(
        4, bucket=data.buckets, bits=range(2, 9), key=(None, KEY), norm=("max", "l2"),
        leave=(False, True),
    ):  # fmt: skip

        def run(scales: torch.Tensor, packed: torch.Tensor, option: Any) -> torch.Tensor:
            vector = data.vector()
            kernels.quantise(
                vector, option.bucket, option.norm, option.bits, option.key, scales, packed,
                option.leave,
            )  # fmt: skip
            return vector

        yield str(option), lambda option=option, run=run: quantised(data, option, run)


@row
def runs_of_accumulate_quantise(data: Data) -> Iterator[Run]:
    for label, make in sums(data):
        for option in data.some(
            2, bucket=data.buckets, bits=range(2, 9), key=(None, KEY), norm=("max", "l2"),
            leave=(True,),
        ):  # fmt: skip

            def run(
                scales: torch.Tensor,
                packed: torch.Tensor,
                option: Any,
                make: Callable[[], tuple[Any, ...]] = make,
            ) -> torch.Tensor:
                gradient, residual, scale, out = make()
                kernels.accumulate_quantise(
                    gradient, residual, scale, out, option.bucket, option.norm, option.bits,
                    option.key, scales, packed,
                )  # fmt: skip
                return out

            yield f"{label} {option}", lambda option=option, run=run: quantised(data, option, run)


def sent(data: Data, option: Any, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends: scales and codes."""
    vector, packed = data.vector(which), buffer_of(data.numel, option.bits)
    scales = largest(vector, option.bucket)
    reference.quantise_pack(vector, scales, option.bucket, option.bits, KEY, packed)
    return scales, packed


@row
def runs_of_dequantise_mean(data: Data) -> Iterator[Run]:
    for option in data.some(3, bucket=data.buckets, bits=range(2, 9), payloads=(0, 1, 2, 5)):
        payloads = [sent(data, option, which) for which in range(option.payloads)]
        bound = torch.zeros(data.numel, dtype=torch.float64)
        parts, starts, at = [], [], 0
        for scales, packed in payloads:
            bound += spread(scales, option.bucket, data.numel).abs().double()
            starts.append(at)
            parts += [scales.view(torch.uint8), packed]
            at += sum(part.numel() for part in parts[-2:])
            parts.append(torch.zeros(-at % 8, dtype=torch.uint8))
            at += -at % 8
        buffer = torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])
        scale_bytes = -(-data.numel // option.bucket) * data.vector(0, 1).element_size()
        # As many as sent, more (some sent nothing), and a power of two.
        ranks = data.rng.choice((max(1, option.payloads), option.payloads + 1, 8))

        def run(
            option: Any = option,
            ranks: int = ranks,
            buffer: torch.Tensor = buffer,
            starts: list[int] = starts,
            scale_bytes: int = scale_bytes,
            bound: torch.Tensor = bound,
        ) -> Outcome:
            out = torch.full((data.numel,), 7.0, dtype=data.dtype)
            kernels.dequantise_mean(
                buffer, starts, scale_bytes, option.bucket, option.bits, ranks, out
            )
            return {"out": Result(out, bound)}

        yield f"{option} ranks={ranks}", run


@row
def runs_of_dequantise_add(data: Data) -> Iterator[Run]:
    for option in data.some(3, bucket=data.buckets, bits=range(2, 9), alpha=(1.0, -1.0, 1 / 3)):
        scales, packed = sent(data, option, 1)

        def run(
            option: Any = option, scales: torch.Tensor = scales, packed: torch.Tensor = packed
        ) -> Outcome:
            out = data.vector()
            bound = out.abs().double() + spread(scales, option.bucket, data.numel).abs().double()
            kernels.dequantise_add(packed, scales, option.bucket, option.bits, option.alpha, out)
            return {"out": Result(out, bound)}

        yield str(option), run


def codes_of(data: Data, bits: int) -> torch.Tensor:
    rng = np.random.default_rng((bits, data.numel))
    return torch.from_numpy(rng.integers(0, 2**bits, data.numel).astype(np.uint8))


@row
def runs_of_pack_bits(data: Data) -> Iterator[Run]:
    for bits in range(1, 9):
        yield (
            f"bits={bits}",
            lambda bits=bits: {"bytes": Result(kernels.pack_bits(codes_of(data, bits), bits))},
        )


@row
def runs_of_unpack_bits(data: Data) -> Iterator[Run]:
    for bits in range(1, 9):
        packed = reference_packed(codes_of(data, bits), bits)
        yield (
            f"bits={bits}",
            lambda bits=bits, packed=packed: {
                "codes": Result(kernels.unpack_bits(packed, bits, data.numel))
            },
        )


def reference_packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    packed = buffer_of(codes.numel(), bits)
    reference.pack_bits(codes, bits, packed)
    return packed


WIDTHS = [(2, 2), (2, 4), (4, 8), (4, 10), (8, 10), (8, 31), (3, 5), (5, 16)]


@row
def runs_of_quantise_lanes(data: Data) -> Iterator[Run]:
    for option in data.some(3, widths=WIDTHS, key=(None, KEY)):

        def run(option: Any = option) -> Outcome:
            vector, (bits, width) = data.vector(), option.widths
            scale = largest(vector, data.numel)[0]
            words = torch.full((kernels.lane_words(data.numel, width),), -7, dtype=torch.int32)
            kernels.quantise_lanes(vector, scale, bits, width, option.key, words)
            finite = torch.full_like(words, bool(scale.isfinite()), dtype=torch.bool)
            return {"words": Result(words, of=finite)}

        yield str(option), run


@row
def runs_of_lanes_add(data: Data) -> Iterator[Run]:
    for option in data.some(3, widths=[w for w in WIDTHS if w[1] > w[0]], alpha=(1.0, 1 / 3)):
        bits, width = option.widths
        ranks = min(5, 1 << (width - bits))
        rng = np.random.default_rng((bits, width))
        levels, count = 2 ** (bits - 1) - 1, kernels.lane_words(data.numel, width)
        words = np.zeros(count, np.int64)
        lanes = rng.integers(-ranks * levels, ranks * levels + 1, data.numel)
        lanes[: min(3, data.numel)] = -ranks * levels  # all that borrowing can do
        for i in range(32 // width):
            part = lanes[i * count : (i + 1) * count]
            words[: part.size] += part << (width * i)
        packed = torch.from_numpy(((words + 2**31) % 2**32 - 2**31).astype(np.int32))

        def run(option: Any = option, packed: torch.Tensor = packed, ranks: int = ranks) -> Outcome:
            out, scale = data.vector(), torch.tensor(0.7, dtype=data.dtype)
            bound = out.abs().double() + ranks * option.alpha
            kernels.lanes_add(packed, scale, *option.widths, ranks, option.alpha, out)
            return {"out": Result(out, bound)}

        yield f"{option} ranks={ranks}", run


@row
def runs_of_natural_pack(data: Data) -> Iterator[Run]:
    for above in (0, 3):

        def run(above: int = above) -> Outcome:
            vector = data.vector()
            peak = largest(vector, data.numel)[0].nan_to_num(1, 1, 1)
            lowest = -126 if data.dtype == torch.float32 else -1022
            exponent = (torch.frexp(peak).exponent + above).clamp(min=lowest).to(torch.int32)
            codes = buffer_of(data.numel, 8)
            kernels.natural_pack(vector, exponent, KEY, codes)
            return {"codes": Result(codes, of=vector.isfinite())}

        yield f"exponent +{above}", run


@row
def runs_of_natural_add(data: Data) -> Iterator[Run]:
    for factor in (1.0, 2.0**-140, 3e5):

        def run(factor: float = factor) -> Outcome:
            out = data.vector()
            bound = out.abs().double() + factor
            kernels.natural_add(codes_of(data, 8), factor, out)
            return {"out": Result(out, bound)}

        yield f"factor={factor}", run


@row
def runs_of_mean_magnitude(data: Data) -> Iterator[Run]:
    yield "", lambda: {"mean": Result(kernels.mean_magnitude(data.vector()))}


@row
def runs_of_sign_pack(data: Data) -> Iterator[Run]:
    def run() -> Outcome:
        packed, vector = buffer_of(data.numel, 1), data.vector()
        vector[::7] *= -0.0
        kernels.sign_pack(vector, packed)
        return {"bytes": Result(packed)}

    yield "", run


@row
def runs_of_sign_add(data: Data) -> Iterator[Run]:
    packed = reference_packed(codes_of(data, 1), 1)
    for alpha in (1.0, -1 / 3):

        def run(alpha: float = alpha) -> Outcome:
            out, scale = data.vector(), torch.tensor(0.7, dtype=data.dtype)
            bound = out.abs().double() + 1
            kernels.sign_add(packed, scale, alpha, out)
            return {"out": Result(out, bound)}

        yield f"alpha={alpha}", run


# -- rows: low-rank methods ------------------------------------------------------------------


def matrix_of(data: Data, which: int, *shape: int) -> torch.Tensor:
    """Of moderate size, so that no sum of products overflows; that is not what these are for."""
    kind = "gauss" if data.kind in ("special", "rare", "huge", "subnormal") else data.kind
    numel = int(np.prod(shape))
    return vector_of(kind, numel, data.dtype, data.seed + which).view(*shape)


@row
def runs_of_orthonormalise(data: Data) -> Iterator[Run]:
    for batch, rank in ((1, 1), (3, 4), (1, 9)):
        if rank > data.numel or (rank > 4 and data.numel > 100_000):
            continue

        def run(batch: int = batch, rank: int = rank) -> Outcome:
            stack = vector_of("gauss", batch * rank * data.numel, data.dtype, data.seed)
            stack = stack.view(batch, rank, data.numel)
            if data.kind == "ties" and rank > 2:
                stack[:, 2] = stack[:, 0] - 2 * stack[:, 1]
            elif data.kind == "sparse":
                stack[:, rank // 2] = 0
            elif data.kind == "special":
                stack[0, 0, 0], stack[-1, -1, -1] = torch.inf, torch.nan
            elif data.kind == "huge":
                stack *= torch.finfo(data.dtype).max / 100
            # Square matrices need not be well-conditioned, and then rounding shows.
            near = 1.0 if data.numel > 2 * rank else 1e3
            found = kernels.orthonormalise(stack)
            return {"rows": Result(found, near), "zero": Result(found.any(dim=2))}

        yield f"{batch}x{rank}x{data.numel}", run


@row
def runs_of_shared_uniform(data: Data) -> Iterator[Run]:
    numel = min(data.numel, 5000)  # the reference draws in Python
    like = torch.empty(0, dtype=data.dtype)
    yield "", lambda: {"numbers": Result(kernels.shared_uniform(KEY, 1, numel, like))}


def _products(name: str, shapes: Callable[[int, int, int], list[tuple[int, int]]]) -> Row:
    """Rows for products of two matrices: ``r``, ``n`` and ``m`` are their sizes."""

    def runs(data: Data) -> Iterator[Run]:
        for rank in (1, 4):
            n, m = max(1, data.numel // 40), min(40, data.numel)

            def run(rank: int = rank, n: int = n, m: int = m) -> Outcome:
                first, second, result = shapes(rank, n, m)
                a, b = matrix_of(data, 1, *first), matrix_of(data, 2, *second)
                out = torch.full(result, 7.0, dtype=data.dtype)
                bound = getattr(reference, name)(a.abs(), b.abs(), torch.empty_like(out)).double()
                same = getattr(kernels, name)(a, b, out)
                assert same is out
                return {"out": Result(out, bound)}

            yield f"{rank} {n}x{m}", run

    return runs


ROWS["project_rows"] = _products("project_rows", lambda r, n, m: [(r, m), (n, m), (r, n)])
ROWS["project_columns"] = _products("project_columns", lambda r, n, m: [(r, n), (n, m), (r, m)])
ROWS["low_rank"] = _products("low_rank", lambda r, n, m: [(r, n), (r, m), (n, m)])


@row
def runs_of_add_low_rank(data: Data) -> Iterator[Run]:
    n, m = max(1, data.numel // 40), min(40, data.numel)
    for rank, alpha in ((1, -1.0), (4, 0.3)):

        def run(rank: int = rank, alpha: float = alpha) -> Outcome:
            target = matrix_of(data, 0, n, m)
            left, right = matrix_of(data, 1, rank, n), matrix_of(data, 2, rank, m)
            bound = target.abs().double()
            bound += reference.low_rank(left.abs(), right.abs(), torch.empty_like(target)).double()
            kernels.add_low_rank(target, left, right, alpha)
            return {"out": Result(target, bound)}

        yield f"{rank} alpha={alpha}", run


# -- rows: error curves ----------------------------------------------------------------------


def finite(data: Data) -> torch.Tensor:
    """Finite, with squares that fp64 holds: what error curves are for."""
    kind = data.kind if data.kind in ("heavy", "constant", "sparse", "ties") else "gauss"
    return vector_of(kind, data.numel, data.dtype, data.seed)


@row
def runs_of_topk_errors(data: Data) -> Iterator[Run]:
    vector = finite(data)
    histogram = kernels.accumulate(vector, vector, 0.0, torch.empty_like(vector))
    ks = [0, *data.ks()]
    yield (
        f"ks={ks}",
        lambda: {
            "errors": Result(
                kernels.topk_errors(histogram, ks), float(vector.double().square().sum())
            )
        },
    )


@row
def runs_of_quantiser_errors(data: Data) -> Iterator[Run]:
    for option in data.some(3, bucket=data.buckets, norm=("max", "l2"), nearest=(False, True)):

        def run(option: Any = option) -> Outcome:
            vector = finite(data)
            scales = reference.bucket_scales(vector, option.bucket, option.norm).double()
            energy = spread(scales, option.bucket, data.numel).square().sum()
            bound = torch.tensor([float(energy) / (2 ** (bits - 1) - 1) for bits in range(2, 9)])
            found = kernels.quantiser_errors(vector, option.bucket, option.norm, option.nearest)
            return {str(data.dtype).removeprefix("torch."): Result(found, bound.double())}

        yield str(option), run


@row
def runs_of_rank_errors(data: Data) -> Iterator[Run]:
    for rank in (1, 4):
        factor = matrix_of(data, 0, rank, max(1, data.numel // 4))
        energy = float(factor.double().square().sum()) * 1.25
        yield (
            f"rank={rank}",
            lambda factor=factor, energy=energy: {
                "errors": Result(kernels.rank_errors(energy, factor), energy)
            },
        )


# -- the suite -------------------------------------------------------------------------------

#: Of the table, and no operations.
HELPERS = {
    "add", "backend_of", "register_backend", "blocks", "lane_words", "packed_bytes", "power_of_two",
    "squared_norm",
}  # fmt: skip


def public(module: types.ModuleType) -> set[str]:
    """Names of the functions that a module has and does not hide."""
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType)
        and not name.startswith("_")
        and value.__module__.startswith("hvd_greco.kernels")
    }


#: Rounded, but in one way: ranks that decode must have equal results whatever serves them.
ALIKE = {
    "scatter_add.out",
    "quantise.vector",
    "accumulate_quantise.vector",
    "dequantise_mean.out",
    "dequantise_add.out",
    "orthonormalise.rows",
}

#: Every operation of the table or of a backend, with or without a row.
OPERATIONS = sorted(public(kernels) - HELPERS)


def test_every_operation_has_a_row_and_a_reference() -> None:
    assert set(OPERATIONS) == ROWS.keys()
    assert public(reference) >= set(OPERATIONS)
    for module in (*PORTABLE, cpu):
        own = {n for n in public(module) if module is cpu or vars(module)[n].__module__.endswith(
            module.__name__.rpartition(".")[2])}  # fmt: skip
        assert own - HELPERS <= set(OPERATIONS), f"{module.__name__} has what the table lacks"
    results = {name.partition(".")[0] for name in reference.TOLERANCES}
    assert results <= set(OPERATIONS)


@contextlib.contextmanager
def serving(backend: types.ModuleType | None) -> Iterator[None]:
    """Let one backend serve CPU tensors."""
    before = dispatch.backend_of("cpu")
    kernels.register_backend("cpu", backend)
    try:
        yield
    finally:
        kernels.register_backend("cpu", before)


def backends_of(operation: str) -> dict[str, types.ModuleType | None]:
    """Those that have it, by name; None is the portable one."""
    found: dict[str, types.ModuleType | None] = {"portable": None}
    if hasattr(cpu, operation):
        found["cpu"] = cpu
    return found


@contextlib.contextmanager
def reference_tables() -> Iterator[None]:
    """The reference serves everything, also what the table does without a backend."""
    with serving(reference), pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "shared_indices", reference.shared_indices)
        patch.setattr(portable_linalg, "shared_uniform", reference.shared_uniform)
        for name in ("all_finite", "pack_int32", "topk_errors", "rank_errors"):
            patch.setattr(kernels, name, getattr(reference, name))
        patch.setattr(kernels, "unpack_int32", reference.unpack_int32)
        yield


def check(
    operation: str, data: Data, others: dict[str, types.ModuleType | None] | None = None
) -> None:
    """Every run of a row, on ``others`` or else on all backends of this machine."""
    for label, run in ROWS[operation](data):
        where = f"{operation} {data.kind} {data.numel} {data.dtype} {label}"
        with reference_tables():
            expected = run()
        found = {}
        for name, backend in (others or backends_of(operation)).items():
            with serving(backend):
                found[name] = run()
            looser = reference.CUDA_TOLERANCES if name == "cuda" else {}
            tolerances = {**reference.TOLERANCES, **looser}
            compare(operation, found[name], expected, f"{where} on {name}", tolerances)
        for result in expected:
            if f"{operation}.{result}" in ALIKE and "cpu" in found:
                one, other = found["cpu"][result], found["portable"][result]
                assert_same(one, other, f"{where}: {result} on cpu and portable")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_agrees_with_the_reference(operation: str, kind: str, dtype: torch.dtype) -> None:
    # Half of the sizes for each kind and dtype, so that each size has nine of them.
    first = (KINDS.index(kind) + DTYPES.index(dtype)) % 2
    for numel in SMALL[first::2]:
        check(operation, Data(kind, numel, dtype))


@pytest.mark.parametrize("backend", ["portable", "cpu", "reference"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_code_that_is_never_used_is_refused(backend: str, bits: int) -> None:
    """In any payload, at both ends of what it holds."""
    numel, scales = 29, torch.ones(4)
    for guilty, at in itertools.product(range(3), (0, 8, numel - 1)):
        parts = []
        for payload in range(3):
            codes = torch.zeros(numel, dtype=torch.uint8)
            codes[at] = 2**bits - 1 if payload == guilty else 2**bits - 2
            packed = reference_packed(codes, bits)
            parts += [scales.view(torch.uint8), packed]
            parts.append(torch.zeros(-packed.numel() % 8, dtype=torch.uint8))
        starts = [i * (16 + parts[1].numel() + parts[2].numel()) for i in range(3)]
        innocent = [start for i, start in enumerate(starts) if i != guilty]
        out, buffer = torch.zeros(numel), torch.cat(parts)
        with serving({"portable": None, "cpu": cpu, "reference": reference}[backend]):
            kernels.dequantise_mean(buffer, innocent, 16, 8, bits, 2, out)
            with pytest.raises(WireError, match=f"code {2**bits - 1} received"):
                kernels.dequantise_mean(buffer, starts, 16, 8, bits, 3, out)
            with pytest.raises(WireError, match=f"code {2**bits - 1} received"):
                kernels.dequantise_add(parts[3 * guilty + 1], scales, 8, bits, 1.0, out)


@pytest.mark.parametrize("backend", ["portable", "cpu", "reference"])
def test_nothing_is_done_to_nothing(backend: str) -> None:
    """A layer without elements: no error, and no result but empty ones."""
    none, byte = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    with serving({"portable": None, "cpu": cpu, "reference": reference}[backend]):
        assert int(kernels.accumulate(none, none, 1.0, none).counts.sum()) == 0
        assert kernels.bucket_scales(none, 512, "l2").numel() == 0
        kernels.quantise_pack(none, none, 512, 4, KEY, byte)
        kernels.quantise(none, 512, "max", 4, KEY, none, byte, True)
        kernels.accumulate_quantise(none, none, 1.0, none, 512, "l2", 4, None, none, byte)
        kernels.dequantise_mean(byte, [0, 0], 0, 512, 4, 2, none)
        kernels.dequantise_add(byte, none, 512, 4, 1.0, none)
        kernels.scatter_add(none, [(torch.empty(0, dtype=torch.int64), none)])
        assert kernels.pack_bits(byte, 3).numel() == kernels.unpack_bits(byte, 3, 0).numel() == 0
        assert kernels.orthonormalise(torch.empty(2, 3, 0)).shape == (2, 3, 0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_agrees_with_the_reference_at_size(operation: str) -> None:
    """Large vectors: one kind and dtype each, others for every operation."""
    kinds, dtypes = itertools.cycle(KINDS), itertools.cycle(DTYPES)
    for _ in range(OPERATIONS.index(operation)):
        next(kinds), next(dtypes)
    place = OPERATIONS.index(operation)
    for numel in (LARGE[place % 3], LARGE[3 + place % 2]):
        check(operation, Data(next(kinds), numel, next(dtypes)))
