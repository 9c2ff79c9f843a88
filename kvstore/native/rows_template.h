/* The functions of one instruction set, from these macros of the file that includes this one:
 *
 * ATTRIBUTE             the attribute that allows the instructions
 * SET(name)             the name of a function of this set
 * VECTOR                the type of a vector of 16, 32 or 64 bytes
 * LOAD(at), STORE(at, vector), STREAM(at, vector)    STREAM: non-temporal, to a multiple of 16
 * REGISTER              the constraint of a register that has a vector, for inline assembly
 * ADDED(lanes, value, key)     the lanes after a stripe, see `add_stripe` in xxh3.c
 * SCRAMBLED(lanes, key)        the lanes after a row
 */

/* Streamed rows pass through the first cache: 16 lines are read from memory, then 16 are written. That is a
 * third faster than line by line, and serves any alignment of the target. */
#define VECTORS (XXH3_STRIPE / sizeof(VECTOR))

/* The processor's own prefetch ends at each page, and does not fetch targets. Measured on an Intel Xeon with
 * AVX-512: blocks of 64 KiB are copied a quarter faster, larger ones a seventh. */
#define SOURCE_AHEAD 1024
#define TARGET_AHEAD 2048

/* Copies at least 16 bytes. `way` is a constant where this is called, so it costs nothing. */
ATTRIBUTE INLINE void SET(bytes)(uint8_t *target, const uint8_t *source, size_t nbytes, enum way way)
{
    size_t at = -(uintptr_t)target % 16;
    if (at)
        memcpy(target, source, at);
    for (; nbytes - at >= XXH3_STRIPE; at += XXH3_STRIPE)
#pragma GCC unroll 4
        for (size_t j = 0; j < VECTORS; j++) {
            VECTOR value = LOAD(source + at + j * sizeof(VECTOR));
            if (way == STREAMED)
                STREAM(target + at + j * sizeof(VECTOR), value);
            else
                STORE(target + at + j * sizeof(VECTOR), value);
        }
    if (at < nbytes)
        memcpy(target + at, source + at, nbytes - at);
}

ATTRIBUTE INLINE void SET(rows)(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows,
                                enum way way)
{
    uint8_t stage[XXH3_ROW] __attribute__((aligned(64)));
    VECTOR lanes[VECTORS];
    for (size_t j = 0; j < VECTORS; j++)
        lanes[j] = LOAD((const uint8_t *)state->lanes + j * sizeof(VECTOR));
    const uint8_t *secret = (const uint8_t *)state->secret;
    for (; rows; rows--, source += XXH3_ROW) {
        uint8_t *into = way == STREAMED ? stage : target;
#pragma GCC unroll 16
        for (size_t i = 0; i < XXH3_ROW / XXH3_STRIPE; i++) {
            __builtin_prefetch(source + i * XXH3_STRIPE + SOURCE_AHEAD);
            if (way == STORED)
                __builtin_prefetch(target + i * XXH3_STRIPE + TARGET_AHEAD, 1);
#pragma GCC unroll 4
            for (size_t j = 0; j < VECTORS; j++) {
                size_t at = i * XXH3_STRIPE + j * sizeof(VECTOR);
                VECTOR value = LOAD(source + at);
                /* GCC would load it again for each use, and another process may have changed it by then. */
                __asm__("" : "+" REGISTER(value));
                if (way != SUM_ONLY)
                    STORE(into + at, value);
                lanes[j] = ADDED(lanes[j], value, LOAD(secret + 8 * i + j * sizeof(VECTOR)));
            }
        }
        for (size_t j = 0; j < VECTORS; j++)
            lanes[j] = SCRAMBLED(lanes[j], LOAD(secret + 128 + j * sizeof(VECTOR)));
        if (way == STREAMED)
            SET(bytes)(target, stage, XXH3_ROW, STREAMED);
        if (way != SUM_ONLY)
            target += XXH3_ROW;
    }
    for (size_t j = 0; j < VECTORS; j++)
        STORE((uint8_t *)state->lanes + j * sizeof(VECTOR), lanes[j]);
}

ATTRIBUTE static void SET(sum)(xxh3_state *state, const uint8_t *source, size_t rows)
{
    SET(rows)(state, NULL, source, rows, SUM_ONLY);
}

ATTRIBUTE static void SET(copy)(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows)
{
    SET(rows)(state, target, source, rows, STORED);
}

ATTRIBUTE static void SET(stream)(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows)
{
    SET(rows)(state, target, source, rows, STREAMED);
}

ATTRIBUTE static void SET(copy_bytes)(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    if (nbytes < 16)
        memcpy(target, source, nbytes);
    else
        SET(bytes)(target, source, nbytes, STORED);
}

ATTRIBUTE static void SET(stream_bytes)(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    uint8_t stage[XXH3_ROW] __attribute__((aligned(64)));
    for (; nbytes >= XXH3_ROW; nbytes -= XXH3_ROW, source += XXH3_ROW, target += XXH3_ROW) {
        SET(bytes)(stage, source, XXH3_ROW, STORED);
        SET(bytes)(target, stage, XXH3_ROW, STREAMED);
    }
    memcpy(target, source, nbytes);
}

#undef VECTORS
#undef SOURCE_AHEAD
#undef TARGET_AHEAD
#undef ATTRIBUTE
#undef SET
#undef VECTOR
#undef LOAD
#undef STORE
#undef STREAM
#undef REGISTER
#undef ADDED
#undef SCRAMBLED
