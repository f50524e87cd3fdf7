/* One recvmsg(2) into a caller's memory, for kvredis.backends.resp.wire, which does the same through ctypes.
 *
 * Each reply of a block takes two, of which a block of 64 KiB is long enough to notice what each costs beside the kernel.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { VIEWS_MAX = 16 }; /* pieces of a body, and what ends it */

/* Arguments: descriptor, a sequence of views to be filled in order, flags. Gives how many bytes came, or the error's
 * number below zero: a call that a signal has interrupted is not repeated. */
static PyObject *receive(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "receive() takes 3 arguments (%zd given)", count);
        return NULL;
    }
    long descriptor = PyLong_AsLong(args[0]);
    if (descriptor == -1 && PyErr_Occurred()) return NULL;
    long flags = PyLong_AsLong(args[2]);
    if (flags == -1 && PyErr_Occurred()) return NULL;
    PyObject *all = PySequence_Fast(args[1], "receive() takes a sequence of views");
    if (all == NULL) return NULL;
    Py_ssize_t wanted = PySequence_Fast_GET_SIZE(all), held = 0;
    if (wanted > VIEWS_MAX) {
        PyErr_Format(PyExc_ValueError, "receive() fills at most %d views", VIEWS_MAX);
        Py_DECREF(all);
        return NULL;
    }
    Py_buffer views[VIEWS_MAX];
    struct iovec buffers[VIEWS_MAX];
    while (held < wanted && PyObject_GetBuffer(PySequence_Fast_GET_ITEM(all, held), &views[held], PyBUF_WRITABLE) == 0) {
        buffers[held] = (struct iovec){views[held].buf, (size_t)views[held].len};
        held++;
    }
    PyObject *came = NULL;
    if (held == wanted) {
        struct msghdr message = {.msg_iov = buffers, .msg_iovlen = (size_t)wanted};
        ssize_t result;
        Py_BEGIN_ALLOW_THREADS /* the views are held, so that their memory can be neither resized nor unmapped */
        result = recvmsg((int)descriptor, &message, (int)flags);
        if (result < 0) result = -errno;
        Py_END_ALLOW_THREADS
        came = PyLong_FromSsize_t(result);
    }
    while (held > 0) PyBuffer_Release(&views[--held]);
    Py_DECREF(all);
    return came;
}

static PyMethodDef METHODS[] = {
    {"receive", (PyCFunction)(void (*)(void))receive, METH_FASTCALL, "receive(descriptor, views, flags) -> bytes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.backends.resp._recvmsg", .m_size = 0, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__recvmsg(void) { return PyModule_Create(&MODULE); }
