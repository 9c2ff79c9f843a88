/* Reads blocks from slots that no lease holds. Layout of headers: kvstore/arena.py, of extents: Geometry in types.py.
 *
 * A slot may be written at any time. Its header is read before its bytes, and its version again after them, but the
 * proof is the checksum of the bytes that were copied: its seed names namespace, key and length of the block.
 */
#include "copies.h"
#include "kvstore_native.h"

#include <stdatomic.h>
#include <string.h>

#define LABEL_BYTES 4096
#define HEADER_BYTES 192
#define VERSION_AT 8
#define CHECKSUM_AT 168
#define NAMESPACE_BYTES 16
#define KEY_BYTES 64

typedef const _Atomic uint64_t word;

typedef struct {
    unsigned int number;
    unsigned long long payload_offset, slots;
    Py_buffer view;
} extent;

typedef struct {
    Py_buffer *targets;
    Py_ssize_t target_count;
    uint8_t **into;
    extent *extents;
    Py_ssize_t count;
    uint8_t *keys;
    size_t key_bytes;
    const char *namespace;
    uint64_t block_bytes, slot_bytes;
} request;

/* Takes a list of one target for each of n blocks, or one for all. Returns -1 with an exception for one too small. */
static int take_targets(request *q, PyObject *target, Py_ssize_t n)
{
    int is_list = PyList_Check(target);
    Py_ssize_t count = is_list ? n : 1, blocks_in_each = is_list ? 1 : n;
    q->targets = PyMem_Calloc((size_t)count + 1, sizeof *q->targets);
    q->into = PyMem_Malloc((size_t)n * sizeof *q->into + 1);
    if (q->targets == NULL || q->into == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    while (q->target_count < count) {
        Py_buffer *view = &q->targets[q->target_count];
        PyObject *each = is_list ? PySequence_GetItem(target, q->target_count) : Py_NewRef(target);
        int failed = each == NULL || PyObject_GetBuffer(each, view, PyBUF_WRITABLE);
        Py_XDECREF(each);
        if (failed)
            return -1;
        q->target_count++;
        if (blocks_in_each && q->block_bytes > (uint64_t)view->len / (uint64_t)blocks_in_each) {
            PyErr_Format(PyExc_ValueError, "no room for the blocks in %zd bytes", view->len);
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++)
        q->into[i] = is_list ? q->targets[i].buf : (uint8_t *)q->targets[0].buf + (uint64_t)i * q->block_bytes;
    return 0;
}

/* Returns -1 with an exception for an extent in which no slot of this size can be. */
static int take_extent(request *q, PyObject *tuple)
{
    extent *e = &q->extents[q->count];
    PyObject *memory;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "an extent is no tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "IOKK", &e->number, &memory, &e->payload_offset, &e->slots) ||
        PyObject_GetBuffer(memory, &e->view, PyBUF_SIMPLE))
        return -1;
    q->count++;
    uint64_t size = (uint64_t)e->view.len, end;
    if (e->payload_offset < LABEL_BYTES || e->slots > (e->payload_offset - LABEL_BYTES) / HEADER_BYTES ||
        __builtin_mul_overflow(e->slots, q->slot_bytes, &end) || e->payload_offset > size ||
        end > size - e->payload_offset || (uintptr_t)e->view.buf % 8) {
        PyErr_Format(PyExc_ValueError, "extent %u of %zd bytes has no such slots", e->number, e->view.len);
        return -1;
    }
    const char *from = e->view.buf;
    for (const Py_buffer *out = q->targets; out < q->targets + q->target_count; out++) {
        const char *into = out->buf;
        if (into < from + size && from < into + out->len) {
            PyErr_Format(PyExc_ValueError, "extent %u and the target overlap", e->number);
            return -1;
        }
    }
    return 0;
}

/* Copies the first n keys, which other threads could remove from the list. Returns -1 with an exception. */
static int take_keys(request *q, PyObject *keys, Py_ssize_t n)
{
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "keys are no list");
        return -1;
    }
    q->keys = PyMem_Malloc((size_t)n * KEY_BYTES + 1);
    if (q->keys == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        char *bytes;
        Py_ssize_t length;
        PyObject *key = PyList_GetItem(keys, i);
        if (key == NULL || PyBytes_AsStringAndSize(key, &bytes, &length))
            return -1;
        q->key_bytes = i ? q->key_bytes : (size_t)length;
        if ((size_t)length != q->key_bytes || length > KEY_BYTES) {
            PyErr_Format(PyExc_ValueError, "a key of %zd bytes", length);
            return -1;
        }
        memcpy(q->keys + (size_t)i * q->key_bytes, bytes, (size_t)length);
    }
    return 0;
}

/* Returns the header of a place, and its payload; NULL if no extent has it. */
static const uint8_t *header_at(const request *q, uint64_t place, const uint8_t **payload)
{
    uint64_t index = place & UINT32_MAX;
    for (const extent *e = q->extents; e < q->extents + q->count; e++)
        if (e->number == place >> 32 && index < e->slots) {
            const uint8_t *base = e->view.buf;
            *payload = base + e->payload_offset + index * q->slot_bytes;
            return base + LABEL_BYTES + index * HEADER_BYTES;
        }
    return NULL;
}

static uint64_t seed_of(const request *q, Py_ssize_t i)
{
    uint8_t name[NAMESPACE_BYTES + KEY_BYTES + 8];
    memcpy(name, q->namespace, NAMESPACE_BYTES);
    memcpy(name + NAMESPACE_BYTES, q->keys + (size_t)i * q->key_bytes, q->key_bytes);
    for (int byte = 0; byte < 8; byte++)
        name[NAMESPACE_BYTES + q->key_bytes + (size_t)byte] = (uint8_t)(q->block_bytes >> 8 * byte);
    return sum_bytes(name, NAMESPACE_BYTES + q->key_bytes + 8, 0);
}

static uint64_t load(const uint8_t *header, size_t at)
{
    return atomic_load_explicit((word *)(header + at), memory_order_acquire);
}

/* Copies blocks until one is not there. Returns how many were proved. */
static Py_ssize_t read_blocks(const request *q, const uint64_t *places, Py_ssize_t n)
{
    const uint8_t *payload;
    for (Py_ssize_t i = 0; i < n; i++) {
        const uint8_t *header = header_at(q, places[i], &payload);
        if (header != NULL) {
            __builtin_prefetch(header);
            __builtin_prefetch(header + CHECKSUM_AT);
        }
    }
    Py_ssize_t i = 0;
    for (; i < n; i++) {
        const uint8_t *header = header_at(q, places[i], &payload);
        if (header == NULL)
            break;
        uint64_t version = load(header, VERSION_AT), expected = load(header, CHECKSUM_AT);
        if (!version || copy_block(q->into[i], payload, q->block_bytes, seed_of(q, i)) != expected)
            break;
        atomic_thread_fence(memory_order_acquire);
        if (load(header, VERSION_AT) != version)
            break;
    }
    copies_done();
    return i;
}

static PyObject *read_slots(PyObject *module, PyObject *args)
{
    PyObject *target, *extents, *keys, *result = NULL;
    Py_ssize_t namespace_bytes, places_bytes, n, good = 0;
    unsigned long long block_bytes, slot_bytes;
    const char *places;
    request q = {0};
    if (!PyArg_ParseTuple(args, "OOy#Oy#KK", &target, &extents, &places, &places_bytes, &keys, &q.namespace,
                          &namespace_bytes, &block_bytes, &slot_bytes))
        return NULL;
    q.block_bytes = block_bytes;
    q.slot_bytes = slot_bytes;
    n = places_bytes / 8;
    Py_ssize_t count = PySequence_Size(extents);
    uint64_t *where = PyMem_Malloc((size_t)n * 8 + 1);
    q.extents = PyMem_Calloc((size_t)(count < 0 ? 0 : count) + 1, sizeof *q.extents);
    if (where == NULL || q.extents == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    if (namespace_bytes != NAMESPACE_BYTES || block_bytes > slot_bytes || !slot_bytes) {
        PyErr_SetString(PyExc_ValueError, "no such blocks");
        goto end;
    }
    if (take_targets(&q, target, n))
        goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PySequence_GetItem(extents, i);
        int failed = each == NULL || take_extent(&q, each);
        Py_XDECREF(each);
        if (failed)
            goto end;
    }
    if (count < 0 || take_keys(&q, keys, n))
        goto end;
    memcpy(where, places, (size_t)n * 8);
    Py_BEGIN_ALLOW_THREADS
    good = read_blocks(&q, where, n);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(good);
end:
    for (Py_ssize_t i = 0; i < q.count; i++)
        PyBuffer_Release(&q.extents[i].view);
    for (Py_ssize_t i = 0; i < q.target_count; i++)
        PyBuffer_Release(&q.targets[i]);
    PyMem_Free(q.extents);
    PyMem_Free(q.targets);
    PyMem_Free(q.into);
    PyMem_Free(q.keys);
    PyMem_Free(where);
    return result;
}

static PyMethodDef functions[] = {
    {"read_slots", read_slots, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_slots(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
