/* Small commands out of a buffer, natively, the replies to a run of GETs, and those to leases. fast_parser.py is the contract
 * of `plain_commands`, says what plain means, and has the same function in Python, which gives the same for every
 * buffer. Nothing here looks behind the end of the buffer, and nothing is made in the length that a client claims before
 * the bytes for it are there. client/process_command.py is the contract of `answer_gets`, shm/attach.py that of `keep` and `take`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum {
    NUMBER_MAX = 16 * 1024, /* arguments of a command, and bytes of an argument: TEXT_BYTES_MAX of fast_parser.py */
    ARGUMENT_BYTES_MIN = 6, /* $0 CR LF CR LF */
    PAYLOAD_OFFSET_BYTES = 512, /* entry.py */
    DIGITS_MAX = 20,
    PLACE_BYTES_MAX = 12 + 2 * DIGITS_MAX, /* *2 CR LF :offset CR LF :length CR LF */
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
static PyObject *ACCESSED_S, *EXPIRE_AT_MS, *EXTENT, *HITS, *LENGTH, *VALUE, *ONE;

static int is_get(PyObject *word) {
    if (!PyBytes_CheckExact(word) || PyBytes_GET_SIZE(word) != 3) return 0;
    const char *name = PyBytes_AS_STRING(word);
    return memcmp(name, "GET", 3) == 0 || memcmp(name, "get", 3) == 0;
}

/* Note that `entry` was used now, as StoreState._hit says; lookups that were put off are ordered already
 * (Store.small_hits). 0 unless an exception is set. */
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

/* Arguments: commands, entries, replies, touch and now_s; client/process_command.py says what for. */
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

/* Write a number that is not negative; where it ends. */
static char *digits(char *to, Py_ssize_t number) {
    char text[DIGITS_MAX], *at = text + DIGITS_MAX;
    do *--at = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    memcpy(to, at, (size_t)(text + DIGITS_MAX - at));
    return to + (text + DIGITS_MAX - at);
}

/* What an object is as a number that is not negative; -1 if it is none, without an exception of its own. */
static Py_ssize_t number_of(PyObject *object) {
    if (object == NULL || !PyLong_CheckExact(object)) return -1;
    Py_ssize_t number = PyLong_AsSsize_t(object);
    if (number == -1) PyErr_Clear();
    return number;
}

/* Put the place of the `index`th of a run into `held`; 0 when something is there already, -1 with an exception. */
static int hold_place(PyObject *held, PyObject *run, Py_ssize_t index, PyObject *nbytes, const char *text, Py_ssize_t length) {
    PyObject *word = PyBytes_FromStringAndSize(text, length), *number = PyLong_FromSsize_t(index);
    PyObject *place = word == NULL || number == NULL ? NULL : PyTuple_Pack(3, run, number, nbytes);
    PyObject *there = place == NULL ? NULL : PyDict_SetDefault(held, word, place);
    int put = there == NULL ? -1 : there == place;
    Py_XDECREF(word);
    Py_XDECREF(number);
    Py_XDECREF(place);
    return put;
}

/* Keep one lease and write its reply to *to, behind which *to is then; its bytes of the arena, 0 when it is to be left
 * to others, -1 with an exception. */
static Py_ssize_t keep_one(PyObject *entry, PyObject *const *args, Py_ssize_t index, Py_ssize_t bytes_max, char **to) {
    if (entry == Py_None || PyBytes_CheckExact(entry)) return 0;
    PyObject *extent = PyObject_GetAttr(entry, EXTENT), *whole = extent == NULL ? NULL : PyObject_GetAttr(entry, LENGTH);
    Py_ssize_t length = number_of(whole), start = -1, nbytes = 0;
    Py_XDECREF(whole);
    if (whole != NULL && PyTuple_Check(extent) && PyTuple_GET_SIZE(extent) == 2) {
        start = number_of(PyTuple_GET_ITEM(extent, 0));
        nbytes = number_of(PyTuple_GET_ITEM(extent, 1));
    }
    int kept = extent == NULL || whole == NULL ? -1 : 0;
    if (length >= 0 && start >= 0 && nbytes > 0 && nbytes <= bytes_max) {
        char *word = *to + 5, *past = digits(word, start + PAYLOAD_OFFSET_BYTES);
        kept = hold_place(args[3], args[2], index, PyTuple_GET_ITEM(extent, 1), word, past - word);
        if (kept > 0) {
            memcpy(*to, "*2\r\n:", 5);
            memcpy(past, "\r\n:", 3);
            past = digits(past + 3, length);
            memcpy(past, "\r\n", 2);
            *to = past + 2;
        }
    }
    Py_XDECREF(extent);
    return kept > 0 ? nbytes : kept;
}

/* Arguments: found, at, run, held and room; shm/attach.py says what for. */
static PyObject *keep(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    Py_ssize_t bytes_max, leases_max, at = count == 5 ? number_of(args[1]) : -1, total = 0, nbytes = 1;
    if (at < 0 || !PyList_CheckExact(args[0]) || !PyDict_CheckExact(args[3]) || !PyTuple_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "keep() takes a list, an index, a run, a dict and a pair");
        return NULL;
    }
    if (!PyArg_ParseTuple(args[4], "nn", &bytes_max, &leases_max)) return NULL;
    Py_ssize_t past = PyList_GET_SIZE(args[0]);
    if (past - at > leases_max) past = at + leases_max;
    PyObject *text = PyBytes_FromStringAndSize(NULL, past > at ? (past - at) * PLACE_BYTES_MAX : 0);
    if (text == NULL) return NULL;
    char *to = PyBytes_AS_STRING(text);
    for (; at < past && (nbytes = keep_one(PyList_GET_ITEM(args[0], at), args, at, bytes_max - total, &to)) > 0; at++)
        total += nbytes;
    if (nbytes < 0) {
        Py_DECREF(text);
        return NULL;
    }
    if (_PyBytes_Resize(&text, to - PyBytes_AS_STRING(text)) < 0) return NULL;
    return Py_BuildValue("(Nnn)", text, at, total);
}

/* Whether there is just one lease at each of `words`; -1 with an exception. */
static int are_places(PyObject *words, PyObject *held) {
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(words); index++) {
        PyObject *place = PyDict_GetItemWithError(held, PyList_GET_ITEM(words, index));
        if (place == NULL && PyErr_Occurred()) return -1;
        if (place == NULL || !PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 3) return 0;
    }
    return 1;
}

/* Move the place at `word` from `held` to `taken`; its bytes, 0 if it was moved before, -1 with an exception. */
static Py_ssize_t take_one(PyObject *word, PyObject *held, PyObject *taken) {
    PyObject *place = PyDict_GetItemWithError(held, word);
    if (place == NULL) return PyErr_Occurred() ? -1 : 0;
    if (PyList_Append(taken, place) < 0 || PyDict_DelItem(held, word) < 0) return -1;
    return number_of(PyTuple_GET_ITEM(place, 2)); /* `taken` holds it */
}

/* Arguments: words and held; shm/attach.py says what for. */
static PyObject *take(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyList_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "take() takes a list and a dict");
        return NULL;
    }
    int simple = are_places(args[0], args[1]);
    if (simple < 0) return NULL;
    if (!simple) Py_RETURN_NONE;
    Py_ssize_t total = 0, nbytes = 0;
    PyObject *taken = PyList_New(0);
    for (Py_ssize_t index = 0; taken != NULL && nbytes >= 0 && index < PyList_GET_SIZE(args[0]); index++) {
        nbytes = take_one(PyList_GET_ITEM(args[0], index), args[1], taken);
        total += nbytes;
    }
    if (taken != NULL && nbytes >= 0) return Py_BuildValue("(Nn)", taken, total);
    Py_XDECREF(taken);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a place without bytes");
    return NULL;
}

static PyMethodDef METHODS[] = {
    {"plain_commands", plain_commands, METH_O, "As plain.plain_commands_in_python."},
    {"answer_gets", (PyCFunction)(void (*)(void))answer_gets, METH_FASTCALL, "As client/process_command.py says."},
    {"keep", (PyCFunction)(void (*)(void))keep, METH_FASTCALL, "As places.keep_in_python."},
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, "As places.take_in_python."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.server.protocol._plain", .m_size = 0, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__plain(void) {
    ACCESSED_S = PyUnicode_InternFromString("accessed_s");
    EXPIRE_AT_MS = PyUnicode_InternFromString("expire_at_ms");
    EXTENT = PyUnicode_InternFromString("extent");
    HITS = PyUnicode_InternFromString("hits");
    LENGTH = PyUnicode_InternFromString("length");
    VALUE = PyUnicode_InternFromString("value");
    ONE = PyLong_FromLong(1);
    if (!ACCESSED_S || !EXPIRE_AT_MS || !EXTENT || !HITS || !LENGTH || !VALUE || !ONE) return NULL;
    return PyModule_Create(&MODULE);
}
