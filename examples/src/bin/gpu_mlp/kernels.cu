// The layers of a multilayer perceptron, forward and backward.
//
// NVRTC compiles this file at run time. For tests without a GPU, a C compiler of the host compiles
// the same source to functions `void NAME(void **arguments, u64 threads)`, which execute all
// threads one after the other.
//
// All matrices are row-major. The weights of a layer are [inputs + 1, outputs]: the last row is
// added to every output, as if there were one more input that is always 1. One thread computes one
// element of `out`, so no two threads write to the same place, and a sum has one order. That is
// simple, and fast enough for small layers; large ones need a matrix product in tiles, as cuBLAS
// has it.

typedef unsigned long long u64;

// Every kernel has these parameters; `kernels.rs` says how long `a`, `b` and `out` are.
#define PARAMETERS const float *a, const float *b, float *out, u64 records, u64 inputs, u64 outputs

#ifdef __CUDACC__
#define FUNCTION static __device__
#define KERNEL(NAME) extern "C" __global__ void NAME(PARAMETERS)
#define THREAD ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((u64)gridDim.x * blockDim.x)
#else
#include <math.h>
#define FUNCTION static
#define KERNEL(NAME)                                                              \
    static void NAME##_thread(PARAMETERS, u64 THREAD, u64 THREADS);               \
    void NAME(void **all, u64 threads) {                                          \
        for (u64 thread = 0; thread < threads; thread++)                          \
            NAME##_thread(*(const float **)all[0], *(const float **)all[1],       \
                          *(float **)all[2], *(u64 *)all[3], *(u64 *)all[4],      \
                          *(u64 *)all[5], thread, threads);                       \
    }                                                                             \
    static void NAME##_thread(PARAMETERS, u64 THREAD, u64 THREADS)
#endif

// Iterates over this thread's elements of LEN (grid-stride loop).
#define EACH(I, LEN) for (u64 I = THREAD; I < (LEN); I += THREADS)

// Element `i` of the output of a layer.
FUNCTION float output(u64 i, const float *a, const float *b, u64 inputs, u64 outputs) {
    const u64 record = i / outputs, column = i % outputs;
    float sum = b[inputs * outputs + column];
    for (u64 k = 0; k < inputs; k++) sum += a[record * inputs + k] * b[k * outputs + column];
    return sum;
}

// The softmax's normalization of one record's logits: the logarithm of the sum of exponentials.
FUNCTION float log_sum_exp(const float *logits, u64 outputs) {
    float most = logits[0], sum = 0.0f;
    for (u64 c = 1; c < outputs; c++) most = logits[c] > most ? logits[c] : most;
    for (u64 c = 0; c < outputs; c++) sum += expf(logits[c] - most);
    return most + logf(sum);
}

// out = a · b
KERNEL(linear) {
    EACH(i, records * outputs) out[i] = output(i, a, b, inputs, outputs);
}

// out = max(a · b, 0)
KERNEL(rectified) {
    EACH(i, records * outputs) {
        const float sum = output(i, a, b, inputs, outputs);
        out[i] = sum > 0.0f ? sum : 0.0f;
    }
}

// Cross entropy of the logits `a`, for the labels `b`.
KERNEL(losses) {
    EACH(record, records) {
        const float *logits = a + record * outputs;
        out[record] = log_sum_exp(logits, outputs) - logits[(u64)b[record]];
    }
}

// Its gradient by the logits.
KERNEL(loss_gradient) {
    EACH(i, records * outputs) {
        const u64 record = i / outputs, column = i % outputs;
        const float softmax = expf(a[i] - log_sum_exp(a + record * outputs, outputs));
        out[i] = softmax - (column == (u64)b[record] ? 1.0f : 0.0f);
    }
}

// Replaces the input of a layer, which is the output of a rectifier, by the gradient by the
// rectifier's input: `a` is the gradient by the layer's outputs, `b` its weights.
KERNEL(input_gradient) {
    EACH(i, records * inputs) {
        const u64 record = i / inputs, row = i % inputs;
        float sum = 0.0f;
        for (u64 c = 0; c < outputs; c++) sum += a[record * outputs + c] * b[row * outputs + c];
        out[i] = out[i] > 0.0f ? sum : 0.0f;
    }
}

// Adds the gradient by the weights: `a` are the layer's inputs, `b` the gradient by its outputs.
KERNEL(weight_gradient) {
    EACH(i, (inputs + 1) * outputs) {
        const u64 row = i / outputs, column = i % outputs;
        float sum = 0.0f;
        for (u64 n = 0; n < records; n++)
            sum += (row < inputs ? a[n * inputs + row] : 1.0f) * b[n * outputs + column];
        out[i] += sum;
    }
}
