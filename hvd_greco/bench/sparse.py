"""Operations of sparsifiers, each with the torch chain beside it."""

from __future__ import annotations

import torch

from .. import kernels
from . import chains, cupy_rivals
from .case import Case, Operation, Work
from .inputs import make_input, some_positions


def _topk_ef(case: Case, device: torch.device) -> Work:
    gradient = make_input(case.inputs or "gaussian", case.numel, device)
    # Of the same kind as the gradient, so that their sum is too.
    held = 0.5 * gradient
    residual, k = held.clone(), case.k

    def ours() -> object:
        return kernels.accumulate_select(gradient, residual, 1.0, residual, k, clear=True)

    return Work(
        ours,
        lambda: chains.topk_feedback(gradient, residual, k),
        (residual,),
        lambda: residual.copy_(held),
        cupy_rivals.topk_feedback(gradient, residual, k),
    )


#: Layers of ``topk_ef_many``.
LAYERS = 64


def _topk_ef_many(case: Case, device: torch.device) -> Work:
    parts = make_input("gaussian", case.numel, device).split(max(1, case.numel // LAYERS))
    gradients = [part.clone() for part in parts]
    held = [0.5 * gradient for gradient in gradients]
    residuals = [layer.clone() for layer in held]
    ks = [max(1, round((case.density or 0) * layer.numel())) for layer in gradients]
    scales = [1.0] * len(gradients)

    def ours() -> object:
        return kernels.accumulate_select_many(
            gradients, residuals, scales, residuals, ks, clear=True
        )

    def chain() -> object:
        return [chains.topk_feedback(*each) for each in zip(gradients, residuals, ks, strict=True)]

    def reset() -> None:
        for residual, before in zip(residuals, held, strict=True):
            residual.copy_(before)

    return Work(ours, chain, tuple(residuals), reset)


def _accumulate(case: Case, device: torch.device) -> Work:
    gradient = make_input(case.inputs or "gaussian", case.numel, device)
    residual = 0.5 * gradient
    out = torch.empty_like(residual)

    def ours() -> object:
        found = kernels.accumulate(gradient, residual, 1.0, out)
        return found.counts, found.energies

    return Work(ours, lambda: chains.histogram(gradient, residual, out), (out,))


def _take_topk(case: Case, device: torch.device) -> Work:
    vector, k = make_input(case.inputs or "gaussian", case.numel, device), case.k
    return Work(lambda: kernels.take_topk(vector, k), lambda: chains.topk(vector, k))


def _scatter_add(case: Case, device: torch.device) -> Work:
    out = torch.zeros(case.numel, device=device)
    payloads = [
        (some_positions(case.k, case.numel, device, rank), make_input("gaussian", case.k, device))
        for rank in range(case.ranks or 1)
    ]
    return Work(
        lambda: kernels.scatter_add(out, payloads),
        lambda: chains.scatter_add(out, payloads),
        (out,),
        # Only so that sums stay finite and both see the same ones; the work is always the same.
        out.zero_,
        cupy_rivals.scatter_add(out, payloads),
    )


def _pack_blocks(case: Case, device: torch.device) -> Work:
    positions, numel = some_positions(case.k, case.numel, device, 1), case.numel
    return Work(
        lambda: kernels.pack_block_offsets(positions, numel),
        lambda: chains.pack_blocks(positions, numel),
    )


def _unpack_blocks(case: Case, device: torch.device) -> Work:
    positions, numel = some_positions(case.k, case.numel, device, 1), case.numel
    packed, k = kernels.pack_block_offsets(positions, numel), case.k
    return Work(
        lambda: kernels.unpack_block_offsets(packed, numel, k),
        lambda: chains.unpack_blocks(packed, numel),
    )


def _pack_bitmap(case: Case, device: torch.device) -> Work:
    positions, numel = some_positions(case.k, case.numel, device, 1), case.numel
    return Work(
        lambda: kernels.pack_bitmap(positions, numel), lambda: chains.pack_bitmap(positions, numel)
    )


def _unpack_bitmap(case: Case, device: torch.device) -> Work:
    positions, numel, k = some_positions(case.k, case.numel, device, 1), case.numel, case.k
    packed = kernels.pack_bitmap(positions, numel)
    return Work(
        lambda: kernels.unpack_bitmap(packed, numel, k), lambda: chains.unpack_bitmap(packed, numel)
    )


def _blocks_bytes(case: Case) -> float:
    blocks = kernels.blocks(case.numel)
    return 10.0 * case.k + (4 * blocks if blocks > 1 else 0)


OPERATIONS = (
    Operation(
        "topk_ef", "accumulate_select(clear=True)", ("density", "inputs"),
        # Which entries are the largest is known after the last of them only.
        "16 d: gradient and residual read, their sum written, and read once more",
        lambda case: 16.0 * case.numel,
        "add_, abs, topk, gather, scatter of zeros",
        _topk_ef,
    ),
    Operation(
        "topk_ef_many", "accumulate_select_many(clear=True)", ("density",),
        "16 d, as above, in 64 layers of d / 64",
        lambda case: 16.0 * case.numel,
        "the chain above, layer by layer",
        _topk_ef_many,
    ),
    Operation(
        "accumulate", "accumulate", ("inputs",),
        "12 d: gradient and residual read, their sum written",
        lambda case: 12.0 * case.numel,
        "add, bits shifted to bins, bincount, bincount of squares",
        _accumulate,
    ),
    Operation(
        "take_topk", "take_topk", ("density",),
        "4 d + 12 k: the vector read, positions (8) and entries (4) written",
        lambda case: 4.0 * case.numel + 12 * case.k,
        "abs, topk, gather",
        _take_topk,
    ),
    Operation(
        "scatter_add", "scatter_add", ("density", "ranks"),
        "20 N k: positions (8) and values (4) read, entries read and written",
        lambda case: 20.0 * (case.ranks or 1) * case.k,
        "scatter_add_ for each rank",
        _scatter_add,
    ),
    Operation(
        "pack_blocks", "pack_block_offsets", ("density",),
        "10 k + 4 d / 65,536: positions (8) read, offsets (2) and counts written",
        _blocks_bytes,
        "and, to int16, bincount, cat",
        _pack_blocks,
    ),
    Operation(
        "unpack_blocks", "unpack_block_offsets", ("density",),
        "10 k + 4 d / 65,536: the reverse",
        _blocks_bytes,
        "to int64, repeat_interleave, add, without any check of what was received",
        _unpack_blocks,
    ),
    Operation(
        "pack_bitmap", "pack_bitmap", ("density",),
        "8 k + d / 8: positions read, bits written",
        lambda case: 8.0 * case.k + -(-case.numel // 8),
        "zeros, scatter, times powers of two, sum of eight",
        _pack_bitmap,
    ),
    Operation(
        "unpack_bitmap", "unpack_bitmap", ("density",),
        "8 k + d / 8: the reverse",
        lambda case: 8.0 * case.k + -(-case.numel // 8),
        "shifts, nonzero, without any check of what was received",
        _unpack_bitmap,
    ),
)  # fmt: skip
