"""Every codec through the whole path on simulated ranks: one table, one suite."""

from __future__ import annotations

import importlib.util
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_greco import registry
from hvd_greco.codecs.acp import ACPCodec
from hvd_greco.codecs.base import Codec
from hvd_greco.codecs.dense import BF16Codec, DenseCodec
from hvd_greco.codecs.dgc import DGCCodec
from hvd_greco.codecs.natural import NaturalCodec
from hvd_greco.codecs.powersgd import PowerSGDCodec
from hvd_greco.codecs.qsgd import QSGDCodec
from hvd_greco.codecs.randomk import RandomKCodec
from hvd_greco.codecs.scatter_reduce import ScatterReduceCodec
from hvd_greco.codecs.shared_topk import SharedTopKCodec
from hvd_greco.codecs.sign import SignCodec
from hvd_greco.codecs.summable import SummableQuantCodec
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError
from hvd_greco.exchange.local import LocalMember, combine
from hvd_greco.layers import Layer
from hvd_greco.payload import Kind, Payload, Reduced
from hvd_greco.plan import Assignment, Plan
from simulate import at, context, gaussian, run

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_codec.py"


_loading = threading.Lock()


def example_codec() -> Codec:
    """The user's own codec of examples/, loaded as a user's module would be.

    Not at import: it registers itself, and other files' tables are of what the package has.
    """
    with _loading:  # simulated ranks are threads
        if "own_codec" not in sys.modules:
            spec = importlib.util.spec_from_file_location("own_codec", EXAMPLE)
            assert spec is not None
            assert spec.loader is not None
            sys.modules["own_codec"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["own_codec"])
        return sys.modules["own_codec"].TernCodec()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Row:
    """A codec at a level, and what may be expected of it.

    ``rounding``: how far the mean may be from dense, relative to the largest entry that went in;
    None for codecs that drop something.
    ``exact_bytes``: ``wire_bytes()`` is what is sent; else it is the most that may be.
    ``absent_keeps``: without a gradient, a rank's residual stays what it was.
    ``remembers``: with no gradient anywhere, there may be something to send all the same.
    """

    make: Any
    level: float | None
    rounding: float | None
    memory: str = "none"
    exact_bytes: bool = True
    absent_keeps: bool = True
    remembers: bool = False

    @property
    def feedback(self) -> bool:
        return self.memory == "ef"


ROWS = {
    "dense": Row(DenseCodec, None, 1e-6),
    "fp16": Row(lambda: DenseCodec("fp16"), None, 2e-3),
    "bf16": Row(BF16Codec, None, 1e-2),
    "example": Row(example_codec, None, None),
    "topk-all": Row(TopKCodec, 1.0, 1e-6, "ef"),
    "topk-half": Row(TopKCodec, 0.5, None, "ef"),
    "topk-1%": Row(TopKCodec, 0.01, None, "ef"),
    "randomk-all": Row(RandomKCodec, 1.0, 1e-6, "ef"),
    "randomk-10%": Row(RandomKCodec, 0.1, None, "ef"),
    "powersgd-4": Row(PowerSGDCodec, 4, None, "ef"),
    "powersgd-clamped": Row(PowerSGDCodec, 1000, None, "ef"),
    "acp-4": Row(ACPCodec, 4, None, "ef"),
    "topk-all-fp16": Row(lambda: TopKCodec("fp16"), 1.0, 2e-3, "ef"),
    "topk-5%-fp16": Row(lambda: TopKCodec("fp16"), 0.05, None, "ef"),
    "topk-all-q8": Row(lambda: TopKCodec("q8"), 1.0, 1e-2, "ef"),
    "topk-30%-q4": Row(lambda: TopKCodec("q4"), 0.3, None, "ef"),
    "topk-sampled": Row(lambda: TopKCodec("fp16", "sampled"), 0.1, None, "ef", False),
    "sharedtopk-all": Row(SharedTopKCodec, 1.0, 1e-6, "ef"),
    "sharedtopk-5%": Row(SharedTopKCodec, 0.05, None, "ef"),
    "dgc": Row(DGCCodec, 0.02, None, "dgc", absent_keeps=False, remembers=True),
    "dgc-ef": Row(DGCCodec, 0.02, None, "ef"),
    "topk-ef21": Row(TopKCodec, 0.1, None, "ef21", remembers=True),
    "qsgd-4-ef21": Row(QSGDCodec, 4, None, "ef21", remembers=True),
    "sign-ef21-sgdm": Row(SignCodec, None, None, "ef21-sgdm", remembers=True),
    "acp-2-ef21": Row(ACPCodec, 2, None, "ef21", remembers=True),
    "qsgd-8": Row(QSGDCodec, 8, 1e-2),
    "qsgd-4": Row(QSGDCodec, 4, None),
    "qsgd-3-l2": Row(lambda: QSGDCodec(bucket=64, norm="l2"), 3, None),
    "qsgd-8-ef": Row(QSGDCodec, 8, 1e-2, "ef"),
    "qsgd-2-ef": Row(lambda: QSGDCodec(bucket=100), 2, None, "ef"),
    "natural": Row(NaturalCodec, None, None),
    "natural-ef": Row(NaturalCodec, None, None, "ef"),
    "sign": Row(SignCodec, None, None, "ef"),
    "summable-8": Row(SummableQuantCodec, 8, 1e-2),
    "summable-4": Row(SummableQuantCodec, 4, None),
    "summable-3-ef": Row(SummableQuantCodec, 3, None, "ef"),
}
# The owner of a shard settles what coding its mean left out, with a gradient of its own or without.
ROWS["topk-all-scatter"] = Row(
    lambda: ScatterReduceCodec(TopKCodec()), 1.0, 1e-6, "ef", absent_keeps=False
)
ROWS["topk-10%-scatter"] = Row(
    lambda: ScatterReduceCodec(TopKCodec()), 0.1, None, "ef", absent_keeps=False
)
ROWS["qsgd-8-scatter"] = Row(lambda: ScatterReduceCodec(QSGDCodec()), 8, 2e-2)


def test_every_codec_and_memory_is_in_the_table() -> None:
    """What is registered later must come here as well."""
    tried = {row.make().name for row in ROWS.values()}
    assert {*registry.codecs()} <= tried
    assert {*registry.memories()} == {row.memory for row in ROWS.values()}


FEEDBACK = [name for name, row in ROWS.items() if row.feedback]
SIZES = (1, 2, 3, 4, 8)
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "odd": (37,),
    "matrix": (40, 30),
    "conv": (8, 4, 3, 3),
    "empty": (0, 5),
}


def build(row: Row, **options: Any) -> Any:
    """A constructor for ``simulate.run`` that assigns the codec to every layer, saving or not."""

    def make(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        codec = row.make()
        compressor = Compressor(
            pairs, codec, row.level, group=member, min_numel=0, **{"memory": row.memory, **options}
        )
        # Use the codec even where it saves nothing, so that tiny shapes go through it too.
        assignments = {
            slot.layer.name: Assignment(codec.name, row.level)
            if slot.layer.numel
            else Assignment("dense")
            for slot in compressor._directory.slots
        }
        compressor.plan = Plan(assignments, context=compressor.plan.context)
        return compressor

    return make


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_get_one_mean(name: str, size: int) -> None:
    gradients = gaussian(SHAPES, size, steps=3)
    outcomes = run(gradients, build(ROWS[name]), shuffle=True)
    for step in range(3):
        for layer in SHAPES:
            results = [outcome.results[step][layer] for outcome in outcomes]
            assert all(torch.equal(results[0], other) for other in results[1:])
            assert results[0].shape == SHAPES[layer]
            rounding = ROWS[name].rounding
            if rounding is not None:
                dense = sum(gradients[step][rank][layer] for rank in range(size)) / size
                if dense.numel():
                    # Relative to what went in: entries of opposite sign may cancel in the mean.
                    largest = max(gradients[step][r][layer].abs().max() for r in range(size))
                    assert (results[0] - dense).abs().max() <= rounding * largest


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost(name: str, size: int, dtype: torch.dtype) -> None:
    """The conservation law, op Sum: decoded + sum of e' = sum of g + sum of e. Case 8."""
    gradients = gaussian(SHAPES, size, steps=4, dtype=dtype)
    outcomes = run(gradients, build(ROWS[name]), average=False)
    for layer in (layer for layer, shape in SHAPES.items() if shape != (0, 5)):
        before = torch.zeros(SHAPES[layer], dtype=torch.float64)
        for step in range(4):
            put_in = sum(gradients[step][rank][layer].double() for rank in range(size)) + before
            after = sum(outcome.residuals[step][layer].double() for outcome in outcomes)
            decoded = outcomes[0].results[step][layer].double()
            tolerance = 1e-5 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(decoded + after, put_in, atol=tolerance * size, rtol=0)
            before = after


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_come_back_as_they_went(name: str, dtype: torch.dtype) -> None:
    """Case 4: bf16 in, bf16 out, whatever carries it."""
    gradients = gaussian({"w": (33, 9)}, 3, steps=2, dtype=dtype)
    outcomes = run(gradients, build(ROWS[name]))
    result = outcomes[0].results[0]["w"]
    assert result.dtype == dtype
    assert torch.equal(result, outcomes[2].results[0]["w"])
    if ROWS[name].rounding is not None:
        dense = sum(gradients[0][rank]["w"].double() for rank in range(3)) / 3
        bound = max(ROWS[name].rounding, {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 0))
        largest = max(gradients[0][rank]["w"].abs().max().double() for rank in range(3))
        assert (result.double() - dense).abs().max() <= bound * largest


@pytest.mark.parametrize("name", ROWS)
def test_zeros_stay_zeros(name: str) -> None:
    """Case 19."""
    zeros = [[{"w": torch.zeros(50, 7)} for _ in range(3)] for _ in range(2)]
    for outcome in run(zeros, build(ROWS[name])):
        for step in range(2):
            assert not outcome.results[step]["w"].any()
            residual = outcome.residuals[step]["w"]
            assert residual is None or not residual.any()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_scale_passes_through(name: str, scale: float) -> None:
    """Multiplying gradients by a power of two multiplies results: nothing is clipped or offset."""
    if name == "fp16":
        scale = 2.0**-6 if scale < 1 else 2.0**6
    else:
        scale = 2.0**-26 if scale < 1 else 2.0**26
    plain = gaussian({"w": (33, 9)}, 2, steps=2)
    scaled = [[{n: g * scale for n, g in rank.items()} for rank in step] for step in plain]
    first, second = run(plain, build(ROWS[name])), run(scaled, build(ROWS[name]))
    torch.testing.assert_close(
        second[0].results[1]["w"] / scale, first[0].results[1]["w"], rtol=2e-3, atol=1e-5
    )


@pytest.mark.parametrize("name", ROWS)
def test_layouts_do_not_matter(name: str) -> None:
    """A channels-last gradient meets a contiguous one of another rank element by element."""
    gradients = gaussian({"conv": (8, 4, 5, 3)}, 2, steps=2)
    expected = run(gradients, build(ROWS[name]))
    turned = [
        [
            {"conv": rank["conv"].to(memory_format=torch.channels_last) if r == 1 else rank["conv"]}
            for r, rank in enumerate(step)
        ]
        for step in gradients
    ]
    outcomes = run(turned, build(ROWS[name]))
    for step in range(2):
        for outcome in outcomes:
            assert torch.equal(outcome.results[step]["conv"], expected[0].results[step]["conv"])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["channels last", "transposed", "every other"])
def test_weights_agree_in_every_layout(name: str, dtype: torch.dtype, layout: str) -> None:
    """A rank without a gradient gets contiguous zeros; weights must agree to the last bit."""
    turn = {
        "channels last": lambda g: g.to(memory_format=torch.channels_last),
        "transposed": lambda g: g.transpose(0, 1),
        "every other": lambda g: g.repeat_interleave(2, dim=3)[..., ::2],
    }[layout]
    gradients: Any = gaussian({"conv": (8, 4, 5, 3)}, 3, steps=3, dtype=dtype)
    for step in range(3):
        for rank in range(3):
            gradients[step][rank]["conv"] = turn(gradients[step][rank]["conv"])
        gradients[step][step % 3]["conv"] = None
    outcomes = run(gradients, build(ROWS[name]), rate=0.3)
    for outcome in outcomes:
        parameter = outcome.parameters["conv"]
        assert torch.equal(parameter, outcomes[0].parameters["conv"])
        assert parameter.grad.stride() == parameter.stride()


def _heavy(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    # Cauchy: a few entries carry nearly all of the norm.
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return torch.tan(u * torch.pi).float().clamp(-1e6, 1e6)


VALUES: dict[str, Any] = {
    "constant": lambda generator, shape: torch.full(shape, 0.3),
    "heavy-tailed": _heavy,
    "huge": lambda generator, shape: 1e37 * torch.randn(shape, generator=generator),
    "tiny": lambda generator, shape: 1e-37 * torch.randn(shape, generator=generator),
    "subnormal": lambda generator, shape: 1e-41 * torch.randn(shape, generator=generator),
    "mostly zero": lambda generator, shape: (
        torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.02)
    ),
    "one entry": lambda generator, shape: torch.eye(*shape) * (torch.arange(shape[1]) == 7),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("values", VALUES)
def test_values_of_every_kind(name: str, values: str) -> None:
    """Cases 19 and 27: finite in, finite out, alike on all ranks, and nothing is lost."""
    generator = torch.Generator().manual_seed(5)
    gradients: Any = [
        [{"w": VALUES[values](generator, (40, 30))} for _ in range(3)] for _ in range(4)
    ]
    outcomes = run(gradients, build(ROWS[name]), average=False)
    largest = max(rank["w"].abs().max() for step in gradients for rank in step)
    before = torch.zeros(40, 30, dtype=torch.float64)
    for step in range(4):
        result = outcomes[0].results[step]["w"]
        if name == "fp16" and values == "huge":
            # fp16 on the wire ends at 65,504, as its docs say; what matters is that all see it.
            assert not any(o.results[step]["w"].isfinite().all() for o in outcomes)
            continue
        assert all(torch.equal(result, other.results[step]["w"]) for other in outcomes)
        assert result.isfinite().all()
        if ROWS[name].feedback:
            held = sum(outcome.residuals[step]["w"].double() for outcome in outcomes)
            put_in = sum(rank["w"].double() for rank in gradients[step]) + before
            error = (result.double() + held - put_in).abs().max()
            assert error <= 1e-4 * float(largest) + 1e-43  # subnormals are 1.4e-45 apart
            before = held


@pytest.mark.parametrize("name", ROWS)
def test_bytes_are_known_before_and_counted_after(name: str) -> None:
    shapes = {"matrix": (40, 30), "odd": (1237,), "conv": (8, 4, 3, 3)}
    for size in (2, 3, 5):
        for outcome in run(gaussian(shapes, size, steps=4), build(ROWS[name])):
            for report, stated in zip(outcome.reports, outcome.announced, strict=True):
                sent = report.sent_bytes
                assert sent == stated if ROWS[name].exact_bytes else 0.4 * stated < sent <= stated
                assert {layer.name for layer in report.layers} == set(shapes)


#: Levels at which a codec hardly saves anything, or nothing.
HARDLY = {
    "randomk-70%": Row(RandomKCodec, 0.7, None, "ef"),
    "randomk-99%": Row(RandomKCodec, 0.985, None, "ef"),
    "sharedtopk-50%": Row(SharedTopKCodec, 0.5, None, "ef"),
    "sharedtopk-96%": Row(SharedTopKCodec, 0.96, None, "ef"),
    "topk-30%-scatter": Row(lambda: ScatterReduceCodec(TopKCodec()), 0.6, None, "ef"),
    "powersgd-20": Row(PowerSGDCodec, 17, None, "ef"),
    "acp-20": Row(ACPCodec, 17, None, "ef"),
}


@pytest.mark.parametrize("name", [*ROWS, *HARDLY])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nothing_grows_that_is_compressed(name: str, dtype: torch.dtype) -> None:
    """Case 29: what is compressed sends less than dense, whatever the dtype and the ranks."""
    row = {**ROWS, **HARDLY}[name]

    def make(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        options: Any = {"memory": row.memory, "group": member, "min_numel": 0}
        return Compressor(pairs, row.make(), row.level, **options)

    shapes = {"matrix": (40, 30), "odd": (137,), "one": (1,), "conv": (8, 4, 3, 3)}
    for size in (2, 3, 8):
        for outcome in run(gaussian(shapes, size, steps=2, dtype=dtype), make):
            for report in outcome.reports:
                for layer in report.layers:
                    assert layer.codec == "dense" or layer.sent_bytes < layer.dense_bytes
                assert report.ratio >= 1
                each = 4 if dtype == torch.bfloat16 else dtype.itemsize
                assert report.dense_bytes == (1200 + 137 + 1 + 288) * each


@pytest.mark.parametrize("name", ROWS)
def test_first_payloads_are_of_the_kind_that_the_codec_states(name: str) -> None:
    """Bytes on the link, and which exchanges a codec goes with, follow from it."""
    codec, level = ROWS[name].make(), ROWS[name].level
    layer, here = Layer(0, "w", (40, 30), torch.float32), context(size=2)
    codec.adapt_to(ROWS[name].memory)
    work = at(here, layer, codec.check_level(level))
    assert codec.encode(work, torch.randn(1200)).kind is codec.kind
    assert codec.encode_absent(work, torch.zeros(1)).kind is codec.kind


@pytest.mark.parametrize("name", ROWS)
def test_absent_gradients_contribute_nothing(name: str) -> None:
    """Cases 9 and 13: a rank without a gradient takes part, adds zero, and keeps its residual."""
    gradients = gaussian({"a": (40, 9), "b": (77,)}, 3, steps=6)
    for step in range(6):
        gradients[step][step % 3]["a" if step % 2 else "b"] = None
    gradients[4] = [{"a": None, "b": None} for _ in range(3)]
    outcomes = run(gradients, build(ROWS[name]), shuffle=True)
    for step in range(6):
        for layer in ("a", "b"):
            result = outcomes[0].results[step][layer]
            assert torch.isfinite(result).all()
            assert all(torch.equal(result, other.results[step][layer]) for other in outcomes)
            for rank, outcome in enumerate(outcomes):
                if gradients[step][rank][layer] is None and step and ROWS[name].absent_keeps:
                    before, after = (
                        outcome.residuals[step - 1][layer],
                        outcome.residuals[step][layer],
                    )
                    assert (before is None) == (after is None)
                    assert before is None or torch.equal(before, after)
            if ROWS[name].rounding is not None:
                present = [gradients[step][r][layer] for r in range(3)]
                dense = sum(g for g in present if g is not None) / 3
                torch.testing.assert_close(
                    result, dense + torch.zeros_like(result), atol=3e-2, rtol=0
                )
    assert ROWS[name].remembers or not outcomes[0].results[4]["a"].any()


@pytest.mark.parametrize("name", ROWS)
def test_no_trace_of_the_step_before_misleads(name: str) -> None:
    """Cases 5 and 13: gradients zeroed in place, and versions that stand still.

    "c" is dense, and has no checks of its own on the wire.
    """
    gradients = gaussian({"a": (40, 9), "b": (77,), "c": (5,)}, 3, steps=8)
    for step in range(1, 8):
        for layer in ("a", "b", "c")[: 1 + step % 3] if step % 2 else ("c",):
            gradients[step][step % 3][layer] = None

    def make(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        compressor = build(ROWS[name])(pairs, member)
        assignments = {**compressor.plan.assignments, "c": Assignment("dense")}
        compressor.plan = Plan(assignments, context=compressor.plan.context)
        return compressor

    outcomes = run(gradients, make, rate=0.1, in_place=True)
    for outcome in outcomes[1:]:
        for layer, parameter in outcome.parameters.items():
            assert torch.equal(parameter, outcomes[0].parameters[layer])
            assert {*outcome.states[-1][layer]} == {*outcomes[0].states[-1][layer]}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_step_leaves_no_trace(name: str, poison: float) -> None:
    """Case 17: every rank sees it, and no state of any layer of any rank changes."""
    clean = gaussian({"a": (40, 9), "b": (77,)}, 3, steps=4)
    poisoned = [[dict(rank) for rank in step] for step in clean]
    bad = clean[2][1]["a"].clone()
    bad[5, 5] = poison
    poisoned[2][1]["a"] = bad
    outcomes = run(poisoned, build(ROWS[name]))
    for outcome in outcomes:
        assert not torch.isfinite(outcome.results[2]["a"]).all()
        for layer in ("a", "b"):
            before, after = outcome.residuals[1][layer], outcome.residuals[2][layer]
            assert (before is None) == (after is None)
            assert before is None or torch.equal(before, after)
            before, after = outcome.states[1][layer], outcome.states[2][layer]
            assert {*before} == {*after}
            assert all(torch.equal(before[key], after[key]) for key in before)
        if ROWS[name].memory != "none":
            assert outcome.reports[2].nonfinite
            assert not outcome.reports[3].nonfinite
        assert torch.isfinite(outcome.results[3]["a"]).all()


@pytest.mark.parametrize("name", ROWS)
def test_the_result_shares_no_memory_with_state(name: str) -> None:
    """Case 7: what the next backward adds to the gradient in place changes no residual."""

    def check(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        compressor = build(ROWS[name])(pairs, member)
        original = compressor.decompress

        def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
            result = original(tensor, context)
            held = [t for s in compressor._directory.slots for t in s.state.slots.values()]
            held += [
                s.state.residual
                for s in compressor._directory.slots
                if s.state.residual is not None
            ]
            pointers = {t.untyped_storage().data_ptr() for t in held}
            pointers |= {
                t.untyped_storage().data_ptr()
                for s in compressor._directory.slots
                for t in s.buffers._tensors.values()
            }
            assert result.untyped_storage().data_ptr() not in pointers
            return result

        compressor.decompress = decompress  # type: ignore[method-assign]
        return compressor

    run(gaussian({"a": (40, 9)}, 2, steps=3), check)


#: One row of each codec and route: what their options change is not when anything is exchanged.
ONE_EACH = list({row.make().name: name for name, row in ROWS.items() if name != "example"}.values())


@pytest.mark.parametrize("name", ONE_EACH)
def test_adversarial_orders_never_stall(name: str) -> None:
    """200 steps in which every rank submits and finishes its layers in an order of its own."""
    shapes = {f"layer{i}": (17 + i, 3) for i in range(7)}
    gradients = gaussian(shapes, 3, steps=1)[0]
    outcomes = run([gradients] * 200, build(ROWS[name]), shuffle=True, stall=10)
    for layer in shapes:
        assert torch.equal(outcomes[0].results[-1][layer], outcomes[2].results[-1][layer])


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_loss_scale_that_changes_changes_nothing(name: str) -> None:
    """Case 18: residuals are kept unscaled, so the trajectory is that of plain training."""
    plain = gaussian({"w": (33, 9)}, 2, steps=6)
    scales = [1024.0, 1024.0, 2048.0, 512.0, 512.0, 4096.0]
    scaled = [
        [{n: g * s for n, g in r.items()} for r in step]
        for step, s in zip(plain, scales, strict=True)
    ]

    def with_scale(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        steps = iter(scales)
        return build(ROWS[name], loss_scale=lambda: next(steps))(pairs, member)

    reference, outcome = run(plain, build(ROWS[name]))[0], run(scaled, with_scale)[0]
    for step, scale in enumerate(scales):
        assert torch.equal(outcome.results[step]["w"] / scale, reference.results[step]["w"])


def test_randomk_without_feedback_is_unbiased() -> None:
    """Mean over 10,000 draws within 5 standard errors, and the variance is (d/k - 1) g^2."""
    layer = Layer(0, "w", (60,), torch.float32)
    vector = torch.randn(60, generator=torch.Generator().manual_seed(3))
    codec, draws = RandomKCodec(), 10_000
    codec.adapt_to("none")
    total, squares = torch.zeros(60, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
    out = torch.empty(60)
    for step in range(draws):
        work = at(context(step), layer, 0.25)
        sent = codec.encode(work, vector.clone())
        codec.decode(work, sent, Reduced(Kind.CARRIED, sent.buffer, 1), out)
        total += out
        squares += out.double() ** 2
    mean = total / draws
    variance = squares / draws - mean**2
    predicted = 3.0 * vector.double() ** 2
    assert ((mean - vector).abs() <= 5 * (predicted / draws).sqrt()).all()
    assert abs(variance.sum() / predicted.sum() - 1) < 0.1


def test_topk_sends_each_ranks_own_choice() -> None:
    """Case 1: ranks choose different positions; the mean is that of their own sparse vectors."""
    gradients = gaussian({"w": (100,)}, 3, steps=1)
    outcome = run(gradients, build(Row(TopKCodec, 0.05, None, "ef")))[0]
    expected = torch.zeros(100)
    for rank in range(3):
        g = gradients[0][rank]["w"]
        keep = g.abs().argsort(descending=True)[:5]
        expected[keep] += g[keep] / 3
    torch.testing.assert_close(outcome.results[0]["w"], expected)


def test_density_one_is_dense_bit_for_bit() -> None:
    gradients = gaussian({"w": (33, 9)}, 2, steps=3)
    full = run(gradients, build(ROWS["topk-all"]))[0]
    dense = run(gradients, build(ROWS["dense"]))[0]
    for step in range(3):
        assert torch.equal(full.results[step]["w"], dense.results[step]["w"])
        assert not full.residuals[step]["w"].any()


def test_bf16_adds_in_fp32() -> None:
    """Eight ranks of 1 + 2^-7: a running bf16 sum would round seven times, ours not at all."""
    value = 1 + 2.0**-7
    gradients = [[{"w": torch.full((64,), value)} for _ in range(8)]]
    outcome = run(gradients, build(ROWS["bf16"]))[0]
    assert (outcome.results[0]["w"] == value).all()


def test_combine_by_hand() -> None:
    one = Payload(Kind.SCATTER, torch.tensor([1, 2, 3]), splits=(1, 2))
    two = Payload(Kind.SCATTER, torch.tensor([4, 5, 6]), splits=(2, 1))
    assert [r.buffer.tolist() for r in combine([one, two])] == [[1, 4, 5], [2, 3, 6]]
    gathered = combine(
        [
            Payload(Kind.GATHER, torch.tensor([7])),
            Payload(Kind.GATHER, torch.empty(0, dtype=torch.int64)),
        ]
    )
    assert gathered[1].buffer.tolist() == [7]


@pytest.mark.parametrize("codec", [TopKCodec(), RandomKCodec()])
@pytest.mark.parametrize("bad", [0, 1.5, float("nan"), None])
def test_levels_are_checked(codec: Codec, bad: float | None) -> None:
    with pytest.raises(ConfigError, match="density"):
        codec.check_level(bad)
