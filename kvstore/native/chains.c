/* Walks from a row of the core's table of blocks to the root of its chain. The GIL is kept: see index.c. */
#include "kvstore_native.h"

#include <stdint.h>

#define ADJACENT 256

typedef struct {
    Py_buffer view;
    const int32_t *parent;
    size_t rows;
} links;

/* Returns whether a row is none of the table, with an exception. */
static int is_beyond(const links *of, int64_t row)
{
    if (row < (int64_t)of->rows)
        return 0;
    PyErr_Format(PyExc_IndexError, "row %lld of %zu", (long long)row, of->rows);
    return 1;
}

static PyObject *chain_above(PyObject *module, PyObject *args)
{
    links of;
    Py_buffer out;
    long long row;
    if (!PyArg_ParseTuple(args, "y*Lw*", &of.view, &row, &out))
        return NULL;
    of.parent = of.view.buf;
    of.rows = (size_t)of.view.len / sizeof *of.parent;
    int64_t *into = out.buf;
    size_t n = 0, room = (size_t)out.len / sizeof *into;
    int failed = 0;
    while (row >= 0 && n < room && !(failed = is_beyond(&of, row))) {
        into[n++] = row;
        row = of.parent[row];
    }
    PyBuffer_Release(&of.view);
    PyBuffer_Release(&out);
    return failed ? NULL : PyLong_FromSize_t(n);
}

static PyObject *chain_root(PyObject *module, PyObject *args)
{
    links of;
    long long row, budget, rows = 0, runs = 1;
    if (!PyArg_ParseTuple(args, "y*LL", &of.view, &row, &budget))
        return NULL;
    of.parent = of.view.buf;
    of.rows = (size_t)of.view.len / sizeof *of.parent;
    int failed = 0;
    while (!(failed = row < 0 || is_beyond(&of, row)) && runs + ++rows / ADJACENT <= budget && of.parent[row] >= 0) {
        runs += of.parent[row] != row - 1;
        row = of.parent[row];
    }
    PyBuffer_Release(&of.view);
    if (failed && PyErr_Occurred())
        return NULL;
    long long left = budget - runs - rows / ADJACENT;
    return failed || left < 0 ? Py_BuildValue("LL", -1LL, failed ? budget : 0LL) : Py_BuildValue("LL", row, left);
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
