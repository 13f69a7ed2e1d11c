// Rows of each matrix of a batch made orthonormal: one Cholesky QR for all of them.
//
// The same arithmetic as portable_linalg.py, whose comments say why it is what it is. For the Gram
// matrix entries become whole numbers of 22 bits. Here those are 32-bit integers and their sums
// 64-bit ones: a multiplication of those is one instruction, also on GPUs that are slow at fp64,
// and the sums are exact in any order. The product with the inverse factor is in the rows' own
// dtype, in order, each operation rounded once.
//
// A pass is four launches for the whole batch: ortho_top, ortho_gram, ortho_factor, ortho_apply.
// Matrices with `hard` set need another, in place: they are `active` there.
#include "common.cuh"

#define MOST_ROWS 64
// Numbers of cholesky.py: bits of an entry, columns of one partial sum, the largest exponent that
// needs no scaling before the product, dependent rows (squared), and growth that asks for a repeat.
#define ENTRY_BITS 22
#define CHUNK 512
#define SAFE 48
#define DEPENDENT_SQUARED 0x1p-32
#define HARD 0x1p4
// Columns of a block of ortho_top and ortho_apply; those of ortho_gram are CHUNK.
#define TOP_COLUMNS 16384
#define APPLY_COLUMNS 64
// Integers of shared memory for a tile of columns in ortho_gram.
#define TILE_CELLS (64 * (MOST_ROWS + 4))

struct Stack {
    void* stack;   // T [batch, rank, length], read
    void* out;     // T [batch, rank, length], written; may be `stack`
    u64* tops;     // [batch, rank], zero before the pass
    u64* sums;     // [batch, chunks, rank, rank], zero before the pass; column >= row is written
    void* weights; // T [batch, rank, padded(rank)]: the inverse factor, a column after the other
    double* downs; // [batch, rank]: factors of the rows before the product; 0 for dead ones
    const u32* active;  // [batch], or null for all
    u32* hard;          // [batch]; not the same array as `active`
    u64 rank;           // 1 .. MOST_ROWS
    u64 length;
    u64 chunks;  // ceil(length / CHUNK)
};

__device__ inline int padded(int rank) { return (rank + 3) & ~3; }

__device__ inline double power_of_two(int exponent) {
    // The smaller ones are subnormal: the inverse of fp64's largest numbers needs 2**-1024.
    const i64 bits = exponent < -1022 ? 1ll << (exponent + 1074) : (i64)(exponent + 1023) << 52;
    return __longlong_as_double(bits);
}

// The exponent that frexp returns. (Of subnormal numbers -1022: for what depends on it here, any
// below -978 is the same.)
__device__ inline int exponent_of(double value) {
    return (int)((__double_as_longlong(value) & 0x7fffffffffffffffll) >> 52) - 1022;
}

__device__ inline double from_bits(u64 bits, float) { return (double)__uint_as_float((u32)bits); }
__device__ inline double from_bits(u64 bits, double) { return __longlong_as_double((i64)bits); }

// Rows that are zero, or have inf or NaN in them, are dead.
__device__ inline bool dead(double top) {
    return top == 0.0 || (__double_as_longlong(top) >> 52) == 0x7ff;
}

// A limit keeps powers finite for fp64's smallest numbers, which then have fewer bits.
__device__ inline double limited_power(int exponent) {
    return power_of_two(exponent < 1000 ? exponent : 1000);
}

// What turns a row's entries into whole numbers; 0 for a dead row.
template <class T>
__device__ inline double scale_of(u64 top_bits) {
    const double top = from_bits(top_bits, T(0));
    return dead(top) ? 0.0 : limited_power(ENTRY_BITS - exponent_of(top));
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

// Sums of products of rows. A thread has four rows times four rows, and shares its columns with the
// neighbours that have the same rows. Blocks: batch * chunks.
template <class T>
__device__ inline void gram(const Stack& s) {
    __shared__ int4 tile[TILE_CELLS / 4];
    __shared__ double scales[MOST_ROWS];
    const u32 matrix = (u32)(blockIdx.x / s.chunks), part = (u32)(blockIdx.x % s.chunks);
    if (s.active && !global(s.active)[matrix]) return;
    const int rank = (int)s.rank, rows = padded(rank), quads = rows / 4, tiles = quads * quads;
    // Columns lie `stride` integers apart, an odd number of 16 bytes where that is to be had.
    const int stride = quads % 2 ? rows : rows + 4;
    int columns = CHUNK;
    while (columns * stride > TILE_CELLS) columns /= 2;
    int sharers = 1;
    while (2 * sharers * tiles <= THREADS && sharers < columns) sharers *= 2;
    const T* from = global((const T*)s.stack) + (u64)matrix * rank * s.length;
    const u64 begin = (u64)part * CHUNK;
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        scales[i] = scale_of<T>(global(s.tops)[matrix * rank + i]);
    }
    i32* cells = (i32*)tile;

    // Up to 256 products of four rows times four, and 256 threads at most: one turn each. Those
    // below the diagonal are not needed.
    const int own = threadIdx.x % sharers, pair = threadIdx.x / sharers;
    const int above = pair / quads, below = pair % quads;
    const bool busy = pair < tiles && above <= below;
    i64 sum[4][4] = {};
    for (int first = 0; first < CHUNK && begin + first < s.length; first += columns) {
        __syncthreads();
        for (int i = threadIdx.x; i < rows * columns; i += THREADS) {
            const int row = i / columns, column = i % columns;
            const u64 at = begin + first + column;
            i32 number = 0;
            if (row < rank && at < s.length) number = whole(from[row * s.length + at], scales[row]);
            cells[column * stride + row] = number;
        }
        __syncthreads();
        if (!busy) continue;
        for (int column = own; column < columns; column += sharers) {
            const int at = column * stride / 4;
            const int4 a = tile[at + above], b = tile[at + below];
            const i32 one[4] = {a.x, a.y, a.z, a.w}, other[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sum[i][j] += (i64)one[i] * other[j];
            }
        }
    }
    const int together = sharers < 32 ? sharers : 32;
    u64* sums = global(s.sums) + (matrix * s.chunks + part) * rank * rank;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            for (int step = together / 2; step; step /= 2) {
                sum[i][j] += __shfl_xor_sync(EVERY_LANE, sum[i][j], step);
            }
            const int row = 4 * above + i, column = 4 * below + j;
            if (busy && own % together == 0 && row <= column && column < rank) {
                atomicAdd(sums + row * rank + column, (u64)sum[i][j]);
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
static_assert(WIDTH <= THREADS, "a thread for each column");

__device__ inline void round_to(float& to, double value) { to = __double2float_rn(value); }
__device__ inline void round_to(double& to, double value) { to = value; }

template <class T>
__device__ inline void factor(const Stack& s) {
    __shared__ double table[MOST_ROWS * WIDTH];
    __shared__ double length[MOST_ROWS];
    __shared__ int exponents[MOST_ROWS];
    __shared__ u32 is_hard, is_unsafe;
    const u32 matrix = blockIdx.x;
    if (s.active && !global(s.active)[matrix]) {
        if (threadIdx.x == 0) global(s.hard)[matrix] = 0;
        return;
    }
    const int rank = (int)s.rank, square = rank * rank;
    const u64* sums = global(s.sums) + matrix * s.chunks * square;
    for (int i = threadIdx.x; i < square; i += THREADS) {
        const int row = i / rank, column = i % rank;
        if (column < row) continue;
        // Each sum has 53 bits, but their sum may have more.
        double total = 0.0;
        for (u64 chunk = 0; chunk < s.chunks; ++chunk) {
            total = __dadd_rn(total, (double)(i64)sums[chunk * square + i]);
        }
        table[row * WIDTH + column + 1] = total;
    }
    if (threadIdx.x == 0) is_hard = is_unsafe = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        const double squared = table[i * WIDTH + i + 1];
        length[i] = squared > 0 ? __ddiv_rn(1.0, __dsqrt_rn(squared)) : 0.0;
        const double top = from_bits(global(s.tops)[matrix * rank + i], T(0));
        exponents[i] = exponent_of(top);
        if (dead(top) || exponents[i] > SAFE || exponents[i] < -SAFE) atomicOr(&is_unsafe, 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < square; i += THREADS) {
        const int row = i / rank, column = i % rank;
        if (column >= row) {
            double& cell = table[row * WIDTH + column + 1];
            // The mirror image of the lower half, where the row's factor comes first.
            cell = __dmul_rn(__dmul_rn(cell, length[column]), length[row]);
        }
        if (column <= row) table[row * WIDTH + column] = column == row;
    }
    __syncthreads();
    for (int j = 0; j < rank; ++j) {
        // Row j from its pivot on, to the right, and then to the end of what is beside it.
        double* row = table + j * WIDTH;
        const double pivot = row[j + 1];
        const bool good = pivot > DEPENDENT_SQUARED;
        const double root = __dsqrt_rn(good ? pivot : 1.0);
        __syncthreads();
        // A loop here makes ptxas spill on sm_90.
        if ((int)threadIdx.x <= rank) {
            row[threadIdx.x] = good ? __ddiv_rn(row[threadIdx.x], root) : 0.0;
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

    // Factors of the rows as they are; or of rows brought to below 1, where one is dead or would
    // overflow or vanish.
    const int rows = padded(rank);
    T* weights = global((T*)s.weights) + (u64)matrix * rank * rows;
    for (int i = threadIdx.x; i < rank * rows; i += THREADS) {
        const int column = i / rows, row = i % rows;
        double weight = 0.0;
        if (row < rank && column <= row) {
            const double cell = table[row * WIDTH + column];
            if (fabs(cell) > HARD) atomicOr(&is_hard, 1u);
            const int bits = is_unsafe ? ENTRY_BITS : ENTRY_BITS - exponents[column];
            weight = __dmul_rn(__dmul_rn(cell, length[column]), power_of_two(bits));
        }
        round_to(weights[i], weight);
    }
    for (int i = threadIdx.x; i < rank; i += THREADS) {
        const bool none = dead(from_bits(global(s.tops)[matrix * rank + i], T(0)));
        const double down = none ? 0.0 : limited_power(-exponents[i]);
        global(s.downs)[matrix * rank + i] = is_unsafe ? down : 1.0;
    }
    __syncthreads();
    if (threadIdx.x == 0) global(s.hard)[matrix] = is_hard;
}

// out = inverse factor times rows. Blocks: batch * ceil(length / APPLY_COLUMNS).
template <class T>
__device__ inline void apply(const Stack& s) {
    __shared__ T cells[MOST_ROWS * APPLY_COLUMNS];
    const u32 parts = (u32)((s.length + APPLY_COLUMNS - 1) / APPLY_COLUMNS);
    const u32 matrix = blockIdx.x / parts, part = blockIdx.x % parts;
    if (s.active && !global(s.active)[matrix]) return;
    const int rank = (int)s.rank, rows = padded(rank);
    const u64 begin = (u64)part * APPLY_COLUMNS, offset = (u64)matrix * rank * s.length;
    const T* from = global((const T*)s.stack) + offset;
    T* to = global((T*)s.out) + offset;
    const double* downs = global((const double*)s.downs) + matrix * rank;
    // All rows of these columns before any is written: `out` may be `stack`.
    for (int i = threadIdx.x; i < rank * APPLY_COLUMNS; i += THREADS) {
        const int row = i / APPLY_COLUMNS;
        const u64 at = begin + i % APPLY_COLUMNS;
        T value = at < s.length ? from[row * s.length + at] : T(0);
        const double down = downs[row];
        if (down == 0.0) {
            value = T(0);  // and not 0 * inf
        } else if (down != 1.0) {
            round_to(value, __dmul_rn((double)value, down));
        }
        cells[i] = value;
    }
    __syncthreads();
    const int column = threadIdx.x % APPLY_COLUMNS;
    if (begin + column >= s.length) return;
    const T* weights = global((const T*)s.weights) + (u64)matrix * rank * rows;
    for (int quad = threadIdx.x / APPLY_COLUMNS; quad < rows / 4; quad += THREADS / APPLY_COLUMNS) {
        T sum[4] = {};
        // The factor is lower triangular. What is above its diagonal is not added as zero, which
        // could change the sign of another zero.
        for (int k = 0; k < rank && k < 4 * quad + 4; ++k) {
            const T value = cells[k * APPLY_COLUMNS + column];
            T weight[4];
#pragma unroll
            for (int i = 0; i < 4; i += Vector<T>::COUNT) {
                Vector<T> some;
                load(some, weights + k * rows + 4 * quad + i);
#pragma unroll
                for (int j = 0; j < Vector<T>::COUNT; ++j) weight[i + j] = some.part[j];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const T product = times(weight[i], value);
                if (k == 0) {
                    sum[i] = product;
                } else if (k <= 4 * quad + i) {
                    sum[i] = plus(sum[i], product);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * quad + i;
            if (row < rank) to[row * s.length + begin + column] = sum[i];
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
KERNEL(ortho_factor_float32, factor<float>)
KERNEL(ortho_factor_float64, factor<double>)
KERNEL(ortho_apply_float32, apply<float>)
KERNEL(ortho_apply_float64, apply<double>)
