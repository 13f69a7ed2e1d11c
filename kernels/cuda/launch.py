"""Launches of the ``.cu`` kernels on torch tensors: any number of vectors in each launch.

Arguments are checked by the table of operations, not here. Results are on the inputs' device, and
nothing waits for the device except :func:`orthonormalise`, once.

Extra memory, beside results: accumulate_many 8 bytes a block of 16,384 elements; select_many 8
bytes an element (12 for fp64: its list of candidates is as long as the vector if all magnitudes are
alike) and 32 KiB a vector; scatter_add_many none that grows; orthonormalise ``8 * r**2`` bytes for
each 512 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...errors import ConfigError
from .. import portable_linalg
from . import tables
from .runtime import launch, upload, zeros

_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def accumulate_many(
    gradients: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor | None],
    scale: float,
    outs: Sequence[torch.Tensor | None],
    counts: torch.Tensor,
    energies: torch.Tensor,
) -> None:
    """``out = residual + scale * gradient`` of each vector, and the histogram of its magnitudes.

    One launch. (``torch.add(..., alpha=)`` rounds product and sum at once on the CPU, so for a
    ``scale`` that is no power of two it differs in the last bit now and then.)

    Args:
        gradients: fp32, fp16 or bf16, or fp64, shape ``[d]``; one dtype.
        residuals: fp32, or fp64 if the gradients are, ``[d]``; None for zero.
        scale: rounded to ``outs``' dtype.
        outs: like ``residuals``; may be those, or the gradients; None for the histogram alone.
        counts: int64, ``[n, 2048]`` (``[n, 4096]`` for fp64), overwritten: magnitudes by their
            bits without the 20 (51) lowest.
        energies: fp64, same shape, overwritten: sums of squares, each within 1e-6 of the exact
            one and the same to the last bit on every device.
    """
    dtype, device = gradients[0].dtype, gradients[0].device
    size = 8 if dtype == torch.float64 else 4
    blocks = [tables.accumulate_blocks(g.numel(), size) for g in gradients]
    of_block, first = tables.block_map(blocks)
    counts.zero_()
    energies.zero_()
    (finished,) = zeros(device, len(blocks))
    segments = np.zeros(len(blocks), dtype=tables.ACCUMULATE_SEGMENT)
    for i, gradient in enumerate(gradients):
        segments[i] = (
            _address(gradient), _address(residuals[i]), _address(outs[i]), gradient.numel(), scale,
            _address(counts[i]), _address(energies[i]), _address(finished[i:]), first[i], blocks[i],
        )  # fmt: skip
    table, owners = upload(device, (segments, of_block))
    launch("accumulate", f"accumulate_{_NAMES[dtype]}", len(of_block), device, table, owners)


def histograms(count: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the counts and energies of ``count`` vectors of the dtype and device of ``like``."""
    shape = (count, tables.BINS[like.element_size()])
    counts = torch.empty(shape, dtype=torch.int64, device=like.device)
    return counts, torch.empty(shape, dtype=torch.float64, device=like.device)


def select_many(
    vectors: Sequence[torch.Tensor],
    ks: Sequence[int],
    counts: torch.Tensor | None = None,
    clear: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Positions and values of the greatest entries of vectors of one dtype.

    Five launches for fp32 and eight for fp64, however many vectors; one more without ``counts``.

    Args:
        vectors: fp32 or fp64, each ``[d]``, ``d`` below 2**31.
        ks: how many of each, ``1 <= k <= d``.
        counts: int64, ``[n, bins]``: their histograms by :func:`accumulate_many`, if there are any.
        clear: set the selected entries of ``vectors`` to zero, as error feedback wants.
    """
    dtype, device = vectors[0].dtype, vectors[0].device
    name, size = _NAMES[dtype], vectors[0].element_size()
    for vector in vectors:
        if vector.numel() >= 1 << 31:
            raise ConfigError(f"take_topk: {vector.numel()} elements, fewer than 2**31 work")
    if counts is None:
        counts, energies = histograms(len(vectors), vectors[0])
        nothing = [None] * len(vectors)
        accumulate_many(vectors, nothing, 1.0, nothing, counts, energies)

    blocks = [tables.select_blocks(v.numel()) for v in vectors]
    refine = [tables.refine_blocks(v.numel()) for v in vectors]
    of_block, first = tables.block_map(blocks)
    of_refine, first_refine = tables.block_map(refine)
    states, digits, compact, select, tickets = zeros(
        device,
        len(vectors) * tables.SELECT_STATE // 8,
        len(vectors) * tables.DIGITS // 2,
        len(of_block),
        len(of_block),
        2,
    )
    segments = np.zeros(len(vectors), dtype=tables.SELECT_SEGMENT)
    scratch, found = [], []
    for i, (vector, k) in enumerate(zip(vectors, ks, strict=True)):
        lists = (
            torch.empty(vector.numel(), dtype=torch.int32, device=device),
            torch.empty_like(vector),
        )
        out = (
            torch.empty(k, dtype=torch.int64, device=device),
            torch.empty(k, dtype=dtype, device=device),
        )
        scratch.append(lists)
        found.append(out)
        segments[i] = (
            _address(vector), vector.numel(), k, _address(counts[i]),
            _address(states) + i * tables.SELECT_STATE, _address(digits) + i * 4 * tables.DIGITS,
            _address(compact) + 8 * int(first[i]), _address(select) + 8 * int(first[i]),
            _address(lists[0]), _address(lists[1]), _address(out[0]), _address(out[1]), clear,
            first[i], first_refine[i], refine[i],
        )  # fmt: skip
    table, owners, refiners = upload(device, (segments, of_block, of_refine))
    launch("select", f"select_threshold_{name}", len(vectors), device, table)
    launch("select", f"select_compact_{name}", len(of_block), device, table, owners, tickets)
    for shift, width in tables.REFINEMENTS[size]:
        launch(
            "select", f"select_refine_{name}", len(of_refine), device, table, refiners,
            np.uint32(shift), np.uint32(width),
        )  # fmt: skip
    launch("select", f"select_filter_{name}", len(of_block), device, table, owners, tickets[1:])
    return found


def scatter_add_many(
    outs: Sequence[torch.Tensor],
    payloads: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
    alpha: float = 1.0,
) -> None:
    """``out[index] += alpha * value`` for each rank's payload, in rank order; one launch for all.

    Every device adds in the same order and rounds product and sum, so the bits are the same.

    Args:
        outs: fp32 or fp64, ``[d]`` each; changed in place.
        payloads: for each of ``outs``, ``(index, value)`` of each rank: int64, strictly ascending,
            below ``d``; and out's dtype, or fp16 or bf16 where that is fp32; one dtype for all.
        alpha: rounded to ``out``'s dtype.
    """
    dtypes = {value.dtype for ranks in payloads for _, value in ranks}
    if not dtypes:
        return
    if len(dtypes) > 1:
        raise ConfigError(f"scatter_add: values of one dtype work, got {sorted(map(str, dtypes))}")
    device = outs[0].device
    of_block, first = tables.block_map([tables.scatter_blocks(out.numel()) for out in outs])
    rows = np.zeros(sum(map(len, payloads)), dtype=tables.SCATTER_PAYLOAD)
    everyone = [payload for ranks in payloads for payload in ranks]
    for row, (index, value) in enumerate(everyone):
        rows[row] = _address(index), _address(value), index.numel()
    # Two uploads: segments hold the address of the other table.
    (row_table,) = upload(device, (rows,))
    segments = np.zeros(len(outs), dtype=tables.SCATTER_SEGMENT)
    begin = 0
    for i, (out, ranks) in enumerate(zip(outs, payloads, strict=True)):
        address = _address(row_table) + begin * tables.SCATTER_PAYLOAD.itemsize
        segments[i] = _address(out), out.numel(), alpha, address, len(ranks), first[i]
        begin += len(ranks)
    table, owners = upload(device, (segments, of_block))
    name = f"scatter_add_{_NAMES[dtypes.pop()]}"
    launch("scatter", name, len(of_block), device, table, owners)


def orthonormalise(stack: torch.Tensor) -> torch.Tensor:
    """Rows of each matrix made orthonormal; the bits of ``portable_linalg.orthonormalise``.

    Four launches, and four for each further pass, of at most five, that a matrix of the batch needs
    because it is ill-conditioned. Whether one does is what the host waits for.

    Args:
        stack: fp32 or fp64, ``[b, r, n]``, contiguous, not empty. With more than 64 rows it is
            computed on the CPU.
    """
    batch, rank, length = stack.shape
    if rank > tables.MOST_ROWS:
        return portable_linalg.orthonormalise(stack)
    device, name = stack.device, _NAMES[stack.dtype]
    shape = tables.ortho_shape(batch, rank, length)
    stack, out = stack.detach(), torch.empty_like(stack)
    weights = torch.empty(shape.weights, dtype=stack.dtype, device=device)
    downs = torch.empty(shape.tops, dtype=torch.float64, device=device)
    active: torch.Tensor | None = None
    for repeat in range(1 + tables.ORTHO_REPEATS):
        tops, sums = zeros(device, shape.tops, shape.sums)
        hard = torch.empty(batch, dtype=torch.int32, device=device)
        given = out if repeat else stack
        row = np.zeros(1, dtype=tables.ORTHO_STACK)
        row[0] = (
            _address(given), _address(out), _address(tops), _address(sums), _address(weights),
            _address(downs), _address(active), _address(hard), rank, length, shape.chunks,
        )  # fmt: skip
        (table,) = upload(device, (row,))
        launch("orthonormalise", f"ortho_top_{name}", shape.top, device, table)
        launch("orthonormalise", f"ortho_gram_{name}", shape.gram, device, table)
        launch("orthonormalise", f"ortho_factor_{name}", batch, device, table)
        launch("orthonormalise", f"ortho_apply_{name}", shape.apply, device, table)
        if not bool(hard.any()):
            break
        active = hard
    return out
