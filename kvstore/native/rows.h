/* Rows of XXH3 that are hashed, copied, or both in one pass, for each instruction set. */
#ifndef KVSTORE_ROWS_H
#define KVSTORE_ROWS_H

#include "xxh3.h"

/* Copies `rows` rows of XXH3_ROW bytes and adds them to the hash. Each byte of the source is read once. */
typedef void copy_rows(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows);
typedef void sum_rows(xxh3_state *state, const uint8_t *source, size_t rows);

struct row_functions {
    const char *name;
    sum_rows *sum;
    copy_rows *copy;   /* ordinary stores: the target stays in the cache */
    copy_rows *stream; /* non-temporal stores: the target is not read into the cache */
};

/* Returns the functions for this machine's best instruction set. */
const struct row_functions *best_rows(void);

#endif
