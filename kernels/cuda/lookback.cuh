// Ordered compaction in one pass: where a tile's chosen items go depends on how many were chosen in
// all tiles before it, which the tile learns from their published counts ("decoupled look-back")
// and not from another pass over the data.
//
// Two kinds of items are counted at once, in one word: the first in bits 0 to 30, the second in
// bits 31 to 61. A vector has fewer than 2^31 elements, so neither sum can overflow. Bits 62 and 63
// of a published word say what it holds. The word is all that tiles tell each other, so a 64-bit
// access, which is never torn, needs no fence beside it.
#ifndef GRECO_LOOKBACK
#define GRECO_LOOKBACK
#include "common.cuh"

// Each thread takes ROUNDS times 4 neighbours of a tile; a round is THREADS * 4 items.
#define ROUNDS 4
#define TILE_ITEMS (THREADS * 4 * ROUNDS)

#define SECOND 31
#define COUNT_MASK ((1ull << 31) - 1)
#define OWN (1ull << 62)
#define WITH_ALL_BEFORE (2ull << 62)
#define WORD_MASK ((1ull << 62) - 1)

__device__ inline u32 firsts(u64 word) { return (u32)(word & COUNT_MASK); }
__device__ inline u32 seconds(u64 word) { return (u32)((word >> SECOND) & COUNT_MASK); }

// The number of this block in the order in which blocks begin. A tile may wait for those with lower
// numbers, since they have begun: that holds for no other numbering.
__device__ inline u32 take_ticket(u64* tickets) {
    __shared__ u32 ticket;
    if (threadIdx.x == 0) ticket = atomicAdd((u32*)tickets, 1u);
    __syncthreads();
    return ticket;
}

// Counts of chosen items in the tile before each of this thread's rounds.
//
// Bit 4 * round + i of `first` and `second` says whether the thread's i-th item of that round is of
// that kind. Returns the tile's total.
__device__ inline u64 count_in_tile(u32 first, u32 second, u64 (&before)[ROUNDS]) {
    __shared__ u64 of_warp[WARPS * ROUNDS];
    __shared__ u64 of_tile;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 lower = (1u << lane) - 1;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        u32 lanes[2] = {0, 0}, all[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 a = __ballot_sync(EVERY_LANE, (first >> (4 * round + i)) & 1);
            const u32 b = __ballot_sync(EVERY_LANE, (second >> (4 * round + i)) & 1);
            lanes[0] += __popc(a & lower);
            all[0] += __popc(a);
            lanes[1] += __popc(b & lower);
            all[1] += __popc(b);
        }
        before[round] = lanes[0] | (u64)lanes[1] << SECOND;
        if (lane == 0) of_warp[round * WARPS + warp] = all[0] | (u64)all[1] << SECOND;
    }
    __syncthreads();
    if (warp == 0) {
        // WARPS * ROUNDS is 32: one sum for each lane, in the order of the items.
        const u64 mine = of_warp[lane];
        u64 sum = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u64 other = __shfl_up_sync(EVERY_LANE, sum, step);
            if (lane >= (u32)step) sum += other;
        }
        of_warp[lane] = sum - mine;
        if (lane == 31) of_tile = sum;
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) before[round] += of_warp[round * WARPS + warp];
    return of_tile;
}

// Publishes a tile's total and returns the sum of those before it, to every thread of the block.
__device__ inline u64 look_back(volatile u64* states, u32 tile, u64 total) {
    __shared__ u64 before;
    if (threadIdx.x < 32) {
        const u32 lane = threadIdx.x;
        u64 sum = 0;
        if (tile) {
            if (lane == 0) states[tile] = OWN | total;
            for (i64 end = tile;; end -= 32) {
                const i64 at = end - 1 - (i64)lane;
                u64 word = WITH_ALL_BEFORE;
                if (at >= 0) {
                    while (!((word = states[at]) >> 62)) __nanosleep(32);
                }
                const u32 enough = __ballot_sync(EVERY_LANE, word >> 62 == 2);
                // Only lanes up to the nearest tile that knows all before it count.
                const u32 last = enough ? __ffs(enough) - 1 : 31;
                u64 part = lane <= last ? word & WORD_MASK : 0;
#pragma unroll
                for (int step = 16; step; step /= 2) {
                    part += __shfl_xor_sync(EVERY_LANE, part, step);
                }
                sum += part;
                if (enough) break;
            }
        }
        if (lane == 0) {
            states[tile] = WITH_ALL_BEFORE | (sum + total);
            before = sum;
        }
    }
    __syncthreads();
    return before;
}

#endif
