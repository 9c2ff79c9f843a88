/* The functions of one instruction set, from these macros of the file that includes this one:
 *
 * ATTRIBUTE             the attribute that allows the instructions
 * SET(name)             the name of a function of this set
 * VECTOR                the type of a vector of 16, 32 or 64 bytes
 * LOAD(at), STORE(at, vector), STREAM(at, vector)    STREAM: non-temporal, to a multiple of 16
 * ADDED(lanes, value, key)     the lanes after a stripe, see `add_stripe` in xxh3.c
 * SCRAMBLED(lanes, key)        the lanes after a row
 */
#define VECTORS (XXH3_STRIPE / sizeof(VECTOR))

/* `way` is a constant where this is called, so it costs nothing. */
ATTRIBUTE INLINE void SET(rows)(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows,
                                enum way way)
{
    VECTOR lanes[VECTORS];
    for (size_t j = 0; j < VECTORS; j++)
        lanes[j] = LOAD((const uint8_t *)state->lanes + j * sizeof(VECTOR));
    const uint8_t *secret = (const uint8_t *)state->secret;
    for (; rows; rows--, source += XXH3_ROW, target += way == SUM_ONLY ? 0 : XXH3_ROW) {
#pragma GCC unroll 16
        for (size_t i = 0; i < XXH3_ROW / XXH3_STRIPE; i++) {
#pragma GCC unroll 4
            for (size_t j = 0; j < VECTORS; j++) {
                size_t at = i * XXH3_STRIPE + j * sizeof(VECTOR);
                VECTOR value = LOAD(source + at);
                if (way == STORED)
                    STORE(target + at, value);
                if (way == STREAMED)
                    STREAM(target + at, value);
                lanes[j] = ADDED(lanes[j], value, LOAD(secret + 8 * i + j * sizeof(VECTOR)));
            }
        }
        for (size_t j = 0; j < VECTORS; j++)
            lanes[j] = SCRAMBLED(lanes[j], LOAD(secret + 128 + j * sizeof(VECTOR)));
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

ATTRIBUTE INLINE void SET(bytes)(uint8_t *target, const uint8_t *source, size_t nbytes, enum way way)
{
    size_t head = -(uintptr_t)target % 16, at = head < nbytes ? head : nbytes;
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
    memcpy(target + at, source + at, nbytes - at);
}

ATTRIBUTE static void SET(copy_bytes)(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    SET(bytes)(target, source, nbytes, STORED);
}

ATTRIBUTE static void SET(stream_bytes)(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    SET(bytes)(target, source, nbytes, STREAMED);
}

#undef VECTORS
#undef ATTRIBUTE
#undef SET
#undef VECTOR
#undef LOAD
#undef STORE
#undef STREAM
#undef ADDED
#undef SCRAMBLED
