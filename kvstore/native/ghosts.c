/* Finds and puts values by fingerprint in a table of ghosts. Layout: kvstore/core/reuse/ghosts.py.
 *
 * The GIL is kept, as in index.c. The buckets of a batch are asked for ahead.
 */
#include "kvstore_native.h"

#include <stdint.h>

#define WAYS 8
#define VALUE_BITS 41
#define VALUE ((UINT64_C(1) << VALUE_BITS) - 1)
#define AT_ONCE 32

typedef struct {
    uint64_t *cells, buckets;
    const uint64_t *fingerprints;
    size_t n;
    Py_buffer table, names;
} ghosts;

/* Opens a table and fingerprints for it. Returns 0 with an exception if the first is none. */
static int open_ghosts(ghosts *these, PyObject *table, PyObject *names)
{
    if (PyObject_GetBuffer(table, &these->table, PyBUF_WRITABLE))
        return 0;
    if (PyObject_GetBuffer(names, &these->names, PyBUF_SIMPLE)) {
        PyBuffer_Release(&these->table);
        return 0;
    }
    these->cells = these->table.buf;
    these->buckets = (uint64_t)these->table.len / (WAYS * sizeof(uint64_t));
    these->fingerprints = these->names.buf;
    these->n = (size_t)these->names.len / sizeof(uint64_t);
    if (!these->buckets || these->buckets >> 32 || (uint64_t)these->table.len % (WAYS * sizeof(uint64_t))) {
        PyErr_Format(PyExc_ValueError, "a table of ghosts of %zd bytes", these->table.len);
        PyBuffer_Release(&these->table);
        PyBuffer_Release(&these->names);
        return 0;
    }
    return 1;
}

static void close_ghosts(ghosts *these)
{
    PyBuffer_Release(&these->table);
    PyBuffer_Release(&these->names);
}

static uint64_t *bucket_of(const ghosts *these, uint64_t fingerprint)
{
    return these->cells + WAYS * ((fingerprint >> 32) * these->buckets >> 32);
}

static void ask_ahead(const ghosts *these, size_t i)
{
    if (i + AT_ONCE < these->n)
        __builtin_prefetch(bucket_of(these, these->fingerprints[i + AT_ONCE]), 1);
}

/* Never 0, the word of a free cell. */
static uint64_t tag_of(uint64_t fingerprint)
{
    uint64_t tag = fingerprint << VALUE_BITS;
    return tag ? tag : VALUE + 1;
}

/* Returns the first cell of a bucket with a tag, NULL if there is none. */
static uint64_t *cell_of(uint64_t *bucket, uint64_t tag)
{
    for (int way = 0; way < WAYS; way++)
        if ((bucket[way] ^ tag) <= VALUE)
            return &bucket[way];
    return NULL;
}

/* Returns the first cell with the lowest value, which a free cell has. */
static uint64_t *lowest_of(uint64_t *bucket)
{
    uint64_t *lowest = bucket;
    for (int way = 1; way < WAYS; way++)
        if ((bucket[way] & VALUE) < (*lowest & VALUE))
            lowest = &bucket[way];
    return lowest;
}

static void find_all(const ghosts *these, int64_t *values, int remove)
{
    for (size_t i = 0; i < these->n; i++) {
        ask_ahead(these, i);
        uint64_t tag = tag_of(these->fingerprints[i]), *cell = cell_of(bucket_of(these, these->fingerprints[i]), tag);
        values[i] = cell == NULL ? -1 : (int64_t)(*cell ^ tag);
        if (cell != NULL && remove)
            *cell = 0;
    }
}

static void put_all(const ghosts *these, const uint64_t *values)
{
    for (size_t i = 0; i < these->n; i++) {
        ask_ahead(these, i);
        uint64_t tag = tag_of(these->fingerprints[i]), *bucket = bucket_of(these, these->fingerprints[i]);
        uint64_t *same = cell_of(bucket, tag);
        *(same == NULL ? lowest_of(bucket) : same) = tag | (values[i] & VALUE);
    }
}

static PyObject *ghosts_find(PyObject *module, PyObject *args)
{
    PyObject *table, *names, *result = NULL;
    Py_buffer out;
    int remove;
    ghosts these;
    if (!PyArg_ParseTuple(args, "OOw*p", &table, &names, &out, &remove))
        return NULL;
    if (open_ghosts(&these, table, names)) {
        if ((size_t)out.len == these.n * sizeof(int64_t)) {
            find_all(&these, out.buf, remove);
            result = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_ValueError, "%zd bytes for the values of %zu ghosts", out.len, these.n);
        }
        close_ghosts(&these);
    }
    PyBuffer_Release(&out);
    return result;
}

static PyObject *ghosts_put(PyObject *module, PyObject *args)
{
    PyObject *table, *names, *result = NULL;
    Py_buffer values;
    ghosts these;
    if (!PyArg_ParseTuple(args, "OOy*", &table, &names, &values))
        return NULL;
    if (open_ghosts(&these, table, names)) {
        if ((size_t)values.len == these.n * sizeof(uint64_t)) {
            put_all(&these, values.buf);
            result = Py_NewRef(Py_None);
        } else {
            PyErr_Format(PyExc_ValueError, "%zd bytes of values for %zu ghosts", values.len, these.n);
        }
        close_ghosts(&these);
    }
    PyBuffer_Release(&values);
    return result;
}

static PyMethodDef functions[] = {
    {"ghosts_find", ghosts_find, METH_VARARGS, NULL},
    {"ghosts_put", ghosts_put, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_ghosts(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
