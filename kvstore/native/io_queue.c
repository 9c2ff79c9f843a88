/* Batches of reads and writes that threads move without the GIL: a thread needs it once a batch, to report the end.
 *
 * A task is a run of pieces of one batch, for one thread. Tasks are cut off the oldest batch when a thread is free.
 * A batch leaves its lane with its last piece, and ends with its last task. The contract: portable_queue.py.
 */
#define _GNU_SOURCE
#include "files.h"
#include "kvstore_native.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define MOST_PIECES 64                    /* of a task, which delays urgent ones */
#define FEW_PIECES 4                      /* of a task: waking another thread takes longer than moving so little */
#define FEW_BYTES ((size_t)128 << 10)     /* the same */
#define MOST_TASK_BYTES ((size_t)1 << 30) /* the length of a piece fits a submission of io_uring */

typedef struct {
    piece whole;
    Py_buffer view;
} transfer;

typedef struct batch {
    struct batch *next;
    PyObject *token;
    size_t count, at, start;  /* transfers; the first piece that no thread has: its transfer, its start there */
    size_t tasks;             /* under way */
    size_t most_bytes, most_pieces;
    transfer transfers[];
} batch;

typedef struct {
    batch *first, *last;
    size_t waiting_pieces;
} lane;

typedef struct {
    batch *of;
    size_t n;
    piece pieces[MOST_PIECES];
    size_t transfers[MOST_PIECES]; /* the number of each piece's transfer */
} task;

typedef struct {
    PyObject_HEAD
    pid_t process;
    pthread_mutex_t mutex; /* guards all below. Its holder waits neither for the GIL nor for I/O */
    pthread_cond_t changed;
    size_t threads, task_bytes, queue_pieces, idle;
    unsigned int others_every, passed_over;
    int closed;
    lane lanes[2]; /* the second one is urgent */
} queue;

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t share(size_t total, size_t parts)
{
    return total / parts + (total % parts != 0);
}

static lane *next_lane(queue *q)
{
    lane *others = &q->lanes[0], *urgent = &q->lanes[1];
    if (urgent->first == NULL || others->first == NULL)
        return urgent->first == NULL ? others : urgent;
    q->passed_over = (q->passed_over + 1) % q->others_every;
    return q->passed_over ? urgent : others;
}

/* Cuts the next task off its batch. Returns 0 if nothing waits. */
static int take_task(queue *q, task *t)
{
    lane *l = next_lane(q);
    batch *b = t->of = l->first;
    if (b == NULL)
        return 0;
    t->n = 0;
    size_t pieces = 0, room = b->most_bytes;
    while (b->at < b->count && pieces < b->most_pieces) {
        const piece *whole = &b->transfers[b->at].whole;
        size_t size = least(whole->length - b->start, q->task_bytes);
        if (size > room && pieces)
            break;
        if (size) {
            room -= least(room, size);
            pieces++;
        }
        if (size && !whole->error) {
            t->transfers[t->n] = b->at;
            t->pieces[t->n++] = (piece){.fd = whole->fd,
                                        .write = whole->write,
                                        .offset = whole->offset + (off_t)b->start,
                                        .memory = whole->memory + b->start,
                                        .length = size};
        }
        b->start += size;
        if (b->start == whole->length) {
            b->start = 0;
            b->at++;
        }
    }
    l->waiting_pieces -= pieces;
    b->tasks++;
    if (b->at == b->count) {
        l->first = b->next;
        if (l->first == NULL)
            l->last = NULL;
    }
    return 1;
}

/* Keeps the errors of a task. Returns its batch if that has ended. */
static batch *end_task(const task *t)
{
    batch *b = t->of;
    for (size_t i = 0; i < t->n; i++)
        if (t->pieces[i].error)
            b->transfers[t->transfers[i]].whole.error = t->pieces[i].error;
    b->tasks--;
    return b->tasks == 0 && b->at == b->count ? b : NULL;
}

static void free_batch(batch *b)
{
    for (size_t i = 0; i < b->count; i++)
        PyBuffer_Release(&b->transfers[i].view);
    Py_XDECREF(b->token);
    PyMem_Free(b);
}

/* Takes a tuple of fd, offset, buffer, and whether it is written. Returns -1 with an exception for another thing. */
static int take_transfer(transfer *each, PyObject *tuple)
{
    piece *whole = &each->whole;
    long long offset;
    PyObject *buffer;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "a transfer is no tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(tuple, "iLOp", &whole->fd, &offset, &buffer, &whole->write))
        return -1;
    if (offset < 0 || PyObject_GetBuffer(buffer, &each->view, whole->write ? PyBUF_SIMPLE : PyBUF_WRITABLE)) {
        PyErr_Clear(); /* the other transfers are moved */
        whole->error = EINVAL;
        return 0;
    }
    whole->offset = (off_t)offset;
    whole->memory = each->view.buf;
    whole->length = (size_t)each->view.len;
    return 0;
}

static batch *new_batch(PyObject *list, PyObject *token)
{
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "transfers are no list");
        return NULL;
    }
    size_t n = (size_t)PyList_Size(list);
    batch *b = PyMem_Calloc(1, sizeof *b + n * sizeof *b->transfers);
    if (b == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (; b->count < n; b->count++) {
        PyObject *each = PyList_GetItem(list, (Py_ssize_t)b->count);
        if (each == NULL || take_transfer(&b->transfers[b->count], each)) {
            free_batch(b);
            return NULL;
        }
    }
    b->token = Py_NewRef(token);
    return b;
}

/* Appends a batch, or refuses all of it, and wakes threads for it. Returns 0 if the queue is closed. */
static int append(queue *q, batch *b, lane *l)
{
    size_t bytes = 0, pieces = 0;
    for (size_t i = 0; i < b->count; i++) {
        bytes += b->transfers[i].whole.length;
        pieces += share(b->transfers[i].whole.length, q->task_bytes);
    }
    b->most_bytes = least(q->task_bytes, most(share(bytes, q->threads), FEW_BYTES));
    b->most_pieces = least(MOST_PIECES, most(share(pieces, q->threads), FEW_PIECES));
    pthread_mutex_lock(&q->mutex);
    int open = !q->closed;
    if (open) {
        if (pieces > q->queue_pieces - least(l->waiting_pieces, q->queue_pieces)) {
            for (size_t i = 0; i < b->count; i++)
                b->transfers[i].whole.error = EAGAIN;
            b->at = b->count;
            pieces = 0;
        }
        l->waiting_pieces += pieces;
        *(l->last == NULL ? &l->first : &l->last->next) = b;
        l->last = b;
        size_t tasks = most(share(bytes, b->most_bytes), share(pieces, b->most_pieces));
        for (size_t wakes = least(q->idle, most(tasks, 1)); wakes; wakes--)
            pthread_cond_signal(&q->changed);
    }
    pthread_mutex_unlock(&q->mutex);
    return open;
}

static PyObject *queue_submit(PyObject *self, PyObject *arguments)
{
    queue *q = (queue *)self;
    PyObject *list, *token;
    int urgent, open = 0;
    if (!PyArg_ParseTuple(arguments, "OOp", &list, &token, &urgent))
        return NULL;
    batch *b = new_batch(list, token);
    if (b == NULL)
        return NULL;
    if (q->process == getpid()) /* after a fork there are no threads */
        open = append(q, b, &q->lanes[urgent]);
    if (!open)
        free_batch(b);
    return PyBool_FromLong(open);
}

/* Returns the token of a batch, and the number and error of each transfer that failed. */
static PyObject *report(batch *b)
{
    PyObject *failures = PyList_New(0);
    for (size_t i = 0; failures != NULL && i < b->count; i++) {
        int error = b->transfers[i].whole.error;
        if (!error)
            continue;
        PyObject *failure = Py_BuildValue("ni", (Py_ssize_t)i, error);
        if (failure == NULL || PyList_Append(failures, failure))
            Py_CLEAR(failures);
        Py_XDECREF(failure);
    }
    PyObject *ended = failures == NULL ? NULL : PyTuple_Pack(2, b->token, failures);
    Py_XDECREF(failures);
    free_batch(b);
    return ended;
}

static PyObject *queue_next(PyObject *self, PyObject *nothing)
{
    queue *q = (queue *)self;
    batch *ended = NULL;
    task t;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&q->mutex);
    while (ended == NULL) {
        if (take_task(q, &t)) {
            pthread_mutex_unlock(&q->mutex);
            move_all(t.pieces, t.n);
            pthread_mutex_lock(&q->mutex);
            ended = end_task(&t);
        } else if (q->closed) {
            break;
        } else {
            q->idle++;
            pthread_cond_wait(&q->changed, &q->mutex);
            q->idle--;
        }
    }
    pthread_mutex_unlock(&q->mutex);
    Py_END_ALLOW_THREADS
    return ended == NULL ? Py_NewRef(Py_None) : report(ended);
}

static PyObject *queue_close(PyObject *self, PyObject *nothing)
{
    queue *q = (queue *)self;
    if (q->process == getpid()) {
        pthread_mutex_lock(&q->mutex);
        q->closed = 1;
        pthread_cond_broadcast(&q->changed);
        pthread_mutex_unlock(&q->mutex);
    }
    Py_RETURN_NONE;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    Py_ssize_t threads, task_bytes, queue_pieces, others_every;
    if (names != NULL && PyDict_Size(names)) {
        PyErr_SetString(PyExc_TypeError, "no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "nnnn", &threads, &task_bytes, &queue_pieces, &others_every))
        return NULL;
    if (threads < 1 || task_bytes < 1 || (size_t)task_bytes > MOST_TASK_BYTES || queue_pieces < 1 ||
        others_every < 1 || others_every > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a number is too small or too large");
        return NULL;
    }
    queue *q = (queue *)PyType_GenericAlloc(type, 0);
    if (q == NULL)
        return NULL;
    q->threads = (size_t)threads;
    q->task_bytes = (size_t)task_bytes;
    q->queue_pieces = (size_t)queue_pieces;
    q->others_every = (unsigned int)others_every;
    pthread_mutex_init(&q->mutex, NULL);
    pthread_cond_init(&q->changed, NULL);
    q->process = getpid();
    return (PyObject *)q;
}

static void queue_dealloc(PyObject *self)
{
    queue *q = (queue *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < 2; i++)
        for (batch *b = q->lanes[i].first, *next; b != NULL; b = next) {
            next = b->next;
            free_batch(b);
        }
    pthread_cond_destroy(&q->changed);
    pthread_mutex_destroy(&q->mutex);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"submit", queue_submit, METH_VARARGS, NULL},
    {"next", queue_next, METH_NOARGS, NULL},
    {"close", queue_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "kvstore.native._native.IOQueue",
    .basicsize = sizeof(queue),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

int add_io_queue(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
