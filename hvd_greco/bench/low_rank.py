"""Operations of low-rank methods, beside torch's QR and products in torch's usual layout."""

from __future__ import annotations

import math

import torch

from .. import kernels
from . import cupy_rivals
from .case import Case, Operation, Work
from .inputs import make_input


def _orthonormalise(case: Case, device: torch.device) -> Work:
    rank, length = case.low_rank or 1, case.length or 1
    stack = make_input("gaussian", rank * length, device).view(1, rank, length)
    # LAPACK wants columns one after the other: this view is just that, and saves torch a copy.
    columns = stack[0].t()
    usual = columns.contiguous()

    def error(found: torch.Tensor) -> float:
        rows = found[0].double()
        return float((rows @ rows.t() - torch.eye(rank, device=device)).abs().max())

    return Work(
        lambda: kernels.orthonormalise(stack),
        lambda: torch.linalg.qr(columns).Q,
        rivals={"qr of [n, r]": lambda: torch.linalg.qr(usual).Q, **cupy_rivals.qr(columns)},
        error=error,
    )


def side(case: Case) -> int:
    """Rows and columns of the matrix that a case has in place of a vector."""
    return math.isqrt(case.numel)


def _factors(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A square matrix and two factors of r rows."""
    n, rank = side(case), case.low_rank or 1
    matrix = make_input("gaussian", n * n, device).view(n, n)
    left = make_input("gaussian", rank * n, device, seed=2).view(rank, n)
    return matrix, left, make_input("gaussian", rank * n, device, seed=3).view(rank, n)


def _project(case: Case, device: torch.device, rows: bool) -> Work:
    matrix, basis, _ = _factors(case, device)
    out = torch.empty_like(basis)
    columns, turned = basis.t().contiguous(), torch.empty_like(basis.t().contiguous())
    operation = kernels.project_rows if rows else kernels.project_columns
    source = matrix if rows else matrix.t()
    return Work(
        lambda: operation(basis, matrix, out), lambda: torch.matmul(source, columns, out=turned).t()
    )


def _project_rows(case: Case, device: torch.device) -> Work:
    return _project(case, device, True)


def _project_columns(case: Case, device: torch.device) -> Work:
    return _project(case, device, False)


def _low_rank(case: Case, device: torch.device) -> Work:
    matrix, left, right = _factors(case, device)
    columns, others = left.t().contiguous(), right.t().contiguous()
    return Work(
        lambda: kernels.low_rank(left, right, matrix),
        lambda: torch.matmul(columns, others.t(), out=matrix),
        (matrix,),
    )


def _add_low_rank(case: Case, device: torch.device) -> Work:
    held, left, right = _factors(case, device)
    target = held.clone()
    columns, others = left.t().contiguous(), right.t().contiguous()
    return Work(
        lambda: kernels.add_low_rank(target, left, right, -1.0),
        lambda: target.sub_(columns @ others.t()),
        (target,),
        lambda: target.copy_(held),
    )


def _product_bytes(case: Case, matrices: int) -> float:
    n = side(case)
    return 4.0 * (matrices * n * n + 2 * n * (case.low_rank or 1))


OPERATIONS = (
    Operation(
        "orthonormalise", "orthonormalise", ("length", "low_rank"),
        "8 n r: the factor read and written",
        lambda case: 8.0 * case.numel,
        "linalg.qr of the factor as LAPACK wants it; `others`: of a contiguous [n, r]",
        _orthonormalise,
        crossed=True,
    ),
    Operation(
        "project_rows", "project_rows", ("low_rank",),
        "4 (n m + n r + m r): matrix and basis read, product written",
        lambda case: _product_bytes(case, 1),
        "matmul with factors as [m, r]",
        _project_rows,
    ),
    Operation(
        "project_columns", "project_columns", ("low_rank",),
        "4 (n m + n r + m r): matrix and basis read, product written",
        lambda case: _product_bytes(case, 1),
        "matmul with factors as [n, r]",
        _project_columns,
    ),
    Operation(
        "low_rank", "low_rank", ("low_rank",),
        "4 (n m + n r + m r): factors read, matrix written",
        lambda case: _product_bytes(case, 1),
        "matmul with factors as [n, r]",
        _low_rank,
    ),
    Operation(
        "add_low_rank", "add_low_rank", ("low_rank",),
        "4 (2 n m + n r + m r): factors and matrix read, matrix written",
        lambda case: _product_bytes(case, 2),
        "matmul, sub_",
        _add_low_rank,
    ),
)  # fmt: skip
