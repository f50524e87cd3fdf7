/* Small commands out of a buffer, natively, and the replies to a run of GETs. plain.py is the contract of
 * `plain_commands`, says what plain means, and has the same function in Python, which gives the same for every buffer.
 * Nothing here looks behind the end of the buffer, and nothing is made in the length that a client claims before the
 * bytes for it are there. runs.py is the contract of `answer_gets`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum {
    NUMBER_MAX = 16 * 1024, /* arguments of a command, and bytes of an argument: TEXT_BYTES_MAX of plain.py */
    ARGUMENT_BYTES_MIN = 6, /* $0 CR LF CR LF */
};

typedef enum { COMPLETE, INCOMPLETE, NOT_PLAIN } state;

/* The first CR LF in [at, end), NULL if there is none. */
static const char *line_break(const char *at, const char *end) {
    while (at < end && (at = memchr(at, '\r', (size_t)(end - at))) != NULL) {
        if (end - at > 1 && at[1] == '\n') return at;
        at++;
    }
    return NULL;
}

/* What something is that is not as it should be: it may become so only as long as its line has not ended. */
static state wrong(const char *at, const char *end) { return line_break(at, end) == NULL ? INCOMPLETE : NOT_PLAIN; }

/* Read the line `kind` (* or $) and a number, as Redis' clients write it; *at is behind it then. */
static state number_line(const char **at, const char *end, char kind, Py_ssize_t *number) {
    const char *here = *at, *digits = here + 1;
    Py_ssize_t value = 0;
    if (here == end || *here != kind) return wrong(*at, end);
    for (here = digits; here < end && *here >= '0' && *here <= '9' && value <= NUMBER_MAX; here++)
        value = 10 * value + (*here - '0');
    if (here == digits || value > NUMBER_MAX || (*digits == '0' && here - digits > 1)) return wrong(*at, end);
    if (end - here < 2 || here[0] != '\r' || here[1] != '\n') return wrong(*at, end);
    *number = value;
    *at = here + 2;
    return COMPLETE;
}

/* Read one argument, whose text is at *text then; *at is behind it. */
static state argument(const char **at, const char *end, const char **text, Py_ssize_t *length) {
    const char *here = *at;
    state found = number_line(&here, end, '$', length);
    if (found != COMPLETE) return found;
    if (end - here < *length + 2) return end - here < *length ? INCOMPLETE : wrong(here + *length, end);
    if (here[*length] != '\r' || here[*length + 1] != '\n') return wrong(here + *length, end);
    *text = here;
    *at = here + *length + 2;
    return COMPLETE;
}

/* Whether there are fewer than `wanted` line breaks in [at, end). */
static int breaks_fewer_than(Py_ssize_t wanted, const char *at, const char *end) {
    while (wanted > 0 && (at = line_break(at, end)) != NULL) {
        at += 2;
        wanted--;
    }
    return wanted > 0;
}

/* Read `count` arguments into a new list, *words; `name` is the last command's, which is used again if it is equal, as
 * in pipelines it mostly is. A list is made only if all can be there. -1 with an exception if there is no memory. */
static int arguments(const char **at, const char *end, Py_ssize_t count, PyObject *name, PyObject **words) {
    const char *text;
    Py_ssize_t length;
    PyObject *list = NULL;
    if ((end - *at) / ARGUMENT_BYTES_MIN >= count && (list = PyList_New(count)) == NULL) return -1;
    for (Py_ssize_t number = 0; number < count; number++) {
        state found = argument(at, end, &text, &length);
        if (found != COMPLETE) {
            Py_XDECREF(list);
            return found;
        }
        if (list == NULL) continue;
        PyObject *word = name;
        if (number == 0 && name != NULL && PyBytes_GET_SIZE(name) == length &&
            memcmp(PyBytes_AS_STRING(name), text, (size_t)length) == 0) {
            Py_INCREF(word);
        } else if ((word = PyBytes_FromStringAndSize(text, length)) == NULL) {
            Py_DECREF(list);
            return -1;
        }
        PyList_SET_ITEM(list, number, word);
    }
    *words = list;
    return COMPLETE;
}

/* Whether a line in [at, end), or what stands behind the last one, is longer than any argument may be. */
static int has_long_line(const char *at, const char *end) {
    while (end - at > NUMBER_MAX) {
        const char *stop = line_break(at, end);
        if ((stop == NULL ? end : stop) - at > NUMBER_MAX) return 1;
        if (stop == NULL) break;
        at = stop + 2;
    }
    return 0;
}

/* All commands at *at into the list `commands`; *plain is what plain_commands says of the rest. -1 with an exception. */
static int read_commands(const char **at, const char *end, PyObject *commands, int *plain) {
    PyObject *name = NULL;
    Py_ssize_t count = 0;
    *plain = 1;
    while (*at < end) {
        const char *here = *at;
        PyObject *words = NULL;
        state counted = number_line(&here, end, '*', &count);
        if (counted == COMPLETE && count == 0) counted = NOT_PLAIN;
        if (counted != COMPLETE) {
            *plain = counted == INCOMPLETE;
            return 0;
        }
        int found = arguments(&here, end, count, name, &words);
        if (found < 0) return -1;
        if (found != COMPLETE) {
            *plain = found == INCOMPLETE || breaks_fewer_than(1 + 2 * count, *at, end);
            return 0;
        }
        name = PyList_GET_ITEM(words, 0);
        int failed = PyList_Append(commands, words);
        Py_DECREF(words);
        if (failed) return -1;
        *at = here;
    }
    return 0;
}

static PyObject *plain_commands(PyObject *module, PyObject *data) {
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) return NULL;
    const char *at = view.buf, *end = at + view.len;
    int plain = 0;
    PyObject *found = NULL, *commands = PyList_New(0);
    if (commands != NULL && read_commands(&at, end, commands, &plain) == 0) {
        Py_ssize_t left = end - at;
        if (left > NUMBER_MAX && has_long_line(at, end)) {
            plain = 0;
            left = view.len;
            if (PyList_SetSlice(commands, 0, PyList_GET_SIZE(commands), NULL) < 0) Py_CLEAR(commands);
        }
        if (commands != NULL) found = Py_BuildValue("(OnO)", commands, left, plain ? Py_True : Py_False);
    }
    Py_XDECREF(commands);
    PyBuffer_Release(&view);
    return found;
}

/* Attributes of an entry, made once. */
static PyObject *ACCESSED_S, *EXPIRE_AT_MS, *HITS, *VALUE, *ONE;

static int is_get(PyObject *word) {
    if (!PyBytes_CheckExact(word) || PyBytes_GET_SIZE(word) != 3) return 0;
    const char *name = PyBytes_AS_STRING(word);
    return memcmp(name, "GET", 3) == 0 || memcmp(name, "get", 3) == 0;
}

/* Note that `entry` was used now, as Store.fetch does; 0 unless an exception is set. */
static int note_hit(PyObject *entry, PyObject *touch, PyObject *now_s) {
    PyObject *done = PyObject_CallOneArg(touch, entry);
    if (done == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) return -1;
        PyErr_Clear(); /* another thread has just taken the entry away: it was a hit before that */
    }
    Py_XDECREF(done);
    PyObject *hits = PyObject_GetAttr(entry, HITS);
    PyObject *more = hits == NULL ? NULL : PyNumber_Add(hits, ONE);
    PyObject *now = more == NULL ? NULL : PyObject_CallNoArgs(now_s);
    int failed = now == NULL || PyObject_SetAttr(entry, HITS, more) < 0 ||
                 PyObject_SetAttr(entry, ACCESSED_S, now) < 0;
    Py_XDECREF(hits);
    Py_XDECREF(more);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* The value as a reply of one piece. */
static PyObject *bulk(PyObject *value) {
    char head[32];
    Py_ssize_t length = PyBytes_GET_SIZE(value);
    int head_bytes = PyOS_snprintf(head, sizeof head, "$%zd\r\n", length);
    PyObject *reply = PyBytes_FromStringAndSize(NULL, head_bytes + length + 2);
    if (reply == NULL) return NULL;
    char *to = PyBytes_AS_STRING(reply);
    memcpy(to, head, (size_t)head_bytes);
    memcpy(to + head_bytes, PyBytes_AS_STRING(value), (size_t)length);
    memcpy(to + head_bytes + length, "\r\n", 2);
    return reply;
}

/* The reply to GET `key` if its value is small and has no end; NULL for all else, with an exception or without. */
static PyObject *answer(PyObject *key, PyObject *entries, PyObject *touch, PyObject *now_s) {
    PyObject *entry = PyDict_GetItemWithError(entries, key), *reply = NULL;
    if (entry == NULL) return NULL;
    Py_INCREF(entry); /* while others run, in a policy that takes a lock, the key may lose it */
    PyObject *value = PyObject_GetAttr(entry, VALUE);
    PyObject *end = value == NULL ? NULL : PyObject_GetAttr(entry, EXPIRE_AT_MS);
    if (end != NULL && PyBytes_CheckExact(value) && PyObject_IsTrue(end) == 0 && note_hit(entry, touch, now_s) == 0)
        reply = bulk(value);
    Py_XDECREF(end);
    Py_XDECREF(value);
    Py_DECREF(entry);
    return reply;
}

/* Arguments: commands, entries, replies, touch and now_s; runs.py says what for. */
static PyObject *answer_gets(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 5 || !PyList_CheckExact(args[0]) || !PyDict_CheckExact(args[1]) || !PyList_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "answer_gets() takes a list, a dict, a list and two callables");
        return NULL;
    }
    Py_ssize_t done = 0;
    for (; done < PyList_GET_SIZE(args[0]); done++) {
        PyObject *words = PyList_GET_ITEM(args[0], done);
        if (!PyList_CheckExact(words) || PyList_GET_SIZE(words) != 2 || !is_get(PyList_GET_ITEM(words, 0))) break;
        PyObject *key = PyList_GET_ITEM(words, 1);
        if (!PyBytes_CheckExact(key)) break;
        Py_INCREF(key);
        PyObject *reply = answer(key, args[1], args[3], args[4]);
        Py_DECREF(key);
        int failed = reply == NULL || PyList_Append(args[2], reply) < 0;
        Py_XDECREF(reply);
        if (failed) {
            PyErr_Clear(); /* the handler, which this command is left to, meets what is wrong itself */
            break;
        }
    }
    return PyLong_FromSsize_t(done);
}

static PyMethodDef METHODS[] = {
    {"plain_commands", plain_commands, METH_O, "As plain.plain_commands_in_python."},
    {"answer_gets", (PyCFunction)(void (*)(void))answer_gets, METH_FASTCALL, "As runs.py says."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.server._plain", .m_size = 0, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__plain(void) {
    ACCESSED_S = PyUnicode_InternFromString("accessed_s");
    EXPIRE_AT_MS = PyUnicode_InternFromString("expire_at_ms");
    HITS = PyUnicode_InternFromString("hits");
    VALUE = PyUnicode_InternFromString("value");
    ONE = PyLong_FromLong(1);
    if (!ACCESSED_S || !EXPIRE_AT_MS || !HITS || !VALUE || !ONE) return NULL;
    return PyModule_Create(&MODULE);
}
