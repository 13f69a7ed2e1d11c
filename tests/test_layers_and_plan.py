"""Facts about layers, checks of arguments, and what a plan agrees on."""

from __future__ import annotations

import math

import pytest
import torch

from hvd_greco.codecs.sparse_wire import sparse_layout
from hvd_greco.codecs.topk import kept
from hvd_greco.config import check_density
from hvd_greco.errors import ConfigError
from hvd_greco.layers import Layer, check_named_parameters
from hvd_greco.payload import Kind, network_bytes
from hvd_greco.plan import Assignment, Plan, matches, step_words


def test_named_parameters_come_back_sorted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    names = [name for name, _ in check_named_parameters(model.named_parameters())]
    assert names == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda m: m, "model.named_parameters()"),
        (lambda m: list(m.parameters()), "pairs"),
        (lambda m: [], "is empty"),
        (lambda m: [("a", m.weight), ("a", m.bias)], "'a' occurs twice"),
        (lambda m: [("a", m.weight), ("b", m.weight)], "'a' and 'b' are one"),
        (lambda m: [("a", 3)], "pairs"),
        (lambda m: torch.nn.LazyLinear(3).named_parameters(), "'weight' has no shape yet"),
    ],
)
def test_bad_named_parameters_are_refused(bad: object, message: str) -> None:
    with pytest.raises(ConfigError, match="named_parameters") as caught:
        check_named_parameters(bad(torch.nn.Linear(2, 2)))  # type: ignore[operator]
    assert message in str(caught.value)


@pytest.mark.parametrize("bad", [0, 1.5, -0.1, math.nan, math.inf, "0.1", None, True, 0.0])
def test_bad_densities_name_argument_and_value(bad: object) -> None:
    with pytest.raises(ConfigError, match="density") as caught:
        check_density("density", bad)
    assert repr(bad) in str(caught.value)


def test_a_percentage_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"pass 0\.05"):
        check_density("density", 5)


def test_kept_is_at_least_one_and_at_most_all() -> None:
    assert kept(10, 0.001) == 1
    assert kept(1000, 0.0125) == 12
    assert kept(3, 1.0) == 3


def test_matrix_views() -> None:
    assert Layer(0, "w", (4, 3, 2), torch.float32).matrix == (4, 6)
    assert Layer(0, "b", (7,), torch.float32).matrix == (1, 7)
    assert Layer(0, "s", (), torch.float32).numel == 1


@pytest.mark.parametrize(
    ("numel", "k", "form", "index_bytes"),
    [
        (1000, 10, "block", 20),
        (65_536, 100, "block", 200),
        (65_537, 1, "int32", 4),
        (65_537, 100, "block", 208),
        (1000, 500, "bitmap", 125),
        (1000, 1000, "all", 0),
        (20_000_000, 200, "int32", 800),
    ],
)
def test_positions_take_the_smallest_form(numel: int, k: int, form: str, index_bytes: int) -> None:
    layout = sparse_layout(numel, k, torch.float32)
    assert (layout.form, layout.index_bytes) == (form, index_bytes)
    assert layout.nbytes == -(-(4 * k + index_bytes) // 8) * 8


def test_one_percent_costs_about_six_bytes_a_value() -> None:
    layout = sparse_layout(10_000_000, 100_000, torch.float32)
    assert layout.nbytes / 100_000 < 6.02


def test_network_bytes_by_hand() -> None:
    assert network_bytes(Kind.CARRIED, 1000, 4) == 1500
    assert network_bytes(Kind.GATHER, 1000, 4) == 3000
    assert network_bytes(Kind.SCATTER, 1000, 4) == 750
    assert network_bytes(Kind.GATHER, 1000, 1) == 0


def _plan(**changes: object) -> Plan:
    facts: dict[str, object] = {
        "assignments": {"b": Assignment("topk", 0.01), "a": Assignment("dense")},
        "context": {"seed": "0", "memory": "error feedback"},
        "epoch": 0,
    }
    facts.update(changes)
    return Plan(**facts)  # type: ignore[arg-type]


def test_a_digest_depends_on_every_fact_and_on_no_order() -> None:
    digests = {
        _plan().digest,
        _plan(epoch=1).digest,
        _plan(context={"seed": "1", "memory": "error feedback"}).digest,
        _plan(assignments={"a": Assignment("dense"), "b": Assignment("topk", 0.02)}).digest,
        _plan(assignments={"a": Assignment("dense")}).digest,
    }
    assert len(digests) == 5
    turned = _plan(
        assignments={"a": Assignment("dense"), "b": Assignment("topk", 0.01)},
        context={"memory": "error feedback", "seed": "0"},
    )
    assert turned.digest == _plan().digest


def test_step_words_are_exact_in_sums() -> None:
    first, second = step_words(_plan(), 5)
    assert first != step_words(_plan(), 6)[0]
    total = sum(torch.full((8192,), first, dtype=torch.float64).tolist())
    assert total == 8192 * first
    assert 0 <= second < 2**40


def test_patterns() -> None:
    assert matches("encoder.0.bias", ["*.bias"])
    assert not matches("encoder.0.weight", ["*.bias", "head*"])
