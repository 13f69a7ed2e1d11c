// Rows of each matrix of a batch made orthonormal: one Cholesky QR for all of them.
//
// The same arithmetic as portable_linalg.py, whose comments say why it is what it is: entries
// become whole numbers, so that the two big sums (the Gram matrix, and the product with the inverse
// factor) are exact in any order; the rest is in fp64, each operation rounded once. Here the whole
// numbers are 32-bit integers, and sums are 64-bit: a multiplication of those is one instruction,
// also on GPUs that are slow at fp64.
//
// A pass is four launches for the whole batch: ortho_top, ortho_gram, ortho_factor, ortho_apply.
// Matrices with `hard` set need another, in place: they are `active` there.
#include "common.cuh"

#define MOST_ROWS 64
// Bits of an entry, and those that are multiplied apart.
#define ENTRY_BITS 26
#define LOW_BITS 13
// Columns of one partial sum in portable_linalg; those are rounded when they are added up.
#define CHUNK 4096
// Columns of a block of ortho_top, ortho_gram and ortho_apply.
#define TOP_COLUMNS 16384
#define GRAM_COLUMNS 512
#define APPLY_COLUMNS 128
// Integers of shared memory for a tile of columns in ortho_gram.
#define TILE_CELLS (32 * (MOST_ROWS + 4))

struct Stack {
    void* stack;   // T [batch, rank, length], read
    void* out;     // T [batch, rank, length], written; may be `stack`
    u64* tops;     // [batch, rank], zero before the pass
    u64* sums;     // [batch, chunks, 2, rank, rank], zero before the pass
    int4* weights; // [batch, rank, padded(rank) / 2], two (first, second) in each
    double* backs; // [batch, rank]
    const u32* active;  // [batch], or null for all
    u32* hard;          // [batch]; not the same array as `active`
    u64 rank;           // 1 .. MOST_ROWS
    u64 length;
    u64 chunks;  // ceil(length / CHUNK)
};

__device__ inline int padded(int rank) { return (rank + 3) & ~3; }

__device__ inline double power_of_two(int exponent) {
    return __longlong_as_double((i64)(exponent + 1023) << 52);
}

// The exponent that frexp returns. (Of subnormal numbers -1022, which is small enough here.)
__device__ inline int exponent_of(double value) {
    const i64 bits = __double_as_longlong(value) & 0x7fffffffffffffffll;
    return bits ? (int)(bits >> 52) - 1022 : 0;
}

__device__ inline double from_bits(u64 bits, float) { return (double)__uint_as_float((u32)bits); }
__device__ inline double from_bits(u64 bits, double) { return __longlong_as_double((i64)bits); }

// What turns a row's entries into whole numbers; 0 for a row with inf or NaN.
template <class T>
__device__ inline double scale_of(u64 top_bits) {
    const double top = from_bits(top_bits, T(0));
    if ((__double_as_longlong(top) >> 52) == 0x7ff) return 0.0;
    const int up = ENTRY_BITS - exponent_of(top);
    return power_of_two(up < 1000 ? up : 1000);
}

template <class T>
__device__ inline i32 whole(T value, double scale) {
    return scale == 0.0 ? 0 : __double2int_rn(__dmul_rn((double)value, scale));
}

// Greatest magnitude of each row, as bits. Blocks: batch * rank * ceil(length / TOP_COLUMNS).
template <class T>
__device__ inline void top(const Stack& s) {
    const u32 parts = (u32)((s.length + TOP_COLUMNS - 1) / TOP_COLUMNS);
    const u32 row = blockIdx.x / parts, part = blockIdx.x % parts;
    if (s.active && !global(s.active)[row / s.rank]) return;
    const T* from = global((const T*)s.stack) + row * s.length;
    const u64 begin = (u64)part * TOP_COLUMNS, end = begin + TOP_COLUMNS;
    u64 most = 0;
    for (u64 at = begin + threadIdx.x; at < end && at < s.length; at += THREADS) {
        const u64 bits = Format<T>::magnitude(from[at]);
        most = bits > most ? bits : most;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const u64 other = __shfl_xor_sync(EVERY_LANE, most, step);
        most = other > most ? other : most;
    }
    if ((threadIdx.x & 31) == 0) atomicMax(global(s.tops) + row, most);
}

// Sums of products of rows, high and low bits of the first factor apart. A thread has four rows
// times four rows, and shares its columns with the neighbours that have the same rows.
// Blocks: batch * ceil(length / GRAM_COLUMNS).
template <class T>
__device__ inline void gram(const Stack& s) {
    __shared__ int4 tile_whole[TILE_CELLS / 4];
    __shared__ int4 tile_high[TILE_CELLS / 4];
    __shared__ double scales[MOST_ROWS];
    const u32 parts = (u32)((s.length + GRAM_COLUMNS - 1) / GRAM_COLUMNS);
    const u32 matrix = blockIdx.x / parts, part = blockIdx.x % parts;
    if (s.active && !global(s.active)[matrix]) return;
    const int rank = (int)s.rank, rows = padded(rank), quads = rows / 4, tiles = quads * quads;
    // Columns lie `stride` integers apart, an odd number of 16 bytes where that is to be had.
    const int stride = quads % 2 ? rows : rows + 4;
    int columns = GRAM_COLUMNS;
    while (columns * stride > TILE_CELLS) columns /= 2;
    int sharers = 1;
    while (2 * sharers * tiles <= THREADS && sharers < columns) sharers *= 2;
    const int own = threadIdx.x % sharers;
    const bool busy = (int)threadIdx.x / sharers < tiles;
    const T* from = global((const T*)s.stack) + (u64)matrix * rank * s.length;
    const u64 begin = (u64)part * GRAM_COLUMNS;
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        scales[i] = scale_of<T>(global(s.tops)[matrix * rank + i]);
    }
    i32* cells_whole = (i32*)tile_whole;
    i32* cells_high = (i32*)tile_high;

    // Up to 256 products of four rows times four, and 256 threads at most: one turn each.
    const int pair = threadIdx.x / sharers, above = pair / quads, below = pair % quads;
    i64 high[4][4] = {}, low[4][4] = {};
    for (int first = 0; first < GRAM_COLUMNS; first += columns) {
        __syncthreads();
        for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
            const int row = i / columns, column = i % columns;
            const u64 at = begin + first + column;
            i32 number = 0;
            if (row < rank && at < s.length) number = whole(from[row * s.length + at], scales[row]);
            cells_whole[column * stride + row] = number;
            // To the nearest, and of two equally near to the even one.
            cells_high[column * stride + row] =
                (number + (1 << (LOW_BITS - 1)) - 1 + ((number >> LOW_BITS) & 1)) >> LOW_BITS;
        }
        __syncthreads();
        if (!busy) continue;
        for (int column = own; column < columns; column += sharers) {
            const int at = column * stride / 4;
            const int4 a = tile_whole[at + above], up = tile_high[at + above];
            const int4 b = tile_whole[at + below];
            const i32 all[4] = {a.x, a.y, a.z, a.w}, top[4] = {up.x, up.y, up.z, up.w};
            const i32 other[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i32 rest = all[i] - top[i] * (1 << LOW_BITS);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    high[i][j] += (i64)top[i] * other[j];
                    low[i][j] += (i64)rest * other[j];
                }
            }
        }
    }
    const int together = sharers < 32 ? sharers : 32;
    u64* sums = global(s.sums) + (matrix * s.chunks + begin / CHUNK) * 2 * rank * rank;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            for (int step = together / 2; step; step /= 2) {
                high[i][j] += __shfl_xor_sync(EVERY_LANE, high[i][j], step);
                low[i][j] += __shfl_xor_sync(EVERY_LANE, low[i][j], step);
            }
            const int row = 4 * above + i, column = 4 * below + j;
            if (busy && own % together == 0 && row < rank && column < rank) {
                atomicAdd(sums + row * rank + column, (u64)high[i][j]);
                atomicAdd(sums + (rank + row) * rank + column, (u64)low[i][j]);
            }
        }
    }
}

// Inverse of the lower Cholesky factor, by elimination beside a unit matrix. One block a matrix.
//
// Of the left square only what is on and above the diagonal is ever read again, and of the right
// one only what is on and below it is not zero, so both fit into a table one column wider:
// left (i, c) at [i][c + 1], right (i, c) at [i][c].
#define WIDTH (MOST_ROWS + 1)
__device__ inline void factor(const Stack& s) {
    __shared__ double table[MOST_ROWS * WIDTH];
    __shared__ double length[MOST_ROWS];
    __shared__ u32 is_hard;
    const u32 matrix = blockIdx.x;
    if (s.active && !global(s.active)[matrix]) {
        if (threadIdx.x == 0) global(s.hard)[matrix] = 0;
        return;
    }
    const int rank = (int)s.rank, square = rank * rank;
    const u64* sums = global(s.sums) + matrix * s.chunks * 2 * square;
    for (int i = threadIdx.x; i < square; i += THREADS) {
        const int row = i / rank, column = i % rank;
        if (column < row) continue;
        double high = 0.0, low = 0.0;
        for (u64 chunk = 0; chunk < s.chunks; ++chunk) {
            high = __dadd_rn(high, (double)(i64)sums[chunk * 2 * square + i]);
            low = __dadd_rn(low, (double)(i64)sums[(chunk * 2 + 1) * square + i]);
        }
        table[row * WIDTH + column + 1] = __dadd_rn(__dmul_rn(high, 1 << LOW_BITS), low);
    }
    if (threadIdx.x == 0) is_hard = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        const double squared = table[i * WIDTH + i + 1];
        length[i] = squared > 0 ? __ddiv_rn(1.0, __dsqrt_rn(squared)) : 0.0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < square; i += THREADS) {
        const int row = i / rank, column = i % rank;
        if (column >= row) {
            double& cell = table[row * WIDTH + column + 1];
            cell = __dmul_rn(__dmul_rn(cell, length[row]), length[column]);
        }
        if (column <= row) table[row * WIDTH + column] = column == row;
    }
    __syncthreads();
    for (int j = 0; j < rank; ++j) {
        // Row j from its pivot on, to the right, and then to the end of what is beside it.
        double* row = table + j * WIDTH;
        const double pivot = row[j + 1];
        const bool good = pivot > 0x1p-32;
        const double root = __dsqrt_rn(good ? pivot : 1.0);
        __syncthreads();
        for (int c = threadIdx.x; c <= rank; c += THREADS) {
            row[c] = good ? __ddiv_rn(row[c], root) : 0.0;
        }
        __syncthreads();
        // Below it: columns up to j of what is beside, columns from i on of the left square.
        for (int i = threadIdx.x; i < (rank - j - 1) * (rank + 1); i += THREADS) {
            const int below = j + 1 + i / (rank + 1), c = i % (rank + 1);
            if (c > j && c <= below) continue;
            double& cell = table[below * WIDTH + c];
            cell = __dsub_rn(cell, __dmul_rn(row[below + 1], row[c]));
        }
        __syncthreads();
    }

    // As whole numbers too, in two parts, each row with a power of two of its own.
    int bits = 53 - ENTRY_BITS;
    for (int above = rank - 1; above; above /= 2) --bits;
    const int rows = padded(rank);
    i32* weights = (i32*)(global(s.weights) + (u64)matrix * rank * rows / 2);
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        double most = 0.0, most_scaled = 0.0;
        for (int c = 0; c <= i && i < rank; ++c) {
            double& cell = table[i * WIDTH + c];
            most = fmax(most, fabs(cell));
            cell = __dmul_rn(cell, length[c]);
            most_scaled = fmax(most_scaled, fabs(cell));
        }
        if (most > 0x1p12) atomicOr(&is_hard, 1u);
        const int exponent = exponent_of(most_scaled);
        for (int c = 0; c < rank; ++c) {
            const bool zero = i >= rank || c > i;
            const double scaled = zero ? 0.0 : ldexp(table[i * WIDTH + c], bits - exponent);
            const double first = rint(scaled);
            const double rest = __dmul_rn(__dsub_rn(scaled, first), power_of_two(bits));
            weights[2 * (c * rows + i)] = __double2int_rn(first);
            weights[2 * (c * rows + i) + 1] = __double2int_rn(rest);
        }
        if (i < rank) global(s.backs)[matrix * rank + i] = power_of_two(exponent - bits);
    }
    __syncthreads();
    if (threadIdx.x == 0) global(s.hard)[matrix] = is_hard;
}

__device__ inline void round_to(float& to, double value) { to = __double2float_rn(value); }
__device__ inline void round_to(double& to, double value) { to = value; }

// out = inverse factor times rows. Blocks: batch * ceil(length / APPLY_COLUMNS).
template <class T>
__device__ inline void apply(const Stack& s) {
    __shared__ i32 numbers[MOST_ROWS * APPLY_COLUMNS];
    __shared__ double scales[MOST_ROWS];
    const u32 parts = (u32)((s.length + APPLY_COLUMNS - 1) / APPLY_COLUMNS);
    const u32 matrix = blockIdx.x / parts, part = blockIdx.x % parts;
    if (s.active && !global(s.active)[matrix]) return;
    const int rank = (int)s.rank, rows = padded(rank);
    const u64 begin = (u64)part * APPLY_COLUMNS, offset = (u64)matrix * rank * s.length;
    const T* from = global((const T*)s.stack) + offset;
    T* to = global((T*)s.out) + offset;
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        scales[i] = scale_of<T>(global(s.tops)[matrix * rank + i]);
    }
    __syncthreads();
    // All rows of these columns before any is written: `out` may be `stack`.
    for (int i = threadIdx.x; i < rank * APPLY_COLUMNS; i += THREADS) {
        const int row = i / APPLY_COLUMNS;
        const u64 at = begin + i % APPLY_COLUMNS;
        numbers[i] = at < s.length ? whole(from[row * s.length + at], scales[row]) : 0;
    }
    __syncthreads();
    int bits = 53 - ENTRY_BITS;
    for (int above = rank - 1; above; above /= 2) --bits;
    const double less = power_of_two(-bits);
    const int column = threadIdx.x % APPLY_COLUMNS;
    if (begin + column >= s.length) return;
    const int4* weights = global((const int4*)s.weights) + (u64)matrix * rank * rows / 2;
    const double* backs = global((const double*)s.backs) + matrix * rank;
    for (int quad = threadIdx.x / APPLY_COLUMNS; quad < rows / 4; quad += THREADS / APPLY_COLUMNS) {
        i64 high[4] = {}, low[4] = {};
        // The factor is lower triangular.
        for (int k = 0; k < rank && k < 4 * quad + 4; ++k) {
            const i32 number = numbers[k * APPLY_COLUMNS + column];
            const int4 a = weights[k * rows / 2 + 2 * quad], b = weights[k * rows / 2 + 2 * quad + 1];
            const i32 firsts[4] = {a.x, a.z, b.x, b.z}, seconds[4] = {a.y, a.w, b.y, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                high[i] += (i64)firsts[i] * number;
                low[i] += (i64)seconds[i] * number;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * quad + i;
            if (row < rank) {
                const double sum = __dadd_rn((double)high[i], __dmul_rn((double)low[i], less));
                round_to(to[row * s.length + begin + column], __dmul_rn(sum, backs[row]));
            }
        }
    }
}

#define KERNEL(name, call)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const Stack* given) { \
        const Stack stack = *given;                                                  \
        call(stack);                                                                 \
    }

KERNEL(ortho_top_float32, top<float>)
KERNEL(ortho_top_float64, top<double>)
KERNEL(ortho_gram_float32, gram<float>)
KERNEL(ortho_gram_float64, gram<double>)
KERNEL(ortho_factor, factor)
KERNEL(ortho_apply_float32, apply<float>)
KERNEL(ortho_apply_float64, apply<double>)
