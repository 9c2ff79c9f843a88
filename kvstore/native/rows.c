#include "rows.h"

#include <string.h>

static void sum_portable(xxh3_state *state, const uint8_t *source, size_t rows)
{
    for (size_t i = 0; i < rows; i++)
        xxh3_row(state, source + i * XXH3_ROW);
}

static void copy_portable(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows)
{
    for (size_t i = 0; i < rows; i++) {
        uint8_t row[XXH3_ROW];
        memcpy(row, source + i * XXH3_ROW, XXH3_ROW);
        xxh3_row(state, row);
        memcpy(target + i * XXH3_ROW, row, XXH3_ROW);
    }
}

static const struct row_functions PORTABLE = {"portable C", sum_portable, copy_portable, copy_portable};

const struct row_functions *best_rows(void)
{
    return &PORTABLE;
}
