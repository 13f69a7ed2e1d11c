"""Top-k in all its forms, shared-index top-k and DGC: what the table of codecs cannot show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_codecs import Row, build

import hvd_greco as greco
from hvd_greco import kernels, methods
from hvd_greco.codecs.base import Turn
from hvd_greco.codecs.dgc import DGCCodec, warm_up
from hvd_greco.codecs.shared_topk import SharedTopKCodec
from hvd_greco.codecs.sparse_wire import VALUES, sparse_layout
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError, WireError
from hvd_greco.exchange.local import LocalGroup, LocalMember
from hvd_greco.launch import python_command, run_ranks
from hvd_greco.layers import Layer
from hvd_greco.memories.dgc import DGCMemory
from hvd_greco.payload import Kind, Payload, Reduced
from simulate import at, context, gaussian, run


def noise(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- the sampled threshold -------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("kind", ["gauss", "heavy", "ties", "rows"])
def test_sampled_selection_is_close_to_exact(density: float, kind: str) -> None:
    """0.8 k to k entries, and always the largest: no entry left out beats one that was taken."""
    exact = 0
    for seed in range(5):
        vector = noise(1_000_000, seed)
        if kind == "heavy":
            vector = vector**7
        elif kind == "ties":
            vector = vector.mul(2).round()
        elif kind == "rows":
            vector.view(1000, 1000).mul_(torch.logspace(-3, 3, 1000))
        k = round(density * vector.numel())
        chosen = kernels.select_sampled(vector, k)
        assert 0.8 * k <= chosen.numel() <= k
        assert (chosen.diff() > 0).all()
        mask = torch.zeros(vector.numel(), dtype=torch.bool)
        mask[chosen] = True
        assert vector[chosen].abs().min() >= vector[~mask].abs().max()
        exact += torch.equal(chosen, kernels.select_topk(vector, k))
    assert exact >= 3


def test_sampled_selection_falls_back_to_exact() -> None:
    """A sample that shows nothing of the rest: large entries at its very positions."""
    k, vector = 10_000, noise(1_000_000) * 1e-6
    stride = (k // 128) | 1
    vector[::stride] = torch.linspace(1, 2, -(-vector.numel() // stride))
    wanted = kernels.select_topk(vector, 2 * k)
    assert torch.equal(kernels.select_sampled(vector, 2 * k)[:100], wanted[:100])
    vector = noise(1_000_000) + 10
    vector[:: (2 * k // 128) | 1] *= 1e-3
    assert torch.equal(kernels.select_sampled(vector, 2 * k), kernels.select_topk(vector, 2 * k))


def test_sampled_selection_takes_no_zeros_and_every_nonfinite() -> None:
    vector = torch.zeros(1_000_000)
    assert kernels.select_sampled(vector, 5000).numel() == 0
    vector[123_456:124_000] = 1e-45
    assert kernels.select_sampled(vector, 5000).tolist() == list(range(123_456, 124_000))
    assert kernels.select_sampled(torch.tensor([0.0, -0.0, 3.0]), 2).tolist() == [2]
    # The sample sees non-zeros alone, and they are fewer than 0.8 k: the exact fallback fills up.
    vector = torch.zeros(1_000_000)
    seen = torch.arange(0, 1_000_000, (20_000 // 128) | 1)
    vector[seen] = 1.0 + seen
    assert torch.equal(kernels.select_sampled(vector, 20_000), seen)
    vector = noise(1_000_000)
    vector[7], vector[999_999] = float("nan"), float("-inf")
    chosen = kernels.select_sampled(vector, 5000).tolist()
    assert 7 in chosen
    assert chosen[-1] == 999_999


def test_sampled_payloads_travel() -> None:
    """Counts differ between ranks; a gradient with few non-zeros costs few bytes; case 13."""
    gradients = gaussian({"w": (1000, 100)}, 3, steps=4)
    gradients[1][2]["w"] = torch.zeros(1000, 100)
    gradients[2][0]["w"] = torch.zeros(1000, 100).index_fill_(0, torch.tensor([3]), 2.0)
    row = Row(lambda: TopKCodec("fp32", "sampled"), 0.02, None, "none", False)
    outcomes = run(gradients, build(row, memory="ef"), average=False)
    before = torch.zeros(1000, 100)
    for step in range(4):
        put_in = sum(gradients[step][r]["w"] for r in range(3)) + before
        before = sum(o.residuals[step]["w"] for o in outcomes)
        result = outcomes[0].results[step]["w"]
        assert all(torch.equal(result, o.results[step]["w"]) for o in outcomes)
        torch.testing.assert_close(result + before, put_in, atol=1e-5, rtol=0)
        for outcome in outcomes:
            assert outcome.reports[step].sent_bytes <= outcome.compressor.wire_bytes()
    codec, layer = row.make(), Layer(0, "w", (1000, 100), torch.float32)
    empty = codec.encode(at(context(), layer, 0.02), torch.zeros(100_000))
    assert empty.nbytes == 8
    for count in (-1, 2001, 2**40):
        forged = torch.zeros(16_000, dtype=torch.uint8)
        forged[:8].view(torch.int64).fill_(count)
        with pytest.raises(WireError, match=f"announces {count} values, 2000 are the most"):
            codec.decode(
                at(context(), layer, 0.02),
                empty,
                Reduced(Kind.GATHER, forged, 1),
                torch.empty(100_000),
            )
    twice = Reduced(Kind.GATHER, torch.cat([empty.buffer, empty.buffer]), 1)
    with pytest.raises(WireError, match="from 1 ranks; payload 2"):
        codec.decode(at(context(), layer, 0.02), empty, twice, torch.empty(100_000))
    assert bool(empty.finite)


# -- values on the wire ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "limit"), [("fp32", 6.05), ("fp16", 4.05), ("q8", 3.05), ("q4", 2.55)]
)
@pytest.mark.parametrize("numel", [1_000_000, 20_000_000])
def test_bytes_of_a_kept_value(values: str, limit: float, numel: int) -> None:
    k = numel // 100
    assert sparse_layout(numel, k, torch.float32, values).nbytes / k <= limit


NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@example(data=[3.401992901712019e38, -1.0], scale=0)
@example(data=[1e-45, -3e-45], scale=0)
@given(data=st.lists(NUMBERS, min_size=1, max_size=40), scale=st.integers(-140, 20))
@settings(max_examples=150, deadline=None)
def test_values_are_rounded_towards_themselves(
    values: str, dtype: torch.dtype, data: list[float], scale: int
) -> None:
    """Never overflow, and no error larger than the value: what error feedback needs."""
    vector = torch.tensor(data, dtype=dtype) * 2.0**scale
    vector = torch.where(vector.isfinite(), vector, 0)
    layout = sparse_layout(1000, vector.numel(), dtype, values)
    buffer = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    sent = layout.pack(vector, torch.arange(vector.numel()), buffer)
    got, indices = layout.unpack(buffer)
    assert torch.equal(sent, got)
    assert indices is not None
    assert indices.tolist() == list(range(vector.numel()))
    assert got.isfinite().all()
    error, largest = (got - vector).abs(), vector.abs().max()
    assert (error <= vector.abs()).all()
    bits = {"fp32": 0.0, "fp16": 2.0**-11, "q8": 0.51 / 127, "q4": 0.51 / 7}[values]
    tiny = 2e-38 if dtype == torch.float32 else 1e-290
    assert (error <= bits * largest + tiny).all()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("selection", ["exact", "sampled"])
@given(raw=st.binary(min_size=0, max_size=96), size=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_never_do_harm(values: str, selection: str, raw: bytes, size: int) -> None:
    codec, layer = TopKCodec(values, selection), Layer(0, "w", (300,), torch.float32)
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    sent = Payload(Kind.GATHER, buffer)
    out = torch.empty(300)
    try:
        codec.decode(at(context(), layer, 0.02), sent, Reduced(Kind.GATHER, buffer, size), out)
    except WireError:
        return
    assert (out != 0).sum() <= 6 * size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "int8"}, "values: 'int8' is none of fp32, fp16, q8, q4"),
        ({"selection": "random"}, "selection: 'random' is none of exact, sampled"),
    ],
)
def test_options_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TopKCodec(**options)
    assert message in str(caught.value)


def test_ranks_that_differ_in_an_option_are_told() -> None:
    """Case 11: a rank that quantises meets one that does not."""

    def work(member: LocalMember) -> None:
        parameter = torch.nn.Parameter(torch.ones(5000))
        values = "fp16" if member.rank else "q8"
        compressor = greco.TopK([("w", parameter)], values=values, group=member)
        (parameter * 2).sum().backward()
        member.reduce_gradients([("w", parameter)], compressor)

    with pytest.raises(greco.MismatchError, match="topk values: q8 on rank 0, fp16 on rank 1"):
        LocalGroup(2).run(work)


# -- shared-index top-k ----------------------------------------------------------------------


def test_the_leader_chooses_and_all_send() -> None:
    gradients = gaussian({"w": (200,)}, 3, steps=5)
    outcomes = run(gradients, build(Row(SharedTopKCodec, 0.05, None, "ef")))
    residuals = [torch.zeros(200) for _ in range(3)]
    for step in range(5):
        vectors = [residuals[r] + gradients[step][r]["w"] for r in range(3)]
        keep = vectors[step % 3].abs().argsort(descending=True)[:10]
        expected = torch.zeros(200)
        expected[keep] = sum(v[keep] for v in vectors) / 3
        torch.testing.assert_close(outcomes[0].results[step]["w"], expected)
        for rank, vector in enumerate(vectors):
            vector[keep] = 0
            residuals[rank] = vector
            torch.testing.assert_close(outcomes[rank].residuals[step]["w"], vector)


def test_only_the_leader_pays_for_positions() -> None:
    outcomes = run(gaussian({"w": (2000,)}, 3, 4), build(Row(SharedTopKCodec, 0.05, None, "ef")))
    for step in range(4):
        for rank, outcome in enumerate(outcomes):
            spared = 0 if step % 3 == rank else 2 * 100
            assert outcome.announced[step] == outcome.announced[rank] - spared
            assert outcome.reports[step].sent_bytes == outcome.announced[step]


def test_its_cost_does_not_grow_with_the_ranks() -> None:
    layer = Layer(0, "w", (1000, 100), torch.float32)
    costs = [SharedTopKCodec().network_bytes(layer, 0.01, n) for n in (2, 4, 64)]
    assert costs[2] < 2 * costs[0]
    assert TopKCodec().network_bytes(layer, 0.01, 64) > 30 * TopKCodec().network_bytes(
        layer, 0.01, 2
    )


def test_a_leader_without_a_gradient_draws_positions() -> None:
    gradients = gaussian({"w": (400,)}, 2, steps=1)
    given_by_one = gradients[0][1]["w"]
    gradients[0][0]["w"] = None
    outcomes = run(gradients, build(Row(SharedTopKCodec, 0.1, None, "ef")))
    result = outcomes[0].results[0]["w"]
    sent = result.nonzero().flatten()
    assert torch.equal(result, outcomes[1].results[0]["w"])
    assert sent.numel() == 40
    torch.testing.assert_close(result[sent], given_by_one[sent] / 2)
    assert sent.tolist() != kernels.select_topk(given_by_one, 40).tolist()


@given(raw=st.binary(min_size=8, max_size=8))
@settings(max_examples=200, deadline=None)
def test_received_positions_are_checked(raw: bytes) -> None:
    codec, layer = SharedTopKCodec(), Layer(0, "w", (70_000,), torch.float32)
    level = 2 / 70_000
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    sent = codec.encode(at(context(1, 0, 2), layer, level), noise(70_000))
    assert sent.nbytes == 0
    turn = Turn(
        at(context(1, 0, 2), layer, level),
        sent,
        Reduced(Kind.GATHER, buffer, 2),
        lambda: noise(70_000),
    )
    positions = buffer.view(torch.int32)
    if bool(((positions < 0) | (positions >= 70_000)).any()):
        with pytest.raises(WireError):
            codec.next_round(turn)
    else:
        assert codec.next_round(turn).buffer.tolist() == noise(70_000)[positions.long()].tolist()


# -- DGC -------------------------------------------------------------------------------------

Make = Callable[[list[tuple[str, torch.Tensor]], LocalMember], Compressor]


def forced(level: float, schedule: Any = None, **options: Any) -> Make:
    """DGC on every layer, saving or not."""
    row = Row(DGCCodec, level, None, "none")
    return lambda pairs, member: build(row, memory=DGCMemory(**options), schedule=schedule)(
        pairs, member
    )


def named(**options: Any) -> Make:
    """DGC as users make it: biases and whatever does not save bytes go dense."""
    return lambda pairs, member: greco.DGC(pairs, group=member, **options)


SHAPES = {"weight": (60, 50), "bias": (60,)}


def train(
    gradients: list[list[dict[str, torch.Tensor | None]]], make: Make, **options: Any
) -> list[dict[str, torch.Tensor]]:
    """Train on given gradients with plain SGD of these options; parameters of every rank."""

    def work(member: LocalMember) -> dict[str, torch.Tensor]:
        parameters = {
            n: torch.nn.Parameter(noise(math.prod(s), 5).view(s)) for n, s in SHAPES.items()
        }
        compressor = make(list(parameters.items()), member)
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1, **options)
        for ranks in gradients:
            optimizer.zero_grad()
            for name, parameter in parameters.items():
                wanted = ranks[member.rank][name]
                if wanted is not None:
                    (parameter * wanted).sum().backward()
            member.reduce_gradients(parameters.items(), compressor)
            if all(bool(p.grad.isfinite().all()) for p in parameters.values()):
                optimizer.step()
        return {n: p.detach().clone() for n, p in parameters.items()}

    return LocalGroup(len(gradients[0])).run(work)


def momentum_sgd(
    gradients: list[list[dict[str, torch.Tensor | None]]], **options: Any
) -> dict[str, torch.Tensor]:
    """What dense Horovod with torch.optim.SGD gives."""
    means = [
        [{n: sum((r[n] for r in ranks if r[n] is not None), torch.zeros(s)) / len(ranks)
          for n, s in SHAPES.items()}]
        for ranks in gradients
    ]  # fmt: skip
    dense = lambda pairs, member: greco.Dense(pairs, group=member)  # noqa: E731
    return train(means, dense, **options)[0]


SGD_OPTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "weight_decay": 0.05},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.0, "weight_decay": 0.05},
]


@pytest.mark.parametrize("options", SGD_OPTIONS)
@pytest.mark.parametrize("way", ["compressed", "named"])
def test_density_one_is_momentum_sgd(options: dict[str, Any], way: str) -> None:
    """Cases 25 and 26: to rounding, over 8 steps, with gradients missing on some ranks."""
    gradients = gaussian(SHAPES, 2, steps=8)
    gradients[3][1]["weight"] = None
    gradients[5] = [{"weight": None, "bias": None} for _ in range(2)]
    make = forced(1.0, **options) if way == "compressed" else named(density=1.0, **options)
    ranks = train(gradients, make)
    wanted = momentum_sgd(gradients, **options)
    for name in SHAPES:
        assert torch.equal(ranks[0][name], ranks[1][name])
        torch.testing.assert_close(ranks[0][name], wanted[name], atol=2e-6, rtol=2e-6)


def test_weight_decay_after_the_exchange_would_be_another_method() -> None:
    """Case 25: it matters where it is added. This is what the test above would see if it broke."""
    gradients = gaussian(SHAPES, 2, steps=8)
    late = train(gradients, named(density=1.0, momentum=0.8), weight_decay=0.05)[0]
    wanted = momentum_sgd(gradients, momentum=0.8, weight_decay=0.05)
    assert (late["weight"] - wanted["weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_dgc_by_the_formula(nesterov: bool, density: float) -> None:
    """u, v, masking, local clipping and weight decay, step by step in fp64."""
    size, steps, m, decay, clip = 2, 12, 0.9, 0.01, 40.0
    gradients = gaussian(SHAPES, size, steps)
    options = {"momentum": m, "nesterov": nesterov, "weight_decay": decay, "clip": clip}
    got = train(gradients, forced(density, **options))[0]
    clipped = 0
    for name, shape in SHAPES.items():
        p = noise(math.prod(shape), 5).double()
        u, v = ([torch.zeros_like(p) for _ in range(size)] for _ in range(2))
        k = max(1, round(density * p.numel()))
        for step in range(steps):
            total = torch.zeros_like(p)
            for rank in range(size):
                g = gradients[step][rank][name].double().flatten()
                limit = clip / math.sqrt(size)
                clipped += bool(g.norm() > limit)
                g = g * min(1.0, limit / float(g.norm())) + decay * p
                u[rank] = m * u[rank] + g
                v[rank] = v[rank] + (g + m * u[rank] if nesterov else u[rank])
                keep = v[rank].abs().argsort(descending=True)[:k]
                total[keep] += v[rank][keep]
                v[rank][keep] = 0
                u[rank][keep] = 0
            p = p - 0.1 * total / size
        torch.testing.assert_close(got[name].double().flatten(), p, atol=1e-5, rtol=1e-5)
    assert 0 < clipped < 2 * size * steps


@pytest.mark.parametrize("values", ["fp32", "q4"])
def test_dgc_loses_nothing(values: str) -> None:
    """decoded + sum of v' = sum of v + sum of what was accumulated, op Sum."""
    gradients = gaussian({"w": (40, 30)}, 3, steps=6)
    row = Row(lambda: DGCCodec(values), 0.05, None, "none")
    outcomes = run(
        gradients, build(row, memory=DGCMemory(momentum=0.9)), average=False, shuffle=True
    )
    before = torch.zeros(40, 30)
    momenta = [torch.zeros(40, 30) for _ in range(3)]
    for step in range(6):
        for rank in range(3):
            momenta[rank] = 0.9 * momenta[rank] + gradients[step][rank]["w"]
        put_in = before + sum(momenta)
        before = sum(o.residuals[step]["w"] for o in outcomes)
        torch.testing.assert_close(
            outcomes[0].results[step]["w"] + before, put_in, atol=2e-5, rtol=0
        )
        # The next step's momenta are those of the ranks, masked.
        if step < 5:
            momenta = [_momentum_after(gradients[: step + 1], row, rank) for rank in range(3)]


def _momentum_after(gradients: Any, row: Row, rank: int) -> torch.Tensor:
    outcome = run(gradients, build(row, memory=DGCMemory(momentum=0.9)), average=False)[rank]
    held = outcome.compressor._directory.slots[0].state.slots["dgc.momentum"]
    return held.view(40, 30).clone()


def _state(compressor: Compressor) -> dict[str, torch.Tensor]:
    found = {}
    for slot in compressor._directory.slots:
        held = {**slot.state.slots, "v": slot.state.residual}
        found.update(
            {f"{slot.layer.name}/{n}": t.clone() for n, t in held.items() if t is not None}
        )
    return found


@pytest.mark.parametrize("poisoned", ["weight", "bias"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_nonfinite_step_changes_no_momentum(poisoned: str, poison: float) -> None:
    """Case 17, with layers that go dense: the momentum of none of them changes."""
    gradients = gaussian(SHAPES, 2, steps=3)
    bad = gradients[2][1][poisoned].clone()
    bad.view(-1)[3] = poison
    poisoned_gradients = [*gradients[:2], [gradients[2][0], {**gradients[2][1], poisoned: bad}]]
    make = named(density=0.01, clip=500.0)
    before = run(gradients[:2], make)
    after = run(poisoned_gradients, make)
    clean = run(gradients, make)
    for rank in range(2):
        old, new = _state(before[rank].compressor), _state(after[rank].compressor)
        assert set(old) == {"weight/v", "weight/dgc.momentum", "bias/dgc.dense"}
        assert all(torch.equal(old[n], new[n]) for n in old)
        assert not torch.equal(old["weight/v"], _state(clean[rank].compressor)["weight/v"])
        assert not after[rank].results[2][poisoned].isfinite().all()


def test_dgc_does_not_feel_the_loss_scale() -> None:
    """Case 18, for compressed and for dense layers."""
    plain = gaussian(SHAPES, 2, steps=6)
    scales = [1024.0, 1024.0, 2048.0, 512.0, 512.0, 4096.0]
    scaled = [
        [{n: g * s for n, g in r.items()} for r in step]
        for step, s in zip(plain, scales, strict=True)
    ]

    def with_scale(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        steps = iter(scales)
        return greco.DGC(pairs, 0.05, clip=50.0, group=member, loss_scale=lambda: next(steps))

    reference = run(plain, named(density=0.05, clip=50.0))[0]
    outcome = run(scaled, with_scale)[0]
    for step, scale in enumerate(scales):
        for name in SHAPES:
            torch.testing.assert_close(
                outcome.results[step][name] / scale, reference.results[step][name]
            )


def test_synchronising_twice_counts_once() -> None:
    """Case 20, for a layer that goes dense: its momentum moves once a step."""

    def work(member: LocalMember) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(10))
        compressor = greco.DGC([("bias", parameter)], group=member)
        for _ in range(3):
            parameter.grad = None
            parameter.sum().backward()
            for _ in range(2):
                member.reduce_gradients([("bias", parameter)], compressor)
            with torch.no_grad():
                parameter -= parameter.grad
        return parameter.detach().clone()

    expected = -(1 + 1.9 + 2.71)
    for result in LocalGroup(2).run(work):
        torch.testing.assert_close(result, torch.full((10,), expected))


def test_warm_up_stages() -> None:
    schedule = warm_up(0.001, 10)
    assert [schedule(s) for s in (0, 9, 10, 25, 39, 40, 10_000)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001,
    ]  # fmt: skip
    assert [warm_up(0.05, 1)(s) for s in range(4)] == [0.25, 0.0625, 0.05, 0.05]
    assert warm_up(0.3, 5)(0) == 0.3


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_density_changes_in_mid_training(size: int, momentum: float) -> None:
    """Case 23: all ranks change at one step, and nothing accumulated is lost.

    With 8 ranks the first stages save nothing, so the layer goes dense in them.
    """
    gradients = gaussian(SHAPES, size, steps=15)
    make = named(density=0.002, momentum=momentum, warmup=2)
    outcomes = run(gradients, make, shuffle=True)
    stages = [0.25, 0.0625, 0.015625, 0.004, 0.002]
    arrived = torch.zeros(60, 50)
    put_in = torch.zeros(60, 50)
    for step in range(15):
        results = [o.results[step]["weight"] for o in outcomes]
        assert all(torch.equal(results[0], other) for other in results)
        reports = [next(r for r in o.reports[step].layers if r.name == "weight") for o in outcomes]
        assert len({(r.codec, r.level) for r in reports}) == 1
        dense = size == 8 and step < 2
        assert reports[0].codec == ("dense" if dense else "dgc")
        assert reports[0].level == (None if dense else stages[min(step // 2, 4)])
        arrived += results[0]
        put_in += sum(gradients[step][r]["weight"] for r in range(size)) / size
    if not momentum:
        waiting = sum(o.residuals[-1]["weight"] for o in outcomes) / size
        torch.testing.assert_close(arrived + waiting, put_in, atol=1e-4, rtol=0)


def test_momentum_gathered_while_dense_is_taken_along() -> None:
    """Dense for 3 steps, then at density 1: momentum SGD throughout."""
    gradients = gaussian(SHAPES, 2, steps=6)

    def make(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        compressor = forced(1.0, nesterov=True)(pairs, member)
        compressed, steps = compressor.plan, iter(range(100))
        dense = greco.DGC([(n, p.detach()) for n, p in pairs], 1.0, group=member).plan
        original = compressor._open_step

        def open_step() -> None:
            original()
            compressor.plan = dense if next(steps) < 3 else compressed

        compressor._open_step = open_step  # type: ignore[method-assign]
        return compressor

    ranks = train(gradients, make)
    wanted = momentum_sgd(gradients, momentum=0.9, nesterov=True)
    for name in SHAPES:
        torch.testing.assert_close(ranks[0][name], wanted[name], atol=2e-6, rtol=2e-6)


class LikeHorovod(torch.optim.SGD):
    """Calls a compressor from a frame like Horovod's."""

    compression: Any

    def _allreduce_grad_async(self, p: torch.Tensor) -> Any:
        return self.compression.compress(p.grad)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ({"momentum": 0.9}, {}, "momentum=0.9 of its own"),
        ({"weight_decay": 0.1}, {"weight_decay": 0.01}, "Give the optimizer weight_decay=0"),
        ({"weight_decay": 0.1}, {}, None),
        ({"momentum": 0.9}, {"momentum": 0.0}, None),
        ({}, {"weight_decay": 0.01}, None),
    ],
)
def test_what_would_act_twice_is_refused(
    optimizer: dict[str, float], options: dict[str, float], message: str | None
) -> None:
    """Case 26, at the first step and with the remedy; also when a schedule turns it on later."""

    def work(member: LocalMember) -> str | None:
        parameter = torch.nn.Parameter(torch.ones(5000))
        made = LikeHorovod([parameter], lr=0.1, **optimizer)
        made.compression = greco.DGC([("w", parameter)], group=member, **options)
        (parameter * 2).sum().backward()
        try:
            made._allreduce_grad_async(parameter)
        except ConfigError as error:
            return str(error)
        return None

    for found in LocalGroup(2).run(work):
        assert found is None if message is None else message in str(found)


def test_adam_is_asked_for_its_betas() -> None:
    memory = DGCMemory()
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"betas\[0\]=0.9 of its own"):
        memory.check_optimizer(torch.optim.Adam([parameter]))
    memory.check_optimizer(torch.optim.Adam([parameter], betas=(0.0, 0.99)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum: 1.0 is not in [0, 1)"),
        ({"momentum": "x"}, "momentum: needs a number"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov: needs a momentum"),
        ({"nesterov": "no"}, "nesterov: needs True or False, got 'no'"),
        ({"clip": 0.0}, "clip: 0 would zero"),
        ({"clip": -1.0}, "clip: -1.0 is not a finite number >= 0"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"warmup": 1.5}, "warmup"),
        ({"density": 10}, "for 10 percent pass 0.1"),
        ({"memory": "ef"}, "memory: DGC has no such argument; it has clip, density"),
        ({"schedule": None}, "schedule: DGC has no such argument"),
    ],
)
def test_dgc_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    def work(member: LocalMember) -> None:
        with pytest.raises(ConfigError) as caught:
            greco.DGC([("w", torch.nn.Parameter(torch.ones(5000)))], group=member, **options)
        assert message in str(caught.value)

    LocalGroup(2).run(work)


def test_dgc_memory_refuses_what_sends_every_entry() -> None:
    with pytest.raises(ConfigError, match="nothing to mask"):
        DGCMemory().check(methods.parse("bf16").method.make(), None)
    DGCMemory().check(SharedTopKCodec(), 0.01)


def test_a_single_rank_is_warned() -> None:
    with pytest.warns(UserWarning, match="single rank"):
        greco.DGC([("w", torch.nn.Parameter(torch.ones(5000)))], group=LocalGroup(1).member(0))


def test_dgc_spec_and_signature() -> None:
    spec = methods.parse("dgc:density=0.01,momentum=0.8,nesterov=yes,warmup=3,clip=2")
    assert spec.options == {
        "density": 0.01, "momentum": 0.8, "nesterov": True, "warmup": 3, "clip": 2.0,
    }  # fmt: skip
    assert methods.parse("dgc:0.02").options == {"density": 0.02}

    def work(member: LocalMember) -> None:
        parameter = torch.nn.Parameter(torch.ones(50_000))
        made = methods.build(spec, [("w", parameter)], group=member)
        assert (
            made._memory.describe() == "dgc(momentum=0.8, nesterov=True, clip=2.0, weight_decay=0)"
        )
        assert made.plan.assignments["w"].level == 0.25
        assert greco.DGC([("w", parameter)], 0.03, group=member).plan.assignments["w"].level == 0.03

    LocalGroup(2).run(work)
    assert "momentum" in str(greco.DGC.__signature__)
    assert "memory" not in greco.DGC.__signature__.parameters


SCRIPT = """
import sys, torch
import horovod.torch as hvd
import hvd_greco as greco
hvd.init()
torch.set_num_threads(1)

def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Tanh(), torch.nn.Linear(80, 5))

def train(make, steps=12, **options):
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.05, **options)
    outer = hvd.DistributedOptimizer(
        inner, named_parameters=net.named_parameters(), compression=make(net.named_parameters())
    )
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        outer.zero_grad()
        x = torch.randn(16, 64, generator=data)
        torch.nn.functional.cross_entropy(net(x), x[:, :5].argmax(1)).backward()
        outer.step()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(flat, hvd.broadcast(flat, 0)), "ranks differ"
    return flat

none = lambda pairs: hvd.Compression.none
sgd = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
wanted = train(none, **sgd)
got = train(lambda p: greco.DGC(p, 1.0, **sgd))
assert torch.allclose(got, wanted, atol=1e-5), (got - wanted).abs().max()
assert not torch.allclose(train(none), wanted, atol=1e-2)
for values in ("fp32", "fp16", "q8", "q4"):
    for selection in ("exact", "sampled"):
        train(lambda p: greco.TopK(p, 0.1, values=values, selection=selection, min_numel=64))
train(lambda p: greco.SharedTopK(p, 0.1, min_numel=64))
train(lambda p: greco.SharedTopK(p, 1.0, min_numel=1))
train(lambda p: greco.DGC(p, 0.01, warmup=2, clip=1.0, min_numel=64, **sgd))
try:
    train(lambda p: greco.DGC(p, 0.01), momentum=0.9)
except greco.ConfigError as error:
    assert "momentum=0.9 of its own" in str(error)
else:
    raise SystemExit("optimizer momentum was not refused")
print("fine", flush=True)
"""


def test_under_mpirun(tmp_path: Path) -> None:
    """Stock Horovod on two ranks: every form trains, density 1 is momentum SGD, case 26."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = run_ranks(2, python_command(str(script)), timeout=120, capture=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("fine") == 2
