// out[index] += alpha * value for several ranks' payloads, one rank after another.
//
// A block owns a stretch of out and takes from every payload what falls into it, ranks in order:
// each element is summed in the same order whatever the number of blocks, and no atomics are
// needed, since the positions of one payload are distinct.
#include "common.cuh"

struct ScatterPayload {
    const i64* index;   // [count], strictly ascending, below the segment's length
    const void* value;  // V [count]
    u64 count;
};

struct ScatterSegment {
    void* out;  // T [length]
    u64 length;
    double alpha;
    const ScatterPayload* payloads;  // [ranks], in rank order
    u64 ranks;
    u64 first_block;
};

// Elements of out that a block owns.
#define STRETCH 8192

// The first of `count` ascending positions that is not below `bound`.
__device__ inline u64 lower_bound(const i64* index, u64 count, i64 bound) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (index[middle] < bound) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <class V, class T>
__device__ inline void scatter_add(const ScatterSegment* segments, const u32* segment_of_block) {
    __shared__ u64 range[2];
    const ScatterSegment segment = segments[segment_of_block[blockIdx.x]];
    const i64 begin = (i64)(blockIdx.x - segment.first_block) * STRETCH;
    const T alpha = (T)segment.alpha;
    T* out = global((T*)segment.out);
    for (u64 rank = 0; rank < segment.ranks; ++rank) {
        const ScatterPayload payload = global(segment.payloads)[rank];
        const i64* index = global(payload.index);
        const V* value = global((const V*)payload.value);
        // Two threads of two warps: lanes of one warp would search one after the other.
        if (threadIdx.x == 0) range[0] = lower_bound(index, payload.count, begin);
        if (threadIdx.x == 32) {
            range[1] = lower_bound(index, payload.count, begin + STRETCH);
        }
        __syncthreads();
        const u64 end = range[1];
        for (u64 at = range[0] + threadIdx.x; at < end; at += THREADS) {
            T& cell = out[index[at]];
            cell = plus(cell, times((T)widen(value[at]), alpha));
        }
        // The next rank's threads read what these wrote, and `range` is about to change.
        __syncthreads();
    }
}

#define SCATTER_ADD(suffix, V, T)                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) scatter_add_##suffix(   \
        const ScatterSegment* segments, const u32* segment_of_block) {            \
        scatter_add<V, T>(segments, segment_of_block);                            \
    }

SCATTER_ADD(float32, float, float)
SCATTER_ADD(float16, Half, float)
SCATTER_ADD(bfloat16, Bfloat, float)
SCATTER_ADD(float64, double, double)
