"""What the controller believes of time: overlap, links, codecs, and plans that follow from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvd_greco as greco
from hvd_greco.adapt import calibrate, links, time_policy, timeline
from hvd_greco.adapt.budget import parse_budget
from hvd_greco.adapt.journal import Interval, LayerLine, read_journal
from hvd_greco.adapt.links import Link, measure_links
from hvd_greco.adapt.options import Options
from hvd_greco.adapt.pipeline import Part, Prediction, StepModel, simulate
from hvd_greco.adapt.statistics import Sums
from hvd_greco.adapt.time_policy import TimePolicy
from hvd_greco.adapt.timeline import Timeline, Times, slowest
from hvd_greco.codecs.dense import DenseCodec
from hvd_greco.codecs.skip import SkipCodec
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.errors import ConfigError
from hvd_greco.exchange.echo import EchoGroup
from hvd_greco.exchange.local import LocalMember
from hvd_greco.layers import Layer
from hvd_greco.memories.error_feedback import ErrorFeedback
from hvd_greco.payload import Kind, Payload, Reduced, network_bytes
from hvd_greco.plan import Assignment
from simulate import gaussian, run

#: A second each, and a second for 100 bytes.
LINKS = {kind: Link(1.0, 0.01) for kind in (Kind.SUM, Kind.GATHER, Kind.CARRIED, Kind.SCATTER)}


def dense(nbytes: float) -> Part:
    return Part(0.0, 0.0, Kind.CARRIED, nbytes)


# -- simulation --------------------------------------------------------------------------------


def test_communication_within_the_backward_pass_costs_nothing() -> None:
    found = simulate(np.array([10.0, 20.0]), [dense(400), dense(0)], LINKS)
    assert found.backward == 20.0
    # The first layer's 5 s are over by 15; the second one and the checks share a second.
    assert found.total == 21.0
    assert found.exposed == 1.0
    assert found.link == 6.0


def test_one_collective_at_a_time_and_what_waits_is_fused() -> None:
    # The first runs from 1 to 12; by then both others are there, and share one latency.
    found = simulate(np.array([1.0, 2.0, 3.0]), [dense(1000), dense(300), dense(200)], LINKS)
    assert found.total == 12.0 + 1.0 + 5.0


def test_private_payloads_wait_for_the_roll_call() -> None:
    gather = Part(0.5, 0.25, Kind.GATHER, 100)
    found = simulate(np.array([1.0]), [gather], LINKS)
    # Encoded at 1.5; roll call and checks are fused until 2.5; two seconds for the payload.
    assert found.backward == 1.5
    assert found.total == 1.5 + 1.0 + 2.0 + 0.25
    assert found.codec == 0.75


def test_rounds_come_one_after_the_other() -> None:
    two = Part(0.0, 0.0, Kind.SUM, 200, rounds=2)
    assert simulate(np.array([0.0]), [two], LINKS).total == 1.0 + 2.0 + 2.0


def test_nothing_is_sent_of_a_skipped_layer() -> None:
    skip = Part(0.5, 0.5, Kind.NOTHING, 0)
    assert simulate(np.array([1.0]), [skip], LINKS).total == 1.5 + 1.0  # the checks


def test_later_layers_wait_for_the_encoding_of_earlier_ones() -> None:
    parts = [Part(2.0, 0.0, Kind.NOTHING, 0), dense(0)]
    assert simulate(np.array([1.0, 1.5]), parts, LINKS).backward == 3.5


def test_a_model_is_fitted_to_what_was_measured() -> None:
    model = StepModel({"a": 1.0, "b": 2.0}, {"a": [dense(500)], "b": [dense(100)]}, LINKS)
    truth = StepModel({"a": 1.0, "b": 2.0}, model.parts, LINKS, slow=1.7)
    measured = truth.predict({}).total
    assert math.isclose(model.fitted({}, measured).predict({}).total, measured, rel_tol=1e-4)
    assert math.isclose(model.fitted({}, measured).slow, 1.7, rel_tol=1e-3)
    # Where communication is hidden, a step's time says nothing of it.
    assert model.fitted({}, 0.5 * model.predict({}).total).slow == pytest.approx(1.0)
    hidden = StepModel({"a": 1.0, "b": 900.0}, model.parts, LINKS)
    assert hidden.fitted({}, 1000.0).slow == 1.0


# -- measurements --------------------------------------------------------------------------------


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowGroup(EchoGroup):
    """Takes the time of a link, by a clock of its own."""

    def __init__(self, size: int, clock: Clock, link: Link) -> None:
        super().__init__(size)
        self._clock, self._link = clock, link

    def wait(self, ticket: Payload) -> Reduced:
        if ticket.buffer.dtype != torch.float64:
            nbytes = network_bytes(ticket.kind, ticket.nbytes, self.size)
            self._clock.now += self._link.seconds(nbytes)
            return super().wait(ticket)
        return Reduced(ticket.kind, ticket.buffer, self.size)  # rank 0's time, agreed on


@pytest.mark.parametrize("link", [Link(1e-3, 1e-9), Link(2e-4, 4e-8), Link(5e-3, 1e-12)])
def test_links_are_found_from_their_times(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(links, "time", clock)
    group = SlowGroup(4, clock, link)
    found = measure_links(group, "test", [Kind.SUM, Kind.GATHER, Kind.SCATTER, Kind.CARRIED])
    for kind in (Kind.SUM, Kind.GATHER, Kind.SCATTER):
        small = network_bytes(kind, 256, 4) * link.seconds_per_byte
        assert math.isclose(found[kind].latency, link.latency + small, rel_tol=1e-6)
        assert math.isclose(found[kind].seconds_per_byte, link.seconds_per_byte, rel_tol=1e-6)
    assert found[Kind.CARRIED] == found[Kind.SUM]
    # 10 Gbit/s or 200 Mbit/s: less than two seconds in all.
    assert clock.now - 100.0 < 2.0


def test_a_timeline_takes_encoding_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timeline, "time", clock)
    line = Timeline(["a", "b"])
    assert math.isnan(line.take().total)
    line.resume()
    for _ in range(5):
        for name in ("b", "a"):
            clock.now += 2.0  # backward
            line.enter(name)
            clock.now += 0.5  # encoding
            line.leave()
        clock.now += 3.0
        line.close(usual=True)
        clock.now += 50.0  # a decision, say
        line.resume()
    line.close(usual=False)
    assert line.take().ready.tolist() == [4.0, 2.0]
    assert line.take().total == 8.0
    line.forget()
    assert math.isnan(line.take().total)


def test_the_slowest_rank_counts() -> None:
    nan = math.nan
    found = slowest([Times(np.array([1.0, nan, nan]), 3.0), Times(np.array([0.5, 2.0, nan]), nan)])
    assert found.ready[:2].tolist() == [1.0, 2.0]
    assert math.isnan(found.ready[2])
    assert found.total == 3.0


def test_coefficients_are_never_negative() -> None:
    features = np.array([[1, 10, 5], [1, 100, 20], [1, 1000, 400], [1, 10, 9]], dtype=float)
    found = calibrate._fit(features, features @ [2.0, 0.5, 0.0])
    np.testing.assert_allclose(found, [2.0, 0.5, 0.0], atol=1e-9)
    # Falling with the number of elements: the best that is left is a constant.
    found = calibrate._fit(features[:3], np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found[0] > 0


def test_codecs_are_timed_by_the_whole_path() -> None:
    layers = [Layer(i, f"l{i}", (n, 64), torch.float32) for i, n in enumerate((8, 100, 2000))]
    codecs = {"topk": TopKCodec(), "skip": SkipCodec(), "dense": DenseCodec()}
    assignments = (
        Assignment("topk", 0.01), Assignment("topk", 0.1), Assignment("skip"), Assignment("dense"),
    )  # fmt: skip
    options = [Options(layer, assignments, (1.0, 2.0, 0.0, 9.0), 0) for layer in layers]
    times = calibrate.measure_codecs(options, codecs, ErrorFeedback(), 4)
    assert set(times.coefficients) == {"topk", "skip", "dense"}
    for codec in codecs.values():
        small, large = (
            times.seconds(codec, layer, Assignment(codec.name, 0.1), 4).sum()
            for layer in (layers[0], layers[2])
        )
        assert 0 < small <= large < 0.5


# -- decisions -----------------------------------------------------------------------------------


def evidence(seconds_per_byte: float, measured: float = math.nan, current: int = 0) -> Any:
    """Two layers with five options: topk at two levels, fp16, skip and dense."""
    assignments = (
        Assignment("topk", 0.01), Assignment("topk", 0.1), Assignment("fp16"), Assignment("skip"),
        Assignment("dense"),
    )  # fmt: skip
    options, sums, parts = [], {}, {}
    for i, name in enumerate(("a", "b")):
        layer = Layer(i, name, (1000,), torch.float32)
        nbytes = (100.0, 1000.0, 2000.0, 0.0, 4000.0)
        options.append(Options(layer, assignments, nbytes, 0))
        sums[name] = Sums(np.array([50.0, 10.0, 0.01, 100.0, 0.0]), 100.0, 100.0, 3)
        parts[name] = [
            Part(1e-3, 1e-3, Kind.GATHER, nbytes[0]), Part(1e-3, 2e-3, Kind.GATHER, nbytes[1]),
            dense(nbytes[2]), Part(5e-4, 5e-4, Kind.NOTHING, 0.0), dense(nbytes[4]),
        ]  # fmt: skip
    net = {kind: Link(1e-4, seconds_per_byte) for kind in LINKS}
    model = StepModel({"a": 0.010, "b": 0.011}, parts, net)
    return greco.Evidence(
        0,
        100,
        options,
        sums,
        {"a": current, "b": current},
        0.0,
        8000.0,
        model=model,
        measured_seconds=measured,
    )


def policy(budget: str = "error:1.0", **options: Any) -> TimePolicy:
    return TimePolicy(parse_budget(budget), **options)


def test_where_compression_does_not_pay_the_plan_is_dense() -> None:
    found = policy().decide(evidence(1e-9))
    assert found.choice.tolist() == [4, 4]
    assert "compression does not pay" in found.reason


def test_on_a_slow_link_the_budget_of_error_is_used() -> None:
    given = evidence(1e-5, current=4)
    found = policy().decide(given)
    assert set(found.choice.tolist()) <= {0, 1, 3}
    errors = given.errors[np.arange(2), found.choice].sum()
    assert errors <= 100.0 * (1 + 1e-9)
    assert given.model is not None
    chosen = given.model.predict(dict(zip(("a", "b"), found.choice.tolist(), strict=True)))
    every = [
        given.model.predict({"a": a, "b": b}).total
        for a in range(5)
        for b in range(5)
        if given.errors[0, a] + given.errors[1, b] <= 100.0
    ]
    assert math.isclose(chosen.total, min(every), rel_tol=1e-3)


def test_in_between_half_precision_is_enough() -> None:
    found = policy().decide(evidence(4e-7, current=4))
    assert found.choice.tolist() == [2, 2]


def test_a_plan_that_was_measured_to_be_slow_is_left() -> None:
    """What was measured is believed: the model had promised more."""
    decides = policy()
    assert decides.decide(evidence(1e-5, measured=0.095, current=4)).choice.tolist() != [4, 4]
    chosen = decides.decide(evidence(1e-5, current=4)).choice
    later = evidence(1e-5, measured=0.2)
    slow = greco.Evidence(
        1, 200, later.options, later.sums, dict(zip("ab", chosen.tolist(), strict=True)), 0.0,
        8000.0, model=later.model, measured_seconds=0.2,
    )  # fmt: skip
    found = decides.decide(slow)
    assert found.choice.tolist() != chosen.tolist()


def test_what_the_model_leaves_out_is_learnt_from_compressed_plans() -> None:
    """What hides in the backward pass lengthens it here by 0.4 of its time, or all by a fifth."""
    gather = Part(1e-3, 1e-3, Kind.GATHER, 4000.0)
    model = StepModel(
        {"a": 0.010, "b": 0.030, "c": 0.100},
        {"a": [gather], "b": [dense(0.0)], "c": [gather]},
        {kind: Link(1e-4, 1e-5) for kind in LINKS},
    )
    simulated = model.predict({})
    # The first layer's 40 ms with the second one's hook, and latencies; nothing of the third.
    assert 0.040 < simulated.hidden < 0.041
    experience = time_policy._Experience()
    for _ in range(20):
        experience.learn(simulated, simulated.total + 0.4 * simulated.hidden)
    assert math.isclose(experience.tax, 0.4, rel_tol=1e-3)
    assert math.isclose(experience.factor, 1.0, rel_tol=1e-3)
    # Nothing hidden: the factor alone.
    hidden = time_policy._Experience()
    for _ in range(20):
        hidden.learn(Prediction(0.1, 0.09, 0.0, 0.01), 0.12)
    assert hidden.tax == 0.0
    assert math.isclose(hidden.factor, 1.2, rel_tol=1e-3)
    # Whatever ten times as long was, it was no plan.
    hidden.learn(Prediction(0.1, 0.09, 0.0, 0.01), 10.0)
    assert hidden.factor <= 1.5


def test_dense_steps_teach_nothing_of_compression() -> None:
    decides = policy()
    decides.decide(evidence(1e-5, measured=0.095, current=4))
    assert decides._memory == time_policy._Experience(known=decides._memory.known)
    found = decides.decide(evidence(1e-5, measured=0.095))
    assert found.figures["surcharge"] > 1.0
    assert np.isfinite(found.seconds)


def test_hysteresis_keeps_a_plan() -> None:
    best = policy().decide(evidence(1e-5, current=4)).choice
    given = evidence(1e-5)
    same = greco.Evidence(
        1, 200, given.options, given.sums, dict(zip("ab", best.tolist(), strict=True)), 0.0,
        8000.0, model=given.model,
    )  # fmt: skip
    found = policy().decide(same)
    assert found.choice.tolist() == best.tolist()
    assert found.reason.startswith("kept")


def test_a_step_budget_is_used_for_less_error() -> None:
    given = evidence(1e-5, current=4)
    assert given.model is not None
    loose, tight, impossible = (
        policy(f"step:{seconds}").decide(given) for seconds in (0.060, 0.025, 0.001)
    )

    def seconds(decision: greco.Decision) -> float:
        choice = dict(zip("ab", decision.choice.tolist(), strict=True))
        return float(given.model.predict(choice).total)

    def error(decision: greco.Decision) -> float:
        return float(given.errors[np.arange(2), decision.choice].sum())

    assert seconds(loose) <= 0.060
    assert seconds(tight) <= 0.025
    assert error(loose) < error(tight)
    assert "no plan is predicted to keep 0.001 s" in impossible.reason


def test_without_times_nothing_changes() -> None:
    given = evidence(1e-5)
    blind = greco.Evidence(0, 1, given.options, given.sums, given.current, 0.0, 8000.0)
    assert policy().decide(blind).choice.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "ratio:10"}, "limits bytes, which objective='bytes' knows of"),
        ({"metric": "mood"}, "metric: 'mood' is none of residual, squared, lgreco"),
        ({"solver": "luck"}, "solver: 'luck' is none of hull, dp"),
        ({"hysteresis": -1.0}, "hysteresis: -1.0 is outside"),
    ],
)
def test_bad_arguments(options: dict[str, Any], said: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(10, 10))
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        greco.LocalGroup(1).run(
            lambda member: greco.LGreco(
                [("w", parameter)], objective="time", group=member, **options
            )
        )


# -- all together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["error:1.0", "step:10"])
@pytest.mark.parametrize("family", ["topk", "auto"])
def test_ranks_agree_on_plans_for_time(family: str, budget: str, tmp_path: Path) -> None:
    shapes = {"wide": (64, 96), "tall": (200, 20), "small": (40, 40), "bias": (60,)}
    log = tmp_path / "log"

    def build(named: list[tuple[str, torch.Tensor]], member: LocalMember) -> Any:
        return greco.LGreco(
            named, family=family, objective="time", budget=budget, interval=10, min_numel=100,
            group=member, log=f"{log}.{member.rank}",
        )  # fmt: skip

    found = run(gaussian(shapes, 3, 45), build, shuffle=True)
    for step in range(45):
        for other in found[1:]:
            for name in shapes:
                assert torch.equal(other.results[step][name], found[0].results[step][name])
    assert len({each.compressor.plan.digest for each in found}) == 1
    lines = read_journal(Path(f"{log}.0"))
    decisions = [line for line in lines if isinstance(line, Interval)]
    assert [each.step for each in decisions] == [20, 30, 40]
    for report in found[0].reports[:20]:
        assert report.sent_bytes == report.dense_bytes + report.beacon_bytes
    for each in decisions:
        assert each.measured_seconds is not None
        assert each.predicted_seconds is not None
        assert each.measured_seconds > 0
        assert each.predicted_seconds > 0
        assert each.figures["dense_seconds"] > 0
    if budget.startswith("step"):
        # Ten seconds are enough for dense, which loses nothing.
        assert decisions[0].error == 0.0
    layers = [line for line in lines if isinstance(line, LayerLine)]
    assert all(line.predicted_link_seconds is not None for line in layers)
