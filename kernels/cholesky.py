"""Numbers that every backend's orthonormalisation must share, for all to give the same bits."""

from __future__ import annotations

#: Columns of one partial Gram matrix. Their sums are added in order.
CHUNK = 512
#: Bits of the whole numbers that the Gram matrix is worked out from, relative to the largest entry
#: of their row: 2 * 22 and 9 for the columns make 53, all that fp64 holds exactly.
BITS = 22
#: A row whose distance from the span of the rows before it is less than this share of its length
#: depends on them: fp32 entries say no more.
DEPENDENT = 2.0**-16
#: Growth of the inverse factor from which rounding could show: go over the result again.
HARD = 2.0**4
PASSES = 5
#: Exponent of a row without a largest magnitude: all zero, or with inf or NaN in it.
DEAD = 1 << 20
#: Rows whose largest magnitude has an exponent beyond this are scaled before the product.
SAFE = 48
