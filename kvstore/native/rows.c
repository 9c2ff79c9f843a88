/* The choice of an instruction set, and C for machines of which nothing is known. */
#include "rows.h"

#include <string.h>

static void sum(xxh3_state *state, const uint8_t *source, size_t rows)
{
    for (size_t i = 0; i < rows; i++)
        xxh3_row(state, source + i * XXH3_ROW);
}

static void copy(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows)
{
    for (size_t i = 0; i < rows; i++) {
        uint8_t row[XXH3_ROW];
        memcpy(row, source + i * XXH3_ROW, XXH3_ROW);
        READ_ONCE(row);
        xxh3_row(state, row);
        memcpy(target + i * XXH3_ROW, row, XXH3_ROW);
    }
}

static void any_bytes(uint8_t *target, const uint8_t *source, size_t nbytes)
{
    memcpy(target, source, nbytes);
}

static void no_fence(void)
{
}

static const row_functions PORTABLE = {"C", sum, copy, copy, any_bytes, any_bytes, no_fence};

const row_functions *rows_of(int number)
{
#if defined(__x86_64__)
    const instruction_set *set = x86_sets;
#elif defined(__aarch64__)
    const instruction_set *set = arm_sets;
#else
    static const instruction_set none = {0};
    const instruction_set *set = &none;
#endif
    for (; set->functions != NULL; set++)
        if (set->runs() && number-- == 0)
            return set->functions;
    return number == 0 ? &PORTABLE : NULL;
}
