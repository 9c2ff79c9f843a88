/* Kernels over KV blocks in device memory: XXH3 checksums, copies of many pieces, FP8.
 *
 * Both CUDA C++ and C99: threads share nothing and wait for nobody, so that they may also run one after
 * another, as plain functions. Rows of tables are uploaded by kernels.py, which says what is in them.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __cplusplus
extern "C" {
#endif

#define THREAD ((u64)blockIdx.x * blockDim.x + threadIdx.x)

/* XXH3, 64 bits, of more than 240 bytes.
 *
 * The input is rows of 1 KiB, a row is 16 stripes of 64 bytes, a stripe 8 lanes of 8. What a row adds to the
 * lanes does not depend on the rows before it, so the sums of many rows are computed in parallel. A chain then
 * runs through the sums of a block in order. Lanes work in pairs, a thread each: a pair's values are 16 bytes.
 *
 * `xxh3_rows` sums some rows of all blocks, then `xxh3_chain` chains them while the L2 cache still holds the
 * sums, and so on. They are two kernels since few registers let many threads of the first hide the latency of
 * memory, and the second, of few threads, needs many to have loads in flight.
 *
 * The chain costs about 45 cycles a row, and takes no longer for hundreds of blocks. (One block of 64 MiB alone
 * is slow: 1.5 ms.)
 */
#define XXH32_1 0x9E3779B1ULL
#define XXH64_1 0x9E3779B185EBCA87ULL
#define XXH64_2 0xC2B2AE3D27D4EB4FULL
#define XXH64_3 0x165667B19E3779F9ULL
#define XXH64_4 0x85EBCA77C2B2AE63ULL
#define XXH64_5 0x27D4EB2F165667C5ULL
#define STRIPES 16
#define ROW_BYTES 1024

__device__ static const u64 XXH3_SECRET[24] = {
    0xBE4BA423396CFEB8ULL, 0x1CAD21F72C81017CULL, 0xDB979083E96DD4DEULL, 0x1F67B3B7A4A44072ULL,
    0x78E5C0CC4EE679CBULL, 0x2172FFCC7DD05A82ULL, 0x8E2443F7744608B8ULL, 0x4C263A81E69035E0ULL,
    0xCB00C391BB52283CULL, 0xA32E531B8B65D088ULL, 0x4EF90DA297486471ULL, 0xD8ACDEA946EF1938ULL,
    0x3F349CE33F76FAA8ULL, 0x1D4F0BC7C7BBDCF9ULL, 0x3159B4CD4BE0518AULL, 0x647378D9C97E9FC8ULL,
    0xC3EBD33483ACC5EAULL, 0xEB6313FAFFA081C5ULL, 0x49DAF0B751DD0D17ULL, 0x9E68D429265516D3ULL,
    0xFCA1477D58BE162BULL, 0xCE31D07AD1B8F88FULL, 0x280416958F3ACB45ULL, 0x7E404BBBCAFBD7AFULL,
};

__device__ static const u64 XXH3_START[8] = {
    0xC2B2AE3DULL, XXH64_1, XXH64_2, XXH64_3, XXH64_4, 0x85EBCA77ULL, XXH64_5, XXH32_1,
};

/* A block to hash: where it is, how long, under which seed. */
typedef struct {
    u64 address, length, seed;
} Hashed;

/* Word `i` of the secret that belongs to a seed. */
__device__ static u64 secret(u32 i, u64 seed)
{
    return i % 2 ? XXH3_SECRET[i] - seed : XXH3_SECRET[i] + seed;
}

/* The 8 bytes of that secret from a byte on that is not a multiple of 8. */
__device__ static u64 secret_at(u32 byte, u64 seed)
{
    u32 shift = byte % 8 * 8;
    return secret(byte / 8, seed) >> shift | secret(byte / 8 + 1, seed) << (64 - shift);
}

__device__ static u64 product(u64 value)
{
    return (value & 0xFFFFFFFFULL) * (value >> 32);
}

/* Adds a pair's values of one stripe to its lanes, each lane's value to the other. */
__device__ static void accumulate(ulonglong2 *lanes, ulonglong2 value, u64 key_x, u64 key_y)
{
    lanes->x += value.y + product(value.x ^ key_x);
    lanes->y += value.x + product(value.y ^ key_y);
}

__device__ static u64 unaligned(const u8 *at)
{
    u64 value = 0;
    for (u32 i = 0; i < 8; i++)
        value |= (u64)at[i] << 8 * i;
    return value;
}

/* What a row adds to the lanes: sums[block][row - start][pair], for rows [start, start + rows) of n blocks. The
 * last row of a block has no sum.
 */
__global__ void xxh3_rows(const Hashed *blocks, u32 n, u32 start, u32 rows, ulonglong2 *sums)
{
    u64 thread = THREAD;
    u32 pair = thread % 4, place = thread / 4, block = place / rows, row = start + place % rows;
    if (block >= n || row >= (blocks[block].length - 1) / ROW_BYTES)
        return;
    const ulonglong2 *from = (const ulonglong2 *)blocks[block].address + (u64)row * (ROW_BYTES / 16) + pair;
    u64 seed = blocks[block].seed;
    ulonglong2 values[STRIPES], lanes = {0, 0};
#pragma unroll
    for (u32 i = 0; i < STRIPES; i++)
        values[i] = from[4 * i];
    const u64 *word = XXH3_SECRET + 2 * pair;
#pragma unroll
    for (u32 i = 0; i < STRIPES; i++) /* `secret`, for a word of which it is known that it is even or odd */
        accumulate(&lanes, values[i], i % 2 ? word[i] - seed : word[i] + seed,
                   i % 2 ? word[i + 1] + seed : word[i + 1] - seed);
    sums[thread] = lanes;
}

#define AHEAD 24

__device__ static void scramble(ulonglong2 *lanes, ulonglong2 sum, u64 key_x, u64 key_y)
{
    u64 x = lanes->x + sum.x, y = lanes->y + sum.y;
    lanes->x = (x ^ x >> 47 ^ key_x) * XXH32_1;
    lanes->y = (y ^ y >> 47 ^ key_y) * XXH32_1;
}

/* Runs a pair's lanes through the sums of `rows` rows. */
__device__ static void chain_rows(ulonglong2 *lanes, const ulonglong2 *sums, u32 rows, u64 key_x, u64 key_y)
{
    ulonglong2 now[AHEAD] = {{0, 0}}, next[AHEAD];
    u32 done = 0;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (i < rows)
            now[i] = sums[4 * i];
    for (; done + AHEAD <= rows; done += AHEAD) {
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) { /* behind the last row: that one again, so that nothing branches */
            u32 row = done + AHEAD + i;
            next[i] = sums[4 * (u64)(row < rows ? row : rows - 1)];
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            scramble(lanes, now[i], key_x, key_y);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            now[i] = next[i];
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++)
        if (done + i < rows)
            scramble(lanes, now[i], key_x, key_y);
}

/* Adds the row at the end of a block, which has 1 to 1024 bytes, and folds the pair. */
__device__ static u64 finish(ulonglong2 lanes, const Hashed *block, u32 full, u32 pair)
{
    const u8 *from = (const u8 *)block->address;
    u64 length = block->length, seed = block->seed;
    const ulonglong2 *last = (const ulonglong2 *)(from + (u64)full * ROW_BYTES) + pair;
    u32 stripes = (length - 1 - (u64)full * ROW_BYTES) / 64;
#pragma unroll
    for (u32 i = 0; i < STRIPES - 1; i++)
        if (i < stripes)
            accumulate(&lanes, last[4 * i], secret(i + 2 * pair, seed), secret(i + 2 * pair + 1, seed));
    ulonglong2 end = {unaligned(from + length - 64 + 16 * pair), unaligned(from + length - 56 + 16 * pair)};
    accumulate(&lanes, end, secret_at(121 + 16 * pair, seed), secret_at(129 + 16 * pair, seed));
    u64 x = lanes.x ^ secret_at(11 + 16 * pair, seed), y = lanes.y ^ secret_at(19 + 16 * pair, seed);
    return x * y ^ __umul64hi(x, y);
}

/* Chains rows [start, start + rows) of n blocks, from the lanes that the rows before have left to those for the
 * rows behind, or to folds. lanes[block][pair]. folds[block][pair]: what is left to do is to add these four up,
 * the length too, and to mix the bits.
 */
__global__ void xxh3_chain(const Hashed *blocks, u32 n, u32 start, u32 rows, const ulonglong2 *sums,
                           ulonglong2 *lanes, u64 *folds)
{
    u64 thread = THREAD;
    u32 pair = thread % 4, place = thread / 4;
    if (place >= n)
        return;
    const Hashed *block = blocks + place;
    u64 seed = block->seed;
    u32 full = (block->length - 1) / ROW_BYTES, left = full - start;
    ulonglong2 now = {XXH3_START[2 * pair], XXH3_START[2 * pair + 1]};
    if (start)
        now = lanes[thread];
    chain_rows(&now, sums + (u64)place * rows * 4 + pair, left < rows ? left : rows,
               secret(16 + 2 * pair, seed), secret(17 + 2 * pair, seed));
    if (left <= rows)
        folds[thread] = finish(now, block, full, pair);
    else
        lanes[thread] = now;
}

/* Copies of many pieces. A thread takes four times 16 bytes before it puts any down, a block of threads one
 * chunk of a piece: small enough that pages of 4 KiB keep a block of threads busy, and large enough that what
 * is read of the table is little.
 */
#define CHUNK_BYTES 16384

/* places: n targets, n sources, and n lengths unless `each` is that of all. n * chunks blocks of threads. */
__global__ void copy_pieces(const u64 *places, u32 n, u32 chunks, u64 each)
{
    u32 piece = blockIdx.x / chunks, width = blockDim.x, thread = threadIdx.x;
    u64 start = (u64)(blockIdx.x % chunks) * CHUNK_BYTES;
    u64 whole = each ? each : places[2 * (u64)n + piece];
    if (start >= whole)
        return;
    u64 target = places[piece] + start, source = places[n + piece] + start, left = whole - start;
    u32 nbytes = left < CHUNK_BYTES ? (u32)left : CHUNK_BYTES;
    u32 vectors = (target | source) % 16 ? 0 : nbytes / 16;
    ulonglong2 *into = (ulonglong2 *)target, taken[4] = {{0, 0}};
    const ulonglong2 *from = (const ulonglong2 *)source;
    for (u32 at = thread; at < vectors; at += 4 * width) {
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (at + i * width < vectors)
                taken[i] = from[at + i * width];
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (at + i * width < vectors)
                into[at + i * width] = taken[i];
    }
    for (u32 at = 16 * vectors + thread; at < nbytes; at += width)
        ((u8 *)target)[at] = ((const u8 *)source)[at];
}

/* FP8: values of 16 bits (BF16 or FP16) as E4M3, with a power of two as the scale of each head.
 *
 * A block is [outer][runs][heads][8 * chunks] values; a group of them, with one scale, are the runs of
 * one (outer, head). Its code is the scales, a float each, [outer][heads], then a byte a value. All
 * arithmetic is exact but for the one rounding, to the nearest, ties to even; so no order and no
 * contraction changes a bit. No operand or result that matters is a subnormal float: CuPy has the compiler
 * flush them to zero. See kvstore/fp8.py.
 *
 * 16 threads look for the largest magnitude of a group, and whoever encodes looks at these 16: nobody waits
 * for anybody, for the price of reading the block twice.
 */
#define PARTS 16

typedef struct {
    u64 target, source;
} Recoded;

/* The magnitude of a value without its sign; 0 for what is no number. */
__device__ static u32 magnitude(u32 value, u32 bfloat16)
{
    value &= 0x7FFF;
    return value < (bfloat16 ? 0x7F80 : 0x7C00) ? value : 0;
}

/* A magnitude as a float, exactly: 16 bits of BF16 are the upper half of one. */
__device__ static float widened(u32 value, u32 bfloat16)
{
    if (bfloat16)
        return __uint_as_float(value << 16);
    return value < 0x400 ? __fmul_rn((float)value, 0x1p-24f) : __uint_as_float((value << 13) + (112u << 23));
}

/* The exponent (biased by 127) of the least scale under which a magnitude is at most 448, that is 1.75 * 2^8;
 * not so little that the least code would be less than the least number of the type.
 */
__device__ static u32 scale_exponent(u32 largest, u32 bfloat16)
{
    u32 over = (__float_as_uint(widened(largest, bfloat16)) + 0x1FFFFF) >> 23, least = bfloat16 ? 3 : 112;
    return over > least + 8 ? over - 8 : least;
}

/* `limit` is what the type can hold, in units of the scale, or 448. */
__device__ static u32 encoded(u32 value, u32 bfloat16, float inverse, float limit)
{
    u32 sign = value >> 8 & 0x80, rest = value & 0x7FFF;
    if (rest >= (bfloat16 ? 0x7F80 : 0x7C00))
        return sign | 0x7F;
    float scaled = bfloat16 && rest < 0x80 /* 2^-133 each; 2^-69 * inverse is not subnormal where it matters */
                       ? __fmul_rn(__fmul_rn((float)rest, 0x1p-64f), __fmul_rn(inverse, 0x1p-69f))
                       : __fmul_rn(widened(rest, bfloat16), inverse);
    if (scaled > limit)
        scaled = limit;
    u32 bits = __float_as_uint(scaled);
    if (scaled < 0x1p-6f) /* steps of 2^-9, which are those of floats from 2^14 on */
        return sign | (__float_as_uint(__fadd_rn(scaled, 0x1p14f)) - __float_as_uint(0x1p14f));
    return sign | (((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

__device__ static u32 decoded(u32 code, u32 bfloat16, float scale)
{
    u32 sign = (code & 0x80) << 8, rest = code & 0x7F;
    if (rest == 0x7F)
        return sign | (bfloat16 ? 0x7FC0 : 0x7E00);
    float value = rest < 8 ? __fmul_rn((float)rest, 0x1p-9f) : __uint_as_float((rest << 20) + (120u << 23));
    if (bfloat16 && scale < 0x1p-100f) { /* 2^64 times as large, so that it is not subnormal */
        value = __fmul_rn(value, __fmul_rn(scale, 0x1p64f));
        return sign | (value < 0x1p-62f ? (u32)__fmul_rn(value, 0x1p69f)
                                        : (__float_as_uint(value) - (64u << 23)) >> 16);
    }
    value = __fmul_rn(value, scale);
    u32 bits = __float_as_uint(value);
    if (bfloat16)
        return sign | bits >> 16;
    return sign | (value < 0x1p-14f ? (u32)__fmul_rn(value, 0x1p24f) : (bits - (112u << 23)) >> 13);
}

/* The largest magnitude in each 16th of each group: parts[block][outer][head][16]. */
__global__ void fp8_largest(const Recoded *blocks, u32 n, u32 groups, u32 runs, u32 heads, u32 chunks,
                            u32 bfloat16, u16 *parts)
{
    u64 thread = THREAD, group = thread / PARTS;
    if (group / groups >= n)
        return;
    u32 head = group % groups % heads, outer = group % groups / heads, largest = 0;
    const ulonglong2 *from = (const ulonglong2 *)blocks[group / groups].source;
    for (u32 at = thread % PARTS; at < runs * chunks; at += PARTS) {
        ulonglong2 values = from[((u64)(outer * runs + at / chunks) * heads + head) * chunks + at % chunks];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 value = magnitude((u32)((i < 4 ? values.x : values.y) >> i % 4 * 16), bfloat16);
            largest = value > largest ? value : largest;
        }
    }
    parts[thread] = largest;
}

/* A thread takes 8 values, and who has the first of a group puts down its scale. */
__global__ void fp8_encode(const Recoded *blocks, u32 n, u32 groups, u32 runs, u32 heads, u32 chunks,
                           u32 bfloat16, const u16 *parts)
{
    u32 a_block = groups * runs * chunks, largest = 0;
    u64 thread = THREAD, block = thread / a_block;
    if (block >= n)
        return;
    u32 at = thread % a_block, run = at / chunks / heads;
    u32 group = run / runs * heads + at / chunks % heads;
    for (u32 i = 0; i < PARTS; i++) {
        u32 value = parts[(block * groups + group) * PARTS + i];
        largest = value > largest ? value : largest;
    }
    u32 exponent = scale_exponent(largest, bfloat16);
    float inverse = __uint_as_float((254 - exponent) << 23);
    float limit = exponent == (bfloat16 ? 247 : 135) ? 240.0f : 448.0f;
    u32 *into = (u32 *)blocks[block].target;
    if (run % runs == 0 && at % chunks == 0)
        into[group] = exponent << 23;
    ulonglong2 values = ((const ulonglong2 *)blocks[block].source)[at];
    u32 codes[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 value = (u32)((i < 4 ? values.x : values.y) >> i % 4 * 16) & 0xFFFF;
        codes[i / 4] |= encoded(value, bfloat16, inverse, limit) << i % 4 * 8;
    }
    into[groups + 2 * (u64)at] = codes[0];
    into[groups + 2 * (u64)at + 1] = codes[1];
}

__global__ void fp8_decode(const Recoded *blocks, u32 n, u32 groups, u32 runs, u32 heads, u32 chunks,
                           u32 bfloat16)
{
    u32 a_block = groups * runs * chunks;
    u64 thread = THREAD, block = thread / a_block;
    if (block >= n)
        return;
    u32 at = thread % a_block, group = at / chunks / heads / runs * heads + at / chunks % heads;
    const u32 *from = (const u32 *)blocks[block].source;
    float scale = __uint_as_float(from[group]);
    u64 values[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 code = from[groups + 2 * (u64)at + i / 4] >> i % 4 * 8 & 0xFF;
        values[i / 4] |= (u64)decoded(code, bfloat16, scale) << i % 4 * 16;
    }
    ulonglong2 whole = {values[0], values[1]};
    ((ulonglong2 *)blocks[block].target)[at] = whole;
}

#ifdef __cplusplus
}
#endif
