#include "xxh3.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only"
#endif

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

static const uint64_t SECRET[24] = {
    0xBE4BA423396CFEB8u, 0x1CAD21F72C81017Cu, 0xDB979083E96DD4DEu, 0x1F67B3B7A4A44072u,
    0x78E5C0CC4EE679CBu, 0x2172FFCC7DD05A82u, 0x8E2443F7744608B8u, 0x4C263A81E69035E0u,
    0xCB00C391BB52283Cu, 0xA32E531B8B65D088u, 0x4EF90DA297486471u, 0xD8ACDEA946EF1938u,
    0x3F349CE33F76FAA8u, 0x1D4F0BC7C7BBDCF9u, 0x3159B4CD4BE0518Au, 0x647378D9C97E9FC8u,
    0xC3EBD33483ACC5EAu, 0xEB6313FAFFA081C5u, 0x49DAF0B751DD0D17u, 0x9E68D429265516D3u,
    0xFCA1477D58BE162Bu, 0xCE31D07AD1B8F88Fu, 0x280416958F3ACB45u, 0x7E404BBBCAFBD7AFu,
};

static uint32_t read32(const void *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static uint64_t read64(const void *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static uint64_t read_secret(const uint64_t *secret, size_t byte)
{
    return read64((const uint8_t *)secret + byte);
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t rotated(uint64_t value, int bits)
{
    return value << bits | value >> (64 - bits);
}

static uint64_t avalanche(uint64_t hash)
{
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

static uint64_t avalanche_xxh64(uint64_t hash)
{
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

void xxh3_start(xxh3_state *state, uint64_t seed)
{
    static const uint64_t lanes[XXH3_LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(state->lanes, lanes, sizeof lanes);
    for (size_t i = 0; i < 24; i++)
        state->secret[i] = i % 2 ? SECRET[i] - seed : SECRET[i] + seed;
    state->seed = seed;
}

static void add_stripe(uint64_t *lanes, const uint8_t *data, const uint8_t *secret)
{
    for (size_t i = 0; i < XXH3_LANES; i++) {
        uint64_t value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
        lanes[i ^ 1] += value;
        lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

void xxh3_row(xxh3_state *state, const uint8_t *row)
{
    for (size_t i = 0; i < XXH3_ROW / XXH3_STRIPE; i++)
        add_stripe(state->lanes, row + XXH3_STRIPE * i, (const uint8_t *)(state->secret + i));
    for (size_t i = 0; i < XXH3_LANES; i++) {
        uint64_t lane = state->lanes[i];
        state->lanes[i] = (lane ^ lane >> 47 ^ state->secret[16 + i]) * PRIME32_1;
    }
}

static uint64_t long_hash(const xxh3_state *state, uint64_t length, const uint8_t *end, size_t held)
{
    const uint8_t *secret = (const uint8_t *)state->secret, *row = end + held - ((length - 1) % XXH3_ROW + 1);
    xxh3_state last = *state;
    if (row > end) /* the last stripe reaches into the row before the last, which is here too */
        xxh3_row(&last, end);
    for (size_t i = 0; i < (length - 1) % XXH3_ROW / XXH3_STRIPE; i++)
        add_stripe(last.lanes, row + XXH3_STRIPE * i, secret + 8 * i);
    add_stripe(last.lanes, end + held - XXH3_STRIPE, secret + 121);
    uint64_t hash = length * PRIME64_1;
    for (size_t i = 0; i < 4; i++)
        hash += fold(last.lanes[2 * i] ^ read64(secret + 11 + 16 * i),
                     last.lanes[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return avalanche(hash);
}

/* The short hashes use the secret that does not depend on the seed. */
static uint64_t mixed(const uint8_t *data, size_t byte, uint64_t seed)
{
    return fold(read64(data) ^ (read_secret(SECRET, byte) + seed),
                read64(data + 8) ^ (read_secret(SECRET, byte + 8) - seed));
}

static uint64_t hash_0_to_16(const uint8_t *data, size_t n, uint64_t seed)
{
    if (n > 8) {
        uint64_t low = read64(data) ^ ((SECRET[3] ^ SECRET[4]) + seed);
        uint64_t high = read64(data + n - 8) ^ ((SECRET[5] ^ SECRET[6]) - seed);
        return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
    }
    if (n >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t value = read32(data + n - 4) + ((uint64_t)read32(data) << 32);
        uint64_t hash = value ^ ((SECRET[1] ^ SECRET[2]) - seed);
        hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * 0x9FB21C651E98DF25u;
        hash = (hash ^ ((hash >> 35) + n)) * 0x9FB21C651E98DF25u;
        return hash ^ hash >> 28;
    }
    if (n) {
        uint32_t value = (uint32_t)data[0] << 16 | (uint32_t)data[n / 2] << 24 | data[n - 1] | (uint32_t)n << 8;
        return avalanche_xxh64(value ^ ((uint64_t)((uint32_t)SECRET[0] ^ (uint32_t)(SECRET[0] >> 32)) + seed));
    }
    return avalanche_xxh64(seed ^ SECRET[7] ^ SECRET[8]);
}

static uint64_t hash_17_to_128(const uint8_t *data, size_t n, uint64_t seed)
{
    uint64_t hash = n * PRIME64_1;
    for (size_t i = 0; 32 * i < n; i++)
        hash += mixed(data + 16 * i, 32 * i, seed) + mixed(data + n - 16 * (i + 1), 32 * i + 16, seed);
    return avalanche(hash);
}

static uint64_t hash_129_to_240(const uint8_t *data, size_t n, uint64_t seed)
{
    uint64_t hash = n * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        hash += mixed(data + 16 * i, 16 * i, seed);
    hash = avalanche(hash);
    for (size_t i = 8; i < n / 16; i++)
        hash += mixed(data + 16 * i, 16 * (i - 8) + 3, seed);
    return avalanche(hash + mixed(data + n - 16, 119, seed));
}

uint64_t xxh3_finish(const xxh3_state *state, uint64_t length, const uint8_t *end, size_t held)
{
    if (length > XXH3_SHORT)
        return long_hash(state, length, end, held);
    if (length > 128)
        return hash_129_to_240(end, held, state->seed);
    return length > 16 ? hash_17_to_128(end, held, state->seed) : hash_0_to_16(end, held, state->seed);
}
