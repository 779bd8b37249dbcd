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
#define KERNEL(NAME, ARGUMENTS) extern "C" __global__ void NAME(const ARGUMENTS a)
#define THREAD ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((u64)gridDim.x * blockDim.x)
#else
#include <math.h>
#define KERNEL(NAME, ARGUMENTS)                                           \
    static void NAME##_thread(const ARGUMENTS a, u64 THREAD, u64 THREADS); \
    void NAME(void **arguments, u64 threads) {                            \
        for (u64 thread = 0; thread < threads; thread++)                  \
            NAME##_thread(*(const ARGUMENTS *)arguments[0], thread, threads); \
    }                                                                     \
    static void NAME##_thread(const ARGUMENTS a, u64 THREAD, u64 THREADS)
#endif

// Iterates over this thread's elements of LEN (grid-stride loop).
#define EACH(I, LEN) for (u64 I = THREAD; I < (LEN); I += THREADS)

// ---- optimizers ----

// Constants are those of `optimizer.rs`. `clipped`: address of the scale, if the gradient is
// clipped; else the scale is `scale`.
typedef struct {
    const float *sum;
    float *parameters;
    float *first;
    float *second;
    const float *clipped;
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
    const float scale = a.clipped ? *a.clipped : a.scale;
    EACH(i, a.len) {
        const float p = a.parameters[i];
        a.parameters[i] = p - a.rate * (a.sum[i] * scale + a.decay_or_keep * p);
    }
}

KERNEL(sgd_momentum, Step) {
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
KERNEL(to_bf16, Convert) {
    const u32 *values = (const u32 *)a.values;
    EACH(i, a.len) {
        const u32 bits = values[i];
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        ((unsigned short *)a.converted)[i] =
            (unsigned short)(is_nan ? (bits >> 16) | 0x40u : rounded);
    }
}

KERNEL(from_bf16, Convert) {
    const unsigned short *values = (const unsigned short *)a.values;
    EACH(i, a.len) ((u32 *)a.converted)[i] = (u32)values[i] << 16;
}

// ---- NaNs and infinities ----

// A reduction to one partial result per thread.
typedef struct {
    const void *values;
    void *partials;
    u64 len;
    // Position of the first value in its tensor.
    u64 start;
} Fold;

// Counts the elements that are NaN or infinite: those whose exponent bits are all set.
KERNEL(nonfinite, Fold) {
    const u32 *values = (const u32 *)a.values;
    u64 count = 0;
    EACH(i, a.len) count += (values[i] & 0x7f800000u) == 0x7f800000u;
    ((u64 *)a.partials)[THREAD] = count;
}

// ---- clipping ----

KERNEL(square_sums, Fold) {
    const float *values = (const float *)a.values;
    double sum = 0.0;
    EACH(i, a.len) sum += (double)values[i] * (double)values[i];
    ((double *)a.partials)[THREAD] = sum;
}

KERNEL(double_sums, Fold) {
    const double *values = (const double *)a.values;
    double sum = 0.0;
    EACH(i, a.len) sum += values[i];
    ((double *)a.partials)[THREAD] = sum;
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
    if (THREAD == 0 && THREADS > 0) {
        double sum = 0.0;
        for (u64 i = 0; i < a.len; i++) sum += a.square_sums[i];
        // PyTorch adds 1e-6 too.
        const double factor = a.limit / (sqrt(sum) / a.records + 1e-6);
        *a.scale = (float)((factor < 1.0 ? factor : 1.0) / a.records);
    }
}

// ---- digests ----

// Sums of a hash of each element and its position. The sum does not depend on the order, so no
// thread waits for another. The hash (SplitMix64's finalizer) is a bijection, so a change of one
// element always changes the sum.
KERNEL(digests, Fold) {
    const u32 *values = (const u32 *)a.values;
    u64 sum = 0;
    EACH(i, a.len) {
        u64 z = values[i] + (a.start + i + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        sum += z ^ (z >> 31);
    }
    ((u64 *)a.partials)[THREAD] = sum;
}

KERNEL(word_sums, Fold) {
    const u64 *values = (const u64 *)a.values;
    u64 sum = 0;
    EACH(i, a.len) sum += values[i];
    ((u64 *)a.partials)[THREAD] = sum;
}
