// The k entries of greatest magnitude, exactly, in ascending order of position.
//
// Magnitudes compare as bit patterns (NaN above infinity above finite), and of equals the lowest
// position wins. The histogram that accumulate.cu made says in which bin the k-th magnitude lies
// (select_threshold), so one pass over the vector puts all entries of that bin and those above into
// a list (select_compact). What follows reads the list alone: select_refine, a digit of the k-th
// magnitude at a time, and select_filter, which keeps what belongs.
#include "lookback.cuh"

struct SelectState {
    u64 bin;         // of the k-th magnitude
    u64 candidates;  // entries in that bin and in those above
    u64 prefix;      // the leading bits of the k-th magnitude, as far as they are known
    u64 wanted;      // how many to take of the entries that begin with `prefix`
    u64 finished;
};

struct SelectSegment {
    void* vector;  // T [length]
    u64 length;    // below 2^31
    u64 k;         // 1 .. length
    const u64* counts;       // [BINS], of this vector
    SelectState* state;      // zero before the launch
    u32* digits;             // [2048], zero before the launch
    u64* compact_states;     // [ceil(length / TILE_ITEMS)], zero before the launch
    u64* filter_states;      // [ceil(length / TILE_ITEMS)], zero before the launch
    u32* list_index;         // [>= candidates], 16-byte aligned
    void* list_value;        // T [>= candidates], 16-byte aligned
    i64* out_index;          // [k]
    void* out_value;         // T [k], or null
    u64 clear;               // not 0: vector[out_index] = 0
    u64 first_block;         // of select_compact and select_filter
    u64 first_refine_block;  // of select_refine
    u64 refine_blocks;
};

#define DIGITS 2048

// From the top, the bin in which `wanted` counts are reached, and how many it and the bins above it
// hold; to every thread. Each thread sums its own stretch of bins.
template <class C>
__device__ inline void find_bin(const volatile C* counts, int bins, u64 wanted, u32& bin,
                                u64& reached) {
    __shared__ u64 sums[THREADS];
    __shared__ u64 found_reached;
    __shared__ u32 found_bin;
    const int stretch = bins / THREADS, first = threadIdx.x * stretch;
    u64 own = 0;
    for (int i = 0; i < stretch; ++i) own += counts[first + i];
    sums[threadIdx.x] = own;
    __syncthreads();
    for (u32 step = 1; step < THREADS; step *= 2) {
        const u64 above = threadIdx.x + step < THREADS ? sums[threadIdx.x + step] : 0;
        __syncthreads();
        sums[threadIdx.x] += above;
        __syncthreads();
    }
    u64 sum = sums[threadIdx.x] - own;
    if (sum < wanted && wanted <= sum + own) {
        for (int i = stretch - 1; i >= 0; --i) {
            sum += counts[first + i];
            if (sum >= wanted) {
                found_bin = first + i;
                found_reached = sum;
                break;
            }
        }
    }
    __syncthreads();
    bin = found_bin;
    reached = found_reached;
}

// One block for each segment.
template <class T>
__device__ inline void threshold(const SelectSegment* segments) {
    const SelectSegment segment = segments[blockIdx.x];
    u32 bin;
    u64 reached;
    const u64* counts = global(segment.counts);
    SelectState* state = global(segment.state);
    find_bin<u64>(counts, Format<T>::BINS, segment.k, bin, reached);
    if (threadIdx.x == 0) {
        state->bin = state->prefix = bin;
        state->candidates = reached;
        state->wanted = segment.k - (reached - counts[bin]);
    }
}

// Four neighbours, from `at` on; `count` says how many there are before the vector ends.
template <class T>
__device__ inline void load_four(T (&values)[4], const T* from, i64 count, bool wide) {
    if (wide && count >= 4) {
#pragma unroll
        for (int j = 0; j < 4; j += Vector<T>::COUNT) {
            Vector<T> vector;
            load(vector, from + j);
#pragma unroll
            for (int i = 0; i < Vector<T>::COUNT; ++i) values[j + i] = vector.part[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = i < count ? from[i] : T(0);
    }
}

template <class T>
__device__ inline void compact(const SelectSegment* segments, const u32* segment_of_block,
                               u64* tickets) {
    const u32 ticket = take_ticket(tickets);
    const SelectSegment segment = segments[segment_of_block[ticket]];
    const u32 tile = ticket - (u32)segment.first_block;
    const u64 bin = global(segment.state)->bin;
    const T* vector = global((const T*)segment.vector);
    const i64 begin = (i64)tile * TILE_ITEMS + threadIdx.x * 4, length = segment.length;

    T values[ROUNDS][4];
    u32 chosen = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const i64 at = begin + round * THREADS * 4;
        load_four(values[round], vector + at, length - at, aligned(vector));
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = begin + round * THREADS * 4 + i < length;
            const u64 own = Format<T>::magnitude(values[round][i]) >> Format<T>::LOW;
            chosen |= (u32)(inside && own >= bin) << (4 * round + i);
        }
    }
    u64 before[ROUNDS];
    const u64 total = count_in_tile(chosen, 0, before);
    const u32 start = firsts(look_back(global(segment.compact_states), tile, total));
    u32* list_index = global(segment.list_index);
    T* list_value = global((T*)segment.list_value);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        u32 to = start + firsts(before[round]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((chosen >> (4 * round + i)) & 1) {
                list_index[to] = (u32)(begin + round * THREADS * 4 + i);
                list_value[to] = values[round][i];
                ++to;
            }
        }
    }
}

// The next `width` bits of the k-th magnitude, which lie above the `shift` lowest ones.
template <class T>
__device__ inline void refine(const SelectSegment* segments, const u32* segment_of_block,
                              u32 shift, u32 width) {
    __shared__ u32 counts[DIGITS];
    const SelectSegment segment = segments[segment_of_block[blockIdx.x]];
    SelectState* state = global(segment.state);
    u32* all_counts = global(segment.digits);
    const u64 prefix = state->prefix, candidates = state->candidates, wanted = state->wanted;
    const T* list = global((const T*)segment.list_value);
    const int digits = 1 << width;
    for (int i = threadIdx.x; i < DIGITS; i += THREADS) counts[i] = 0;
    __syncthreads();

    // Runs of one digit are counted in a register: in a constant vector they never end.
    u32 digit = 0, run = 0;
    const u64 step = segment.refine_blocks * THREADS * 4;
    for (u64 at = ((blockIdx.x - segment.first_refine_block) * THREADS + threadIdx.x) * 4;
         at < candidates; at += step) {
        T values[4];
        load_four(values, list + at, (i64)(candidates - at), true);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u64 bits = Format<T>::magnitude(values[i]);
            if (at + i < candidates && bits >> (shift + width) == prefix) {
                const u32 next = (u32)(bits >> shift) & (digits - 1);
                if (next != digit) {
                    if (run) atomicAdd(&counts[digit], run);
                    digit = next;
                    run = 0;
                }
                ++run;
            }
        }
    }
    if (run) atomicAdd(&counts[digit], run);
    __syncthreads();
    for (int i = threadIdx.x; i < digits; i += THREADS) {
        if (counts[i]) atomicAdd(&all_counts[i], counts[i]);
    }
    if (last_block((u32*)&state->finished, segment.refine_blocks)) {
        u32 found;
        u64 reached;
        // Digits that `width` bits cannot express have count 0.
        find_bin<u32>(all_counts, DIGITS, wanted, found, reached);
        if (threadIdx.x == 0) {
            state->prefix = prefix << width | found;
            state->wanted = wanted - (reached - ((volatile u32*)all_counts)[found]);
            state->finished = 0;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) all_counts[i] = 0;
    }
}

// Of the candidates, those above the k-th magnitude, and of those equal to it the first `wanted`.
template <class T>
__device__ inline void filter(const SelectSegment* segments, const u32* segment_of_block,
                              u64* tickets) {
    const u32 ticket = take_ticket(tickets);
    const SelectSegment segment = segments[segment_of_block[ticket]];
    const u32 tile = ticket - (u32)segment.first_block;
    const i64 begin = (i64)tile * TILE_ITEMS + threadIdx.x * 4;
    const SelectState* state = global(segment.state);
    const i64 candidates = (i64)state->candidates;
    if ((i64)tile * TILE_ITEMS >= candidates) return;
    const u64 kth = state->prefix;
    const u32 wanted = (u32)state->wanted;
    const T* list = global((const T*)segment.list_value);

    T values[ROUNDS][4];
    u32 above = 0, equal = 0;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        const i64 at = begin + round * THREADS * 4;
        load_four(values[round], list + at, candidates - at, true);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool inside = begin + round * THREADS * 4 + i < candidates;
            const u64 bits = Format<T>::magnitude(values[round][i]);
            above |= (u32)(inside && bits > kth) << (4 * round + i);
            equal |= (u32)(inside && bits == kth) << (4 * round + i);
        }
    }
    u64 before[ROUNDS];
    const u64 total = count_in_tile(above, equal, before);
    const u64 start = look_back(global(segment.filter_states), tile, total);
    const u32* list_index = global(segment.list_index);
    i64* out_index = global(segment.out_index);
    T* out_value = global((T*)segment.out_value);
    T* vector = global((T*)segment.vector);
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        u32 over = firsts(start) + firsts(before[round]);
        u32 ties = seconds(start) + seconds(before[round]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool is_over = (above >> (4 * round + i)) & 1;
            const bool is_tie = (equal >> (4 * round + i)) & 1;
            if (is_over || (is_tie && ties < wanted)) {
                const u32 to = over + (ties < wanted ? ties : wanted);
                const u32 index = list_index[begin + round * THREADS * 4 + i];
                out_index[to] = index;
                if (out_value) out_value[to] = values[round][i];
                if (segment.clear) vector[index] = T(0);
            }
            over += is_over;
            ties += is_tie;
        }
    }
}

#define SELECT(suffix, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                       \
        select_threshold_##suffix(const SelectSegment* segments) {                              \
        threshold<T>(segments);                                                                 \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) select_compact_##suffix(              \
        const SelectSegment* segments, const u32* segment_of_block, u64* tickets) {             \
        compact<T>(segments, segment_of_block, tickets);                                        \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) select_refine_##suffix(               \
        const SelectSegment* segments, const u32* segment_of_block, u32 shift, u32 width) {     \
        refine<T>(segments, segment_of_block, shift, width);                                    \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) select_filter_##suffix(               \
        const SelectSegment* segments, const u32* segment_of_block, u64* tickets) {             \
        filter<T>(segments, segment_of_block, tickets);                                         \
    }

SELECT(float32, float)
SELECT(float64, double)
