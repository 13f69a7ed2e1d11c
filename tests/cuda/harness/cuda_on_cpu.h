// Runs a CUDA kernel on the CPU: one fiber (ucontext) for each thread of a block, one OS thread
// for each block that is "resident". A kernel's own .cu file is included after this header.
//
// What it checks that a GPU would not: a barrier or warp operation that some threads never reach,
// uninitialised shared memory (it is filled with 0xff before each block), and, in shuffled order,
// missing barriers: after each wait a random ready thread goes on, and atomics may be overtaken.
// With AddressSanitizer and UndefinedBehaviorSanitizer also accesses out of bounds, misaligned
// vector accesses and undefined shifts.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace harness {

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

struct Options {
    uint64_t seed;     // 0: threads take turns in order; else the seed of their random order
    uint32_t workers;  // blocks that run at the same time
};

struct Fiber;
struct Block;

// What the fiber that runs on this OS thread belongs to.
Fiber* self();
const Index& thread_index();
const Index& block_index();
unsigned block_size();
unsigned grid_size();

void block_barrier();
// Waits for all lanes of `mask`, and returns what each of them brought, by lane.
const uint64_t* meet(unsigned mask, uint64_t value);
void give_way();      // of a thread that waits for another block
void before_atomic(); // in shuffled order, perhaps another thread goes first
unsigned lane();

int run(const Options& options, unsigned grid, unsigned block, void (*body)(void*), void* what,
        std::string& error);

template <class... A, size_t... I>
int launch(const Options& options, unsigned grid, unsigned block, void (*kernel)(A...),
           void** arguments, std::string& error, std::index_sequence<I...>) {
    struct Call {
        void (*kernel)(A...);
        std::tuple<A...> arguments;
    } call{kernel, std::tuple<A...>(*(A*)arguments[I]...)};
    return run(
        options, grid, block,
        [](void* what) { std::apply(((Call*)what)->kernel, ((Call*)what)->arguments); }, &call,
        error);
}

template <class... A>
int launch(const Options& options, unsigned grid, unsigned block, void (*kernel)(A...),
           void** arguments, std::string& error) {
    return launch(options, grid, block, kernel, arguments, error,
                  std::index_sequence_for<A...>());
}
}  // namespace harness

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// A block keeps to one OS thread.
#define __shared__ static thread_local
#define threadIdx (harness::thread_index())
#define blockIdx (harness::block_index())
#define blockDim (harness::Index{harness::block_size(), 1, 1})
#define gridDim (harness::Index{harness::grid_size(), 1, 1})

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};

inline void __syncthreads() { harness::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { harness::meet(mask, 0); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { harness::give_way(); }

template <class T>
inline uint64_t harness_bits(T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T>
inline T harness_value(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint64_t* all = harness::meet(mask, predicate != 0);
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) {
        if ((mask >> i & 1) && all[i]) result |= 1u << i;
    }
    return result;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
template <class T>
inline T harness_from(unsigned mask, T value, unsigned from) {
    const uint64_t* all = harness::meet(mask, harness_bits(value));
    // A lane that does not take part has nothing to give; on a GPU the value would be undefined.
    return mask >> from & 1 ? harness_value<T>(all[from]) : harness_value<T>(~0ull);
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from) {
    return harness_from(mask, value, from & 31);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = harness::lane();
    return harness_from(mask, value, lane >= by ? lane - by : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = harness::lane();
    return harness_from(mask, value, lane + by < 32 ? lane + by : lane);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int with) {
    return harness_from(mask, value, (harness::lane() ^ with) & 31);
}

template <class T>
inline T atomicAdd(T* at, T value) {
    harness::before_atomic();
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicOr(T* at, T value) {
    harness::before_atomic();
    return __atomic_fetch_or(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicExch(T* at, T value) {
    harness::before_atomic();
    return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
template <class T>
inline T atomicMax(T* at, T value) {
    harness::before_atomic();
    T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (old < value && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_SEQ_CST,
                                                       __ATOMIC_SEQ_CST)) {
    }
    return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }

inline float __uint_as_float(unsigned bits) { return harness_value<float>(bits); }
inline unsigned __float_as_uint(float value) { return harness_bits(value); }
inline double __longlong_as_double(long long bits) { return harness_value<double>(bits); }
inline long long __double_as_longlong(double value) { return harness_bits(value); }
// Compiled with -ffp-contract=off, so that each of these rounds once.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
// Saturating, and 0 for NaN, as the instructions are; in C++ those cases would be undefined.
inline unsigned __double2uint_rn(double value) {
    return value > 0 ? (value < 4294967295.0 ? (unsigned)rint(value) : 0xffffffffu) : 0;
}
inline unsigned __float2uint_rn(float value) { return __double2uint_rn(value); }
inline int __double2int_rn(double value) {
    if (!(value == value)) return 0;
    return value > -2147483648.0 ? (value < 2147483647.0 ? (int)rint(value) : 2147483647)
                                 : -2147483647 - 1;
}
inline long long __double2ll_rn(double value) { return (long long)rint(value); }
inline float __double2float_rn(double value) { return (float)value; }

inline bool __isGlobal(const void*) { return true; }
#define __builtin_assume(condition) ((void)(condition))
