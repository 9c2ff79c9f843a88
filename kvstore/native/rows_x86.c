/* Rows with SSE2, AVX2 and AVX-512. */
#if defined(__x86_64__)
#include "rows.h"

#include <immintrin.h>
#include <string.h>

#define PRIME32_1 ((int)0x9E3779B1u)
#define SWAPPED_HALVES 0x4E /* of each 16 bytes: a lane's value is added to its neighbour */

#define INLINE static inline __attribute__((always_inline))

enum way { SUM_ONLY, STORED, STREAMED };

static void fence(void)
{
    _mm_sfence();
}

/* Non-temporal stores of 16 bytes fill a line as fast as wider ones, and need less alignment: the memory of a
 * large numpy array starts 16 bytes behind a page. */

#define ATTRIBUTE
#define SET(name) name##_sse2
#define VECTOR __m128i
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))
#define STORE(at, vector) _mm_storeu_si128((__m128i *)(at), vector)
#define STREAM(at, vector) _mm_stream_si128((__m128i *)(at), vector)
#define REGISTER "v"
#define ADDED(lanes, value, key) added_sse2(lanes, value, key)
#define SCRAMBLED(lanes, key) scrambled_sse2(lanes, key)

INLINE __m128i added_sse2(__m128i lanes, __m128i value, __m128i key)
{
    __m128i keyed = _mm_xor_si128(value, key);
    __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
    return _mm_add_epi64(product, _mm_add_epi64(lanes, _mm_shuffle_epi32(value, SWAPPED_HALVES)));
}

INLINE __m128i scrambled_sse2(__m128i lanes, __m128i key)
{
    __m128i prime = _mm_set1_epi32(PRIME32_1);
    __m128i mixed = _mm_xor_si128(_mm_xor_si128(lanes, _mm_srli_epi64(lanes, 47)), key);
    __m128i high = _mm_mul_epu32(_mm_srli_epi64(mixed, 32), prime);
    return _mm_add_epi64(_mm_mul_epu32(mixed, prime), _mm_slli_epi64(high, 32));
}

#include "rows_template.h"

#define AVX2 __attribute__((target("avx2")))
#define ATTRIBUTE AVX2
#define SET(name) name##_avx2
#define VECTOR __m256i
#define LOAD(at) _mm256_loadu_si256((const __m256i *)(at))
#define STORE(at, vector) _mm256_storeu_si256((__m256i *)(at), vector)
#define STREAM(at, vector) put_avx2(at, vector)
#define REGISTER "v"
#define ADDED(lanes, value, key) added_avx2(lanes, value, key)
#define SCRAMBLED(lanes, key) scrambled_avx2(lanes, key)

AVX2 INLINE void put_avx2(uint8_t *at, __m256i vector)
{
    _mm_stream_si128((__m128i *)at, _mm256_castsi256_si128(vector));
    _mm_stream_si128((__m128i *)(at + 16), _mm256_extracti128_si256(vector, 1));
}

AVX2 INLINE __m256i added_avx2(__m256i lanes, __m256i value, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(value, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, _mm256_shuffle_epi32(value, SWAPPED_HALVES)));
}

AVX2 INLINE __m256i scrambled_avx2(__m256i lanes, __m256i key)
{
    __m256i prime = _mm256_set1_epi32(PRIME32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47)), key);
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

#include "rows_template.h"

#define AVX512 __attribute__((target("avx512f")))
#define ATTRIBUTE AVX512
#define SET(name) name##_avx512
#define VECTOR __m512i
#define LOAD(at) _mm512_loadu_si512(at)
#define STORE(at, vector) _mm512_storeu_si512(at, vector)
#define STREAM(at, vector) put_avx512(at, vector)
#define REGISTER "v"
#define ADDED(lanes, value, key) added_avx512(lanes, value, key)
#define SCRAMBLED(lanes, key) scrambled_avx512(lanes, key)

AVX512 INLINE void put_avx512(uint8_t *at, __m512i vector)
{
    _mm_stream_si128((__m128i *)at, _mm512_castsi512_si128(vector));
    _mm_stream_si128((__m128i *)(at + 16), _mm512_extracti32x4_epi32(vector, 1));
    _mm_stream_si128((__m128i *)(at + 32), _mm512_extracti32x4_epi32(vector, 2));
    _mm_stream_si128((__m128i *)(at + 48), _mm512_extracti32x4_epi32(vector, 3));
}

AVX512 INLINE __m512i added_avx512(__m512i lanes, __m512i value, __m512i key)
{
    __m512i keyed = _mm512_xor_si512(value, key);
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(product, _mm512_add_epi64(lanes, _mm512_shuffle_epi32(value, SWAPPED_HALVES)));
}

AVX512 INLINE __m512i scrambled_avx512(__m512i lanes, __m512i key)
{
    __m512i prime = _mm512_set1_epi32(PRIME32_1);
    __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47)), key);
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

#include "rows_template.h"

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2");
}

static int has_sse2(void)
{
    return 1; /* every x86-64 */
}

static const row_functions WITH_AVX512 = {
    "AVX-512", sum_avx512, copy_avx512, stream_avx512, copy_bytes_avx512, stream_bytes_avx512, fence};
static const row_functions WITH_AVX2 = {"AVX2", sum_avx2, copy_avx2, stream_avx2, copy_bytes_avx2, stream_bytes_avx2, fence};
static const row_functions WITH_SSE2 = {"SSE2", sum_sse2, copy_sse2, stream_sse2, copy_bytes_sse2, stream_bytes_sse2, fence};

const instruction_set x86_sets[] = {
    {&WITH_AVX512, has_avx512}, {&WITH_AVX2, has_avx2}, {&WITH_SSE2, has_sse2}, {NULL, NULL}};
#else
typedef int nothing; /* a file must not be empty */
#endif
