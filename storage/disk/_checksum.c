/* XXH3-128 of long payloads that lie in no cache, for kvredis.storage.disk.checksum, its only user.
 *
 * A block that goes to disk, or has just come from there, has to be fetched from memory for its checksum, and that is
 * what the time goes into: out of a cache xxhash does 50 GB/s, out of memory a third of it, since one stream of reads
 * waits at each page until the processor has seen where it goes. The sums of XXH3's blocks do not depend on each other
 * until they are scrambled one after the other, so STREAMS stretches of a group are read beside each other here, their
 * sums are kept, and the scrambling follows in the order of the bytes. The result is XXH3's, to the bit.
 *
 * Facts: https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm", inputs of more than 240 bytes with the
 * default secret and seed 0.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define VECTORS 1
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum {
    LONG_FROM_BYTES = 241,         /* shorter inputs go by other rules, which only xxhash has */
    UNLOCK_FROM_BYTES = 128 * 1024, /* from here on the interpreter lock is given up: about 5 us of summing */
    STRIPE_BYTES = 64,
    BLOCK_STRIPES = 16,
    BLOCK_BYTES = BLOCK_STRIPES * STRIPE_BYTES,
    STREAMS = 4,              /* measured: 62 ms of CPU per GB by one, 40 by four, no less by eight */
    STRETCH_BYTES = 16 * 1024, /* so far apart are the streams: at 4 KiB they get into each other's way */
    STRETCH_BLOCKS = STRETCH_BYTES / BLOCK_BYTES,
    GROUP_BLOCKS = STREAMS * STRETCH_BLOCKS,
    AHEAD_BYTES = 256, /* so far ahead a cache line is asked for */
    SECRET_BYTES = 192,
    KEY_STEP = 8, /* each stripe's key begins so many bytes behind that of the one before */
    SCRAMBLE_KEY = SECRET_BYTES - STRIPE_BYTES,
    LAST_KEY = SECRET_BYTES - STRIPE_BYTES - 7,
    LOW_KEY = 11,
    HIGH_KEY = SECRET_BYTES - STRIPE_BYTES - 11,
    LANES = 8,
};

static const unsigned char SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, AVALANCHE = 0x165667919E3779F9;

#define INLINE static inline __attribute__((always_inline, target("avx2")))

/* The eight lanes, four in each half. */
struct sums {
    __m256i low, high;
};

INLINE __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

INLINE __m256i add_half(__m256i sum, __m256i data, __m256i key) {
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i neighbour = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(_mm256_add_epi64(sum, neighbour), product);
}

INLINE struct sums add_stripe(struct sums sums, const char *stripe, const unsigned char *key) {
    sums.low = add_half(sums.low, load(stripe), load(key));
    sums.high = add_half(sums.high, load(stripe + STRIPE_BYTES / 2), load(key + STRIPE_BYTES / 2));
    return sums;
}

INLINE __m256i scramble_half(__m256i sum, const unsigned char *key) {
    __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), load(key));
    __m256i low = _mm256_mul_epu32(mixed, prime), high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

INLINE struct sums scramble(struct sums sums) {
    sums.low = scramble_half(sums.low, SECRET + SCRAMBLE_KEY);
    sums.high = scramble_half(sums.high, SECRET + SCRAMBLE_KEY + STRIPE_BYTES / 2);
    return sums;
}

/* Add a group of blocks to the sums: first each block's own, of all streams side by side, then one after the other. */
INLINE struct sums add_group(struct sums sums, const char *group) {
    struct sums own[GROUP_BLOCKS];
    for (int block = 0; block < STRETCH_BLOCKS; block++) {
        struct sums beside[STREAMS];
        for (int stream = 0; stream < STREAMS; stream++)
            beside[stream].low = beside[stream].high = _mm256_setzero_si256();
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++) {
            const char *at = group + block * BLOCK_BYTES + stripe * STRIPE_BYTES;
            for (int stream = 0; stream < STREAMS; stream++, at += STRETCH_BYTES) {
                _mm_prefetch(at + AHEAD_BYTES, _MM_HINT_T0); /* behind the end too: a prefetch never faults */
                beside[stream] = add_stripe(beside[stream], at, SECRET + stripe * KEY_STEP);
            }
        }
        for (int stream = 0; stream < STREAMS; stream++) own[stream * STRETCH_BLOCKS + block] = beside[stream];
    }
    for (int block = 0; block < GROUP_BLOCKS; block++) {
        sums.low = _mm256_add_epi64(sums.low, own[block].low);
        sums.high = _mm256_add_epi64(sums.high, own[block].high);
        sums = scramble(sums);
    }
    return sums;
}

static uint64_t read_word(const unsigned char *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static uint64_t merge(const uint64_t *lanes, const unsigned char *key, uint64_t total) {
    for (int lane = 0; lane < LANES; lane += 2, key += 2 * sizeof *lanes) {
        unsigned __int128 left = lanes[lane] ^ read_word(key), right = lanes[lane + 1] ^ read_word(key + sizeof *lanes);
        unsigned __int128 product = left * right;
        total += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    total = (total ^ (total >> 37)) * AVALANCHE;
    return total ^ (total >> 32);
}

/* Put the checksum of at least LONG_FROM_BYTES into `digest`, its higher half first, each with the highest byte first. */
__attribute__((target("avx2"))) static void sum_up(const char *data, size_t bytes, unsigned char digest[16]) {
    uint64_t lanes[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    struct sums sums = {load(lanes), load(lanes + LANES / 2)};
    const char *at = data, *last = data + bytes - STRIPE_BYTES;
    size_t blocks = (bytes - 1) / BLOCK_BYTES, stripes = (bytes - 1) % BLOCK_BYTES / STRIPE_BYTES;
    for (; blocks >= GROUP_BLOCKS; blocks -= GROUP_BLOCKS, at += GROUP_BLOCKS * BLOCK_BYTES) sums = add_group(sums, at);
    for (; blocks > 0; blocks--) {
        for (int stripe = 0; stripe < BLOCK_STRIPES; stripe++, at += STRIPE_BYTES)
            sums = add_stripe(sums, at, SECRET + stripe * KEY_STEP);
        sums = scramble(sums);
    }
    for (size_t stripe = 0; stripe < stripes; stripe++, at += STRIPE_BYTES)
        sums = add_stripe(sums, at, SECRET + stripe * KEY_STEP);
    sums = add_stripe(sums, last, SECRET + LAST_KEY);
    _mm256_storeu_si256((__m256i *)lanes, sums.low);
    _mm256_storeu_si256((__m256i *)(lanes + LANES / 2), sums.high);
    uint64_t halves[2] = {merge(lanes, SECRET + HIGH_KEY, ~(bytes * PRIME64_2)), merge(lanes, SECRET + LOW_KEY, bytes * PRIME64_1)};
    for (int byte = 0; byte < 16; byte++) digest[byte] = (unsigned char)(halves[byte / 8] >> (56 - byte % 8 * 8));
}

static int can(void) { return __builtin_cpu_supports("avx2"); }

#else
enum { LONG_FROM_BYTES = 241, UNLOCK_FROM_BYTES = 0 };
static void sum_up(const char *data, size_t bytes, unsigned char digest[16]) { (void)data, (void)bytes, (void)digest; }
static int can(void) { return 0; }
#endif

/* Sum up payloads whose buffers are held, without the interpreter lock where that takes a while; NULL with an exception. */
static PyObject *sum_all(const Py_buffer *views, Py_ssize_t count) {
    unsigned char(*found)[16] = PyMem_Malloc((size_t)count * sizeof *found + 1);
    if (found == NULL) return PyErr_NoMemory();
    Py_ssize_t bytes = 0;
    for (Py_ssize_t at = 0; at < count; at++) bytes += views[at].len;
    PyThreadState *state = bytes < UNLOCK_FROM_BYTES ? NULL : PyEval_SaveThread();
    for (Py_ssize_t at = 0; at < count; at++) sum_up(views[at].buf, (size_t)views[at].len, found[at]);
    if (state != NULL) PyEval_RestoreThread(state);
    PyObject *digests = PyList_New(count);
    for (Py_ssize_t at = 0; digests != NULL && at < count; at++) {
        PyObject *digest = PyBytes_FromStringAndSize((const char *)found[at], sizeof found[at]);
        if (digest == NULL) Py_CLEAR(digests);
        else PyList_SET_ITEM(digests, at, digest);
    }
    PyMem_Free(found);
    return digests;
}

static PyObject *digests(PyObject *module, PyObject *payloads) {
    (void)module;
    PyObject *all = PySequence_Fast(payloads, "digests() takes a sequence of payloads"), *found = NULL;
    if (all == NULL) return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(all), held = 0;
    Py_buffer *views = PyMem_Malloc((size_t)count * sizeof *views + 1); /* held, so none is resized or unmapped meanwhile */
    int good = views != NULL;
    if (!good) PyErr_NoMemory();
    while (good && held < count) {
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(all, held), &views[held], PyBUF_SIMPLE) < 0) break;
        held++;
        good = can() && views[held - 1].len >= LONG_FROM_BYTES;
        if (!good)
            PyErr_Format(PyExc_ValueError, "no checksum of %zd bytes here: at least %d, and a processor with AVX2",
                         views[held - 1].len, LONG_FROM_BYTES);
    }
    if (good && held == count) found = sum_all(views, count);
    while (held > 0) PyBuffer_Release(&views[--held]);
    PyMem_Free(views);
    Py_DECREF(all);
    return found;
}

static PyObject *is_usable(PyObject *module, PyObject *nothing) {
    (void)module, (void)nothing;
    return PyBool_FromLong(can());
}

static PyMethodDef METHODS[] = {
    {"digests", digests, METH_O, "digests(payloads) -> [XXH3-128 of each, 16 bytes]"},
    {"is_usable", is_usable, METH_NOARGS, "is_usable() -> whether this processor has what digests() needs"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "kvredis.storage.disk._checksum", .m_size = 0, .m_methods = METHODS,
};

PyMODINIT_FUNC PyInit__checksum(void) { return PyModule_Create(&MODULE); }
