/* Finds, adds and removes rows of the block table in a table of the index. Layout: kvstore/core/blocks/index.py.
 *
 * All arrays are private to one thread, which keeps the GIL: a batch takes microseconds. The memory of a batch's
 * buckets and rows is asked for ahead, because most of the time would be spent in waiting for it.
 */
#include "kvstore_native.h"

#include <string.h>

#define WAYS 8
#define WORDS 8 /* of a key, in the block table: one half of all rows, then the other */
#define HALF (WORDS / 2)
#define FACTORS (WORDS + 2)
#define MIX UINT64_C(0x9E3779B97F4A7C15)
#define SPREAD UINT64_C(0x5BD1E995)
#define AT_ONCE 32

typedef struct {
    uint32_t marks[WAYS], rows[WAYS];
} bucket;

/* `infos`: the namespace in the low 16 bits, the bytes of the key above. */
typedef struct {
    bucket *buckets;
    uint64_t mask;
    const uint64_t *words, *factors;
    const uint32_t *infos;
    uint64_t capacity;
    Py_buffer views[4];
    int open;
} block_index;

typedef struct {
    uint32_t mark;
    bucket *first, *second;
} place;

static void close_index(block_index *index)
{
    while (index->open > 0)
        PyBuffer_Release(&index->views[--index->open]);
}

/* Opens (buckets, words, infos, factors). Returns 0 with an exception if they do not fit together. */
static int open_index(block_index *index, PyObject *parts)
{
    index->open = 0;
    for (int i = 0; i < 4; i++) {
        PyObject *part = PyTuple_GetItem(parts, i);
        if (part == NULL || PyObject_GetBuffer(part, &index->views[i], i ? PyBUF_SIMPLE : PyBUF_WRITABLE)) {
            close_index(index);
            return 0;
        }
        index->open++;
    }
    uint64_t buckets = (uint64_t)index->views[0].len / sizeof(bucket);
    index->buckets = index->views[0].buf;
    index->mask = buckets - 1;
    index->words = index->views[1].buf;
    index->infos = index->views[2].buf;
    index->factors = index->views[3].buf;
    index->capacity = (uint64_t)index->views[2].len / sizeof *index->infos;
    if (!buckets || buckets & (buckets - 1) || buckets > UINT64_C(1) << 32 ||
        (uint64_t)index->views[1].len != index->capacity * WORDS * sizeof *index->words ||
        index->views[3].len != FACTORS * sizeof *index->factors) {
        PyErr_SetString(PyExc_ValueError, "no table of the index with the columns of its rows");
        close_index(index);
        return 0;
    }
    return 1;
}

static const uint64_t *half_of(const block_index *index, int second, uint64_t row)
{
    return index->words + ((second ? index->capacity : 0) + row) * HALF;
}

/* Whether a row has a key of that form and these words. */
static int has_key(const block_index *index, uint64_t row, const uint64_t *words, size_t width, uint32_t info)
{
    size_t first = width < HALF ? width : HALF;
    return index->infos[row] == info && !memcmp(half_of(index, 0, row), words, first * sizeof *words) &&
           (width <= HALF || !memcmp(half_of(index, 1, row), words + HALF, (width - HALF) * sizeof *words));
}

static place place_of(const block_index *index, const uint64_t *words, size_t width, uint32_t info)
{
    const uint64_t *factors = index->factors;
    uint64_t hash = (info & 0xFFFF) * factors[WORDS] + (info >> 16) * factors[WORDS + 1] + 1;
    for (size_t i = 0; i < width; i++)
        hash += words[i] * factors[i];
    hash = (hash ^ hash >> 32) * MIX;
    hash ^= hash >> 29;
    uint32_t mark = (uint32_t)(hash >> 32);
    mark = mark ? mark : 1;
    uint64_t first = hash & index->mask, second = first ^ (mark * SPREAD & index->mask);
    return (place){mark, index->buckets + first, index->buckets + second};
}

/* Returns the cells of a row. The second half of short keys is zeros, which change no hash. */
static place place_of_row(const block_index *index, uint64_t row)
{
    uint32_t info = index->infos[row];
    uint64_t words[WORDS];
    size_t halves = info >> 16 > HALF * sizeof *words ? 2 : 1;
    for (size_t i = 0; i < halves; i++)
        memcpy(words + i * HALF, half_of(index, (int)i, row), HALF * sizeof *words);
    return place_of(index, words, halves * HALF, info);
}

/* Returns the row in a bucket that has a key, -1 for none. */
static int64_t find_in(const block_index *index, const bucket *in, uint32_t mark, const uint64_t *words, size_t width,
                       uint32_t info)
{
    for (int way = 0; way < WAYS; way++) {
        uint64_t row = in->rows[way];
        if (in->marks[way] == mark && row < index->capacity && has_key(index, row, words, width, info))
            return (int64_t)row;
    }
    return -1;
}

static void find_keys(const block_index *index, const uint64_t *words, size_t width, uint32_t info, size_t n,
                      int64_t *rows)
{
    place places[AT_ONCE];
    for (size_t at = 0; at < n; at += AT_ONCE) {
        size_t some = n - at < AT_ONCE ? n - at : AT_ONCE;
        const uint64_t *key = words + at * width;
        for (size_t i = 0; i < some; i++) {
            places[i] = place_of(index, key + i * width, width, info);
            __builtin_prefetch(places[i].first);
            __builtin_prefetch(places[i].second);
        }
        for (size_t i = 0; i < some; i++)
            for (int way = 0; way < WAYS; way++)
                if (places[i].first->marks[way] == places[i].mark) {
                    uint64_t row = places[i].first->rows[way];
                    if (row < index->capacity) {
                        __builtin_prefetch(&index->infos[row]);
                        __builtin_prefetch(half_of(index, 0, row));
                    }
                    break;
                }
        for (size_t i = 0; i < some; i++) {
            int64_t row = find_in(index, places[i].first, places[i].mark, key + i * width, width, info);
            if (row < 0)
                row = find_in(index, places[i].second, places[i].mark, key + i * width, width, info);
            rows[at + i] = row;
        }
    }
}

/* Puts a row into the first cell of a bucket that has `mark` and `row` (0, any: an empty cell). */
static int replace_in(bucket *in, uint32_t mark, int64_t row, uint32_t by_mark, int64_t by_row)
{
    for (int way = 0; way < WAYS; way++)
        if (in->marks[way] == mark && (!mark || in->rows[way] == (uint32_t)row)) {
            in->marks[way] = by_mark;
            in->rows[way] = (uint32_t)by_row;
            return 1;
        }
    return 0;
}

/* Adds or removes rows. Returns the numbers of those for which both buckets are full, or which are in neither. */
static PyObject *change(PyObject *args, int add)
{
    PyObject *parts, *which, *left = NULL;
    Py_buffer view;
    block_index index;
    place places[AT_ONCE];
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &parts, &which) || !open_index(&index, parts))
        return NULL;
    if (PyObject_GetBuffer(which, &view, PyBUF_SIMPLE)) {
        close_index(&index);
        return NULL;
    }
    const int64_t *rows = view.buf;
    size_t n = (size_t)view.len / sizeof *rows;
    for (size_t i = 0; i < n; i++)
        if (rows[i] < 0 || (uint64_t)rows[i] >= index.capacity) {
            PyErr_Format(PyExc_IndexError, "row %lld of %llu", (long long)rows[i], (unsigned long long)index.capacity);
            goto end;
        }
    left = PyList_New(0);
    for (size_t at = 0; left != NULL && at < n; at += AT_ONCE) {
        size_t some = n - at < AT_ONCE ? n - at : AT_ONCE;
        for (size_t i = 0; i < some; i++) {
            __builtin_prefetch(half_of(&index, 0, (uint64_t)rows[at + i]));
            __builtin_prefetch(&index.infos[rows[at + i]]);
        }
        for (size_t i = 0; i < some; i++) {
            places[i] = place_of_row(&index, (uint64_t)rows[at + i]);
            __builtin_prefetch(places[i].first, 1);
            __builtin_prefetch(places[i].second, 1);
        }
        for (size_t i = 0; i < some; i++) {
            int64_t row = rows[at + i];
            uint32_t mark = places[i].mark, old = add ? 0 : mark, new = add ? mark : 0;
            if (replace_in(places[i].first, old, row, new, row) || replace_in(places[i].second, old, row, new, row))
                continue;
            PyObject *number = PyLong_FromSize_t(at + i);
            if (number == NULL || PyList_Append(left, number))
                Py_CLEAR(left);
            Py_XDECREF(number);
            if (left == NULL)
                goto end;
        }
    }
end:
    PyBuffer_Release(&view);
    close_index(&index);
    return left;
}

static PyObject *index_add(PyObject *module, PyObject *args)
{
    return change(args, 1);
}

static PyObject *index_remove(PyObject *module, PyObject *args)
{
    return change(args, 0);
}

static PyObject *index_find(PyObject *module, PyObject *args)
{
    PyObject *parts, *result = NULL;
    unsigned int info;
    Py_buffer words, rows;
    block_index index;
    if (!PyArg_ParseTuple(args, "O!y*Iw*", &PyTuple_Type, &parts, &words, &info, &rows))
        return NULL;
    size_t n = (size_t)rows.len / sizeof(int64_t), width = n ? (size_t)words.len / n / sizeof(uint64_t) : 0;
    if ((size_t)rows.len != n * sizeof(int64_t) || (size_t)words.len != n * width * sizeof(uint64_t) || width > WORDS) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of keys for %zu rows", words.len, n);
    } else if (open_index(&index, parts)) {
        find_keys(&index, words.buf, width, info, n, rows.buf);
        close_index(&index);
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&rows);
    return result;
}

static PyMethodDef functions[] = {
    {"index_add", index_add, METH_VARARGS, NULL},
    {"index_find", index_find, METH_VARARGS, NULL},
    {"index_remove", index_remove, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_index(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
