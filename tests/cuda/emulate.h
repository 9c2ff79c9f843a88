/* What turns kernels.cu into C: emulate.py includes it first, and runs the threads one after another. */

#include <stdint.h>
#include <string.h>

typedef struct {
    unsigned int x, y, z;
} dim3;

typedef struct __attribute__((aligned(16))) {
    unsigned long long x, y;
} ulonglong2;

/* A kernel at a time a thread of the caller: daemons launch from several. */
static __thread dim3 gridDim, blockDim, blockIdx, threadIdx;

#define __global__ static
#define __device__

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

static inline float __uint_as_float(unsigned int bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline unsigned int __float_as_uint(float value)
{
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Each rounds once: the compiler is told to contract nothing. */
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }

/* CuPy has NVRTC flush subnormal numbers to zero. Returns the mode of before. */
#ifdef __x86_64__
static inline unsigned flush_subnormals(void)
{
    unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040);
    return mode;
}
static inline void restore(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#else
static inline unsigned flush_subnormals(void) { return 0; }
static inline void restore(unsigned mode) { (void)mode; }
#endif
