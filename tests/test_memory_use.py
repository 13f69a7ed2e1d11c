"""What each method costs in memory on top of the model, against the documented formula."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_greco import Dense, LocalGroup, RandomK, TopK, methods
from hvd_greco.codecs.sparse_wire import sparse_layout
from hvd_greco.compressor import Compressor
from hvd_greco.exchange.local import LocalMember
from simulate import gaussian, run

SHAPES = {"big": (300, 200), "small": (90, 50), "bias": (100,)}
COMPRESSED = 300 * 200 + 90 * 50


@pytest.mark.parametrize("method", [TopK, RandomK])
def test_error_feedback_costs_one_fp32_copy(method: type[Compressor]) -> None:
    outcome = run(gaussian(SHAPES, 2, steps=3), lambda pairs, member: method(pairs, group=member))[
        0
    ]
    assert outcome.compressor.memory_bytes()["state"] == 4 * COMPRESSED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_buffers_are_payloads_and_at_most_one_vector(dtype: torch.dtype) -> None:
    """Vectors are formed in the gradient's own memory, unless it is of another dtype."""
    gradients = gaussian(SHAPES, 2, steps=3, dtype=dtype)
    outcome = run(gradients, lambda p, m: TopK(p, group=m))[0]
    payloads = sum(
        sparse_layout(numel, round(numel / 100), torch.float32).nbytes + 4 * 5
        for numel in (300 * 200, 90 * 50)
    )
    # One to encode and one to decode.
    vectors = 0 if dtype == torch.float32 else 2 * 4 * 300 * 200
    assert outcome.compressor.memory_bytes()["buffers"] == payloads + vectors


@pytest.mark.parametrize(
    "make",
    [
        lambda p, m: RandomK(p, group=m, memory="none"),
        lambda p, m: Dense(p, group=m),
        lambda p, m: Dense(p, "fp16", group=m),
        lambda p, m: Dense(p, "bf16", group=m),
    ],
)
def test_methods_without_feedback_hold_no_state(make: object) -> None:
    outcome = run(gaussian(SHAPES, 2, steps=2), make)[0]  # type: ignore[arg-type]
    assert outcome.compressor.memory_bytes()["state"] == 0


@pytest.mark.parametrize(
    ("spec", "copies", "more"),
    [
        ("sharedtopk", 1, 0),
        ("sign", 1, 0),
        ("qsgd", 0, 0),
        ("natural", 0, 0),
        ("summable", 0, 0),
        ("powersgd:rank=4", 1, 4 * (200 + 50)),
        ("acp:rank=4", 1, 4 * (300 + 90)),
        ("topk:memory=ef21", 2, 0),
        ("topk:memory=ef21-sgdm", 3, 0),
    ],
)
def test_state_is_what_the_page_says(spec: str, copies: int, more: int) -> None:
    outcome = run(gaussian(SHAPES, 2, steps=3), lambda p, m: methods.build(spec, p, group=m))[0]
    plan = outcome.compressor.plan.assignments
    compressed = sum(math.prod(SHAPES[n]) for n, a in plan.items() if a.codec != "dense")
    assert compressed >= 300 * 200 + 90 * 50
    assert outcome.compressor.memory_bytes()["state"] == 4 * (copies * compressed + more)


@pytest.mark.parametrize("method", [TopK, RandomK, Dense])
def test_nothing_piles_up(method: type[Compressor]) -> None:
    """After 60 steps we hold the very buffers that we held after 20, and no hints of old steps."""

    def work(member: LocalMember) -> list[tuple[dict[str, int], set[int], int]]:
        parameters = {n: torch.nn.Parameter(torch.zeros(s)) for n, s in SHAPES.items()}
        compressor = method(list(parameters.items()), group=member)  # type: ignore[call-arg]
        seen = []
        for step in range(60):
            for parameter in parameters.values():
                parameter.grad = None
                (parameter * (step + 1.0 + member.rank)).sum().backward()
            member.reduce_gradients(list(parameters.items()), compressor)
            if step in (19, 59):
                slots = compressor._directory.slots
                held = [t for slot in slots for t in slot.buffers._tensors.values()]
                hints = len(compressor._directory._by_gradient)
                seen.append((compressor.memory_bytes(), {t.data_ptr() for t in held}, hints))
        return seen

    for early, late in LocalGroup(2).run(work):
        assert early == late
        assert late[2] == 0
