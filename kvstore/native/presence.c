/* Finds and sets keys in a presence table, and where blocks are. Layout: kvstore/core/residency/presence.py.
 *
 * Readers take no lock. A cell is one aligned 8-byte word, loaded at once, and says all about its key: what is
 * read while the writer changes the table was true just before or is true just after. The GIL is kept: the keys
 * are objects of Python, and to get it back may take longer than to find thousands of them. The place of a block
 * is a second word, which may be out of date: its reader checks what it finds there.
 */
#include "kvstore_native.h"

#include <stdatomic.h>
#include <string.h>

#define WAYS 8
#define LINE_BYTES 64
#define KEY_BYTES 64
#define FACTORS (KEY_BYTES / 8 + 1)
#define FLAGS UINT64_C(0x1F)
#define MIX UINT64_C(0x9E3779B97F4A7C15)
#define AT_ONCE 32
#define PREFERRED 5 /* cells of its first bucket that a key takes before it looks at the second */

enum state { NOT_READY, READY, RETIRED };

typedef const _Atomic uint64_t cell;

typedef struct {
    cell *head, *cells;
    uint64_t buckets, factors[FACTORS];
} presence_table;

typedef struct {
    uint64_t mark;
    cell *first, *second;
} place;

/* The same numbers as `splitmix` of mixing.py. */
static void make_factors(uint64_t *factors, uint64_t seed)
{
    for (int i = 0; i < FACTORS; i++) {
        uint64_t z = seed + (uint64_t)(i + 1) * MIX;
        z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
        factors[i] = (z ^ (z >> 31)) | 1;
    }
}

/* Returns 0 if the buffer cannot be a table. The number of buckets is that of the buffer, not what it says. */
static int open_table(presence_table *table, const Py_buffer *view)
{
    table->head = view->buf;
    table->cells = table->head + LINE_BYTES / 8;
    table->buckets = ((uint64_t)view->len / LINE_BYTES - 1) / 2;
    if (view->len < 3 * LINE_BYTES || (uintptr_t)view->buf % LINE_BYTES || table->buckets >> 32)
        return 0;
    make_factors(table->factors, atomic_load_explicit(&table->head[1], memory_order_relaxed));
    return 1;
}

/* Products keep the highest bits of a word to themselves, so that those of two words may cancel out. */
static uint64_t fold(uint64_t word)
{
    return word ^ (word >> 32);
}

static uint64_t mix(uint64_t word)
{
    word = fold(word) * MIX;
    return word ^ (word >> 29);
}

static place place_of(const presence_table *table, const char *key, size_t size)
{
    const uint64_t *factor = table->factors;
    uint64_t hash = size * factor[FACTORS - 1], word = 0;
    for (; size >= 8; size -= 8, key += 8) {
        memcpy(&word, key, 8);
        hash += fold(word) * *factor++;
    }
    if (size) {
        word = 0;
        memcpy(&word, key, size);
        hash += fold(word) * *factor;
    }
    hash = mix(hash);
    uint64_t mark = hash & ~FLAGS, buckets = mix(hash);
    return (place){
        mark ? mark : FLAGS + 1,
        table->cells + WAYS * ((buckets >> 32) * table->buckets >> 32),
        table->cells + WAYS * ((buckets & UINT32_MAX) * table->buckets >> 32),
    };
}

/* Returns the flags of a mark in one bucket, more than FLAGS if it is not there: a cell differs from its mark in
 * them only. */
static uint64_t find_in(cell *bucket, uint64_t mark)
{
    uint64_t least = UINT64_MAX;
    for (int way = 0; way < WAYS; way++) {
        uint64_t differs = atomic_load_explicit(&bucket[way], memory_order_relaxed) ^ mark;
        least = differs < least ? differs : least;
    }
    return least;
}

/* Returns the word beside the cell of a mark, 0 if the cell was removed meanwhile. */
static uint64_t place_beside(const presence_table *table, const place *at, uint64_t mark)
{
    cell *buckets[] = {at->first, at->second};
    for (int which = 0; which < 2; which++)
        for (int way = 0; way < WAYS; way++) {
            cell *here = buckets[which] + way;
            if ((atomic_load_explicit(here, memory_order_relaxed) & ~FLAGS) == mark)
                return atomic_load_explicit(here + WAYS * table->buckets, memory_order_relaxed);
        }
    return 0;
}

/* Writes the flags of each key, 0xFF for absent ones, and the places of those that are there unless `where` is
 * NULL. Returns the number of keys written: with `leading`, of those before the first absent one. Returns -1 with
 * an exception for keys that are not bytes of one length. */
static Py_ssize_t find_keys(const presence_table *table, PyObject *keys, Py_ssize_t n, int leading, uint8_t *out,
                            uint64_t *where)
{
    place places[AT_ONCE];
    uint64_t found[AT_ONCE];
    Py_ssize_t size = -1;
    for (Py_ssize_t at = 0; at < n; at += AT_ONCE) {
        Py_ssize_t some = n - at < AT_ONCE ? n - at : AT_ONCE;
        for (Py_ssize_t i = 0; i < some; i++) {
            PyObject *key = PyList_GetItem(keys, at + i);
            char *bytes;
            Py_ssize_t length;
            if (key == NULL || PyBytes_AsStringAndSize(key, &bytes, &length))
                return -1;
            size = size < 0 ? length : size;
            if (length != size || !length || length > KEY_BYTES) {
                PyErr_Format(PyExc_ValueError, "a key of %zd bytes after keys of %zd", length, size);
                return -1;
            }
            places[i] = place_of(table, bytes, (size_t)length);
            __builtin_prefetch((const void *)places[i].first);
        }
        for (Py_ssize_t i = 0; i < some; i++) {
            found[i] = find_in(places[i].first, places[i].mark);
            if (found[i] > FLAGS)
                __builtin_prefetch((const void *)places[i].second);
        }
        for (Py_ssize_t i = 0; i < some; i++) {
            if (found[i] > FLAGS)
                found[i] = find_in(places[i].second, places[i].mark);
            if (found[i] > FLAGS && leading)
                return at + i;
            out[at + i] = found[i] > FLAGS ? 0xFF : (uint8_t)found[i];
            if (where != NULL)
                where[at + i] = found[i] > FLAGS ? 0 : place_beside(table, &places[i], places[i].mark);
        }
    }
    return n;
}

/* Returns the flags of n keys, None if the table cannot answer. `where` has room for their places, or is NULL. */
static PyObject *flags_of(PyObject *memory, PyObject *keys, Py_ssize_t n, int leading, uint64_t *where)
{
    PyObject *result = NULL;
    Py_buffer view;
    presence_table table;
    if (n < 0 || PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE))
        return NULL;
    uint8_t *out = PyMem_Malloc((size_t)n + 1);
    if (out == NULL) {
        PyErr_NoMemory();
    } else if (!open_table(&table, &view)) {
        PyErr_SetString(PyExc_ValueError, "no presence table");
    } else {
        /* Acquire: the table was filled before it was ready. It must be so still after the last cell was read. */
        int ready = atomic_load_explicit(table.head, memory_order_acquire) == READY;
        Py_ssize_t written = ready ? find_keys(&table, keys, n, leading, out, where) : 0;
        atomic_thread_fence(memory_order_acquire);
        if (written >= 0 && ready && atomic_load_explicit(table.head, memory_order_relaxed) == READY)
            result = PyBytes_FromStringAndSize((char *)out, written);
        else if (written >= 0)
            result = Py_NewRef(Py_None);
    }
    PyMem_Free(out);
    PyBuffer_Release(&view);
    return result;
}

static PyObject *presence(PyObject *module, PyObject *args)
{
    PyObject *memory, *keys;
    int leading;
    if (!PyArg_ParseTuple(args, "OOp", &memory, &keys, &leading))
        return NULL;
    return flags_of(memory, keys, PyList_Size(keys), leading, NULL);
}

static PyObject *places(PyObject *module, PyObject *args)
{
    PyObject *memory, *keys, *result = NULL;
    if (!PyArg_ParseTuple(args, "OO", &memory, &keys))
        return NULL;
    Py_ssize_t n = PyList_Size(keys);
    if (n < 0)
        return NULL;
    uint64_t *where = PyMem_Calloc((size_t)n + 1, sizeof *where);
    if (where == NULL)
        return PyErr_NoMemory();
    PyObject *flags = flags_of(memory, keys, n, 1, where);
    if (flags == Py_None)
        result = Py_NewRef(Py_None);
    else if (flags != NULL)
        result = Py_BuildValue("Oy#", flags, (char *)where, 8 * PyBytes_Size(flags));
    Py_XDECREF(flags);
    PyMem_Free(where);
    return result;
}

static int filled(cell *bucket)
{
    int used = 0;
    for (int way = 0; way < WAYS; way++)
        used += atomic_load_explicit(&bucket[way], memory_order_relaxed) != 0;
    return used;
}

/* Returns the cell of a bucket that has a mark (0: the first free one), NULL if there is none. */
static cell *cell_of(cell *bucket, uint64_t mark)
{
    for (int way = 0; way < WAYS; way++)
        if ((atomic_load_explicit(&bucket[way], memory_order_relaxed) & ~FLAGS) == mark)
            return &bucket[way];
    return NULL;
}

/* The place is there before its cell is. */
static void store(const presence_table *table, cell *at, uint64_t value, uint64_t where)
{
    atomic_store_explicit((_Atomic uint64_t *)(at + WAYS * table->buckets), where, memory_order_relaxed);
    atomic_store_explicit((_Atomic uint64_t *)at, value, memory_order_release);
}

/* Sets one key. Returns the number of keys that the table has gained, 2 if there is no room. */
static int set_key(const presence_table *table, const place *at, uint64_t flags, int there, uint64_t where)
{
    cell *known = cell_of(at->first, at->mark);
    known = known == NULL ? cell_of(at->second, at->mark) : known;
    if (known != NULL) {
        store(table, known, there ? at->mark | flags : 0, where);
        return there ? 0 : -1;
    }
    if (!there)
        return 0;
    /* Most keys in their first bucket: readers then load one line for each. */
    int used = filled(at->first);
    cell *free = cell_of(used >= PREFERRED && filled(at->second) < used ? at->second : at->first, 0);
    if (free == NULL)
        return 2;
    store(table, free, at->mark | flags, where);
    return 1;
}

static PyObject *presence_set(PyObject *module, PyObject *args)
{
    Py_buffer memory, words, flags, there, where;
    Py_ssize_t size, gained = 0;
    presence_table table;
    PyObject *result = NULL;
    int room = 1;
    if (!PyArg_ParseTuple(args, "w*y*ny*y*y*", &memory, &words, &size, &flags, &there, &where))
        return NULL;
    Py_ssize_t n = there.len;
    if (words.len != n * KEY_BYTES || flags.len != n * 8 || where.len != n * 8 || size < 1 || size > KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "not a key, flags and a place for each block");
    } else if (!open_table(&table, &memory)) {
        PyErr_SetString(PyExc_ValueError, "no presence table");
    } else {
        place places[AT_ONCE];
        for (Py_ssize_t at = 0; at < n && room; at += AT_ONCE) {
            Py_ssize_t some = n - at < AT_ONCE ? n - at : AT_ONCE;
            for (Py_ssize_t i = 0; i < some; i++) {
                places[i] = place_of(&table, (const char *)words.buf + (at + i) * KEY_BYTES, (size_t)size);
                __builtin_prefetch((const void *)places[i].first, 1);
                __builtin_prefetch((const void *)places[i].second, 1);
            }
            for (Py_ssize_t i = 0; i < some && room; i++) {
                int more = set_key(&table, &places[i], ((const uint64_t *)flags.buf)[at + i] & FLAGS,
                                   ((const uint8_t *)there.buf)[at + i] != 0, ((const uint64_t *)where.buf)[at + i]);
                room = more < 2;
                gained += room ? more : 0;
            }
        }
        result = Py_BuildValue("nO", gained, room ? Py_True : Py_False);
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&words);
    PyBuffer_Release(&flags);
    PyBuffer_Release(&there);
    PyBuffer_Release(&where);
    return result;
}

static PyMethodDef functions[] = {
    {"presence_set", presence_set, METH_VARARGS, NULL},
    {"presence", presence, METH_VARARGS, NULL},
    {"places", places, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_presence(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
