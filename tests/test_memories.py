"""Memories: what they promise, and which codecs they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_greco import registry
from hvd_greco.codecs.dense import BF16Codec
from hvd_greco.codecs.randomk import RandomKCodec
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError
from hvd_greco.exchange.local import LocalMember
from hvd_greco.layers import Layer
from hvd_greco.memories.ef21 import EF21SGDM
from simulate import at, context, gaussian, run

Pairs = list[tuple[str, torch.Tensor]]


def build(memory: Any, density: float = 0.1, codec: Any = TopKCodec) -> Any:
    def make(pairs: Pairs, member: LocalMember) -> Compressor:
        return Compressor(pairs, codec(), density, memory=memory, group=member, min_numel=1)

    return make


def test_ef21_becomes_exact_on_a_constant_gradient() -> None:
    """EF21's fixed point: with density 0.1 every entry was sent after ten steps."""
    constant = gaussian({"w": (50, 10)}, 3, steps=1)[0]
    outcomes = run([constant] * 12, build("ef21"))
    mean = sum(constant[rank]["w"] for rank in range(3)) / 3
    torch.testing.assert_close(outcomes[0].results[-1]["w"], mean, atol=1e-6, rtol=1e-6)
    # Before that it was not exact, so the test can tell.
    assert (outcomes[0].results[3]["w"] - mean).abs().max() > 1e-2
    for outcome in outcomes:
        assert torch.equal(outcome.results[-1]["w"], outcomes[0].results[-1]["w"])


def test_error_feedback_does_not_become_exact() -> None:
    """The contrast: error feedback repays entry by entry, and no single step is the mean."""
    constant = gaussian({"w": (50, 10)}, 3, steps=1)[0]
    outcome = run([constant] * 12, build("ef"))[0]
    mean = sum(constant[rank]["w"] for rank in range(3)) / 3
    assert (outcome.results[-1]["w"] - mean).abs().max() > 1e-1


@pytest.mark.parametrize("memory", ["ef21", EF21SGDM(eta=0.3)])
@pytest.mark.parametrize("codec", [TopKCodec, RandomKCodec])
def test_ef21_against_its_formulas(memory: Any, codec: Any) -> None:
    """Step by step: send C(v - g_i); g_i += C; mean += mean C."""
    eta = memory.eta if isinstance(memory, EF21SGDM) else 1.0
    gradients = gaussian({"w": (40, 10)}, 2, steps=6)
    outcomes = run(gradients, build(memory, codec=codec))
    own = [torch.zeros(40, 10) for _ in range(2)]
    average: list[torch.Tensor | None] = [None, None]
    mean = torch.zeros(40, 10)
    for step in range(6):
        sent = []
        for rank in range(2):
            g = gradients[step][rank]["w"]
            assert g is not None
            held = average[rank]
            average[rank] = g if held is None else (1 - eta) * held + eta * g
            difference = average[rank] - own[rank]
            if codec is TopKCodec:
                keep = difference.flatten().abs().argsort(descending=True)[:40]
                mask = torch.zeros(400)
                mask[keep] = 1
            else:
                layer = Layer(0, "w", (40, 10), torch.float32)
                work = at(context(step, rank, 2), layer, 0.1)
                mask = torch.zeros(400)
                mask[RandomKCodec()._positions(work, mask.device)] = 1
            part = difference * mask.view(40, 10)
            own[rank] = own[rank] + part
            sent.append(part)
        mean = mean + sum(sent) / 2
        torch.testing.assert_close(outcomes[0].results[step]["w"], mean, atol=1e-5, rtol=1e-5)


def test_ef21_treats_a_missing_gradient_as_zero() -> None:
    """Otherwise the estimate of a branch that is no longer used would be applied for ever."""
    first = gaussian({"w": (50, 10)}, 2, steps=1)[0]
    absent = [{"w": None}, {"w": None}]
    outcome = run([first] + [absent] * 12, build("ef21"))[0]
    assert outcome.results[0]["w"].any()
    assert not outcome.results[-1]["w"].any()


def test_an_overflow_leaves_no_trace_in_ef21() -> None:
    clean = gaussian({"a": (40, 9), "b": (77,)}, 2, steps=5)
    poisoned = [[dict(rank) for rank in step] for step in clean]
    poisoned[2][1]["a"] = torch.full((40, 9), float("inf"))
    skipped = [step for i, step in enumerate(clean) if i != 2]
    for memory in ("ef21", "ef21-sgdm"):
        hurt, never = run(poisoned, build(memory))[0], run(skipped, build(memory))[0]
        assert not torch.isfinite(hurt.results[2]["a"]).all()
        for layer in ("a", "b"):
            assert torch.equal(hurt.results[4][layer], never.results[3][layer])


@pytest.mark.parametrize(
    ("codec", "level", "memory", "reason"),
    [
        (TopKCodec, 0.1, "none", "biased"),
        (RandomKCodec, 0.1, "ef22", "'ef22' is none of"),
        (BF16Codec, None, 3, "memory: needs one of"),
    ],
)
def test_what_theory_forbids_is_refused(
    codec: Any, level: float | None, memory: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(gaussian({"w": (40, 9)}, 2, steps=1), build(memory, level, codec))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, 1.5, -1])
def test_eta_is_checked(bad: float) -> None:
    with pytest.raises(ConfigError, match="eta"):
        EF21SGDM(eta=bad)


@pytest.mark.parametrize("name", registry.memories())
def test_memory_costs_what_it_says(name: str) -> None:
    memory = registry.find_memory(name).make()
    if name == "none":
        codec: Any = RandomKCodec
    else:
        codec = TopKCodec
    outcome = run(gaussian({"w": (300, 40)}, 2, steps=3), build(memory, codec=codec))[0]
    assert outcome.compressor.memory_bytes()["state"] == memory.copies * 4 * 300 * 40
