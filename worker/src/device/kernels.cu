// Optimizers, clipping and digests on a GPU.
//
// NVRTC compiles this file at run time, without contracting a * b + c to fused operations, so all
// GPUs compute bit-identical results, equal to those of `optimizer.rs` on a CPU (except the norm
// for clipping, which is summed in another order). For tests without a GPU, a C compiler of the
// host compiles the same source to functions `void NAME(void **arguments, u64 threads)`, which
// execute all threads one after the other.
//
// A kernel takes one struct, which `kernels.rs` mirrors. The number of threads depends only on
// lengths.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define HERE __device__
#define KERNEL(NAME, ARGUMENTS) extern "C" __global__ void NAME(const ARGUMENTS a)
#define THREAD ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((u64)gridDim.x * blockDim.x)
// Adds VALUE of every thread to *SUM, by way of a sum over each warp. All threads take part.
#define ADD_TO(SUM, VALUE)                                                              \
    do {                                                                                \
        u64 warp = (VALUE);                                                             \
        for (int step = 16; step; step /= 2) warp += __shfl_down_sync(~0u, warp, step); \
        if (threadIdx.x % 32 == 0) atomicAdd((SUM), warp);                              \
    } while (0)
#else
#include <math.h>
#define HERE
#define KERNEL(NAME, ARGUMENTS)                                           \
    static void NAME##_thread(const ARGUMENTS a, u64 THREAD, u64 THREADS); \
    void NAME(void **arguments, u64 threads) {                            \
        for (u64 thread = 0; thread < threads; thread++)                  \
            NAME##_thread(*(const ARGUMENTS *)arguments[0], thread, threads); \
    }                                                                     \
    static void NAME##_thread(const ARGUMENTS a, u64 THREAD, u64 THREADS)
#define ADD_TO(SUM, VALUE) (*(SUM) += (VALUE))
#endif

// Iterates over this thread's elements of LEN (grid-stride loop).
#define EACH(I, LEN) for (u64 I = THREAD; I < (LEN); I += THREADS)

// Declares SUM, and adds VALUE(x) of this thread's elements x of VALUES to it, in an order that
// depends only on LEN. Eight loads are in flight at a time: a loop that adds each element before it
// loads the next one waits for memory at every element.
#define FOLD(TYPE, SUM, ELEMENT, VALUES, LEN, VALUE)                                \
    TYPE SUM = 0;                                                                   \
    do {                                                                            \
        const ELEMENT *values = (const ELEMENT *)(VALUES);                          \
        TYPE parts[8] = {0, 0, 0, 0, 0, 0, 0, 0};                                   \
        u64 at = THREAD;                                                            \
        for (; at + 7 * THREADS < (LEN); at += 8 * THREADS) {                       \
            ELEMENT x[8];                                                           \
            for (int k = 0; k < 8; k++) x[k] = values[at + k * THREADS];            \
            for (int k = 0; k < 8; k++) parts[k] += VALUE(x[k], at + k * THREADS);  \
        }                                                                           \
        for (; at < (LEN); at += THREADS) parts[0] += VALUE(values[at], at);        \
        for (int k = 0; k < 8; k++) SUM += parts[k];                                \
    } while (0)

// Sets each of LEN elements of RESULTS to OF(x) of that of VALUES, with eight loads in flight: the
// arrays could overlap for all that a compiler knows, so it would not load the next element before
// it has stored the last one.
#define MAP(FROM, TO, VALUES, RESULTS, LEN, OF)                                      \
    do {                                                                             \
        const FROM *values = (const FROM *)(VALUES);                                 \
        TO *results = (TO *)(RESULTS);                                               \
        u64 at = THREAD;                                                             \
        for (; at + 7 * THREADS < (LEN); at += 8 * THREADS) {                        \
            FROM x[8];                                                               \
            for (int k = 0; k < 8; k++) x[k] = values[at + k * THREADS];             \
            for (int k = 0; k < 8; k++) results[at + k * THREADS] = OF(x[k]);        \
        }                                                                            \
        for (; at < (LEN); at += THREADS) results[at] = OF(values[at]);              \
    } while (0)

// ---- optimizers ----

// Constants are those of `optimizer.rs`. `clipped`: address of the scale, if the gradient is
// clipped; else the scale is `scale`. `nonfinite`: address of a number; if it is not zero, the step
// changes nothing.
typedef struct {
    const float *sum;
    float *parameters;
    float *first;
    float *second;
    const float *clipped;
    const u64 *nonfinite;
    u64 len;
    float scale;
    float rate;
    float decay_or_keep;
    float momentum_or_beta1;
    float beta2;
    float rest1;
    float rest2;
    float correction;
    float epsilon;
} Step;

KERNEL(sgd, Step) {
    if (a.nonfinite && *a.nonfinite) return;
    const float scale = a.clipped ? *a.clipped : a.scale;
    EACH(i, a.len) {
        const float p = a.parameters[i];
        a.parameters[i] = p - a.rate * (a.sum[i] * scale + a.decay_or_keep * p);
    }
}

KERNEL(sgd_momentum, Step) {
    if (a.nonfinite && *a.nonfinite) return;
    const float scale = a.clipped ? *a.clipped : a.scale;
    EACH(i, a.len) {
        const float p = a.parameters[i];
        const float gradient = a.sum[i] * scale + a.decay_or_keep * p;
        const float b = a.momentum_or_beta1 * a.first[i] + gradient;
        a.first[i] = b;
        a.parameters[i] = p - a.rate * b;
    }
}

KERNEL(sgd_nesterov, Step) {
    if (a.nonfinite && *a.nonfinite) return;
    const float scale = a.clipped ? *a.clipped : a.scale;
    EACH(i, a.len) {
        const float p = a.parameters[i];
        const float gradient = a.sum[i] * scale + a.decay_or_keep * p;
        const float b = a.momentum_or_beta1 * a.first[i] + gradient;
        a.first[i] = b;
        a.parameters[i] = p - a.rate * (gradient + a.momentum_or_beta1 * b);
    }
}

KERNEL(adam_w, Step) {
    if (a.nonfinite && *a.nonfinite) return;
    const float scale = a.clipped ? *a.clipped : a.scale;
    EACH(i, a.len) {
        const float gradient = a.sum[i] * scale;
        const float m = a.momentum_or_beta1 * a.first[i] + a.rest1 * gradient;
        const float v = a.beta2 * a.second[i] + a.rest2 * gradient * gradient;
        a.first[i] = m;
        a.second[i] = v;
        a.parameters[i] =
            a.parameters[i] * a.decay_or_keep - a.rate * m / (sqrtf(v) * a.correction + a.epsilon);
    }
}

// ---- accumulation of gradients ----

typedef struct {
    const float *values;
    float *sum;
    u64 len;
} Add;

KERNEL(add, Add) {
    EACH(i, a.len) a.sum[i] = a.sum[i] + a.values[i];
}

// ---- bfloat16, the upper half of a float ----

typedef struct {
    const void *values;
    void *converted;
    u64 len;
} Convert;

// Rounds to the nearest, ties to even. NaNs stay NaNs.
static HERE unsigned short rounded(u32 bits) {
    const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const u32 next = is_nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    return (unsigned short)(next >> 16);
}

KERNEL(to_bf16, Convert) { MAP(u32, unsigned short, a.values, a.converted, a.len, rounded); }

#define WIDENED(BITS) ((u32)(BITS) << 16)
KERNEL(from_bf16, Convert) { MAP(unsigned short, u32, a.values, a.converted, a.len, WIDENED); }

// ---- NaNs and infinities ----

// A reduction: to one partial result per thread, or to one number, which is zero before.
typedef struct {
    const void *values;
    void *results;
    u64 len;
    // Position of the first value in its tensor.
    u64 start;
} Fold;

// Sets the result if an element is NaN or infinite: its exponent bits are all set. All threads that
// write write the same.
#define IS_NONFINITE(BITS, I) (((BITS) & 0x7f800000u) == 0x7f800000u)
KERNEL(nonfinite, Fold) {
    FOLD(u32, count, u32, a.values, a.len, IS_NONFINITE);
    if (count) *(u64 *)a.results = 1;
}

// ---- clipping ----

#define SQUARE(X, I) ((double)(X) * (double)(X))
KERNEL(square_sums, Fold) {
    FOLD(double, sum, float, a.values, a.len, SQUARE);
    ((double *)a.results)[THREAD] = sum;
}

#define ITSELF(X, I) (X)
KERNEL(double_sums, Fold) {
    FOLD(double, sum, double, a.values, a.len, ITSELF);
    ((double *)a.results)[THREAD] = sum;
}

typedef struct {
    const double *square_sums;
    float *scale;
    u64 len;
    double limit;
    double records;
} Clip;

// Executed by one thread.
KERNEL(clip_scale, Clip) {
    FOLD(double, sum, double, a.square_sums, a.len, ITSELF);
    // PyTorch adds 1e-6 too.
    const double factor = a.limit / (sqrt(sum) / a.records + 1e-6);
    *a.scale = (float)((factor < 1.0 ? factor : 1.0) / a.records);
}

// ---- digests ----

// Adds a hash of each element and its position to the result. The sum does not depend on the order,
// so no thread waits for another. The hash (SplitMix64's finalizer) is a bijection, so a change of
// one element always changes the sum.
static HERE u64 hash(u32 bits, u64 position) {
    u64 z = bits + (position + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#define HASH(BITS, I) hash((BITS), a.start + (I))
KERNEL(digests, Fold) {
    FOLD(u64, sum, u32, a.values, a.len, HASH);
    ADD_TO((u64 *)a.results, sum);
}
