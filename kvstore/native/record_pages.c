/* Makes records of blocks on NVMe, and the pages that have them. Layout: kvstore/tiers/nvme/records.py.
 *
 * The GIL is kept: keys and pages are objects of Python, and a batch takes some microseconds.
 */
#include "kvstore_native.h"
#include "records.h"

#define COLUMNS 7
#define ROW_BYTES (sizeof(record) + 2 * MOST_KEY_BYTES)

static int bad(const char *what, size_t n)
{
    PyErr_Format(PyExc_ValueError, what, n);
    return 0;
}

/* Copies a key from a list, padded with zeros. Returns 0 with an exception. */
static int take_key(PyObject *keys, size_t i, uint8_t *to, uint8_t *nbytes)
{
    char *bytes;
    Py_ssize_t n;
    PyObject *key = PyList_GetItem(keys, (Py_ssize_t)i);
    if (key == NULL || PyBytes_AsStringAndSize(key, &bytes, &n))
        return 0;
    if (n > MOST_KEY_BYTES)
        return bad("a key of %zu bytes, which must have 1 to 64", (size_t)n);
    memcpy(to, bytes, (size_t)n);
    memset(to + n, 0, (size_t)(MOST_KEY_BYTES - n));
    *nbytes = (uint8_t)n;
    return 1;
}

static PyObject *records_pack(PyObject *module, PyObject *args)
{
    /* The numbers of a record: ns, extent, index, version, length, checksum, stored_at. */
    static const size_t item_bytes[COLUMNS] = {4, 4, 4, 8, 4, 8, 8};
    PyObject *keys, *parents, *numbers, *result = NULL;
    Py_buffer rows, views[COLUMNS];
    int open = 0;
    if (!PyArg_ParseTuple(args, "O!O!O!w*", &PyList_Type, &keys, &PyList_Type, &parents, &PyTuple_Type, &numbers,
                          &rows))
        return NULL;
    size_t n = (size_t)PyList_Size(keys);
    int good = PyList_Size(parents) == (Py_ssize_t)n && PyTuple_Size(numbers) == COLUMNS &&
               (size_t)rows.len == n * ROW_BYTES;
    for (int i = 0; good && i < COLUMNS; i++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(numbers, i), &views[i], PyBUF_SIMPLE))
            goto end;
        open++;
        good = (size_t)views[i].len == n * item_bytes[i];
    }
    if (!good) {
        bad("columns of several lengths, for %zu records", n);
        goto end;
    }
    const uint32_t *ns = views[0].buf, *extent = views[1].buf, *index = views[2].buf, *length = views[4].buf;
    const uint64_t *version = views[3].buf, *checksum = views[5].buf, *stored_at = views[6].buf;
    for (size_t i = 0; i < n; i++) {
        uint8_t *row = (uint8_t *)rows.buf + i * ROW_BYTES, *key = row + sizeof(record);
        record head = {.ns = ns[i], .length = length[i], .version = version[i], .checksum = checksum[i]};
        head.stored_at = stored_at[i];
        if (!take_key(keys, i, key, &head.key_bytes) ||
            !take_key(parents, i, key + MOST_KEY_BYTES, &head.parent_bytes))
            goto end;
        if (!head.key_bytes) {
            bad("a key of %zu bytes, which must have 1 to 64", 0);
            goto end;
        }
        head.check = record_check(&head, key, MOST_KEY_BYTES, extent[i], index[i]);
        memcpy(row, &head, sizeof head);
    }
    result = Py_NewRef(Py_None);
end:
    while (open > 0)
        PyBuffer_Release(&views[--open]);
    PyBuffer_Release(&rows);
    return result;
}

/* A page that is made: `number` is a place without the bits of the slot, `bytes` belong to an object. */
typedef struct {
    uint64_t number;
    size_t width;
    uint8_t *bytes;
} page;

/* Returns the page of a place, which is often the last one; NULL with an exception. */
static page *page_of(page *pages, size_t n, uint64_t place, page *last)
{
    uint64_t number = place >> SLOT_BITS;
    if (last != NULL && last->number == number)
        return last;
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pages[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    if (low < n && pages[low].number == number)
        return &pages[low];
    PyErr_Format(PyExc_ValueError, "place %llu is of no page", (unsigned long long)place);
    return NULL;
}

static size_t width_for(const record *head)
{
    size_t longest = head->key_bytes > head->parent_bytes ? head->key_bytes : head->parent_bytes;
    return longest <= 8 ? 8 : (longest + 7) / 8 * 8;
}

static void put_keys(uint8_t *to, size_t width, const uint8_t *from, size_t own)
{
    size_t n = own < width ? own : width;
    for (int i = 0; i < 2; i++) {
        memcpy(to + (size_t)i * width, from + (size_t)i * own, n);
        memset(to + (size_t)i * width + n, 0, width - n);
    }
}

/* Goes through the rows of all changes: with `write` puts each into its page, else widens its page for it. */
static int each_row(PyObject *changes, page *pages, size_t n, int write)
{
    for (Py_ssize_t c = 0; c < PyList_Size(changes); c++) {
        PyObject *change = PyList_GetItem(changes, c);
        Py_buffer places, rows;
        page *p = NULL;
        int good = 1;
        if (!PyArg_ParseTuple(change, "y*y*", &places, &rows))
            return 0;
        size_t count = (size_t)places.len / 8;
        if ((size_t)places.len != 8 * count || (size_t)rows.len != count * ROW_BYTES)
            good = bad("rows that are not those of %zu places", count);
        for (size_t i = 0; good && i < count; i++) {
            uint64_t place = ((const uint64_t *)places.buf)[i];
            const uint8_t *row = (const uint8_t *)rows.buf + i * ROW_BYTES;
            record head;
            memcpy(&head, row, sizeof head);
            if ((p = page_of(pages, n, place, p)) == NULL) {
                good = 0;
            } else if (write) {
                uint8_t *to = p->bytes + (place & (SLOTS - 1)) * row_bytes(p->width);
                memcpy(to, &head, sizeof head);
                put_keys(to + sizeof head, p->width, row + sizeof head, MOST_KEY_BYTES);
            } else if (width_for(&head) > MOST_KEY_BYTES) {
                good = bad("a key of %zu bytes, which must have 1 to 64", width_for(&head));
            } else if (width_for(&head) > p->width) {
                p->width = width_for(&head);
            }
        }
        PyBuffer_Release(&places);
        PyBuffer_Release(&rows);
        if (!good)
            return 0;
    }
    return 1;
}

/* Returns a new page with the rows of the one before, whose keys may be narrower; NULL with an exception. */
static PyObject *new_page(page *p, PyObject *before)
{
    size_t row = row_bytes(p->width);
    char *old = NULL;
    Py_ssize_t nbytes = 0;
    if (before != Py_None && PyBytes_AsStringAndSize(before, &old, &nbytes))
        return NULL;
    PyObject *value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(SLOTS * row));
    if (value == NULL)
        return NULL;
    p->bytes = (uint8_t *)PyBytes_AsString(value);
    size_t own = width_of((size_t)nbytes);
    for (size_t i = 0; own && i < SLOTS; i++) {
        const uint8_t *from = (const uint8_t *)old + i * row_bytes(own);
        memcpy(p->bytes + i * row, from, sizeof(record));
        put_keys(p->bytes + i * row + sizeof(record), p->width, from + sizeof(record), own);
    }
    if (!own)
        memset(p->bytes, 0, SLOTS * row);
    return value;
}

static int is_unused(const page *p)
{
    for (size_t i = 0; i < SLOTS; i++)
        if (p->bytes[i * row_bytes(p->width) + offsetof(record, key_bytes)])
            return 0;
    return 1;
}

static PyObject *records_pages(PyObject *module, PyObject *args)
{
    PyObject *old, *changes, *values = NULL;
    Py_buffer numbers;
    page *pages = NULL;
    if (!PyArg_ParseTuple(args, "y*O!O!", &numbers, &PyList_Type, &old, &PyList_Type, &changes))
        return NULL;
    size_t n = (size_t)numbers.len / 8;
    int good = PyList_Size(old) == (Py_ssize_t)n || bad("there must be %zu pages before", n);
    if (good && (pages = PyMem_Calloc(n + 1, sizeof *pages)) == NULL) {
        PyErr_NoMemory();
        good = 0;
    }
    for (size_t i = 0; good && i < n; i++) {
        PyObject *before = PyList_GetItem(old, (Py_ssize_t)i);
        pages[i].number = ((const uint64_t *)numbers.buf)[i];
        pages[i].width = 8;
        Py_ssize_t nbytes = before == Py_None ? 0 : PyBytes_Size(before);
        good = nbytes >= 0;
        if (good && width_of((size_t)nbytes))
            pages[i].width = width_of((size_t)nbytes);
    }
    good = good && each_row(changes, pages, n, 0) && (values = PyList_New((Py_ssize_t)n)) != NULL;
    for (size_t i = 0; good && i < n; i++) {
        PyObject *value = new_page(&pages[i], PyList_GetItem(old, (Py_ssize_t)i));
        good = value != NULL && !PyList_SetItem(values, (Py_ssize_t)i, value);
    }
    good = good && each_row(changes, pages, n, 1);
    for (size_t i = 0; good && i < n; i++)
        if (is_unused(&pages[i]))
            good = !PyList_SetItem(values, (Py_ssize_t)i, Py_NewRef(Py_None));
    PyMem_Free(pages);
    PyBuffer_Release(&numbers);
    if (!good)
        Py_CLEAR(values);
    return values;
}

static PyMethodDef functions[] = {
    {"records_pack", records_pack, METH_VARARGS, NULL},
    {"records_pages", records_pages, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_record_pages(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
