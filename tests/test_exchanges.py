"""Routes of payloads: scatter-reduce-allgather, and hierarchical; the allgather beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_greco import Dense, LocalGroup, RandomK, TopK, registry
from hvd_greco.codecs.base import Codec, Level, Turn, Work
from hvd_greco.codecs.dense import BF16Codec, DenseCodec
from hvd_greco.codecs.hierarchical import leaders
from hvd_greco.codecs.randomk import RandomKCodec
from hvd_greco.codecs.scatter_reduce import ScatterReduceCodec
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError, StallError, WireError
from hvd_greco.exchange.local import LocalMember, combine
from hvd_greco.layers import Layer, LayerState
from hvd_greco.memories.base import Memory
from hvd_greco.payload import Hosts, Kind, Payload, Reduced, Scope
from hvd_greco.plan import Assignment, Plan
from simulate import Outcome, at, context, gaussian, run

Pairs = list[tuple[str, torch.Tensor]]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "odd": (37,),
    "matrix": (40, 30),
    "conv": (8, 4, 3, 3),
}
#: (ranks, ranks on each host), the degenerate ones included.
PLACES = [(2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (3, 1)]


def make(exchange: str, codec: type[Codec] = TopKCodec, level: Level = 0.1, **options: Any) -> Any:
    """A constructor for ``simulate.run`` that routes every layer, however small."""

    def build(pairs: Pairs, member: LocalMember) -> Compressor:
        compressor = Compressor(
            pairs,
            codec(),
            level,
            exchange=exchange,
            group=member,
            min_numel=0,
            **{"memory": "ef", **options},
        )
        chosen = Assignment(compressor._codec.name, level)
        names = [slot.layer.name for slot in compressor._directory.slots]
        compressor.plan = Plan(dict.fromkeys(names, chosen), context=compressor.plan.context)
        return compressor

    return build


def kept_sum(outcomes: list[Outcome], step: int, layer: str) -> torch.Tensor:
    """Sum of the ranks' residuals; a rank that has none holds zero."""
    like = outcomes[0].results[step][layer]
    total = torch.zeros(like.shape, dtype=torch.float64)
    for outcome in outcomes:
        residual = outcome.residuals[step][layer]
        total += 0 if residual is None else residual.double()
    return total


def assert_equal_everywhere(outcomes: list[Outcome]) -> None:
    for step, results in enumerate(outcomes[0].results):
        for layer, result in results.items():
            assert all(torch.equal(result, other.results[step][layer]) for other in outcomes)


# -- scatter-reduce-allgather ------------------------------------------------------------------


def top(vector: torch.Tensor, k: int) -> torch.Tensor:
    keep = vector.abs().argsort(descending=True)[:k]
    return torch.zeros_like(vector).index_copy(0, keep, vector[keep])


def test_scatter_codes_shards_and_then_their_means() -> None:
    """By hand: 3 ranks, 10 entries, shards of 4 (two zeros at the end), 2 kept in each."""
    gradients = gaussian({"w": (10,)}, 3, steps=1)
    outcomes = run(gradients, make("scatter", level=0.5))
    padded = [torch.cat([gradients[0][r]["w"], torch.zeros(2)]).view(3, 4) for r in range(3)]
    for owner in range(3):
        mean = sum(top(padded[rank][owner], 2) for rank in range(3)) / 3
        decoded = top(mean, 2)
        mine, length = slice(owner * 4, owner * 4 + 4), (4, 4, 2)[owner]
        torch.testing.assert_close(outcomes[2].results[0]["w"][mine], decoded[:length])
        for rank in range(3):
            left = padded[rank][owner] - top(padded[rank][owner], 2)
            if rank == owner:
                left = left + 3 * (mean - decoded)
            held = outcomes[rank].residuals[0]["w"]
            torch.testing.assert_close(held[mine], left[:length])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_scatter_loses_nothing_though_owners_are_absent(size: int) -> None:
    """The law, op Sum, with a rank without a gradient in every step: its shard is still settled."""
    gradients = gaussian(SHAPES, size, steps=8)
    for step in range(1, 8):
        for layer in ("matrix", "odd"):
            gradients[step][(step + len(layer)) % size][layer] = None
    gradients[5] = [dict.fromkeys(SHAPES) for _ in range(size)]
    outcomes = run(gradients, make("scatter"), average=False, shuffle=True)
    assert_equal_everywhere(outcomes)
    for layer, shape in SHAPES.items():
        before = torch.zeros(shape, dtype=torch.float64)
        for step in range(8):
            given = [g[layer] for g in gradients[step] if g[layer] is not None]
            put_in = before + sum(g.double() for g in given)
            before = kept_sum(outcomes, step, layer)
            decoded = outcomes[0].results[step][layer].double()
            torch.testing.assert_close(decoded + before, put_in, atol=1e-5 * size, rtol=0)


def test_cost_per_rank_does_not_grow_with_ranks() -> None:
    layer = Layer(0, "w", (1000, 1000), torch.float32)
    gathered, scattered = TopKCodec(), ScatterReduceCodec(TopKCodec())
    payload = gathered.wire_bytes(layer, 0.01, 1)
    for size in (2, 4, 8, 16, 32, 64):
        assert gathered.network_bytes(layer, 0.01, size) == (size - 1) * payload
        assert scattered.network_bytes(layer, 0.01, size) <= 2.02 * payload
        assert scattered.wire_bytes(layer, 0.01, size) <= 1.02 * payload * (size + 1) / size


def test_what_is_sent_does_not_grow_with_ranks() -> None:
    """The same, from the buffers that were really handed to collectives."""
    measured = {}
    for size in (2, 4, 8):
        for exchange in ("allgather", "scatter"):
            outcomes = run(gaussian({"w": (100, 200)}, size, steps=1), make(exchange, level=0.05))
            report = outcomes[0].reports[0]
            assert report.sent_bytes == outcomes[0].compressor.wire_bytes()
            measured[exchange, size] = report.network_bytes
    assert measured["allgather", 8] > 6 * measured["allgather", 2]
    assert measured["scatter", 8] < 2 * measured["scatter", 2]
    assert measured["scatter", 8] < measured["allgather", 8] / 3


class Coin(TopKCodec):
    """Unbiased: every entry is dropped or doubled by a coin that knows the seed and the step."""

    name = "coin"

    def unbiased(self, level: Level) -> bool:
        return True

    def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
        return layer.numel * layer.work_dtype.itemsize

    def encode(
        self,
        work: Work,
        vector: torch.Tensor,
    ) -> Payload:
        seed = hash((work.seed, work.layer.index, work.step, work.rank)) % 2**31
        coins = torch.rand(work.layer.numel, generator=torch.Generator().manual_seed(seed)) < 0.5
        return Payload(Kind.GATHER, (vector * coins * 2).view(torch.uint8))

    def decode(
        self,
        work: Work,
        sent: Payload,
        reduced: Reduced,
        out: torch.Tensor,
    ) -> None:
        out.zero_()
        for part in reduced.parts(self.wire_bytes(work.layer, work.level, 1)):
            out += part.view(out.dtype)
        out /= reduced.world_size


def exchange_once(codec: Codec, level: Level, vectors: list[torch.Tensor], step: int) -> Any:
    """One step of a two-round codec without a compressor; the mean that rank 0 decodes."""
    size = len(vectors)
    layer = Layer(0, "w", tuple(vectors[0].shape), torch.float32)
    contexts = [context(step, rank, size, seed=1) for rank in range(size)]
    states = [LayerState() for _ in range(size)]
    sent = [
        codec.encode(at(contexts[r], layer, level, states[r]), vectors[r].clone())
        for r in range(size)
    ]
    back = combine(sent)
    turns = [
        Turn(at(contexts[r], layer, level, states[r]), sent[r], back[r], lambda r=r: vectors[r])
        for r in range(size)
    ]
    second = [codec.next_round(turn) for turn in turns]
    out = torch.empty(layer.numel)
    codec.decode(at(contexts[0], layer, level), second[0], combine(second)[0], out)
    return out


@pytest.mark.parametrize("size", [1, 2])
def test_two_unbiased_codings_are_unbiased(size: int) -> None:
    """Their draws must not repeat each other: a coin tossed once for both would double the mean."""
    codec, draws = ScatterReduceCodec(Coin()), 4000
    codec.adapt_to("none")
    vectors = [torch.linspace(-1, 1 + rank, 9) for rank in range(size)]
    mean = sum(vectors) / size
    total, squares = torch.zeros(9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for step in range(draws):
        out = exchange_once(codec, 1.0, vectors, step).double()
        total += out
        squares += out**2
    deviation = (squares / draws - (total / draws) ** 2).clamp(min=1e-12).sqrt()
    assert ((total / draws - mean).abs() <= 5 * deviation / draws**0.5).all()


def test_a_sum_that_overflows_poisons_no_residual() -> None:
    """Finite gradients whose mean, or whose sum with the residual, is not."""
    huge = [{"w": torch.full((64,), 3e38)} for _ in range(4)]
    gradients = [huge, huge, *gaussian({"w": (64,)}, 4, 1)]
    for exchange, hosts in (("scatter", None), ("hierarchical", 2)):
        outcomes = run(gradients, make(exchange), hosts=hosts)
        assert not outcomes[0].results[1]["w"].isfinite().all()
        for outcome in outcomes:
            for step in range(3):
                residual = outcome.residuals[step]["w"]
                assert residual is None or residual.isfinite().all()


def test_scatter_refuses_what_it_cannot_route() -> None:
    def build(codec: Codec, level: Level, memory: str = "ef") -> Compressor:
        pairs = [("w", torch.nn.Parameter(torch.zeros(64, 64)))]
        member = LocalGroup(2).member(0)
        return Compressor(pairs, codec, level, exchange="scatter", memory=memory, group=member)

    class Stateful(TopKCodec):
        def commit(self, *arguments: Any) -> None:
            return

    with pytest.raises(ConfigError, match=r"'randomk' are added up on the way \(carried\)"):
        build(RandomKCodec(), 0.1)
    with pytest.raises(ConfigError, match="'dense' are added up"):
        build(DenseCodec(), None, "none")
    with pytest.raises(ConfigError, match="'bf16' has 2 rounds"):
        build(BF16Codec(), None, "none")
    with pytest.raises(ConfigError, match="keeps state for whole layers"):
        build(Stateful(), 0.1)
    with pytest.raises(ConfigError, match="the data decides how long those of 'topk' are"):
        build(TopKCodec(selection="sampled"), 0.1)
    with pytest.raises(ConfigError, match="'ef21' does not go with exchange='scatter'"):
        build(TopKCodec(), 0.1, "ef21")
    with pytest.raises(ConfigError, match="'none' does not go with 'topk\\+scatter'"):
        build(TopKCodec(), 0.1, "none")


def test_a_codec_whose_sizes_depend_on_data_is_told() -> None:
    class Ragged(Coin):
        def wire_bytes(self, layer: Layer, level: Level, size: int) -> int:
            return 4 * layer.numel + 4

    with pytest.raises(WireError, match="announced 12 bytes for a shard and gave 8"):
        exchange_once(ScatterReduceCodec(Ragged()), 1.0, [torch.ones(4)] * 2, 0)


def test_a_short_or_long_answer_is_refused() -> None:
    codec, layer = ScatterReduceCodec(TopKCodec()), Layer(0, "w", (64,), torch.float32)
    work = at(context(size=2), layer, 0.1)
    piece = codec._piece_bytes(layer, 0.1, 2)
    for count in (0, piece, 3 * piece, 2 * piece - 1):
        reduced = Reduced(Kind.GATHER, torch.zeros(count, dtype=torch.uint8), 2)
        with pytest.raises(WireError):
            codec.decode(work, Payload(Kind.GATHER, reduced.buffer), reduced, torch.empty(64))


# -- hierarchical ------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "hosts"), PLACES)
@pytest.mark.parametrize("codec", [TopKCodec, RandomKCodec])
def test_hierarchical_at_density_one_is_the_mean(size: int, hosts: int, codec: type[Codec]) -> None:
    gradients = gaussian(SHAPES, size, steps=2)
    outcomes = run(gradients, make("hierarchical", codec, 1.0), hosts=hosts, shuffle=True)
    assert_equal_everywhere(outcomes)
    for step in range(2):
        for layer in SHAPES:
            dense = sum(gradients[step][rank][layer] for rank in range(size)) / size
            torch.testing.assert_close(outcomes[0].results[step][layer], dense)


@pytest.mark.parametrize(("size", "hosts"), PLACES)
@pytest.mark.parametrize("codec", [TopKCodec, RandomKCodec])
def test_hierarchical_loses_nothing(size: int, hosts: int, codec: type[Codec]) -> None:
    """Op Sum: decoded + L sum of e' = sum of g + L sum of e, over what the leaders hold."""
    gradients = gaussian(SHAPES, size, steps=6)
    for step in range(1, 6):
        gradients[step][step % size]["matrix"] = None
    outcomes = run(gradients, make("hierarchical", codec), hosts=hosts, average=False, shuffle=True)
    assert_equal_everywhere(outcomes)
    for layer, shape in SHAPES.items():
        before = torch.zeros(shape, dtype=torch.float64)
        for step in range(6):
            given = [g[layer] for g in gradients[step] if g[layer] is not None]
            put_in = hosts * before + sum(g.double() for g in given)
            before = kept_sum(outcomes, step, layer)
            decoded = outcomes[0].results[step][layer].double()
            torch.testing.assert_close(decoded + hosts * before, put_in, atol=1e-5 * size, rtol=0)


def test_leaders_share_the_work_and_hold_the_residuals() -> None:
    """Of each host one rank leads a layer, and on it alone anything is kept."""
    outcomes = run(gaussian(SHAPES, 4, steps=1), make("hierarchical"), hosts=2)
    for layer in SHAPES:
        for rank, outcome in enumerate(outcomes):
            held = outcome.residuals[0][layer]
            assert (held is not None) == (rank % 2 == (0 if layer == "matrix" else 1))


def test_leaders_lead_about_equally_much() -> None:
    """Weights and biases alternate: dealt out in turn, one of two ranks would get all weights."""
    sizes = {f"layer{i:02}": 100 if i % 2 else 100 * (90 + i) for i in range(24)}
    chosen = leaders(sizes, 4)
    load = [sum(sizes[name] for name in sizes if chosen[name] == place) for place in range(4)]
    assert max(load) < 1.1 * min(load)
    assert leaders(dict(reversed(sizes.items())), 4) == chosen


def test_a_host_without_gradients_adds_nothing_and_keeps_its_residual() -> None:
    gradients = gaussian({"w": (40, 9)}, 4, steps=4)
    for rank in (2, 3):
        gradients[2][rank] = {"w": None}
    outcomes = run(gradients, make("hierarchical"), hosts=2)
    before, after = outcomes[2].residuals[1]["w"], outcomes[2].residuals[2]["w"]
    assert before.any()
    assert torch.equal(before, after)
    alone = run([g[:2] for g in gradients[:3]], make("hierarchical"), hosts=2)
    assert not torch.equal(alone[0].results[2]["w"], outcomes[0].results[2]["w"])
    expected = top(outcomes[0].residuals[1]["w"].view(-1) + (
        gradients[2][0]["w"] + gradients[2][1]["w"]).view(-1) / 2, 36) / 2  # fmt: skip
    torch.testing.assert_close(outcomes[0].results[2]["w"].view(-1), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
@pytest.mark.parametrize("memory", ["ef", "ef21", "ef21-sgdm"])
def test_a_nonfinite_step_leaves_no_trace_on_any_host(poison: float, memory: str) -> None:
    clean = gaussian({"a": (40, 9), "b": (77,)}, 4, steps=4)
    poisoned = [[dict(rank) for rank in step] for step in clean]
    bad = clean[2][3]["a"].clone()
    bad[5, 5] = poison
    poisoned[2][3]["a"] = bad
    skipped = [step for i, step in enumerate(clean) if i != 2]
    build = make("hierarchical", memory=memory)
    outcomes, reference = run(poisoned, build, hosts=2), run(skipped, build, hosts=2)
    for outcome, expected in zip(outcomes, reference, strict=True):
        assert not outcome.results[2]["a"].isfinite().all()
        assert outcome.reports[2].nonfinite
        for layer in ("a", "b"):
            # The next step is as if the poisoned one had never been.
            assert torch.equal(outcome.results[3][layer], expected.results[2][layer])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_hierarchical_dtypes_come_back_as_they_went(dtype: torch.dtype) -> None:
    gradients = gaussian({"w": (33, 9)}, 4, steps=2, dtype=dtype)
    outcomes = run(gradients, make("hierarchical", level=1.0), hosts=2)
    assert_equal_everywhere(outcomes)
    result = outcomes[0].results[0]["w"]
    dense = sum(gradients[0][rank]["w"].double() for rank in range(4)) / 4
    assert result.dtype == dtype
    bound = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    assert (result.double() - dense).abs().max() <= bound


def test_ef21_over_hosts_reaches_a_constant_gradient() -> None:
    gradients = gaussian({"w": (20, 10)}, 4, steps=1) * 40
    outcomes = run(gradients, make("hierarchical", memory="ef21"), hosts=2)
    mean = sum(gradients[0][rank]["w"] for rank in range(4)) / 4
    torch.testing.assert_close(outcomes[3].results[-1]["w"], mean)


def test_a_loss_scale_that_changes_changes_nothing_over_hosts() -> None:
    plain, scales = gaussian({"w": (33, 9)}, 4, steps=4), [1024.0, 2048.0, 512.0, 4096.0]
    scaled = [
        [{n: g * s for n, g in r.items()} for r in step]
        for step, s in zip(plain, scales, strict=True)
    ]

    def with_scale(pairs: Pairs, member: LocalMember) -> Compressor:
        steps = iter(scales)
        return make("hierarchical", loss_scale=lambda: next(steps))(pairs, member)

    reference = run(plain, make("hierarchical"), hosts=2)[0]
    outcome = run(scaled, with_scale, hosts=2)[0]
    for step, scale in enumerate(scales):
        assert torch.equal(outcome.results[step]["w"] / scale, reference.results[step]["w"])


@pytest.mark.parametrize(("size", "hosts"), PLACES)
@pytest.mark.parametrize("codec", [TopKCodec, RandomKCodec])
def test_hierarchical_bytes_are_known_and_counted(
    size: int, hosts: int, codec: type[Codec]
) -> None:
    outcomes = run(gaussian(SHAPES, size, steps=2), make("hierarchical", codec), hosts=hosts)
    for outcome in outcomes:
        report = outcome.reports[-1]
        assert report.sent_bytes == outcome.announced[-1]
        # Case 29: dense rounds inside a host are not what was compressed.
        assert report.ratio > 1


def test_only_what_leaves_a_host_counts_as_network() -> None:
    """Eight ranks on two hosts: both leaders' payloads cross once, where allgather sends 56."""
    gradients = gaussian({"w": (100, 200)}, 8, steps=1)
    layer = Layer(0, "w", (100, 200), torch.float32)
    outcomes = run(gradients, make("hierarchical"), hosts=4)
    checks = [o.reports[0].network_bytes for o in outcomes]
    assert checks[0] - checks[1] == TopKCodec().wire_bytes(layer, 0.1, 2)
    assert checks[1] == checks[2] == checks[3]  # carriers and the beacon
    flat = run(gradients, make("allgather"))
    assert sum(o.reports[0].network_bytes for o in flat) > 20 * sum(checks)


def test_hierarchical_refuses_what_cannot_work() -> None:
    pairs = [("w", torch.nn.Parameter(torch.zeros(64, 64)))]

    class Momentum(Memory):
        name = "momentum"

        def compensate(self, *arguments: Any) -> None: ...
        def commit(self, *arguments: Any) -> None: ...

    with pytest.raises(ConfigError, match="hosts: 5 ranks cannot be 2 on each"):
        LocalGroup(5, hosts=2)
    with pytest.raises(ConfigError, match="needs to know the hosts"):
        TopK(pairs, exchange="hierarchical", group=LocalGroup(2).member(0))
    member = LocalGroup(2, hosts=1).member(0)
    with pytest.raises(ConfigError, match="'bf16' has 2 rounds"):
        Dense(pairs, "bf16", exchange="hierarchical", group=member)
    with pytest.raises(ConfigError, match="memory: 'momentum' does not go with"):
        TopK(pairs, memory=Momentum(), exchange="hierarchical", group=member)
    with pytest.raises(ConfigError, match="'none' does not go with 'topk"):
        TopK(pairs, memory="none", exchange="hierarchical", group=member)


def test_routes_have_names_and_go_with_constructors() -> None:
    pairs = [("w", torch.nn.Parameter(torch.zeros(64, 64)))]
    member = LocalGroup(4, hosts=2).member(3)
    assert member.hosts() == Hosts(local_rank=1, local_size=2, cross_rank=1, cross_size=2)
    for exchange in ("scatter", "hierarchical"):
        plan = TopK(pairs, exchange=exchange, group=member).plan
        assert plan.assignments["w"].codec == f"topk+{exchange}"
    assert TopK(pairs, exchange="allgather", group=member).plan.assignments["w"].codec == "topk"
    with pytest.raises(ConfigError, match="exchange: 'ring' is none of allgather, scatter"):
        TopK(pairs, exchange="ring", group=member)
    with pytest.raises(ConfigError, match="'allgather' does not go with 'randomk'"):
        RandomK(pairs, exchange="allgather", group=member)


# -- groups and orders -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exchange", "size", "hosts"),
    [("scatter", 3, None), ("scatter", 4, None), ("hierarchical", 4, 2), ("hierarchical", 6, 3)],
)
def test_adversarial_orders_never_stall(exchange: str, size: int, hosts: int | None) -> None:
    """100 steps, each rank submitting and finishing in its own order, some without gradients."""
    shapes = {f"layer{i}": (17 + i, 3) for i in range(7)}
    once = gaussian(shapes, size, steps=1)[0]
    gradients = [[dict(rank) for rank in once] for _ in range(100)]
    for step in range(100):
        gradients[step][step % size][f"layer{step % 7}"] = None
    gradients[0] = once
    outcomes = run(gradients, make(exchange), shuffle=True, stall=10, hosts=hosts)
    assert_equal_everywhere(outcomes)


def test_parts_of_a_group_meet_by_themselves() -> None:
    def work(member: LocalMember) -> list[Any]:
        mine = torch.tensor([10 + member.rank])
        found: list[Any] = []
        for scope in (Scope.LOCAL, Scope.CROSS, Scope.ALL):
            back = member.wait(member.submit("x", Payload(Kind.GATHER, mine, scope=scope)))
            assert back.world_size == member.part_size(scope)
            found.append(back.buffer.tolist())
        ticket = member.submit("y", Payload(Kind.NOTHING, mine[:0], scope=Scope.CROSS))
        assert member.poll(ticket)
        assert member.wait(ticket).kind is Kind.NOTHING
        return found

    everyone = [10, 11, 12, 13]
    assert LocalGroup(4, hosts=2).run(work) == [
        [[10, 11], [10, 12], everyone],
        [[10, 11], [11, 13], everyone],
        [[12, 13], [10, 12], everyone],
        [[12, 13], [11, 13], everyone],
    ]


def test_a_missing_neighbour_is_named() -> None:
    def work(member: LocalMember) -> None:
        if member.rank != 3:
            payload = Payload(Kind.SUM, torch.ones(1), scope=Scope.LOCAL)
            member.wait(member.submit("x", payload))

    with pytest.raises(StallError, match=r"rank 2 waited 0\.2 s for ranks \[3\]"):
        LocalGroup(4, stall=0.2, hosts=2).run(work)


# -- hosts under Horovod -----------------------------------------------------------------------


def facts(*places: tuple[int, str], each: int = 2) -> list[tuple[int, int, int]]:
    return [(local, each, hash(name)) for local, name in places]


def test_ranks_are_grouped_by_host() -> None:
    from hvd_greco.exchange.hosts import group_by_host, parts

    # Numbered host by host: names do not matter (containers may share one).
    blocks = facts((0, "x"), (1, "x"), (0, "x"), (1, "x"))
    assert group_by_host(blocks) == [[0, 1], [2, 3]]
    dealt = facts((0, "a"), (0, "b"), (1, "a"), (1, "b"))
    assert group_by_host(dealt) == [[0, 2], [1, 3]]
    crossed = facts((0, "a"), (0, "b"), (1, "b"), (1, "a"))
    assert group_by_host(crossed) == [[0, 3], [1, 2]]
    with pytest.raises(ConfigError, match="cannot tell which ranks share a host"):
        group_by_host(facts((0, "x"), (0, "x"), (1, "x"), (1, "x")))
    with pytest.raises(ConfigError, match="hosts have 1 and 2"):
        group_by_host([(0, 2, 1), (1, 2, 1), (0, 1, 2)])
    assert parts([[0, 3], [1, 2]]) == [[0, 3], [1, 2], [0, 1], [3, 2]]
    assert parts([[0, 1, 2]]) == parts([[0], [1]]) == []


def test_process_sets_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import hvd_greco as greco

    names = ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")

    def launched(*values: int) -> None:
        for name, value in zip(names, values, strict=True):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))

    launched(4, 3, 2, 1)
    assert [ps.ranks for ps in greco.host_process_sets()] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert [ps.ranks for ps in greco.host_process_sets(4)] == []
    launched(4, 2, 2, 1)  # ranks dealt out to the hosts in turn
    with pytest.raises(ConfigError, match=r'rank 2 of 4 has local rank 1.*"dynamic"'):
        greco.host_process_sets()
    for name in names:
        monkeypatch.delenv(f"OMPI_COMM_WORLD_{name}")
        monkeypatch.delenv(f"HOROVOD_{name}", raising=False)
    monkeypatch.delenv("PMI_SIZE", raising=False)
    with pytest.raises(ConfigError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        greco.host_process_sets()


# -- every method by every route ---------------------------------------------------------------


ROUTED = {
    "scatter": ("natural", "qsgd", "sign", "topk"),
    "hierarchical": ("acp", "dense", "fp16", "natural", "qsgd", "randomk", "sign", "topk"),
}


@pytest.mark.parametrize("name", sorted(registry.codecs()))
@pytest.mark.parametrize(("exchange", "hosts"), [("scatter", None), ("hierarchical", 2)])
def test_every_method_goes_or_is_refused_with_a_reason(
    name: str, exchange: str, hosts: int | None
) -> None:
    """Equal on all ranks, bytes as announced, and with error feedback nothing lost."""
    entry = registry.codecs()[name]

    def build(pairs: Pairs, member: LocalMember) -> Compressor:
        arguments = entry.arguments({})
        return Compressor(pairs, group=member, min_numel=0, exchange=exchange, **arguments)

    gradients = gaussian({"a": (64, 96), "b": (33, 40)}, 4, steps=3)
    if name not in ROUTED[exchange]:
        with pytest.raises(ConfigError, match=r"does not go with|leave exchange out"):
            run(gradients, build, hosts=hosts)
        return
    outcomes = run(gradients, build, average=False, hosts=hosts, shuffle=True)
    assert_equal_everywhere(outcomes)
    for outcome in outcomes:
        # ACP's turns differ in length: the longer one is announced, and comes every other step.
        sent = max(report.sent_bytes for report in outcome.reports[-2:])
        assert sent == outcome.compressor.wire_bytes()
    if entry.memory == "ef":
        for layer in ("a", "b"):
            before = torch.zeros(outcomes[0].results[0][layer].shape, dtype=torch.float64)
            for step in range(3):
                put_in = (hosts or 1) * before + sum(g[layer].double() for g in gradients[step])
                before = kept_sum(outcomes, step, layer)
                decoded = outcomes[0].results[step][layer].double()
                torch.testing.assert_close(
                    decoded + (hosts or 1) * before, put_in, atol=5e-5, rtol=0
                )
