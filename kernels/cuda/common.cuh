// Names, number formats and arithmetic that every kernel here uses. Only CUDA's builtins: NVRTC
// compiles this without a header path, and tests/cuda/harness compiles it with g++.
#ifndef GRECO_COMMON
#define GRECO_COMMON

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Threads of a block, in every kernel here.
#define THREADS 256
#define WARPS (THREADS / 32)
#define EVERY_LANE 0xffffffffu

// Formats that are only read: their bits, so that no header is needed.
struct Half {
    u16 bits;
};
struct Bfloat {
    u16 bits;
};

// Exact in every case; NaN stays NaN, with its payload.
__device__ inline float widen(Half half) {
    const u32 magnitude = (u32)(half.bits & 0x7fff) << 13;
    u32 bits;
    if (magnitude >= 0x0f800000u) {
        bits = magnitude | 0x7f800000u;
    } else {
        // Exponents are biased by 15 there and by 127 here. As a product, since that is exact for
        // subnormal numbers as well.
        bits = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112f));
    }
    return __uint_as_float(bits | ((u32)(half.bits & 0x8000) << 16));
}
__device__ inline float widen(Bfloat value) { return __uint_as_float((u32)value.bits << 16); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

// Each operation rounds once: a compiler that fused a product with a sum would give other bits on
// other devices.
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }

// A format's bits, and the bins of its magnitudes: the sign bit is masked off, and what is left
// after shifting LOW bits out is the bin. LOW leaves LEAD_BITS bits of the mantissa in it.
template <class T>
struct Format;

template <>
struct Format<float> {
    typedef u32 Bits;
    static const int LOW = 20;
    static const int LEAD_BITS = 3;
    static const int BINS = 2048;
    static const int BIAS = 127;
    __device__ static inline u32 magnitude(float value) {
        return __float_as_uint(value) & 0x7fffffffu;
    }
};

template <>
struct Format<double> {
    typedef u64 Bits;
    static const int LOW = 51;
    static const int LEAD_BITS = 1;
    static const int BINS = 4096;
    static const int BIAS = 1023;
    __device__ static inline u64 magnitude(double value) {
        return (u64)__double_as_longlong(value) & 0x7fffffffffffffffull;
    }
};

// 16 bytes, loaded or stored at once: the widest access there is.
template <class T>
union Vector {
    static const int COUNT = 16 / sizeof(T);
    uint4 whole;
    T part[16 / sizeof(T)];
    __device__ Vector() {}
};

template <class T>
__device__ inline void load(Vector<T>& vector, const T* from) {
    vector.whole = *(const uint4*)from;
}
template <class T>
__device__ inline void store(const Vector<T>& vector, T* to) {
    *(uint4*)to = vector.whole;
}
__device__ inline bool aligned(const void* pointer) { return ((u64)pointer & 15) == 0; }

// A pointer from a table, as one to global memory: which the compiler cannot know by itself, and
// loads and atomics of unknown memory are slower.
template <class T>
__device__ inline T* global(T* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// Which block of a segment's `blocks` this is to finish last, told to all its threads: what the
// others wrote before is then visible. `finished` starts at zero.
__device__ inline bool last_block(u32* finished, u64 blocks) {
    __shared__ u32 arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived = atomicAdd(finished, 1u);
    __syncthreads();
    const bool last = arrived == blocks - 1;
    __threadfence();
    return last;
}

#endif
