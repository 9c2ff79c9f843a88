/* Rows with NEON. Stores are ordinary ones: STNP is a hint that no C intrinsic gives. */
#if defined(__aarch64__)
#include "rows.h"

#include <arm_neon.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum way { SUM_ONLY, STORED, STREAMED };

static void fence(void)
{
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

#define ATTRIBUTE
#define SET(name) name##_neon
#define VECTOR uint64x2_t
#define LOAD(at) vreinterpretq_u64_u8(vld1q_u8((const uint8_t *)(at)))
#define STORE(at, vector) vst1q_u8((uint8_t *)(at), vreinterpretq_u8_u64(vector))
#define STREAM(at, vector) STORE(at, vector)
#define REGISTER "w"
#define ADDED(lanes, value, key) added_neon(lanes, value, key)
#define SCRAMBLED(lanes, key) scrambled_neon(lanes, key)

INLINE uint64x2_t added_neon(uint64x2_t lanes, uint64x2_t value, uint64x2_t key)
{
    uint64x2_t keyed = veorq_u64(value, key);
    uint64x2_t sum = vaddq_u64(lanes, vextq_u64(value, value, 1));
    return vmlal_u32(sum, vmovn_u64(keyed), vshrn_n_u64(keyed, 32));
}

INLINE uint64x2_t scrambled_neon(uint64x2_t lanes, uint64x2_t key)
{
    uint32x2_t prime = vdup_n_u32(0x9E3779B1u);
    uint64x2_t mixed = veorq_u64(veorq_u64(lanes, vshrq_n_u64(lanes, 47)), key);
    uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(mixed, 32), prime), 32);
    return vmlal_u32(high, vmovn_u64(mixed), prime);
}

#include "rows_template.h"

static int always(void)
{
    return 1;
}

static const row_functions WITH_NEON = {"NEON", sum_neon, copy_neon, stream_neon, copy_bytes_neon, stream_bytes_neon, fence};

const instruction_set arm_sets[] = {{&WITH_NEON, always}, {NULL, NULL}};
#else
typedef int nothing; /* a file must not be empty */
#endif
