"""Small layers that wait for each other (on a GPU): the same results as one by one.

Here they are made to wait on the CPU, where nothing else differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvd_greco.late
from hvd_greco import kernels, methods
from hvd_greco.codecs.topk import TopKCodec
from hvd_greco.exchange.local import LocalGroup, LocalMember
from simulate import Outcome, gaussian, run

SHAPES = {f"layer{i}": (40 + 3 * i, 50) for i in range(7)}
METHODS = [
    "topk:density=0.01", "topk:density=0.05,values=fp16", "topk:density=0.05,values=q4",
    "topk:density=0.05,selection=sampled", "topk:density=0.01,memory=ef21", "qsgd:bits=4",
]  # fmt: skip


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let CPU layers wait, for so many of them; 0: as usual."""

    def choose(layers: int) -> None:
        monkeypatch.setattr(hvd_greco.late, "DEVICES", {"cpu"} if layers else set())
        monkeypatch.setattr(hvd_greco.late, "ENOUGH_LAYERS", layers)

    return choose


def outcomes(method: str, size: int = 3) -> list[Outcome]:
    """Five steps: one with an overflow, one in which a rank lacks gradients."""
    gradients: Any = gaussian(SHAPES, size, steps=5)
    gradients[1][0]["layer2"][3, 3] = math.inf
    gradients[3][-1]["layer0"] = gradients[3][-1]["layer5"] = None

    def build(named: list[tuple[str, torch.Tensor]], member: LocalMember) -> Any:
        return methods.build(method, named, group=member, min_numel=64)

    return run(gradients, build, shuffle=True)


@pytest.mark.parametrize("layers", [1, 3, 64])
@pytest.mark.parametrize("method", METHODS)
def test_waiting_changes_nothing(method: str, layers: int, wait: Callable[[int], None]) -> None:
    wait(0)
    expected = outcomes(method)
    wait(layers)
    for ours, theirs in zip(outcomes(method), expected, strict=True):
        for step in range(5):
            for name in SHAPES:
                pairs = [
                    (ours.results[step][name], theirs.results[step][name]),
                    (ours.residuals[step][name], theirs.residuals[step][name]),
                ]
                for found, wanted in pairs:
                    assert (found is None) == (wanted is None)
                    if found is not None:
                        assert wanted is not None
                        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
            assert ours.reports[step].sent_bytes == theirs.reports[step].sent_bytes
            assert ours.reports[step].nonfinite == theirs.reports[step].nonfinite


@pytest.mark.parametrize(("layers", "calls"), [(64, 1), (3, 3)])
def test_calls_are_few(
    layers: int, calls: int, wait: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven layers in one call, or in three; none is left behind."""
    sizes: list[int] = []
    many = kernels.accumulate_select_many

    def counted(gradients: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(gradients))
        return many(gradients, *arguments, **options)

    monkeypatch.setattr(kernels, "accumulate_select_many", counted)
    wait(layers)
    outcomes("topk:density=0.01", size=2)
    # Two ranks, five steps; one of them lacked two layers in one.
    assert sum(sizes) == 2 * 5 * 7 - 2
    assert len(sizes) in (2 * 5 * calls, 2 * 5 * calls - 1)


def test_large_layers_do_not_wait(
    wait: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hvd_greco.late, "MOST_ELEMENTS", 2100)
    wait(64)
    seen: list[int] = []
    many = TopKCodec.encode_many

    def watched(self: TopKCodec, works: Any, *arguments: Any) -> Any:
        seen.extend(work.layer.numel for work in works)
        return many(self, works, *arguments)

    monkeypatch.setattr(TopKCodec, "encode_many", watched)
    outcomes("topk:density=0.01")
    assert set(seen) == {2000}


def test_a_step_that_is_never_finished(wait: Callable[[int], None]) -> None:
    """Layers that wait are submitted all the same: other ranks may have sent theirs."""
    gradients: Any = gaussian(SHAPES, 2, steps=2)
    expected: list[list[torch.Tensor]] = []

    for layers in (0, 2, 64):
        wait(layers)

        def program(member: LocalMember) -> list[torch.Tensor]:
            parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
            compressor = methods.build(
                "topk:density=0.01", list(parameters.items()), group=member, min_numel=64
            )
            for name in list(SHAPES)[:3]:
                parameters[name].grad = gradients[0][member.rank][name].clone()
                compressor.compress(parameters[name].grad)
            for name, parameter in parameters.items():
                parameter.grad = gradients[1][member.rank][name].clone()
            member.reduce_gradients(list(parameters.items()), compressor)
            return [p.grad for p in parameters.values() if p.grad is not None]

        found = LocalGroup(2).run(program)
        if layers == 0:
            expected = found
        for ours, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, theirs))
