/* Holds on many blocks at a time, and their end, natively. lease_many.py is the contract and has the same in Python; what
 * a hit does is said in state.py (StoreState._hit): used_entry below is its fast path.
 *
 * WHY slots are read where they lie and not as attributes: a block leased by the thousand is touched by nothing else,
 * so a lease costs what is noted down for it, and a dozen attributes were most of that. Where slots lie is asked of the
 * classes themselves; if they say something unexpected, this is no module and Python does the work.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

static PyTypeObject *ENTRY, *DATABASE_TYPE, *RUN;
static PyObject *NOWHERE;

/* Slots of Entry, and one of Database and LeaseRun each: names, and how far into the object they are. */
enum { ACCESSED_S, DATABASE, EXPIRE_AT_MS, EXTENT, HITS, KEY, LEASES, LENGTH, TOKENS, VALUE, NUMBER, ENTRIES, SLOTS };
static const char *const NAMES[SLOTS] = {"accessed_s", "database", "expire_at_ms", "extent", "hits",   "key",
                                         "leases",     "length",   "tokens",       "value",  "number", "entries"};
static Py_ssize_t offsets[SLOTS];

static PyObject **slot(PyObject *object, int name) { return (PyObject **)((char *)object + offsets[name]); }

/* Exchange what is in a slot for `value`, whose reference is taken; -1 when that is NULL, with its exception. */
static int put(PyObject *object, int name, PyObject *value) {
    if (value == NULL) return -1;
    PyObject *old = *slot(object, name);
    *slot(object, name) = value;
    Py_XDECREF(old);
    return 0;
}

/* Add to a count in a slot; the new count, -1 with an exception. */
static Py_ssize_t count_on(PyObject *entry, int name, Py_ssize_t step) {
    PyObject *old = *slot(entry, name);
    Py_ssize_t count = old == NULL ? -1 : PyLong_AsSsize_t(old);
    if (count == -1 && !PyErr_Occurred()) PyErr_SetString(PyExc_AttributeError, NAMES[name]);
    if (PyErr_Occurred()) return -1;
    count += step;
    return put(entry, name, PyLong_FromSsize_t(count)) < 0 ? -1 : count;
}

/* What has been held of a run so far. */
typedef struct {
    Py_ssize_t used, leases, nbytes, tokens;
} Sums;

/* Add what a slot says to a sum; -1 with an exception. */
static int add(PyObject *entry, int name, Py_ssize_t *sum) {
    PyObject *number = *slot(entry, name);
    Py_ssize_t value = number == NULL ? -1 : PyLong_AsSsize_t(number);
    if (value < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, NAMES[name]);
        return -1;
    }
    *sum += value;
    return 0;
}

/* Whether an entry's bytes are in the arena and have no end. */
static int is_simple(PyObject *entry) {
    if (entry == NULL || Py_TYPE(entry) != ENTRY || *slot(entry, VALUE) != Py_None) return 0;
    PyObject *end = *slot(entry, EXPIRE_AT_MS), *extent = *slot(entry, EXTENT);
    return extent != NULL && extent != NOWHERE && end != NULL && PyLong_CheckExact(end) && !PyObject_IsTrue(end);
}

/* The entry under `key`, used now, as a new reference; NULL with an exception, or if there is none. */
static PyObject *used_entry(PyObject *key, PyObject *const *args, Sums *sums) {
    PyObject *entry = PyDict_GetItemWithError(args[1], key);
    if (!is_simple(entry)) {
        if (entry == NULL && PyErr_Occurred()) return NULL;
        entry = PyObject_CallOneArg(args[2], key);
        if (entry != Py_None) return entry;
        Py_DECREF(entry);
        return NULL;
    }
    Py_INCREF(entry);
    PyObject *touched = PyObject_CallOneArg(args[3], entry);
    Py_XDECREF(touched);
    if (touched == NULL || count_on(entry, HITS, 1) < 0) {
        Py_DECREF(entry);
        return NULL;
    }
    Py_INCREF(args[4]);
    put(entry, ACCESSED_S, args[4]);
    sums->used++;
    return entry;
}

/* Note what there is under one key: at `index` of `found`, and of `held` if it is held now. -1 with an exception. */
static int hold_one(PyObject *entry, PyObject *found, PyObject *held, Py_ssize_t index, Sums *sums) {
    PyObject *shown = entry, *kept = Py_None;
    if (entry == NULL) {
        if (PyErr_Occurred()) return -1;
        shown = Py_None;
    } else if (Py_TYPE(entry) != ENTRY) {
        PyErr_SetString(PyExc_TypeError, "a hit is an Entry");
        return -1;
    } else if (*slot(entry, VALUE) != Py_None) {
        shown = *slot(entry, VALUE) == NULL ? Py_None : *slot(entry, VALUE);
    } else {
        if (add(entry, LENGTH, &sums->nbytes) < 0 || add(entry, TOKENS, &sums->tokens) < 0) return -1;
        if (count_on(entry, LEASES, 1) < 0) return -1;
        sums->leases++;
        kept = entry;
    }
    Py_INCREF(shown);
    Py_INCREF(kept);
    PyList_SET_ITEM(found, index, shown);
    PyList_SET_ITEM(held, index, kept);
    return 0;
}

/* Arguments: keys, entries, hit, touch and now_s. */
static PyObject *hold(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    (void)module;
    if (argc != 5 || !PyList_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "hold() takes a list, a dict, two callables and a time");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[0]), index = 0;
    Sums sums = {0, 0, 0, 0};
    PyObject *result = NULL, *found = PyList_New(count), *held = found == NULL ? NULL : PyList_New(count);
    for (; held != NULL && index < count && index < PyList_GET_SIZE(args[0]); index++) {
        PyObject *key = PyList_GET_ITEM(args[0], index);
        Py_INCREF(key);
        PyObject *entry = used_entry(key, args, &sums);
        int failed = hold_one(entry, found, held, index, &sums);
        Py_XDECREF(entry);
        Py_DECREF(key);
        if (failed) break;
    }
    if (held != NULL && index == count) result = Py_BuildValue("(OO(nnnn))", found, held, sums.used, sums.leases, sums.nbytes, sums.tokens);
    Py_XDECREF(found);
    Py_XDECREF(held);
    if (result == NULL && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "the keys have changed meanwhile");
    return result;
}

/* Whether `entry` is what stands under its key in `spaces`; -1 with an exception. */
static int is_visible(PyObject *entry, PyObject *spaces) {
    if (spaces == Py_None) return 0;
    PyObject *database = *slot(entry, DATABASE), *key = *slot(entry, KEY);
    PyObject *known = database == NULL || Py_TYPE(database) != DATABASE_TYPE ? NULL : *slot(database, NUMBER);
    Py_ssize_t number = known == NULL ? -1 : PyLong_AsSsize_t(known);
    if (key == NULL || number < 0 || number >= PyList_GET_SIZE(spaces) ||
        !PyDict_CheckExact(PyList_GET_ITEM(spaces, number))) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "an entry of no database");
        return -1;
    }
    PyObject *there = PyDict_GetItemWithError(PyList_GET_ITEM(spaces, number), key);
    return there == NULL && PyErr_Occurred() ? -1 : there == entry;
}

/* End one hold: 1, 0 when it has ended before, -1 with an exception. */
static int end_one(PyObject *place, PyObject *spaces, PyObject *unheld) {
    PyObject *run = PyTuple_CheckExact(place) && PyTuple_GET_SIZE(place) == 3 ? PyTuple_GET_ITEM(place, 0) : NULL;
    PyObject *entries = run != NULL && Py_TYPE(run) == RUN ? *slot(run, ENTRIES) : NULL;
    Py_ssize_t at = entries == NULL ? -1 : PyLong_AsSsize_t(PyTuple_GET_ITEM(place, 1));
    if (at < 0 || !PyList_CheckExact(entries) || at >= PyList_GET_SIZE(entries)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "not a place");
        return -1;
    }
    PyObject *entry = PyList_GET_ITEM(entries, at);
    if (entry == Py_None) return 0;
    Py_INCREF(Py_None);
    PyList_SET_ITEM(entries, at, Py_None); /* what the list had of `entry` is ours now */
    Py_ssize_t leases = Py_TYPE(entry) == ENTRY ? count_on(entry, LEASES, -1) : -1;
    int visible = leases == 0 ? is_visible(entry, spaces) : 1, failed = leases < 0 || visible < 0;
    if (!visible) {
        PyObject *done = PyObject_CallOneArg(unheld, entry);
        failed = done == NULL;
        Py_XDECREF(done);
    }
    Py_DECREF(entry);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "ended more often than begun");
    return failed ? -1 : 1;
}

/* Arguments: places, spaces or None, and unheld. */
static PyObject *end(PyObject *module, PyObject *const *args, Py_ssize_t argc) {
    (void)module;
    if (argc != 3 || !PyList_CheckExact(args[0]) || !(args[1] == Py_None || PyList_CheckExact(args[1]))) {
        PyErr_SetString(PyExc_TypeError, "end() takes a list, a list or None, and a callable");
        return NULL;
    }
    Py_ssize_t ended = 0;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(args[0]); index++) {
        PyObject *place = PyList_GET_ITEM(args[0], index);
        Py_INCREF(place);
        int done = end_one(place, args[1], args[2]);
        Py_DECREF(place);
        if (done < 0) return NULL;
        ended += done;
    }
    return PyLong_FromSsize_t(ended);
}

/* Find where a class has a slot; -1 with an exception when it has none such. */
static int find_slot(PyTypeObject *type, int name) {
    PyObject *descriptor = PyObject_GetAttrString((PyObject *)type, NAMES[name]);
    if (descriptor == NULL) return -1;
    PyMemberDef *member = Py_IS_TYPE(descriptor, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)descriptor)->d_member : NULL;
    int found = member != NULL && member->type == T_OBJECT_EX && PyDescr_TYPE((PyDescrObject *)descriptor) == type;
    if (found) offsets[name] = member->offset;
    Py_DECREF(descriptor);
    if (!found) PyErr_Format(PyExc_ImportError, "%s is no slot of %s", NAMES[name], type->tp_name);
    return found ? 0 : -1;
}

/* Take the classes from entry.py. */
static int find_classes(void) {
    PyObject *module = PyImport_ImportModule("kvredis.storage.entry");
    if (module == NULL) return -1;
    ENTRY = (PyTypeObject *)PyObject_GetAttrString(module, "Entry");
    RUN = (PyTypeObject *)PyObject_GetAttrString(module, "LeaseRun");
    DATABASE_TYPE = (PyTypeObject *)PyObject_GetAttrString(module, "Database");
    NOWHERE = PyObject_GetAttrString(module, "NOWHERE");
    Py_DECREF(module);
    if (!ENTRY || !RUN || !DATABASE_TYPE || !NOWHERE) return -1;
    if (!PyType_Check(ENTRY) || !PyType_Check(RUN) || !PyType_Check(DATABASE_TYPE)) {
        PyErr_SetString(PyExc_ImportError, "Entry, LeaseRun and Database are no classes");
        return -1;
    }
    for (int name = 0; name < SLOTS; name++)
        if (find_slot(name == ENTRIES ? RUN : name == NUMBER ? DATABASE_TYPE : ENTRY, name) < 0) return -1;
    return 0;
}

static PyMethodDef METHODS[] = {
    {"hold", (PyCFunction)(void (*)(void))hold, METH_FASTCALL, "As lease_many.hold_in_python."},
    {"end", (PyCFunction)(void (*)(void))end, METH_FASTCALL, "As lease_many.end_in_python."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.storage._leasing", .m_size = -1, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__leasing(void) { return find_classes() < 0 ? NULL : PyModule_Create(&MODULE); }
