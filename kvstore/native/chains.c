/* Walks from a row of the core's table of blocks to the root of its chain.
 *
 * The GIL is kept, as in index.c: the table belongs to the core's one thread.
 */
#include "kvstore_native.h"

#include <stdint.h>

#define ADJACENT 256

/* Reads the parent of a row. Returns 0 with an exception if the table has no such row. */
static int step_up(const Py_buffer *parents, int64_t row, int64_t *parent)
{
    size_t rows = (size_t)parents->len / sizeof(int32_t);
    if ((uint64_t)row >= rows) {
        PyErr_Format(PyExc_IndexError, "row %lld of %zu", (long long)row, rows);
        return 0;
    }
    *parent = ((const int32_t *)parents->buf)[row];
    return 1;
}

static PyObject *chain_above(PyObject *module, PyObject *args)
{
    Py_buffer parents, out;
    long long start;
    if (!PyArg_ParseTuple(args, "y*Lw*", &parents, &start, &out))
        return NULL;
    int64_t row = start, *into = out.buf;
    size_t n = 0, room = (size_t)out.len / sizeof *into;
    int good = 1;
    while (good && row >= 0 && n < room) {
        into[n++] = row;
        good = step_up(&parents, row, &row);
    }
    PyBuffer_Release(&parents);
    PyBuffer_Release(&out);
    return good ? PyLong_FromSize_t(n) : NULL;
}

static PyObject *chain_root(PyObject *module, PyObject *args)
{
    Py_buffer parents;
    long long start, budget;
    if (!PyArg_ParseTuple(args, "y*LL", &parents, &start, &budget))
        return NULL;
    int64_t row = -1, above = start, rows = 0, runs = 0, left = budget;
    int good = 1;
    while (good && above >= 0 && left >= 0) {
        runs += !rows || above != row - 1;
        rows++;
        left = budget - runs - rows / ADJACENT;
        row = above;
        good = step_up(&parents, row, &above);
    }
    PyBuffer_Release(&parents);
    if (!good)
        return NULL;
    return left < 0 ? Py_BuildValue("LL", -1LL, 0LL) : Py_BuildValue("LL", (long long)row, (long long)left);
}

static PyMethodDef functions[] = {
    {"chain_above", chain_above, METH_VARARGS, NULL},
    {"chain_root", chain_root, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_chains(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
