// out = residual + scale * gradient, and in the same pass a histogram of out's magnitudes.
//
// Energies without an atomic sum of doubles, which would be slow, and would depend on the order in
// which threads come. Within a bin a magnitude is (lead + f) * unit, where lead and unit belong to
// the bin and 0 <= f < 1. Its square is (lead^2 + f * (2 * lead + f)) * unit^2: the first term
// needs the count only, and the second is rounded to a whole number of 2^-SQUARE_BITS and added up
// in integers. The energy of a bin is therefore the same to the last bit however the work was
// divided, and within 2^-(SQUARE_BITS + 1) / lead^2 of the exact one, relatively: 9.6e-7 for fp32
// and for fp64.
#include "common.cuh"

struct AccumulateSegment {
    const void* gradient;  // G [length]
    const void* residual;  // T [length], or null for zero
    void* out;             // T [length], or null for the histogram alone; may be either input
    u64 length;
    double scale;
    u64* counts;    // [BINS], zero before the launch
    u64* energies;  // [BINS], zero before the launch; doubles after it
    u64* finished;  // zero before the launch
    u64 first_block;
    u64 blocks;  // ceil(length / TILE)
};

// Elements of a block, such that sums of squares cannot overflow 32 bits.
template <class T>
struct Tile;
template <>
struct Tile<float> {
    static const int ELEMENTS = 16384;
    static const int SQUARE_BITS = 13;
};
template <>
struct Tile<double> {
    static const int ELEMENTS = 4096;
    static const int SQUARE_BITS = 17;
};

__device__ inline u32 rest_of_square(u32 bits, u32 lead) {
    const float f = __fmul_rn((float)(bits & 0xfffffu), 0x1p-20f);
    const float square = __fmul_rn(f, __fadd_rn((float)(2 * lead), f));
    return __float2uint_rn(__fmul_rn(square, 0x1p13f));
}
__device__ inline u32 rest_of_square(u64 bits, u32 lead) {
    const double f = __dmul_rn((double)(bits & 0x7ffffffffffffull), 0x1p-51);
    const double square = __dmul_rn(f, __dadd_rn((double)(2 * lead), f));
    return __double2uint_rn(__dmul_rn(square, 0x1p17));
}

// The number that a bin's magnitudes begin with: its leading bits, with the implicit one.
template <class T>
__device__ inline u32 lead_of(u32 bin) {
    const u32 one = 1u << Format<T>::LEAD_BITS;
    return bin < one ? bin : (bin & (one - 1)) | one;
}

// What one thread has seen of one bin since it last saw another. Constant and mostly-zero vectors
// are long runs, so they need hardly any atomics, where otherwise all threads would queue at one
// counter.
template <class T>
struct Run {
    u32 bin, count, squares;
    u32 *counts, *sums;

    __device__ inline Run(u32* counts_, u32* sums_)
        : bin(0), count(0), squares(0), counts(counts_), sums(sums_) {}

    __device__ inline void flush() {
        if (count) atomicAdd(&counts[bin], count);
        if (squares) atomicAdd(&sums[bin], squares);
    }
    __device__ inline void add(T value) {
        const typename Format<T>::Bits bits = Format<T>::magnitude(value);
        const u32 next = (u32)(bits >> Format<T>::LOW);
        if (next != bin) {
            flush();
            bin = next;
            count = squares = 0;
        }
        ++count;
        squares += rest_of_square(bits, lead_of<T>(next));
    }
};

template <class G, class T>
__device__ inline T combine(G gradient, T scale, const T* residual) {
    const T scaled = times((T)widen(gradient), scale);
    return residual ? plus(*residual, scaled) : scaled;
}

// Sum of squares of a bin from its count and the sum of the rest_of_square of its members.
template <class T>
__device__ inline double energy_of(u32 bin, u64 count, u64 squares) {
    if (!count) return 0.0;
    const int exponent = bin >> Format<T>::LEAD_BITS;
    if (exponent == 2 * Format<T>::BIAS + 1) {
        // Arithmetic makes quiet NaNs only, and those are in the bins above the one of infinity.
        const bool infinite = (bin & ((1u << Format<T>::LEAD_BITS) - 1)) == 0;
        return __longlong_as_double(infinite ? 0x7ff0000000000000ll : 0x7ff8000000000000ll);
    }
    const double lead = lead_of<T>(bin);
    const double rest = __dmul_rn((double)squares, 1.0 / (1 << Tile<T>::SQUARE_BITS));
    const double sum = __dadd_rn(__dmul_rn((double)count, lead * lead), rest);
    const int unit = (exponent ? exponent : 1) - Format<T>::BIAS - Format<T>::LEAD_BITS;
    return ldexp(sum, 2 * unit);
}

template <class G, class T>
__device__ inline void accumulate(const AccumulateSegment* segments, const u32* segment_of_block) {
    const int BINS = Format<T>::BINS, PER = Vector<G>::COUNT, WIDE = Vector<T>::COUNT;
    __shared__ u32 counts[Format<T>::BINS];
    __shared__ u32 sums[Format<T>::BINS];

    const AccumulateSegment segment = segments[segment_of_block[blockIdx.x]];
    const u64 begin = (blockIdx.x - segment.first_block) * Tile<T>::ELEMENTS;
    const u64 left = segment.length - begin;
    const int span = left < Tile<T>::ELEMENTS ? (int)left : Tile<T>::ELEMENTS;
    const G* gradient = global((const G*)segment.gradient) + begin;
    const T* residual = segment.residual ? (const T*)segment.residual + begin : nullptr;
    T* out = segment.out ? (T*)segment.out + begin : nullptr;
    const T scale = (T)segment.scale;

    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = sums[i] = 0;
    __syncthreads();

    Run<T> run(counts, sums);
    int done = 0;
    if (aligned(gradient) && aligned(residual) && aligned(out)) {
        done = span - span % PER;
        for (int at = threadIdx.x * PER; at < done; at += THREADS * PER) {
            Vector<G> given;
            Vector<T> old[PER / WIDE];
            load(given, gradient + at);
            if (residual) {
#pragma unroll
                for (int j = 0; j < PER / WIDE; ++j) load(old[j], global(residual + at) + j * WIDE);
            }
#pragma unroll
            for (int j = 0; j < PER; ++j) {
                T& cell = old[j / WIDE].part[j % WIDE];
                cell = combine<G, T>(given.part[j], scale, residual ? &cell : nullptr);
                run.add(cell);
            }
            if (out) {
#pragma unroll
                for (int j = 0; j < PER / WIDE; ++j) store(old[j], global(out + at) + j * WIDE);
            }
        }
    }
    for (int at = done + threadIdx.x; at < span; at += THREADS) {
        const T value = combine<G, T>(gradient[at], scale, residual ? residual + at : nullptr);
        run.add(value);
        if (out) *global(out + at) = value;
    }
    run.flush();
    __syncthreads();

    u64 *all_counts = global(segment.counts), *all_sums = global(segment.energies);
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        if (counts[i]) atomicAdd(&all_counts[i], (u64)counts[i]);
        if (sums[i]) atomicAdd(&all_sums[i], (u64)sums[i]);
    }
    if (last_block((u32*)global(segment.finished), segment.blocks)) {
        const volatile u64* total = all_counts;
        volatile u64* energies = all_sums;
        for (int i = threadIdx.x; i < BINS; i += THREADS) {
            energies[i] = (u64)__double_as_longlong(energy_of<T>(i, total[i], energies[i]));
        }
    }
}

#define ACCUMULATE(name, G, T)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                              \
        name(const AccumulateSegment* segments, const u32* segment_of_block) {         \
        accumulate<G, T>(segments, segment_of_block);                                  \
    }

ACCUMULATE(accumulate_float32, float, float)
ACCUMULATE(accumulate_float16, Half, float)
ACCUMULATE(accumulate_bfloat16, Bfloat, float)
ACCUMULATE(accumulate_float64, double, double)
