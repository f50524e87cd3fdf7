/* What Python cannot say of memory, for kvredis.storage.memory.copy, its only user: copies of payloads past the caches, in
 * one piece and by strides, and where views begin.
 *
 * A block is far larger than what a cache should keep of it, and a thread that fills gigabytes of arena never finds the
 * destination in a cache. memcpy reads every such line before it overwrites it; a streaming store does not, which
 * makes two transfers over the memory bus out of three. Below STREAM_FROM_BYTES nothing is won by it, and a reader
 * that follows at once finds the bytes in the cache.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define STREAMS 1
#include <immintrin.h>
#endif

enum {
    STREAM_FROM_BYTES = 64 * 1024, /* shorter ones are memcpy's */
    UNLOCK_FROM_BYTES = 256 * 1024, /* from here on the interpreter lock is given up: about 30 us of copying */
    LINE_BYTES = 64,
};

typedef void (*copier)(char *destination, const char *source, size_t bytes);

static void copy_plain(char *destination, const char *source, size_t bytes) { memcpy(destination, source, bytes); }

#ifdef STREAMS
/* Each takes whole turns to a destination that stands at a line of the cache; what is left over is memcpy's. The caller
 * ends with a fence. */

__attribute__((target("avx512f"))) static void copy_avx512(char *to, const char *from, size_t bytes) {
    for (; bytes >= 256; bytes -= 256, to += 256, from += 256) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        __m512i c = _mm512_loadu_si512(from + 128), d = _mm512_loadu_si512(from + 192);
        _mm512_stream_si512((__m512i *)to, a);
        _mm512_stream_si512((__m512i *)(to + 64), b);
        _mm512_stream_si512((__m512i *)(to + 128), c);
        _mm512_stream_si512((__m512i *)(to + 192), d);
    }
    memcpy(to, from, bytes);
}

__attribute__((target("avx2"))) static void copy_avx2(char *to, const char *from, size_t bytes) {
    for (; bytes >= 128; bytes -= 128, to += 128, from += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64)), d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, bytes);
}

static void copy_sse2(char *to, const char *from, size_t bytes) {
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, bytes);
}
#endif

static const struct {
    const char *name;
    copier copies;
} WAYS[] = {
#ifdef STREAMS
    {"avx512", copy_avx512},
    {"avx2", copy_avx2},
    {"sse2", copy_sse2},
#endif
    {"memcpy", copy_plain},
};

enum { WAYS_MAX = sizeof WAYS / sizeof *WAYS };

/* Whether this processor has what a way needs. */
static int can(int way) {
#ifdef STREAMS
    if (WAYS[way].copies == copy_avx512) return __builtin_cpu_supports("avx512f");
    if (WAYS[way].copies == copy_avx2) return __builtin_cpu_supports("avx2");
#endif
    return way < WAYS_MAX;
}

/* What was streamed is seen by other processors before what is written from here on. */
static void fence(void) {
#ifdef STREAMS
    _mm_sfence();
#endif
}

static void copy_bytes(copier copies, char *destination, const char *source, size_t bytes) {
    uintptr_t to = (uintptr_t)destination, from = (uintptr_t)source;
    if (to < from + bytes && from < to + bytes) {
        memmove(destination, source, bytes);
    } else if (bytes < STREAM_FROM_BYTES) {
        memcpy(destination, source, bytes);
    } else {
        size_t head = -to & (LINE_BYTES - 1);
        memcpy(destination, source, head);
        copies(destination + head, source + head, bytes - head);
        fence();
    }
}

enum { DIMENSIONS_MAX = 6 };

/* How arrays are copied into others of the same shape: `run` bytes lie together in both, all else is told by counts and
 * strides in bytes, the outermost first. */
struct strided {
    size_t run;
    int dimensions;
    Py_ssize_t counts[DIMENSIONS_MAX], to_strides[DIMENSIONS_MAX], from_strides[DIMENSIONS_MAX];
};

static void copy_runs(copier copies, const struct strided *told, char *to, const char *from) {
    Py_ssize_t at[DIMENSIONS_MAX] = {0};
    for (;;) {
        if ((uintptr_t)to % LINE_BYTES) memcpy(to, from, told->run);
        else copies(to, from, told->run);
        int dimension = told->dimensions - 1;
        while (dimension >= 0 && ++at[dimension] == told->counts[dimension]) {
            at[dimension] = 0;
            to -= (told->counts[dimension] - 1) * told->to_strides[dimension];
            from -= (told->counts[dimension] - 1) * told->from_strides[dimension];
            dimension--;
        }
        if (dimension < 0) break;
        to += told->to_strides[dimension];
        from += told->from_strides[dimension];
    }
}

static int read_sizes(PyObject *given, int count, Py_ssize_t *found) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != count) {
        PyErr_Format(PyExc_TypeError, "copy_strided() takes tuples of one length, at most %d", DIMENSIONS_MAX);
        return -1;
    }
    for (int at = 0; at < count; at++) {
        found[at] = PyLong_AsSsize_t(PyTuple_GET_ITEM(given, at));
        if (found[at] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The addresses of a list; NULL with an exception set. */
static void **read_addresses(PyObject *list, Py_ssize_t count) {
    void **found = PyMem_Malloc((size_t)count * sizeof *found + 1);
    if (found == NULL) return PyErr_NoMemory(), NULL;
    for (Py_ssize_t at = 0; at < count; at++) {
        found[at] = PyLong_AsVoidPtr(PyList_GET_ITEM(list, at));
        if (found[at] == NULL && PyErr_Occurred()) {
            PyMem_Free(found);
            return NULL;
        }
    }
    return found;
}

/* Arguments: where arrays begin and where those to be copied into them do, as lists of one length; the bytes of a run,
 * counts, both arrays' strides, and which of WAYS. The caller keeps all arrays, of which no two overlap, and knows that
 * all that is told lies within them. */
static PyObject *copy_strided(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 7 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyTuple_Check(args[3]) ||
        PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1]) || PyTuple_GET_SIZE(args[3]) > DIMENSIONS_MAX) {
        PyErr_SetString(PyExc_TypeError, "copy_strided(to, from, run, counts, to_strides, from_strides, way)");
        return NULL;
    }
    struct strided told = {.dimensions = (int)PyTuple_GET_SIZE(args[3])};
    told.run = PyLong_AsSize_t(args[2]);
    long way = PyLong_AsLong(args[6]);
    if (PyErr_Occurred() || read_sizes(args[3], told.dimensions, told.counts) < 0 ||
        read_sizes(args[4], told.dimensions, told.to_strides) < 0 ||
        read_sizes(args[5], told.dimensions, told.from_strides) < 0)
        return NULL;
    if (way < 0 || way >= WAYS_MAX || !can((int)way)) {
        PyErr_Format(PyExc_ValueError, "this processor has no way of copying number %ld", way);
        return NULL;
    }
    for (int at = 0; at < told.dimensions; at++)
        if (told.counts[at] <= 0) Py_RETURN_NONE;
    Py_ssize_t arrays = PyList_GET_SIZE(args[0]);
    void **to = read_addresses(args[0], arrays), **from = to == NULL ? NULL : read_addresses(args[1], arrays);
    if (from != NULL) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t at = 0; at < arrays; at++) copy_runs(WAYS[way].copies, &told, to[at], from[at]);
        fence();
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(to);
    PyMem_Free(from);
    return from == NULL ? NULL : Py_NewRef(Py_None);
}

/* Arguments: destination, source and which of WAYS. */
static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 3) {
        PyErr_Format(PyExc_TypeError, "copy() takes 3 arguments (%zd given)", count);
        return NULL;
    }
    long way = PyLong_AsLong(args[2]);
    if (way == -1 && PyErr_Occurred()) return NULL;
    if (way < 0 || way >= WAYS_MAX || !can((int)way)) {
        PyErr_Format(PyExc_ValueError, "this processor has no way of copying number %ld", way);
        return NULL;
    }
    Py_buffer to, from;
    if (PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE) < 0) return NULL;
    if (PyObject_GetBuffer(args[1], &from, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&to);
        return NULL;
    }
    PyObject *done = NULL;
    if (to.len != from.len) {
        PyErr_Format(PyExc_ValueError, "cannot copy %zd bytes over %zd", from.len, to.len);
    } else if (to.len < UNLOCK_FROM_BYTES) {
        copy_bytes(WAYS[way].copies, to.buf, from.buf, (size_t)to.len);
        done = Py_NewRef(Py_None);
    } else {
        Py_BEGIN_ALLOW_THREADS /* both buffers are held, so neither can be resized, unmapped or given back meanwhile */
        copy_bytes(WAYS[way].copies, to.buf, from.buf, (size_t)to.len);
        Py_END_ALLOW_THREADS
        done = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    return done;
}

/* The names of the ways that this processor has, the best first, each with its number. */
static PyObject *ways(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    PyObject *names = PyDict_New();
    for (int way = 0; names != NULL && way < WAYS_MAX; way++) {
        if (!can(way)) continue;
        PyObject *number = PyLong_FromLong(way);
        if (number == NULL || PyDict_SetItemString(names, WAYS[way].name, number) < 0) Py_CLEAR(names);
        Py_XDECREF(number);
    }
    return names;
}

/* Where each of a sequence of views begins: through ctypes that takes longer than all else that is done for a copy. */
static PyObject *addresses(PyObject *module, PyObject *views) {
    (void)module;
    PyObject *all = PySequence_Fast(views, "addresses() takes a sequence of views");
    if (all == NULL) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(all);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t at = 0; found != NULL && at < count; at++) {
        Py_buffer view;
        PyObject *address = NULL;
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(all, at), &view, PyBUF_SIMPLE) == 0) {
            address = PyLong_FromVoidPtr(view.buf);
            PyBuffer_Release(&view);
        }
        if (address == NULL) Py_CLEAR(found);
        else PyList_SET_ITEM(found, at, address);
    }
    Py_DECREF(all);
    return found;
}

static PyMethodDef METHODS[] = {
    {"addresses", addresses, METH_O, "addresses(views) -> [address]"},
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, "copy(destination, source, way)"},
    {"copy_strided", (PyCFunction)(void (*)(void))copy_strided, METH_FASTCALL,
     "copy_strided(to, from, run, counts, to_strides, from_strides, way)"},
    {"ways", ways, METH_NOARGS, "ways() -> {name: number}, the best first"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.storage.memory._native", .m_size = 0, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&MODULE); }
