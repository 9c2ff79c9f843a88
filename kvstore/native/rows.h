/* Rows of XXH3 that are hashed, copied, or both in one pass, for each instruction set. */
#ifndef KVSTORE_ROWS_H
#define KVSTORE_ROWS_H

#include "xxh3.h"

/* Adds rows of XXH3_ROW bytes to the hash. */
typedef void sum_rows(xxh3_state *state, const uint8_t *source, size_t rows);

/* The same, and copies them. Each byte of the source is read once: what is hashed is what is copied. */
typedef void copy_rows(xxh3_state *state, uint8_t *target, const uint8_t *source, size_t rows);

/* Only copies. */
typedef void copy_bytes(uint8_t *target, const uint8_t *source, size_t nbytes);

/* After a copy into memory of this thread: what was copied is used, and not read from the source again. */
#define READ_ONCE(copy) __asm__ volatile("" : : "r"(copy) : "memory")

typedef struct {
    const char *name;
    sum_rows *sum;
    copy_rows *copy;        /* ordinary stores: the target stays in the cache */
    copy_rows *stream;      /* non-temporal stores: the target is not read into the cache */
    copy_bytes *copy_bytes, *stream_bytes;
    void (*fence)(void);    /* makes non-temporal stores visible before later stores */
} row_functions;

/* Returns the functions of an instruction set that this machine has: the best one for number 0, then worse
 * ones, NULL after the last one. */
const row_functions *rows_of(int number);

/* The instruction sets of this architecture, from the best one, with a NULL at the end. */
typedef struct {
    const row_functions *functions;
    int (*runs)(void);
} instruction_set;

extern const instruction_set x86_sets[], arm_sets[];

#endif
