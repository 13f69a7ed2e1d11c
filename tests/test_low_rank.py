"""PowerSGD and ACP: orthonormal factors, fixed points, warm starts, and the formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_greco import kernels
from hvd_greco.codecs.acp import ACPCodec
from hvd_greco.codecs.base import Codec, Turn
from hvd_greco.codecs.dense import DenseCodec
from hvd_greco.codecs.low_rank import drawn, rank_of, resized
from hvd_greco.codecs.powersgd import PowerSGDCodec
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError, WireError
from hvd_greco.exchange.local import LocalMember
from hvd_greco.layers import Layer, LayerState
from hvd_greco.payload import Kind, Payload, Reduced
from simulate import Gradients, Outcome, at, context, gaussian, run

CODECS = [PowerSGDCodec, ACPCodec]
LAYER = Layer(0, "w", (40, 30), torch.float32)


def build(codec: type[Codec], level: int, **options: Any) -> Any:
    def make(pairs: list[tuple[str, torch.Tensor]], member: LocalMember) -> Compressor:
        return Compressor(pairs, codec(), level, group=member, min_numel=0, **options)

    return make


def slots(outcome: Outcome) -> dict[str, dict[str, torch.Tensor]]:
    return {s.layer.name: s.state.slots for s in outcome.compressor._directory.slots}


def low_rank_matrix(rank: int, n: int = 40, m: int = 30, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(n, rank, generator=generator)
    return left @ torch.randn(rank, m, generator=generator)


def assert_paid(
    outcome: Outcome, codec: type[Codec], step: int, matrix: torch.Tensor, atol: float
) -> None:
    """Two steps on a constant matrix of less than full rank bring it twice.

    PowerSGD brings it in each. ACP's product with the right factor may leave out something, and
    the next one, with a left factor that spans all columns, brings that as well.
    """
    one, two = outcome.results[step]["w"], outcome.results[step + 1]["w"]
    torch.testing.assert_close(one + two, 2 * matrix, atol=2 * atol, rtol=0)
    if codec is PowerSGDCodec:
        torch.testing.assert_close(one, matrix, atol=atol, rtol=0)


# -- orthonormalise ---------------------------------------------------------------------------


def assert_orthonormal(rows: torch.Tensor, alive: list[bool]) -> None:
    assert [bool(row.any()) for row in rows] == alive
    gram = (rows.double() @ rows.double().T).numpy()
    np.testing.assert_allclose(gram, np.diag(np.array(alive, dtype=float)), atol=1e-6)


@st.composite
def stacks(draw: st.DrawFn) -> np.ndarray:
    """Matrices of small whole numbers times powers of two: their ranks are known exactly."""
    rank, length = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    matrices = []
    for _ in range(draw(st.integers(1, 3))):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        rows = rng.integers(-9, 10, (rank, length)).astype(np.float64)
        for j in range(rank):
            kind = draw(st.sampled_from(["new", "new", "zero", "spike", "sum", "copy"]))
            if kind == "zero":
                rows[j] = 0
            elif kind == "spike":
                rows[j] = 0
                rows[j, rng.integers(length)] = 1
            elif kind == "sum" and j:
                rows[j] = rng.integers(-2, 3, j) @ rows[:j]
            elif kind == "copy" and j:
                rows[j] = rows[rng.integers(j)]
        matrices.append(rows)
    return np.stack(matrices)


@settings(max_examples=200, deadline=None)
@given(stacks(), st.integers(-100, 80), st.data())
def test_independent_rows_come_out_orthonormal_and_others_zero(
    whole: np.ndarray, exponent: int, data: st.DataObject
) -> None:
    shifts = data.draw(st.lists(st.integers(-20, 20), min_size=9, max_size=9))
    scales = np.ldexp(1.0, np.array(shifts[: whole.shape[1]]) + exponent)
    stack = torch.from_numpy(whole * scales[:, None]).float()
    result = kernels.orthonormalise(stack)
    for before, rows in zip(whole, result, strict=True):
        ranks = [0, *(int(np.linalg.matrix_rank(before[:j])) for j in range(1, len(before) + 1))]
        assert_orthonormal(rows, [a < b for a, b in pairwise(ranks)])
        found = rows.double().numpy()
        # What was there lies in the span of what came out.
        np.testing.assert_allclose(before @ found.T @ found, before, atol=1e-4 * 40)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (30, 40), (4, 8193), (32, 20_000)])
def test_orthonormalise_is_qr_with_a_positive_diagonal(shape: tuple[int, int]) -> None:
    stack = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    q, r = torch.linalg.qr(stack[0].double().T)
    expected = (q * r.diagonal().sign()).T
    found = kernels.orthonormalise(stack)[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert_orthonormal(found, [True] * shape[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearly_dependent_rows_are_told_apart(dtype: torch.dtype) -> None:
    fresh = torch.randn(8, 500, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for nearness in (1e-1, 1e-3, 3e-5):
        rows = fresh.clone()
        for j in range(1, 8):
            rows[j] = rows[j - 1] + nearness * fresh[j]
        assert_orthonormal(kernels.orthonormalise(rows[None])[0], [True] * 8)
    hilbert = 1.0 / (torch.arange(12)[:, None] + torch.arange(300)[None] + 1.0)
    gram = kernels.orthonormalise(hilbert[None].to(dtype))[0].double()
    gram = gram @ gram.T
    assert (gram - torch.diag(gram.diagonal().round())).abs().max() < 1e-6


def test_a_row_alone_differs_in_no_bit_from_a_row_among_others() -> None:
    """Ranks orthonormalise whatever is ready: different batches on each."""
    threads = torch.get_num_threads()
    for rank, length in ((1, 1024), (5, 300), (4, 4097), (16, 9000)):
        stack = torch.randn(7, rank, length, generator=torch.Generator().manual_seed(rank))
        stack[2, 0] = 0
        stack[3, rank - 1] = stack[3, 0] * (1 + 1e-5)
        whole = kernels.orthonormalise(stack)
        for count in (1, 2, 5):
            assert torch.equal(kernels.orthonormalise(stack[:count].clone()), whole[:count])
        for i in range(7):
            assert torch.equal(kernels.orthonormalise(stack[i : i + 1].clone())[0], whole[i])
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            assert torch.equal(kernels.orthonormalise(stack), whole)
        finally:
            torch.set_num_threads(threads)


def test_no_order_of_addition_shows() -> None:
    """Sums are exact, so entries in another order give the same bits in that order."""
    generator = torch.Generator().manual_seed(0)
    # Entries with more digits than the sums have room for; a result in fp64 hides nothing.
    stack = torch.randn(3, 4, 4000, generator=generator, dtype=torch.float64) ** 5
    order = torch.randperm(4000, generator=generator)
    shuffled = kernels.orthonormalise(stack[..., order].contiguous())
    assert torch.equal(shuffled, kernels.orthonormalise(stack)[..., order])


def test_size_does_not_matter() -> None:
    stack = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(0))
    expected = kernels.orthonormalise(stack)
    for exponent in (-90, -10, 60, 120):
        assert torch.equal(kernels.orthonormalise(stack * 2.0**exponent), expected)
    for scale in (1e-44, 1e-20, 1e15, 1e37):
        for rows in kernels.orthonormalise(stack * scale):
            assert_orthonormal(rows, [True] * 4)
    wide = stack.double() * 1e300
    torch.testing.assert_close(kernels.orthonormalise(wide).float(), expected)


def test_rows_that_are_not_finite_come_out_zero() -> None:
    stack = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0))
    stack[0, 1, 3], stack[0, 2, 4], stack[1] = float("nan"), float("-inf"), float("inf")
    first, second = kernels.orthonormalise(stack)
    assert_orthonormal(first, [True, False, False, True])
    assert not second.any()


def test_orthonormalise_refuses_what_cannot_be() -> None:
    for bad in (
        torch.zeros(3, 4),
        torch.zeros(1, 3, 4).half(),
        torch.zeros(1, 4, 3).transpose(1, 2),
    ):
        with pytest.raises(ConfigError, match="orthonormalise"):
            kernels.orthonormalise(bad)
    assert kernels.orthonormalise(torch.zeros(0, 4, 3)).shape == (0, 4, 3)


def test_products_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 5, generator=generator)
    left, right = torch.randn(3, 7, generator=generator), torch.randn(3, 5, generator=generator)
    torch.testing.assert_close(
        kernels.project_rows(right, matrix, torch.empty(3, 7)), right @ matrix.T
    )
    torch.testing.assert_close(
        kernels.project_columns(left, matrix, torch.empty(3, 5)), left @ matrix
    )
    product = kernels.low_rank(left, right, torch.empty(7, 5))
    torch.testing.assert_close(product, left.T @ right)
    added = kernels.add_low_rank(matrix.clone(), left, right, -2.0)
    torch.testing.assert_close(added, matrix - 2 * left.T @ right)
    with pytest.raises(ConfigError, match="low_rank"):
        kernels.low_rank(left, right, torch.empty(5, 7))
    with pytest.raises(ConfigError, match="float64"):
        kernels.project_rows(right, matrix.double(), torch.empty(3, 7))


def test_where_a_product_lies_does_not_matter() -> None:
    """MKL gives other bits for this shape where the result is not aligned."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(8, 33, generator=generator), torch.randn(8, 9, generator=generator)
    product = kernels.low_rank(left, right, torch.empty(33, 9))
    for offset in (1, 2, 3, 5):
        out = torch.empty(400)[offset : offset + 297].view(33, 9)
        assert torch.equal(kernels.low_rank(left, right, out), product)


def test_all_finite_sees_every_entry() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (1,), (37,), (1000,), (5, 7)):
            tensor = torch.ones(shape, dtype=dtype)
            assert kernels.all_finite(tensor)
            for poison in (np.nan, np.inf, -np.inf):
                bad = tensor.clone()
                bad.view(-1)[-1] = poison
                assert not kernels.all_finite(bad)
    assert kernels.all_finite(torch.empty(0, 3))
    assert not kernels.all_finite(torch.tensor([[1.0, 2.0], [np.nan, 3.0]])[:, 0])


def test_shared_numbers_are_shared() -> None:
    """The words come from Philox itself, so they may never change."""
    like = torch.empty(0)
    numbers = kernels.shared_uniform((1, 2), 50, 40, like)
    assert torch.equal(numbers, kernels.shared_uniform((1, 2), 50, 40, like))
    assert not torch.equal(numbers, kernels.shared_uniform((1, 3), 50, 40, like))
    assert numbers.min() >= -1
    assert numbers.max() < 1
    assert abs(numbers.mean()) < 5 / (3 * 2000) ** 0.5
    raw = np.random.Philox(key=np.array([1, 2], dtype=np.uint64)).random_raw(1)
    assert float(numbers[0, 0]) == (int(raw[0]) >> 40) / 2**23 - 1


# -- the formulas -----------------------------------------------------------------------------


def qr(columns: np.ndarray) -> np.ndarray:
    q, r = np.linalg.qr(columns)
    return q * np.sign(np.diag(r))


def powersgd_in_numpy(gradients: Gradients, rank: int) -> tuple[list[Any], list[Any]]:
    size = len(gradients[0])
    start = drawn(at(context(), LAYER, rank), "start", rank, 30, torch.empty(0)).double().numpy().T
    residuals, results, q = [np.zeros((40, 30)) for _ in range(size)], [], start
    for ranks in gradients:
        work = [r["w"].double().numpy() + e for r, e in zip(ranks, residuals, strict=True)]
        p = qr(sum(a @ q for a in work))
        locals_ = [a.T @ p for a in work]
        residuals = [a - p @ x.T for a, x in zip(work, locals_, strict=True)]
        q = sum(locals_)
        results.append(p @ q.T / size)
    return results, residuals


def acp_in_numpy(gradients: Gradients, rank: int) -> tuple[list[Any], list[Any]]:
    size = len(gradients[0])
    start = drawn(at(context(), LAYER, rank), "start", rank, 30, torch.empty(0)).double().numpy().T
    residuals, results, q = [np.zeros((40, 30)) for _ in range(size)], [], start
    p = np.empty(0)
    for step, ranks in enumerate(gradients):
        work = [r["w"].double().numpy() + e for r, e in zip(ranks, residuals, strict=True)]
        if step % 2 == 0:
            q = qr(q)
            locals_ = [a @ q for a in work]
            residuals = [a - x @ q.T for a, x in zip(work, locals_, strict=True)]
            p = sum(locals_) / size
        else:
            p = qr(p)
            locals_ = [a.T @ p for a in work]
            residuals = [a - p @ x.T for a, x in zip(work, locals_, strict=True)]
            q = sum(locals_) / size
        results.append(p @ q.T)
    return results, residuals


@pytest.mark.parametrize(
    ("codec", "reference"), [(PowerSGDCodec, powersgd_in_numpy), (ACPCodec, acp_in_numpy)]
)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rank", [1, 4])
def test_five_steps_match_numpy(
    codec: type[Codec], reference: Callable[..., Any], size: int, rank: int
) -> None:
    gradients = gaussian({"w": (40, 30)}, size, steps=5)
    # With one rank everything is dense by plan, so let two ranks carry halves of the same.
    shown = gradients if size > 1 else [[ranks[0], ranks[0]] for ranks in gradients]
    outcomes = run(shown, build(codec, rank))
    results, residuals = reference(shown, rank)
    for step, expected in enumerate(results):
        found = outcomes[0].results[step]["w"].double().numpy()
        np.testing.assert_allclose(found, expected, atol=2e-4)
    for outcome, expected in zip(outcomes, residuals, strict=True):
        np.testing.assert_allclose(outcome.residuals[-1]["w"].numpy(), expected, atol=1e-3)


# -- fixed points -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_enough_rank_is_exact(codec: type[Codec]) -> None:
    """Rank 5 for a sum of true rank 3: exact once the directions were seen."""
    one, two = low_rank_matrix(1, seed=1), low_rank_matrix(2, seed=2)
    outcomes = run([[{"w": one}, {"w": two}]] * 4, build(codec, 5))
    # ACP's first product is with random directions. From then on it owes what it missed.
    expected = (one + two) / 2
    shown = [outcomes[0].results[step]["w"] for step in range(4)]
    if codec is PowerSGDCodec:
        for result in shown:
            torch.testing.assert_close(result, expected, atol=1e-5 * 10, rtol=0)
    total = sum(shown)
    error = (total - 4 * expected).abs().max() / expected.abs().max()
    assert error < 1e-5


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("memory", ["ef", "ef21"])
def test_constant_gradients_arrive_in_the_end(codec: type[Codec], memory: str) -> None:
    """EF: the sum over t steps is t G but for a bounded debt. EF21: the result becomes G."""
    ranks = [{"w": low_rank_matrix(30, seed=seed)} for seed in (1, 2)]
    mean = (ranks[0]["w"] + ranks[1]["w"]) / 2
    outcomes = run([ranks] * 240, build(codec, 4, memory=memory))
    shown = [outcomes[0].results[step]["w"] for step in range(240)]
    if memory == "ef":
        owed = [float((sum(shown[:t]) - t * mean).norm() / mean.norm()) for t in (60, 120, 240)]
        assert owed[2] < 1.2 * owed[0] + 1
        assert owed[2] / 240 < 0.1
    else:
        errors = [float((shown[t - 1] - mean).norm() / mean.norm()) for t in (1, 30, 240)]
        assert errors[1] < 0.5 * errors[0]
        assert errors[2] < 1e-3


@pytest.mark.parametrize("codec", CODECS)
def test_a_direction_that_died_comes_back(codec: type[Codec]) -> None:
    """Gradients of rank one leave no direction for the others; later ones need them again."""
    poor, rich = low_rank_matrix(1), low_rank_matrix(4, seed=7)
    steps = [[{"w": poor}] * 2] * 4 + [[{"w": rich}] * 2] * 4
    outcome = run(steps, build(codec, 4))[0]
    debt = outcome.residuals[-1]["w"].norm() / rich.norm()
    assert debt < 1e-4
    assert all(torch.isfinite(result["w"]).all() for result in outcome.results)


# -- warm starts ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_warm_starts_are_one_on_all_ranks(codec: type[Codec]) -> None:
    """Equal shapes, so batches differ between ranks; absent gradients; every order; a rank change.

    Bitwise, since results would drift apart otherwise.
    """
    shapes = {f"w{i}": (33, 17 if i % 2 else 40) for i in range(6)}
    gradients = gaussian(shapes, 3, steps=40)
    for step, ranks in enumerate(gradients):
        for i, name in enumerate(shapes):
            ranks[(step + i) % 3][name] = None
            if step % 7 == i:
                for rank in ranks:
                    rank[name] = None
    outcomes = run(
        gradients,
        build(codec, 4, schedule=lambda step: 3 if step < 13 else 5 if step < 27 else 2),
        shuffle=True,
    )
    for name in shapes:
        for step in range(40):
            first = outcomes[0].results[step][name]
            assert all(torch.equal(first, other.results[step][name]) for other in outcomes[1:])
        for key, held in slots(outcomes[0])[name].items():
            assert held.shape[0] == 2
            assert all(torch.equal(held, slots(other)[name][key]) for other in outcomes[1:])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("empty", ["absent", "zero", "nan"])
def test_a_step_without_gradients_leaves_the_warm_start(codec: type[Codec], empty: str) -> None:
    gradients = gaussian({"w": (40, 30)}, 2, steps=3)
    filler = {"absent": None, "zero": torch.zeros(40, 30), "nan": torch.full((40, 30), np.nan)}
    # Without a residual, or zero gradients would not give zero vectors.
    constant = [[{"w": low_rank_matrix(2)}] * 2] * 4
    before = run(constant, build(codec, 4))
    after = run([*constant, [{"w": filler[empty]}] * 2], build(codec, 4))
    if empty == "zero":
        # What is left of the residual is rounding, and its directions mean nothing; from no
        # residual at all, zeros must leave no trace.
        state, codec_ = LayerState(), codec()
        _commit(codec_, state, gradients[0][0]["w"], 0)
        held = {key: slot.clone() for key, slot in state.slots.items()}
        _commit(codec_, state, torch.zeros(40, 30), 1)
        assert held.keys() == state.slots.keys()
        assert all(torch.equal(held[key], state.slots[key]) for key in held)
        return
    for key, held in slots(before[0])["w"].items():
        assert torch.equal(held, slots(after[0])["w"][key])
    assert slots(before[0])["w"].keys() == slots(after[0])["w"].keys()
    if empty == "nan":
        assert after[0].results[-1]["w"].isnan().any()


def _commit(
    codec: Codec, state: LayerState, matrix: torch.Tensor, step: int, level: int = 4
) -> Any:
    """One step of one rank alone; returns the result."""
    here, out = context(step), torch.empty(LAYER.numel)
    vector = matrix.reshape(-1)
    sent = codec.encode(at(here, LAYER, level, state), vector)
    reduced = Reduced(sent.kind, sent.buffer.clone(), 1)
    if codec.rounds == 2:
        turn = Turn(at(here, LAYER, level, state), sent, reduced, lambda: vector)
        sent = codec.next_rounds([turn])[0]
        reduced = Reduced(sent.kind, sent.buffer.clone(), 1)
    codec.commit(at(here, LAYER, level, state), sent, reduced)
    codec.decode(at(here, LAYER, level), sent, reduced, out)
    return out.view(40, 30)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_before_commit_changes_state(codec: type[Codec]) -> None:
    """Also where the rank changed, and with a start drawn for the first time."""
    one, state = codec(), LayerState()
    one.encode(at(context(), LAYER, 4, state), low_rank_matrix(8).reshape(-1))
    assert not state.slots
    _commit(one, state, low_rank_matrix(8), 0)
    held = dict(state.slots)
    copies = {key: slot.clone() for key, slot in held.items()}
    for level in (2, 7):
        one.encode(at(context(1), LAYER, level, state), low_rank_matrix(8).reshape(-1))
        one.encode_absent(at(context(1), LAYER, level, state), torch.zeros(1))
    assert state.slots.keys() == held.keys()
    assert all(state.slots[k] is held[k] and torch.equal(held[k], copies[k]) for k in held)


def test_a_new_rank_keeps_the_leading_directions() -> None:
    held = kernels.orthonormalise(torch.randn(1, 4, 30, generator=torch.Generator().manual_seed(0)))
    same = torch.empty(0)
    narrower = resized(held[0], at(context(), LAYER, 4), 2, 30, same)
    assert torch.equal(narrower, held[0, :2])
    wider = resized(held[0] * 5, at(context(), LAYER, 4), 9, 30, same)
    assert torch.equal(wider[:4], held[0] * 5)
    torch.testing.assert_close(wider[4:] @ held[0].T, torch.zeros(5, 4), atol=1e-6, rtol=0)
    torch.testing.assert_close(wider[4:] @ wider[4:].T, torch.eye(5), atol=1e-6, rtol=0)
    # Of another shape (the layer was another one): start anew.
    assert resized(held[0], at(context(), LAYER, 4), 4, 31, same) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("new", [3, 8])
def test_nothing_is_lost_over_a_rank_change(codec: type[Codec], new: int) -> None:
    """Case 23. On a constant gradient, directions that were found are found at once again."""
    matrix = low_rank_matrix(3)
    steps = [[{"w": matrix}] * 2] * 12
    outcome = run(steps, build(codec, 4, schedule=lambda step: 4 if step < 6 else new))[0]
    assert [report.layers[0].level for report in outcome.reports][5:7] == [4, new]
    for step in range(4, 12, 2):
        assert_paid(outcome, codec, step, matrix, 1e-4)


# -- levels, bytes, hostile input -------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_ranks_are_checked_and_clamped(codec: type[Codec]) -> None:
    """Case 28."""
    one = codec()
    for bad in (0, -1, 1.5, None, True, float("nan"), float("inf"), "4"):
        with pytest.raises(ConfigError, match="rank"):
            one.check_level(bad)
    assert one.check_level(4.0) == 4
    assert rank_of(LAYER, 1000) == 30
    assert one.wire_bytes(LAYER, 1000, 2) == one.wire_bytes(LAYER, 30, 2)
    assert one.menu(LAYER) == (1, 2, 4, 8, 16)
    assert one.menu(Layer(0, "b", (64,), torch.float32)) == ()
    hand = {"powersgd": 4 * 4 * (40 + 30), "acp": 4 * 4 * 40}[one.name]
    assert one.wire_bytes(LAYER, 4, 2) == hand


@pytest.mark.parametrize("codec", CODECS)
def test_layers_that_would_grow_go_dense(codec: type[Codec]) -> None:
    """Case 29: r (n + m) >= n m, vectors, scalars."""
    shapes = {"bias": (5000,), "scalar": (), "thin": (4, 500), "row": (1, 900), "w": (60, 50)}
    compressor = run(gaussian(shapes, 2, steps=1), build(codec, 4))[0].compressor
    chosen = {name: compressor.plan.assignments[name].codec for name in shapes}
    dense = DenseCodec().name
    assert chosen == {name: dense if name != "w" else codec.name for name in shapes}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deficient_half_precision_matrices(codec: type[Codec], dtype: torch.dtype) -> None:
    """Case 28: constant, tiny, one row only; worked on in fp32."""
    single = torch.zeros(40, 30)
    single[3] = torch.linspace(-1, 1, 30)
    for matrix in (torch.ones(40, 30), torch.full((40, 30), 6e-5), single):
        outcome = run([[{"w": matrix.to(dtype)}] * 2] * 6, build(codec, 4))[0]
        # ACP's first product is with random directions; what that missed comes with the next.
        found = sum(outcome.results[step]["w"].double() for step in range(6)) / 6
        torch.testing.assert_close(found, matrix.double(), rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e15, 1e30])
def test_size_of_gradients_does_not_matter(codec: type[Codec], scale: float) -> None:
    matrix = low_rank_matrix(3) * scale
    outcome = run([[{"w": matrix}] * 2] * 6, build(codec, 4))[0]
    assert_paid(outcome, codec, 4, matrix, 1e-4 * scale)


@pytest.mark.parametrize("codec", CODECS)
def test_sums_that_overflow_poison_nothing(codec: type[Codec]) -> None:
    """Finite on every rank, infinite when added: no residual or warm start may become NaN."""
    fine = gaussian({"w": (40, 30)}, 2, steps=1)[0]
    huge = [{"w": torch.full((40, 30), 2e38)}, {"w": torch.full((40, 30), 2.5e38)}]
    outcomes = run([fine, huge], build(codec, 4, memory="ef"))
    for outcome in outcomes:
        for held in slots(outcome)["w"].values():
            assert held.isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_payloads_of_another_size_are_refused(codec: type[Codec]) -> None:
    one, state, out = codec(), LayerState(), torch.empty(LAYER.numel)
    vector = low_rank_matrix(8).reshape(-1)
    sent = one.encode(at(context(), LAYER, 4, state), vector)
    wrong = Reduced(sent.kind, torch.zeros(sent.buffer.numel() + 4), 1)
    if codec is PowerSGDCodec:
        with pytest.raises(WireError, match="4 x 40"):
            one.next_round(Turn(at(context(), LAYER, 4, state), sent, wrong, lambda: vector))
        sent = Payload(Kind.SUM, torch.zeros(120), own=torch.zeros(4, 40))
    with pytest.raises(WireError, match="expected, got"):
        one.decode(at(context(), LAYER, 4), sent, wrong, out)


def test_batches_are_the_layers_one_by_one() -> None:
    """Bit for bit, in whatever company: ranks have different layers ready at a time."""
    codec, turns, kept = PowerSGDCodec(), [], []
    for i, shape in enumerate([(40, 30), (40, 20), (40, 30), (16, 30), (40, 30)]):
        layer = Layer(i, f"w{i}", shape, torch.float32)
        generator = torch.Generator().manual_seed(i)
        vector = torch.randn(layer.numel, generator=generator)
        here = context()
        sent = codec.encode(at(here, layer, 4), vector)
        reduced = Reduced(Kind.SUM, sent.buffer.clone(), 1)
        turns.append(Turn(at(here, layer, 4), sent, reduced, lambda v=vector: v))
        kept.append(codec.next_round(turns[-1]).buffer.clone())
    for payload, alone in zip(codec.next_rounds(turns), kept, strict=True):
        assert torch.equal(payload.buffer, alone)


def test_acp_takes_turns_and_a_skipped_step_loses_none() -> None:
    gradients = gaussian({"w": (40, 30)}, 2, steps=5)
    gradients[2][1]["w"] = torch.full((40, 30), np.inf)
    after = [slots(run(gradients[: t + 1], build(ACPCodec, 4))[0])["w"] for t in range(5)]
    assert [next(iter(held)) for held in after] == ["acp.p", "acp.q", "acp.q", "acp.p", "acp.q"]
    assert [next(iter(held.values())).shape for held in after[:2]] == [(4, 40), (4, 30)]


def test_two_steps_of_acp_send_what_the_paper_counts() -> None:
    """r n and r m elements in turn, as one step of PowerSGD sends; each turn at its own length."""
    outcome = run(gaussian({"w": (40, 30)}, 2, steps=4), build(ACPCodec, 4))[0]
    extra = outcome.compressor.wire_bytes() - 4 * 4 * 40
    payloads = [report.sent_bytes - extra for report in outcome.reports]
    assert payloads == [4 * 4 * 40, 4 * 4 * 30] * 2
    two = 2 * ACPCodec().network_bytes(LAYER, 4, 2)
    assert two == PowerSGDCodec().network_bytes(LAYER, 4, 2)


def test_acp_keeps_the_same_whatever_the_op() -> None:
    gradients = gaussian({"w": (40, 30)}, 3, steps=5)
    average = run(gradients, build(ACPCodec, 4))[0]
    total = run(gradients, build(ACPCodec, 4), average=False)[0]
    torch.testing.assert_close(total.results[-1]["w"], 3 * average.results[-1]["w"])
    for key, held in slots(average)["w"].items():
        torch.testing.assert_close(slots(total)["w"][key], held, atol=1e-5, rtol=0)
