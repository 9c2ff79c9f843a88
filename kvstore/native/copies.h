/* Copies and checksums of single blocks, for other files of the C extension. */
#ifndef KVSTORE_COPIES_H
#define KVSTORE_COPIES_H

#include <stdint.h>

/* Copies a block. Returns the hash of the bytes that the target got: each byte of the source is read once. */
uint64_t copy_block(uint8_t *target, const uint8_t *source, uint64_t length, uint64_t seed);

/* Returns the hash of bytes. */
uint64_t sum_bytes(const uint8_t *bytes, uint64_t length, uint64_t seed);

/* Makes all copies of this thread visible before its later stores. */
void copies_done(void);

#endif
