"""Ranks as threads: what the stand-in for Horovod guarantees, and how it fails."""

from __future__ import annotations

import time

import pytest
import torch

from hvd_greco import LocalGroup, TopK
from hvd_greco.errors import ConfigError, MismatchError, StallError
from hvd_greco.exchange.local import LocalMember
from hvd_greco.payload import Kind, Payload
from simulate import gaussian, run


def test_results_come_in_rank_order() -> None:
    def work(member: LocalMember) -> list[int]:
        payload = Payload(Kind.GATHER, torch.full((member.rank,), member.rank))
        return member.wait(member.submit("x", payload)).buffer.tolist()

    assert LocalGroup(3).run(work) == [[1, 2, 2]] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    def work(member: LocalMember) -> None:
        if member.rank != 1:
            member.wait(member.submit("round", Payload(Kind.SUM, torch.ones(1))))

    started = time.monotonic()
    with pytest.raises(StallError, match=r"round.*waited 0\.2 s for ranks \[1\]"):
        LocalGroup(3, stall=0.2).run(work)
    assert time.monotonic() - started < 5


def test_the_first_failure_wins_and_wakes_the_others() -> None:
    def work(member: LocalMember) -> None:
        if member.rank == 2:
            raise RuntimeError("rank 2 broke")
        member.wait(member.submit("round", Payload(Kind.SUM, torch.ones(1))))

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 broke"):
        LocalGroup(3, stall=30).run(work)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Payload(Kind.SUM, torch.ones(1)), Payload(Kind.GATHER, torch.ones(1)), "collectives"),
        (Payload(Kind.SUM, torch.ones(1)), Payload(Kind.SUM, torch.ones(2)), "sizes"),
        (Payload(Kind.SUM, torch.ones(1)), Payload(Kind.SUM, torch.ones(1).int()), "dtypes"),
    ],
)
def test_payloads_that_do_not_fit_are_refused(
    first: Payload, second: Payload, message: str
) -> None:
    def work(member: LocalMember) -> None:
        member.wait(member.submit("x", (first, second)[member.rank]))

    with pytest.raises(MismatchError, match=message):
        LocalGroup(2).run(work)


def test_one_rank_cannot_submit_a_name_twice() -> None:
    def work(member: LocalMember) -> None:
        member.submit("x", Payload(Kind.SUM, torch.ones(1)))
        member.submit("x", Payload(Kind.SUM, torch.ones(1)))

    with pytest.raises(MismatchError, match="twice"):
        LocalGroup(2).run(lambda member: work(member) if member.rank == 0 else None)


def test_a_group_needs_a_rank() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        LocalGroup(0)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"density": 0.1}, {"density": 0.2}, r"layer w: topk\(0.1\) on rank 0, topk\(0.2\)"),
        ({"seed": 1}, {"seed": 2}, "seed: 1 on rank 0, 2 on rank 1"),
        ({}, {"memory": "ef21"}, "memory: ef on rank 0, ef21 on rank 1"),
    ],
)
def test_ranks_with_other_arguments_are_told_which(
    first: dict[str, object], second: dict[str, object], expected: str
) -> None:
    """Case 11: the layer or option, and both values, on every rank, before anything waits."""

    def build(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> TopK:
        options = {"density": 0.1, **(first if member.rank == 0 else second)}
        return TopK(pairs, group=member, min_numel=1, **options)  # type: ignore[arg-type]

    with pytest.raises(MismatchError, match=expected):
        run(gaussian({"w": (100, 10)}, 2, steps=1), build, stall=3)


def test_a_rank_one_step_behind_is_told() -> None:
    """Case 11: a rank that resumed elsewhere."""

    def build(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> TopK:
        compressor = TopK(pairs, group=member, min_numel=1)
        compressor._reduction.step = 7 if member.rank == 0 else 6
        return compressor

    with pytest.raises(MismatchError, match="rank 0 is at step 7, rank 1 at step 6"):
        run(gaussian({"w": (100, 10)}, 2, steps=1), build, stall=3)
