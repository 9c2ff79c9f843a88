/* The layout of records of blocks on NVMe: kvstore/tiers/nvme/records.py. */
#ifndef KVSTORE_RECORDS_H
#define KVSTORE_RECORDS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SLOTS 32
#define SLOT_BITS 5
#define KEY_WORDS 8
#define MOST_KEY_BYTES (8 * KEY_WORDS)
#define MIX UINT64_C(0x9E3779B97F4A7C15)

/* The head of a row; the key and the parent's key follow, of one width each. */
typedef struct {
    uint32_t ns, length;
    uint64_t version, checksum, stored_at, check;
    uint8_t key_bytes, parent_bytes, zeros[6];
} record;

static inline size_t row_bytes(size_t width)
{
    return sizeof(record) + 2 * width;
}

/* Returns the width of the keys of a page with so many bytes; 0: there is no such page. */
static inline size_t width_of(size_t page_bytes)
{
    size_t row = page_bytes / SLOTS, keys = row < sizeof(record) ? 0 : row - sizeof(record);
    return page_bytes == row * SLOTS && keys % 16 == 0 && keys <= 2 * MOST_KEY_BYTES ? keys / 2 : 0;
}

static inline uint64_t record_factor(size_t i)
{
    return (i + 1) * MIX | 1;
}

static inline uint64_t record_sum(const uint8_t *key, size_t width, size_t first)
{
    uint64_t mixed = 0, word;
    for (size_t i = 0; i < width / 8; i++) {
        memcpy(&word, key + 8 * i, 8);
        mixed += word * record_factor(first + i);
    }
    return mixed;
}

/* Returns the check of a record: of its numbers, and of its keys, which are padded with zeros to `width`. */
static inline uint64_t record_check(const record *head, const uint8_t *keys, size_t width, uint32_t extent,
                                    uint32_t index)
{
    const uint64_t numbers[] = {head->ns,       extent,          index,           head->version,     head->length,
                                head->checksum, head->stored_at, head->key_bytes, head->parent_bytes};
    uint64_t mixed = record_sum(keys, width, 0) + record_sum(keys + width, width, KEY_WORDS);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        mixed += numbers[i] * record_factor(2 * KEY_WORDS + i);
    mixed ^= mixed >> 32;
    return mixed * record_factor(0);
}

#endif
