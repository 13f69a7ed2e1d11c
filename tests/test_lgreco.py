"""The controller on simulated ranks: decisions, agreement, and what survives a change of plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvd_greco as greco
from hvd_greco.adapt.journal import Interval, LayerLine, read_journal
from hvd_greco.adapt.other_policies import AccordionPolicy, SchedulePolicy
from hvd_greco.codecs.qsgd import QSGDCodec
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.errors import ConfigError, PolicyError
from hvd_greco.exchange.local import LocalMember
from hvd_greco.plan import Assignment
from simulate import gaussian, run

SHAPES = {"wide": (64, 96), "tall": (200, 20), "small": (40, 40), "bias": (60,)}
FAMILIES = ["topk", "qsgd", "powersgd", "acp", "auto"]


def gradients(size: int, steps: int, seed: int = 0) -> Any:
    """Layers of unlike sizes and tails, of low rank in part: they want unlike levels."""
    found = gaussian(SHAPES, size, steps, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for ranks in found:
        for each in ranks:
            wide, tall, small = each["wide"], each["tall"], each["small"]
            assert wide is not None
            assert tall is not None
            assert small is not None
            few = torch.rand(wide.shape, generator=generator) < 0.02
            each["wide"] = wide * few * 10 + 0.01 * wide
            each["tall"] = 0.1 * tall + tall[:, :1] @ tall[:1]
            each["small"] = small * 1e-4
    return found


def train(steps: int, size: int = 3, gradient: Any = None, **options: Any) -> list[Any]:
    def build(named: list[tuple[str, torch.Tensor]], member: LocalMember) -> Any:
        own = dict(options)
        if own.get("log"):
            own["log"] = f"{own['log']}.{member.rank}"
        return greco.LGreco(named, group=member, min_numel=100, **own)

    return run(gradient or gradients(size, steps), build, shuffle=True)


class Scripted(greco.Policy):
    """Takes the options that a test names, by layer, one dictionary for each decision."""

    name = "scripted"

    def __init__(self, *plans: dict[str, Assignment]) -> None:
        self.plans = list(plans)
        self.seen: list[greco.Evidence] = []

    def decide(self, evidence: greco.Evidence) -> greco.Decision:
        self.seen.append(evidence)
        plan = self.plans[min(evidence.interval, len(self.plans) - 1)]
        choice = [
            each.place(plan[each.layer.name]) if each.layer.name in plan else each.default
            for each in evidence.options
        ]
        return greco.Decision(np.array(choice), "as the test says")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_follow_one_plan_and_save_bytes(family: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = train(20, family=family, interval=6, log=str(log))
    for step in range(20):
        for other in found[1:]:
            for name in SHAPES:
                assert torch.equal(other.results[step][name], found[0].results[step][name])
    compressors = [outcome.compressor for outcome in found]
    assert len({each.plan.digest for each in compressors}) == 1
    assert compressors[0].plan.epoch >= 1
    assert {str(compressors[0].plan.assignments["bias"])} == {"dense"}
    lines = read_journal(Path(f"{log}.0"))
    decisions = [line for line in lines if isinstance(line, Interval)]
    assert [each.step for each in decisions] == [6, 12, 18]
    first = decisions[0]
    assert first.bytes < first.bytes_before
    assert first.figures["used"] <= first.figures["limit"] * (1 + 1e-9)
    layers = [line for line in lines if isinstance(line, LayerLine) and line.interval == 0]
    assert [line.layer for line in layers] == ["small", "tall", "wide"]
    assert math.isclose(sum(line.error for line in layers), first.error)
    assert not Path(f"{log}.1").exists()
    for outcome in found:
        for step, report in enumerate(outcome.reports):
            if family != "acp":
                assert report.sent_bytes <= outcome.announced[step]
        assert outcome.reports[-1].network_bytes < outcome.reports[0].network_bytes


def conserved(found: list[Any], given: Any, size: int) -> None:
    """What went in came out, or is still in a residual: summed over steps, mean over ranks."""
    for name in SHAPES:
        went_in = (
            sum(
                given[step][rank][name].double()
                for step in range(len(given))
                for rank in range(size)
            )
            / size
        )
        came_out = sum(result[name].double() for result in found[0].results)
        held = (
            sum(
                torch.zeros(SHAPES[name]).double()
                if outcome.residuals[-1][name] is None
                else outcome.residuals[-1][name].double()
                for outcome in found
            )
            / size
        )
        scale = float(went_in.abs().max())
        torch.testing.assert_close(came_out + held, went_in, rtol=0, atol=2e-5 * scale + 1e-9)


def test_nothing_is_lost_when_plans_change() -> None:
    """From codec to codec, to skip and to dense and back: gradients in, means and residuals out."""
    top, rank, bits = Assignment("topk", 0.01), Assignment("powersgd", 2), Assignment("qsgd", 3)
    skip, dense = Assignment("skip"), Assignment("dense")
    policy = Scripted(
        {"wide": rank, "tall": bits, "small": skip},
        {"wide": dense, "tall": skip, "small": top},
        {"wide": skip, "tall": dense, "small": dense},
        {"wide": top, "tall": rank, "small": skip},
    )
    given = gradients(3, 22)
    found = train(22, gradient=given, family="auto", default=0.01, interval=5, policy=policy,
                  levels={"topk": [0.01], "powersgd": [1, 2], "qsgd": [3, 4]})  # fmt: skip
    conserved(found, given, 3)
    # A dense layer owes nothing after its first step.
    assert found[0].residuals[10]["wide"] is None
    assert found[0].residuals[9]["wide"] is not None
    means = sum(given[11][rank]["wide"] for rank in range(3)) / 3
    torch.testing.assert_close(found[0].results[11]["wide"], means)
    assert not found[0].results[7]["small"].any()


def test_an_overflow_when_a_layer_goes_dense_keeps_its_residual() -> None:
    dense = Assignment("dense")
    policy = Scripted({"wide": dense, "tall": dense, "small": dense})
    given = gradients(2, 9)
    given[5][1]["tall"][0, 0] = math.inf
    found = train(9, size=2, gradient=given, family="topk", interval=5, policy=policy)
    before, after = (found[0].residuals[step]["wide"] for step in (4, 5))
    assert torch.equal(before, after)
    assert found[0].residuals[6]["wide"] is None
    del given[5]
    for outcome in found:
        del outcome.results[5]
    conserved(found, given, 2)


def test_warm_up_is_dense_and_the_first_decision_ends_it() -> None:
    given = gradients(2, 8)
    found = train(8, size=2, gradient=given, family="topk", warmup=4, interval=100)
    for step in range(4):
        for name in SHAPES:
            mean = (given[step][0][name] + given[step][1][name]) / 2
            assert torch.equal(found[0].results[step][name], mean)
            assert found[0].residuals[step][name] is None
    assert found[0].compressor.plan.epoch == 1
    assert found[0].reports[4].network_bytes < found[0].reports[3].network_bytes / 5


def test_statistics_are_of_all_ranks_and_no_sample_is_missed() -> None:
    policy = Scripted({})
    train(12, family="topk", interval=4, samples=2, policy=policy)
    assert [each.step for each in policy.seen] == [4, 8, 12]
    given = gradients(3, 12)
    for evidence in policy.seen:
        sums = evidence.sums["tall"]
        assert sums.samples == 2 * 3
        steps = (evidence.step - 1, evidence.step - 3)
        energy = sum(
            float(given[step][rank]["tall"].double().square().sum())
            for step in steps
            for rank in range(3)
        )
        assert math.isclose(sums.gradient_energy, energy, rel_tol=1e-6)
        assert (np.diff(sums.errors[:-2]) <= 0).all()
        assert sums.errors[-1] == 0
        assert sums.errors[-2] == pytest.approx(sums.energy)


def test_errors_are_those_of_the_codecs() -> None:
    """What statistics predict for a level is what the codec then leaves."""
    policy = Scripted({})
    found = train(5, family="topk", interval=5, samples=1, default=0.05, policy=policy)
    sums = policy.seen[0].sums["wide"]
    place = policy.seen[0].options[2].place(Assignment("topk", 0.05))
    # Sampled in the last step, whose residuals are what it left.
    left = sum(float(each.residuals[4]["wide"].double().square().sum()) for each in found)
    assert sums.errors[place] == pytest.approx(left, rel=0.02)


def test_a_policy_that_fails_ends_all_ranks() -> None:
    class Broken(greco.Policy):
        name = "broken"

        def decide(self, evidence: greco.Evidence) -> greco.Decision:
            raise ZeroDivisionError("no levels today")

    with pytest.raises(PolicyError, match="policy 'broken' after 4 steps: ZeroDivisionError: no"):
        train(6, family="topk", interval=4, policy=Broken())


def test_statistics_that_fail_on_one_rank_end_all(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = QSGDCodec.errors

    def fail(self: QSGDCodec, work: Any, vector: Any, levels: Any) -> Any:
        if work.rank == 1 and work.layer.name == "tall":
            raise ValueError("not today")
        return errors(self, work, vector, levels)

    monkeypatch.setattr(QSGDCodec, "errors", fail)
    with pytest.raises(PolicyError, match="rank 1: statistics failed: layer 'tall': ValueError"):
        train(6, family="qsgd", interval=4)


def test_levels_that_do_not_exist_end_all_ranks() -> None:
    class Wild(greco.Policy):
        name = "wild"

        def decide(self, evidence: greco.Evidence) -> greco.Decision:
            return greco.Decision(np.array([99, 0, 0]), "")

    with pytest.raises(
        PolicyError, match=r"after 4 steps: layer .*: option 99 was chosen, of 0 to "
    ):
        train(6, family="topk", interval=4, policy=Wild())


def test_overflows_in_all_samples_change_nothing() -> None:
    given = gradients(2, 9)
    for step in range(4):
        given[step][0]["wide"][0, 0] = math.nan
        given[step][1]["small"][0, 0] = math.nan
        given[step][1]["tall"][0, 0] = math.nan
    found = train(9, size=2, gradient=given, family="topk", interval=4)
    assert found[0].compressor.plan.epoch <= 1
    assert all(torch.isfinite(found[0].results[8][name]).all() for name in SHAPES)


def test_ratio_budget(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = train(8, family="topk", interval=4, budget="ratio:20", log=str(log), hysteresis=0)
    report = found[0].reports[-1]
    assert report.dense_bytes / report.network_bytes >= 20 / 2  # on the link two ranks send twice
    (first, _) = (x for x in read_journal(Path(f"{log}.0")) if isinstance(x, Interval))
    assert first.bytes <= first.figures["limit"] + 1e4
    caplog.clear()
    train(8, family="topk", interval=4, budget="ratio:100000")
    assert sum("that is what is used" in record.message for record in caplog.records) == 1


def test_a_plan_that_gains_little_is_not_taken(tmp_path: Path) -> None:
    found = train(9, family="topk", interval=4, hysteresis=0.99, log=str(tmp_path / "log"))
    assert found[0].compressor.plan.epoch == 0
    (line, *_) = read_journal(tmp_path / "log.0")
    assert isinstance(line, Interval)
    assert "less than the hysteresis" in line.reason
    assert line.changed == 0


def test_accordion_and_schedule(tmp_path: Path) -> None:
    given = gradients(2, 13)
    for step in range(13):
        for rank in range(2):
            # Its norm halves from one interval to the next; the others' hardly change.
            given[step][rank]["wide"] *= 0.3 ** (step // 4)
    policy = AccordionPolicy("topk", strong=0.01, fine=0.08)
    found = train(13, size=2, gradient=given, family="topk", interval=4, policy=policy,
                  log=str(tmp_path / "log"))  # fmt: skip
    lines = [x for x in read_journal(tmp_path / "log.0") if isinstance(x, LayerLine)]
    chosen = {(line.interval, line.layer): line.new for line in lines}
    assert {chosen[0, name] for name in ("wide", "tall", "small")} == {"topk(0.08)"}
    assert chosen[1, "wide"] == chosen[2, "wide"] == "topk(0.08)"
    assert chosen[2, "tall"] == "topk(0.01)"
    assert "gradient norm changed by" in lines[-1].reason
    assert found[0].compressor.plan.epoch >= 2
    schedule = SchedulePolicy("topk", lambda step: 0.1 if step < 8 else 0.01)
    found = train(9, family="topk", interval=4, policy=schedule)
    assert str(found[0].compressor.plan.assignments["wide"]) == "topk(0.01)"


def test_the_dynamic_programme_and_the_papers_metric_decide_too() -> None:
    for options in ({"solver": "dp"}, {"metric": "lgreco"}):
        found = train(6, family="topk", interval=5, hysteresis=0, **options)
        assert found[0].compressor.plan.epoch == 1


def test_codecs_with_options_of_their_own() -> None:
    found = train(6, family="topk", interval=5, codecs={"topk": TopKCodec("fp16")})
    assert found[0].compressor.plan.context["topk values"] == "fp16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"family": "topq"}, "family: 'topq' is none of topk, qsgd, powersgd, acp, auto"),
        ({"objective": "money"}, "objective: 'money' is none of bytes"),
        ({"budget": "cheap"}, "budget: 'cheap' is none of"),
        ({"budget": -1}, "budget: -1 is none of"),
        ({"budget": "ratio:0"}, "budget: 'ratio:0' is none of"),
        ({"interval": 0}, "interval: "),
        ({"samples": 0}, "samples: "),
        ({"solver": "luck"}, "solver: 'luck' is none of hull, dp"),
        ({"metric": "mood"}, "metric: 'mood' is none of residual, squared, lgreco"),
        ({"hysteresis": 1.5}, "hysteresis: 1.5 is outside"),
        ({"default": 7.0}, "default: 7.0 is not in (0, 1]"),
        ({"family": "qsgd", "default": 0.3}, "bits: "),
        ({"levels": {"qsgd": [2]}}, "'qsgd' is not in family 'topk'"),
        ({"policy": 3}, "policy: needs a greco.Policy, got 3"),
        ({"memory": "none"}, "memory: LGreco has no such argument"),
        ({"log": "/proc/no/log"}, "log: '/proc/no/log.0' cannot be written"),
    ],
)
def test_bad_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(1, size=1, **options)
    assert said in str(caught.value)


def test_journals_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with pytest.raises(ConfigError, match=r"No such file"):
        read_journal(path)
    path.write_text('{"kind":"interval"}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*missing required field"):
        read_journal(path)
    path.write_bytes(b"x" * (1 << 21))
    with pytest.raises(ConfigError, match="line 1 is longer than 1,048,576 bytes"):
        read_journal(path)


def test_accordions_levels_as_the_budget(tmp_path: Path) -> None:
    """With its fine levels the budget is smaller, with its strong ones larger, than uniform's."""

    def error(reference: greco.Policy | None) -> float:
        log = tmp_path / "log"
        train(5, family="topk", interval=4, hysteresis=0, log=str(log), reference=reference)
        (first, *_) = (x for x in read_journal(Path(f"{log}.0")) if isinstance(x, Interval))
        return first.error / first.error_default

    # The first interval has nothing to compare with, and counts as critical: the fine level.
    fine = error(AccordionPolicy("topk", strong=0.0025, fine=0.16))
    strong = error(AccordionPolicy("topk", strong=0.0025, fine=0.0025))
    assert fine < 0.9 * error(None) < error(None) < strong


def test_a_reference_needs_a_budget_of_error() -> None:
    reference = AccordionPolicy("topk", 0.01, 0.1)
    with pytest.raises(ConfigError, match=r"reference: has no meaning for the budget 'ratio:10'"):
        train(1, size=1, budget="ratio:10", reference=reference)
    with pytest.raises(ConfigError, match=r"reference: needs a greco.Policy, got 'accordion'"):
        train(1, size=1, reference="accordion")


def test_statistics_are_a_number_for_each_option_and_no_gradient() -> None:
    found = train(12, family="auto", interval=5)
    compressor = found[0].compressor
    numbers = sum(len(each.assignments) + 5 for each in compressor._controller._statistics.options)
    assert compressor._controller.nbytes() == 8 * numbers
    residuals = sum(
        0 if held is None else held.numel() * 4 for held in found[0].residuals[-1].values()
    )
    warm_starts = sum(
        t.numel() * 4 for slots in found[0].states[-1].values() for t in slots.values()
    )
    assert compressor.memory_bytes()["state"] == residuals + warm_starts + 8 * numbers


def test_large_layers_are_looked_at_in_parts_and_low_rank_once_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Curves of a part are scaled to the whole; other entries are looked at in each sample."""
    from hvd_greco.adapt import statistics
    from hvd_greco.codecs import low_rank, powersgd

    calls = []
    measured = low_rank.low_rank_errors
    monkeypatch.setattr(
        powersgd, "low_rank_errors", lambda *given: calls.append(1) or measured(*given)
    )
    given = gaussian({"w": (300, 205)}, 2, 12, seed=4)

    def seen() -> Any:
        recorder = Scripted({})

        def build(named: list[tuple[str, torch.Tensor]], member: LocalMember) -> Any:
            return greco.LGreco(
                named, family="auto", interval=12, samples=3, policy=recorder, group=member
            )

        run(given, build)
        return recorder.seen[0]

    whole = seen()
    monkeypatch.setattr(statistics, "_LARGE", 10_000)
    monkeypatch.setattr(statistics, "_BLOCK", 512)
    calls.clear()
    part = seen()
    # Three samples on two ranks, but one look at the singular values on each.
    assert len(calls) == 2
    assert part.sums["w"].samples == 6
    assert math.isclose(part.sums["w"].energy, whole.sums["w"].energy, rel_tol=1e-6)
    assert not np.array_equal(part.errors, whole.errors)
    np.testing.assert_allclose(part.errors, whole.errors, rtol=0.03)
    parts = [statistics._part(torch.arange(20_000.0), turn) for turn in range(4)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(19_968.0))


def test_low_rank_errors_are_what_the_warm_start_leads_to() -> None:
    from hvd_greco.codecs import low_rank
    from hvd_greco.layers import Layer
    from simulate import at, context

    layer = Layer(0, "w", (30, 20), torch.float32)
    where = at(context(), layer, 2)
    matrix = torch.randn(30, 20, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svd(matrix.double())
    energy, squares = float(values.S.square().sum()), values.S.square()

    def errors(start: torch.Tensor | None) -> list[float]:
        return low_rank.low_rank_errors(where, matrix.reshape(-1), [2, 20], start)

    # The best directions lose what a truncated singular value decomposition loses.
    two, all_of_them = errors(values.Vh[:2].float())
    assert math.isclose(two, energy - float(squares[:2].sum()), rel_tol=1e-4)
    assert all_of_them < 1e-4 * energy
    # The worst ones catch their own share, which holds for all ranks.
    worst, most = errors(values.Vh[-2:].float())
    assert math.isclose(worst, energy - float(squares[-2:].sum()), rel_tol=1e-3)
    assert math.isclose(
        most, energy * (1 - float(squares[-2:].sum() / squares[:2].sum())), rel_tol=1e-3
    )
    # Nothing known: seven tenths of the best.
    assert math.isclose(errors(None)[1], 0.3 * energy, rel_tol=1e-4)
