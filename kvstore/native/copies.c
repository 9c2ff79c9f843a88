/* Copies and checksums of batches. The table, its rules and its errors: pieces.py and portable.py. */
#include "copies.h"
#include "kvstore_native.h"
#include "rows.h"

#include <string.h>

typedef struct {
    uint32_t source, target;
    uint64_t source_offset, target_offset, length, seed, sum, more;
} piece;

typedef struct {
    Py_buffer *views;
    Py_ssize_t count, held;
} buffers;

enum action { COPY, COPY_AND_SUM, SUM };

#define HELD (2 * XXH3_ROW)
#define STREAM_FROM (256 << 10)

static const row_functions *rows; /* those that this machine runs fastest, or those that a test has chosen */

static void release(buffers *some)
{
    for (Py_ssize_t i = 0; i < some->held; i++)
        PyBuffer_Release(&some->views[i]);
    PyMem_Free(some->views);
    *some = (buffers){0};
}

/* Takes the buffers of a sequence. Returns -1 with an exception, and holds none then. */
static int take(buffers *some, PyObject *sequence, int flags)
{
    some->count = PySequence_Size(sequence);
    if (some->count < 0)
        return -1;
    some->views = PyMem_Calloc((size_t)some->count + 1, sizeof *some->views);
    if (some->views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; some->held < some->count; some->held++) {
        PyObject *each = PySequence_GetItem(sequence, some->held);
        int failed = each == NULL || PyObject_GetBuffer(each, &some->views[some->held], flags);
        Py_XDECREF(each);
        if (failed) {
            release(some);
            return -1;
        }
    }
    return 0;
}

static int in_bounds(Py_ssize_t i, const char *side, const buffers *some, uint32_t number, uint64_t offset,
                     uint64_t length)
{
    if (number >= (size_t)some->count) {
        PyErr_Format(PyExc_ValueError, "piece %zd: %s %u of %zd", i, side, number, some->count);
        return 0;
    }
    uint64_t size = (uint64_t)some->views[number].len;
    if (offset > size || length > size - offset) {
        PyErr_Format(PyExc_ValueError, "piece %zd: %llu bytes at %llu of %s %u, which has %zd", i,
                     (unsigned long long)length, (unsigned long long)offset, side, number,
                     some->views[number].len);
        return 0;
    }
    return 1;
}

static uint8_t *bytes_at(const buffers *some, uint32_t number, uint64_t offset)
{
    return (uint8_t *)some->views[number].buf + offset;
}

/* Returns -1 with an exception if any piece of the table cannot be copied. */
static int check(const piece *table, Py_ssize_t n, const buffers *targets, const buffers *sources)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        const piece *p = &table[i];
        if (!in_bounds(i, "source", sources, p->source, p->source_offset, p->length))
            return -1;
        if (targets == NULL)
            continue;
        if (!in_bounds(i, "target", targets, p->target, p->target_offset, p->length))
            return -1;
        uintptr_t from = (uintptr_t)bytes_at(sources, p->source, p->source_offset);
        uintptr_t into = (uintptr_t)bytes_at(targets, p->target, p->target_offset);
        if (from < into + p->length && into < from + p->length) {
            PyErr_Format(PyExc_ValueError, "piece %zd: source and target overlap", i);
            return -1;
        }
    }
    if (n && table[n - 1].more) {
        PyErr_SetString(PyExc_ValueError, "the last piece has `more`");
        return -1;
    }
    return 0;
}

/* The progress through one block. */
typedef struct {
    xxh3_state hash;
    uint64_t left;   /* bytes of whole rows before the end that are still to come */
    size_t held;     /* bytes in `end`: of a row that is not whole yet, or of the block's end */
    uint8_t end[HELD];
} progress;

static void add_piece(progress *block, uint8_t *target, const uint8_t *source, uint64_t length)
{
    int stream = length >= STREAM_FROM;
    while (length) {
        uint64_t whole = (length < block->left ? length : block->left) / XXH3_ROW;
        uint64_t taken = whole * XXH3_ROW;
        if (whole && block->held == 0) {
            if (target == NULL)
                rows->sum(&block->hash, source, whole);
            else
                (stream ? rows->stream : rows->copy)(&block->hash, target, source, whole);
            block->left -= taken;
        } else {
            uint64_t room = (block->left ? XXH3_ROW : HELD) - block->held;
            taken = length < room ? length : room;
            memcpy(block->end + block->held, source, taken);
            READ_ONCE(block->end);
            if (target != NULL)
                memcpy(target, block->end + block->held, taken);
            block->held += taken;
            if (block->left && block->held == XXH3_ROW) {
                rows->sum(&block->hash, block->end, 1);
                block->left -= XXH3_ROW;
                block->held = 0;
            }
        }
        source += taken;
        target = target == NULL ? NULL : target + taken;
        length -= taken;
    }
}

/* The bytes of whole rows that are hashed before the end of a block of `length` bytes. The end has the last
 * 64 bytes, even if the last row is shorter. */
static uint64_t bytes_before_end(uint64_t length)
{
    if (length <= XXH3_SHORT)
        return 0;
    uint64_t rows = (length - 1) / XXH3_ROW;
    if (rows && length - rows * XXH3_ROW < XXH3_STRIPE)
        rows--;
    return rows * XXH3_ROW;
}

static void begin_block(progress *block, uint64_t length, uint64_t seed)
{
    xxh3_start(&block->hash, seed);
    block->left = bytes_before_end(length);
    block->held = 0;
}

uint64_t copy_block(uint8_t *target, const uint8_t *source, uint64_t length, uint64_t seed)
{
    progress block;
    begin_block(&block, length, seed);
    add_piece(&block, target, source, length);
    return xxh3_finish(&block.hash, length, block.end, block.held);
}

uint64_t sum_bytes(const uint8_t *bytes, uint64_t length, uint64_t seed)
{
    return copy_block(NULL, bytes, length, seed);
}

void copies_done(void)
{
    rows->fence();
}

/* Copies and hashes one block. Returns its number of pieces. */
static Py_ssize_t sum_block(piece *first, const buffers *targets, const buffers *sources)
{
    progress block;
    uint64_t length = first->length;
    Py_ssize_t n = 1;
    for (; first[n - 1].more; n++)
        length += first[n].length;
    begin_block(&block, length, first->seed);
    for (piece *p = first; p < first + n; p++)
        add_piece(&block, targets == NULL ? NULL : bytes_at(targets, p->target, p->target_offset),
                  bytes_at(sources, p->source, p->source_offset), p->length);
    first[n - 1].sum = xxh3_finish(&block.hash, length, block.end, block.held);
    return n;
}

static void run(enum action action, piece *table, Py_ssize_t n, const buffers *targets, const buffers *sources)
{
    if (action == COPY)
        for (piece *p = table; p < table + n; p++) {
            uint8_t *target = bytes_at(targets, p->target, p->target_offset);
            const uint8_t *source = bytes_at(sources, p->source, p->source_offset);
            (p->length < STREAM_FROM ? rows->copy_bytes : rows->stream_bytes)(target, source, p->length);
        }
    else
        for (Py_ssize_t i = 0; i < n;)
            i += sum_block(&table[i], targets, sources);
    rows->fence();
}

static PyObject *carry_out(enum action action, PyObject *into, PyObject *from, PyObject *pieces)
{
    buffers targets = {0}, sources = {0};
    Py_buffer given;
    piece *table = NULL;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(pieces, &given, PyBUF_WRITABLE))
        return NULL;
    Py_ssize_t n = given.len / (Py_ssize_t)sizeof(piece);
    if (given.len % (Py_ssize_t)sizeof(piece)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no table of pieces of %zu", given.len, sizeof(piece));
        goto end;
    }
    /* A copy: other threads could change the table after it was checked. */
    table = PyMem_Malloc((size_t)given.len + 1);
    if (table == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    memcpy(table, given.buf, (size_t)given.len);
    if (into != NULL && take(&targets, into, PyBUF_WRITABLE))
        goto end;
    if (take(&sources, from, PyBUF_SIMPLE))
        goto end;
    if (check(table, n, into == NULL ? NULL : &targets, &sources))
        goto end;
    Py_BEGIN_ALLOW_THREADS
    run(action, table, n, into == NULL ? NULL : &targets, &sources);
    Py_END_ALLOW_THREADS
    memcpy(given.buf, table, (size_t)given.len);
    result = Py_NewRef(Py_None);
end:
    release(&targets);
    release(&sources);
    PyMem_Free(table);
    PyBuffer_Release(&given);
    return result;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    PyObject *targets, *sources, *table;
    if (!PyArg_ParseTuple(args, "OOO", &targets, &sources, &table))
        return NULL;
    return carry_out(COPY, targets, sources, table);
}

static PyObject *copy_and_sum(PyObject *module, PyObject *args)
{
    PyObject *targets, *sources, *table;
    if (!PyArg_ParseTuple(args, "OOO", &targets, &sources, &table))
        return NULL;
    return carry_out(COPY_AND_SUM, targets, sources, table);
}

static PyObject *sums(PyObject *module, PyObject *args)
{
    PyObject *sources, *table;
    if (!PyArg_ParseTuple(args, "OO", &sources, &table))
        return NULL;
    return carry_out(SUM, NULL, sources, table);
}

/* The hash of one buffer: nothing is copied, so no table is needed. */
static PyObject *checksum(PyObject *module, PyObject *args)
{
    PyObject *payload, *seed;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "OO", &payload, &seed))
        return NULL;
    uint64_t number = PyLong_AsUnsignedLongLongMask(seed), sum;
    if (PyErr_Occurred() || PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sum = sum_bytes(view.buf, (uint64_t)view.len, number);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *instruction_set_name(PyObject *module, PyObject *nothing)
{
    return PyUnicode_FromString(rows->name);
}

static PyObject *choose(PyObject *module, PyObject *args)
{
    int number;
    if (!PyArg_ParseTuple(args, "i", &number))
        return NULL;
    const row_functions *found = number < 0 ? NULL : rows_of(number);
    if (found == NULL)
        return PyErr_Format(PyExc_ValueError, "no instruction set %d here", number);
    rows = found;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"copy", copy, METH_VARARGS, NULL},
    {"copy_and_sum", copy_and_sum, METH_VARARGS, NULL},
    {"sums", sums, METH_VARARGS, NULL},
    {"checksum", checksum, METH_VARARGS, NULL},
    {"instruction_set", instruction_set_name, METH_NOARGS, NULL},
    {"choose", choose, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_copies(PyObject *module)
{
    rows = rows_of(0);
    return PyModule_AddFunctions(module, functions);
}
