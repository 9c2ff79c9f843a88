/* Decodes pages of records of blocks on NVMe. Layout: kvstore/tiers/nvme/records.py.
 *
 * A page is as damaged as the device leaves it: each record is proved by its check before any of it is used. The
 * GIL is kept: pages are objects of Python, and a daemon decodes them before it serves.
 */
#include "kvstore_native.h"
#include "records.h"

#define PAGE_KEY_BYTES 8
#define COLUMNS 11
#define AHEAD 8

/* `width`: bytes of its keys; 0: the page is damaged. */
typedef struct {
    const uint8_t *rows;
    uint32_t extent, first;
    size_t width;
} page;

/* The columns of `Blocks`, in its order. */
typedef struct {
    uint32_t *ns;
    uint8_t *keys, *key_bytes, *parents, *parent_bytes;
    uint32_t *extent, *index;
    uint64_t *version;
    uint32_t *length;
    uint64_t *checksum, *stored_at;
} columns;

static uint32_t big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* Fills a page from a (key, value). Returns 0 with an exception if these are no buffers. */
static int open_page(page *p, PyObject *pair)
{
    PyObject *key = PyTuple_GetItem(pair, 0), *value = key ? PyTuple_GetItem(pair, 1) : NULL;
    Py_buffer view;
    if (value == NULL || PyObject_GetBuffer(key, &view, PyBUF_SIMPLE))
        return 0;
    const uint8_t *bytes = view.buf;
    int good = view.len == PAGE_KEY_BYTES;
    uint32_t number = good ? big_endian(bytes + 4) : 0;
    good &= !(number >> (32 - SLOT_BITS));
    p->extent = good ? big_endian(bytes) : 0;
    p->first = number << SLOT_BITS;
    PyBuffer_Release(&view);
    if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE))
        return 0;
    p->rows = view.buf;
    p->width = good ? width_of((size_t)view.len) : 0;
    PyBuffer_Release(&view);
    return 1;
}

/* Returns all pages of a list of pairs, to be freed; NULL with an exception. The caller keeps the list. */
static page *open_pages(PyObject *pairs)
{
    size_t n = (size_t)PyList_Size(pairs);
    page *pages = PyMem_Malloc((n + 1) * sizeof *pages);
    if (pages == NULL)
        return (page *)PyErr_NoMemory();
    for (size_t i = 0; i < n; i++) {
        PyObject *pair = PyList_GetItem(pairs, (Py_ssize_t)i);
        if (pair == NULL || !open_page(&pages[i], pair)) {
            PyMem_Free(pages);
            return NULL;
        }
    }
    return pages;
}

static int is_valid(const page *p, const uint8_t *row, const record *head, uint32_t slot)
{
    if (!head->key_bytes || head->key_bytes > p->width || head->parent_bytes > p->width)
        return 0;
    return record_check(head, row + sizeof *head, p->width, p->extent, p->first + slot) == head->check;
}

static int is_empty(const uint8_t *row, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++)
        if (row[i])
            return 0;
    return 1;
}

static int append(PyObject *list, uint64_t number)
{
    PyObject *object = PyLong_FromUnsignedLongLong(number);
    int failed = object == NULL || PyList_Append(list, object);
    Py_XDECREF(object);
    return !failed;
}

static PyObject *records_find(PyObject *module, PyObject *args)
{
    PyObject *pairs, *bad_pages = NULL, *bad_places = NULL, *result = NULL;
    Py_buffer rows, stored_at, version;
    if (!PyArg_ParseTuple(args, "O!w*w*w*", &PyList_Type, &pairs, &rows, &stored_at, &version))
        return NULL;
    size_t n = (size_t)PyList_Size(pairs), found = 0, width = 8;
    page *pages = NULL;
    if ((size_t)rows.len < n * SLOTS * 8 || stored_at.len != rows.len || version.len != rows.len) {
        PyErr_Format(PyExc_ValueError, "no room for the rows of %zu pages", n);
        goto end;
    }
    bad_pages = PyList_New(0);
    bad_places = PyList_New(0);
    if (bad_pages == NULL || bad_places == NULL || (pages = open_pages(pairs)) == NULL)
        goto end;
    for (size_t i = 0; i < n; i++) {
        const page *p = &pages[i];
        if (!p->width && !append(bad_pages, i))
            goto end;
        width = p->width > width ? p->width : width;
        for (uint32_t slot = 0; p->width && slot < SLOTS; slot++) {
            const uint8_t *row = p->rows + slot * row_bytes(p->width);
            record head;
            memcpy(&head, row, sizeof head);
            if (is_valid(p, row, &head, slot)) {
                ((int64_t *)rows.buf)[found] = (int64_t)(i << SLOT_BITS | slot);
                ((uint64_t *)stored_at.buf)[found] = head.stored_at;
                ((uint64_t *)version.buf)[found++] = head.version;
            } else if (!is_empty(row, row_bytes(p->width)) &&
                       !append(bad_places, (uint64_t)p->extent << 32 | (p->first + slot))) {
                goto end;
            }
        }
    }
    result = Py_BuildValue("nnOO", (Py_ssize_t)found, (Py_ssize_t)width, bad_pages, bad_places);
end:
    PyMem_Free(pages);
    Py_XDECREF(bad_pages);
    Py_XDECREF(bad_places);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&stored_at);
    PyBuffer_Release(&version);
    return result;
}

static void copy_key(uint8_t *to, size_t to_bytes, const uint8_t *from, size_t from_bytes)
{
    memcpy(to, from, from_bytes);
    memset(to + from_bytes, 0, to_bytes - from_bytes);
}

/* Copies rows to columns, whose keys have `width` bytes. Returns 0 with an exception for a row that is not there. */
static int take_rows(const page *pages, size_t n_pages, const int64_t *rows, size_t n, size_t width, const columns *to)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t number = (uint64_t)rows[i] >> SLOT_BITS;
        const page *p = &pages[number < n_pages ? number : n_pages];
        if (number >= n_pages || !p->width || p->width > width) {
            PyErr_Format(PyExc_IndexError, "row %lld of %zu pages", (long long)rows[i], n_pages);
            return 0;
        }
        if (i + AHEAD < n && (uint64_t)rows[i + AHEAD] >> SLOT_BITS < n_pages) {
            const page *next = &pages[rows[i + AHEAD] >> SLOT_BITS];
            __builtin_prefetch(next->rows + (rows[i + AHEAD] & (SLOTS - 1)) * row_bytes(next->width));
        }
        uint32_t slot = (uint32_t)rows[i] & (SLOTS - 1);
        const uint8_t *row = p->rows + slot * row_bytes(p->width), *key = row + sizeof(record);
        record head;
        memcpy(&head, row, sizeof head);
        to->ns[i] = head.ns;
        copy_key(to->keys + i * width, width, key, p->width);
        to->key_bytes[i] = head.key_bytes;
        copy_key(to->parents + i * width, width, key + p->width, p->width);
        to->parent_bytes[i] = head.parent_bytes;
        to->extent[i] = p->extent;
        to->index[i] = p->first + slot;
        to->version[i] = head.version;
        to->length[i] = head.length;
        to->checksum[i] = head.checksum;
        to->stored_at[i] = head.stored_at;
    }
    return 1;
}

static PyObject *records_take(PyObject *module, PyObject *args)
{
    /* Bytes of an item of each column; 0: the width of keys. */
    static const size_t item_bytes[COLUMNS] = {4, 0, 1, 0, 1, 4, 4, 8, 4, 8, 8};
    PyObject *pairs, *into, *result = NULL;
    Py_buffer rows, views[COLUMNS];
    page *pages = NULL;
    Py_ssize_t width;
    int open = 0;
    if (!PyArg_ParseTuple(args, "O!y*nO!", &PyList_Type, &pairs, &rows, &width, &PyTuple_Type, &into))
        return NULL;
    size_t n = (size_t)rows.len / sizeof(int64_t);
    for (int i = 0; i < COLUMNS; i++) {
        PyObject *column = PyTuple_GetItem(into, i);
        if (column == NULL || PyObject_GetBuffer(column, &views[i], PyBUF_WRITABLE))
            goto end;
        open++;
        if ((size_t)views[i].len != n * (item_bytes[i] ? item_bytes[i] : (size_t)width)) {
            PyErr_Format(PyExc_ValueError, "column %d has %zd bytes for %zu rows", i, views[i].len, n);
            goto end;
        }
    }
    if ((pages = open_pages(pairs)) == NULL)
        goto end;
    columns to = {views[0].buf, views[1].buf, views[2].buf, views[3].buf, views[4].buf, views[5].buf,
                  views[6].buf, views[7].buf, views[8].buf, views[9].buf, views[10].buf};
    if (take_rows(pages, (size_t)PyList_Size(pairs), rows.buf, n, (size_t)width, &to))
        result = Py_NewRef(Py_None);
end:
    PyMem_Free(pages);
    while (open > 0)
        PyBuffer_Release(&views[--open]);
    PyBuffer_Release(&rows);
    return result;
}

static PyMethodDef functions[] = {
    {"records_find", records_find, METH_VARARGS, NULL},
    {"records_take", records_take, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_records(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
