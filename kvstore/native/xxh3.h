/* XXH3, 64 bits, of a block whose bytes come in pieces, after the published specification.
 *
 * An input of more than 240 bytes is rows of 1 KiB, a row 16 stripes of 64 bytes, a stripe 8 lanes of 8. The
 * last row is the last 1 to 1,024 bytes, and the last stripe the last 64 bytes, wherever they start. Whole
 * rows before the last one are hashed by `rows.h`, what is here hashes the end and short inputs.
 */
#ifndef KVSTORE_XXH3_H
#define KVSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH3_ROW 1024
#define XXH3_STRIPE 64
#define XXH3_LANES 8
#define XXH3_SHORT 240

typedef struct {
    uint64_t lanes[XXH3_LANES];
    uint64_t secret[24];
    uint64_t seed;
} xxh3_state;

void xxh3_start(xxh3_state *state, uint64_t seed);

/* Adds a whole row that is not the last one. */
void xxh3_row(xxh3_state *state, const uint8_t *row);

/* Returns the hash of `length` bytes. `end` has the last `held` of them: all, if they are 240 or less, else
 * those behind the rows that were added, and at least 64. */
uint64_t xxh3_finish(const xxh3_state *state, uint64_t length, const uint8_t *end, size_t held);

#endif
