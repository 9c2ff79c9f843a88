/* Reads and writes pieces of files. io_uring gives the device all pieces of a call at once. Where the kernel or a
 * sandbox refuses it, they are moved one after another. The contract: portable_files.py.
 */
#define _GNU_SOURCE
#include "files.h"
#include "kvstore_native.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__has_include) && defined(__linux__)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#if defined(IORING_OFF_SQES) && defined(__NR_io_uring_setup)
#define HAS_URING 1
#endif

#define ALIGN 4096
#define DEPTH 64 /* pieces of one thread at the device */

/* Moves what is left of a piece by system calls. Sets its error. */
static void move(piece *p)
{
    p->error = 0;
    while (p->moved < p->length) {
        char *at = p->memory + p->moved;
        size_t left = p->length - p->moved;
        off_t offset = p->offset + (off_t)p->moved;
        ssize_t n = p->write ? pwrite(p->fd, at, left, offset) : pread(p->fd, at, left, offset);
        if (n < 0 && errno == EINTR)
            continue;
        /* Direct I/O ends short and unaligned only at the end of a file, and then fails with EINVAL. */
        if (n == 0 || (n < 0 && errno == EINVAL && p->moved % ALIGN)) {
            p->error = END_OF_FILE;
            return;
        }
        if (n < 0) {
            p->error = errno;
            return;
        }
        p->moved += (size_t)n;
    }
}

#ifdef HAS_URING

typedef struct {
    int fd;
    pid_t process;
    char *submissions, *completions;
    size_t submissions_bytes, completions_bytes, entries_bytes;
    struct io_uring_sqe *entries;
    struct io_uring_params p;
} ring;

static pthread_key_t of_thread;
static atomic_int refused; /* the errno with which the kernel has refused a ring, 0 before */

static void *map(int fd, size_t bytes, off_t what)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
    return at == MAP_FAILED ? NULL : at;
}

static void close_ring(void *given)
{
    ring *r = given;
    if (r->submissions != NULL)
        munmap(r->submissions, r->submissions_bytes);
    if (r->completions != NULL)
        munmap(r->completions, r->completions_bytes);
    if (r->entries != NULL)
        munmap(r->entries, r->entries_bytes);
    if (r->fd >= 0)
        close(r->fd);
    free(r);
}

/* Returns the ring of this thread, which ends with it; NULL if there can be none. */
static ring *own_ring(void)
{
    ring *r = pthread_getspecific(of_thread);
    if (r != NULL && r->process != getpid()) { /* after a fork: its memory is shared with the parent */
        pthread_setspecific(of_thread, NULL);
        close_ring(r);
        r = NULL;
    }
    if (r != NULL || atomic_load(&refused))
        return r;
    r = calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    r->process = getpid();
    r->fd = (int)syscall(__NR_io_uring_setup, DEPTH, &r->p);
    if (r->fd >= 0) {
        r->submissions_bytes = r->p.sq_off.array + r->p.sq_entries * sizeof(uint32_t);
        r->completions_bytes = r->p.cq_off.cqes + r->p.cq_entries * sizeof(struct io_uring_cqe);
        r->entries_bytes = r->p.sq_entries * sizeof(struct io_uring_sqe);
        r->submissions = map(r->fd, r->submissions_bytes, IORING_OFF_SQ_RING);
        r->completions = map(r->fd, r->completions_bytes, IORING_OFF_CQ_RING);
        r->entries = map(r->fd, r->entries_bytes, IORING_OFF_SQES);
    }
    if (r->fd < 0 || r->submissions == NULL || r->completions == NULL || r->entries == NULL ||
        pthread_setspecific(of_thread, r)) {
        atomic_store(&refused, errno ? errno : ENOMEM);
        close_ring(r);
        return NULL;
    }
    return r;
}

static uint32_t *word_of(char *base, uint32_t at)
{
    return (uint32_t *)(base + at);
}

/* Adds a piece to the submissions. There is room for it. */
static void add(ring *r, const piece *p, size_t number)
{
    uint32_t *tail = word_of(r->submissions, r->p.sq_off.tail);
    uint32_t mask = *word_of(r->submissions, r->p.sq_off.ring_mask), at = *tail & mask;
    struct io_uring_sqe *entry = &r->entries[at];
    memset(entry, 0, sizeof *entry);
    entry->opcode = p->write ? IORING_OP_WRITE : IORING_OP_READ;
    entry->fd = p->fd;
    entry->addr = (uint64_t)(uintptr_t)p->memory;
    entry->len = (uint32_t)p->length;
    entry->off = (uint64_t)p->offset;
    entry->user_data = number;
    word_of(r->submissions, r->p.sq_off.array)[at] = at;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
}

/* Takes the completions that are there. Returns their number. */
static size_t collect(ring *r, piece *pieces)
{
    uint32_t *head = word_of(r->completions, r->p.cq_off.head), at = *head;
    uint32_t mask = *word_of(r->completions, r->p.cq_off.ring_mask);
    uint32_t tail = __atomic_load_n(word_of(r->completions, r->p.cq_off.tail), __ATOMIC_ACQUIRE);
    const struct io_uring_cqe *done = (const void *)(r->completions + r->p.cq_off.cqes);
    for (; at != tail; at++) {
        piece *p = &pieces[done[at & mask].user_data];
        int result = done[at & mask].res;
        p->error = result < 0 ? -result : 0;
        p->moved = result < 0 ? 0 : (size_t)result;
    }
    size_t n = tail - *head;
    __atomic_store_n(head, tail, __ATOMIC_RELEASE);
    return n;
}

/* Returns how many submissions the kernel has taken so far, of those that this thread has ever made. */
static uint32_t taken(ring *r)
{
    return __atomic_load_n(word_of(r->submissions, r->p.sq_off.head), __ATOMIC_ACQUIRE);
}

/* Moves pieces, each at most once. Sets what was moved of each, and its error. */
static void move_at_once(ring *r, piece *pieces, size_t n)
{
    uint32_t *tail = word_of(r->submissions, r->p.sq_off.tail), start = *tail;
    size_t added = 0, ended = 0;
    int failed = 0;
    while (ended < (failed ? taken(r) - start : n)) {
        while (!failed && added < n && added - ended < DEPTH)
            add(r, &pieces[added], added), added++;
        unsigned int waiting = failed ? 0 : *tail - taken(r);
        if (syscall(__NR_io_uring_enter, r->fd, waiting, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 && errno != EINTR)
            failed = 1; /* it takes no more; what it has taken must end before the buffers may go */
        ended += collect(r, pieces);
    }
    if (failed)
        __atomic_store_n(tail, taken(r), __ATOMIC_RELEASE);
}

/* Whether system calls may succeed where the ring did not: with an older kernel, or another kind of file. */
static int may_differ(int error)
{
    return error == EINVAL || error == EAGAIN || error == EINTR || error == EOPNOTSUPP;
}

void move_all(piece *pieces, size_t n)
{
    ring *r = n > 1 ? own_ring() : NULL;
    if (r != NULL)
        move_at_once(r, pieces, n);
    for (piece *p = pieces; p < pieces + n; p++)
        if (p->error ? may_differ(p->error) : p->moved < p->length)
            move(p);
}

static const char *why_no_ring(void)
{
    if (own_ring() != NULL)
        return "";
    int error = atomic_load(&refused);
    return strerror(error ? error : ENOMEM);
}

#else

void move_all(piece *pieces, size_t n)
{
    for (piece *p = pieces; p < pieces + n; p++)
        move(p);
}

static const char *why_no_ring(void)
{
    return "not compiled in";
}

#endif

/* Takes a tuple of fd, offset, buffer, and whether it is written. Returns -1 with an exception. */
static int take(piece *p, Py_buffer *view, PyObject *tuple)
{
    long long offset;
    PyObject *buffer;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a piece is no tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "iLOp", &p->fd, &offset, &buffer, &p->write))
        return -1;
    if (PyObject_GetBuffer(buffer, view, p->write ? PyBUF_SIMPLE : PyBUF_WRITABLE))
        return -1;
    p->offset = (off_t)offset;
    p->memory = view->buf;
    p->length = (size_t)view->len;
    if (offset >= 0 && view->len <= INT32_MAX)
        return 0;
    PyErr_Format(PyExc_ValueError, "a piece of %zd bytes at %lld", view->len, offset);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *move_files(PyObject *module, PyObject *list)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "pieces are no list");
        return NULL;
    }
    Py_ssize_t n = PyList_Size(list), held = 0;
    PyObject *errors = NULL;
    piece *pieces = PyMem_Calloc((size_t)n + 1, sizeof *pieces);
    Py_buffer *views = PyMem_Calloc((size_t)n + 1, sizeof *views);
    if (pieces == NULL || views == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    for (; held < n; held++) {
        PyObject *each = PyList_GetItem(list, held);
        if (each == NULL || take(&pieces[held], &views[held], each))
            goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    move_all(pieces, (size_t)n);
    Py_END_ALLOW_THREADS
    errors = PyList_New(n);
    for (Py_ssize_t i = 0; errors != NULL && i < n; i++) {
        PyObject *error = PyLong_FromLong(pieces[i].error);
        if (error == NULL || PyList_SetItem(errors, i, error))
            Py_CLEAR(errors);
    }
end:
    while (held--)
        PyBuffer_Release(&views[held]);
    PyMem_Free(views);
    PyMem_Free(pieces);
    return errors;
}

static PyObject *why_no_io_uring(PyObject *module, PyObject *nothing)
{
    return PyUnicode_FromString(why_no_ring());
}

static PyMethodDef functions[] = {
    {"move_files", move_files, METH_O, NULL},
    {"why_no_io_uring", why_no_io_uring, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int add_files(PyObject *module)
{
#ifdef HAS_URING
    if (pthread_key_create(&of_thread, close_ring)) {
        PyErr_NoMemory();
        return -1;
    }
#endif
    return PyModule_AddFunctions(module, functions);
}
