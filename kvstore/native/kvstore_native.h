/* What the files of the C extension share. */
#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

/* Adds what one file has to the module. Each returns -1 with an exception, or 0. */
int add_chains(PyObject *module);
int add_copies(PyObject *module);
int add_files(PyObject *module);
int add_ghosts(PyObject *module);
int add_index(PyObject *module);
int add_io_queue(PyObject *module);
int add_presence(PyObject *module);
int add_record_pages(PyObject *module);
int add_records(PyObject *module);
int add_slots(PyObject *module);

#endif
