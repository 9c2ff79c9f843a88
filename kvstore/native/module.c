/* The module kvstore.native._native. Each concern has a file of its own, which adds its functions. */
#include "kvstore_native.h"

static int fill(PyObject *module)
{
    return add_chains(module) || add_copies(module) || add_files(module) || add_ghosts(module) || add_index(module) ||
                   add_io_queue(module) || add_presence(module) || add_record_pages(module) || add_records(module) ||
                   add_slots(module)
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvstore.native._native", .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
