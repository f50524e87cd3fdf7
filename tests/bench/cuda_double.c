/* A CUDA driver without a GPU, for tests: GPUS GPUs whose memory is the CPU's, and which copy at once.

   It answers as the driver does to what is wrong: a copy between GPUs with the contexts exchanged, memory that is no
   GPU's, peer access allowed twice. It counts copies between GPUs with peer access and without, and what was not given
   back. LONELY: no GPU reaches another; SPOIL: from that copy on (from 1) each has a wrong byte; after END_AFTER copies the process
   gets END_SIGNAL. */
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef LONELY
#define LONELY 0
#endif
#ifndef SPOIL
#define SPOIL 1000000
#endif
#ifndef END_AFTER
#define END_AFTER -1
#define END_SIGNAL 0
#endif
#define SLOTS 256

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ALREADY = 704, NOT_ENABLED = 705 };

static char contexts[8];
static int retained[8], enabled[8][8];
static _Thread_local int current = -1;
static struct { char *address; size_t size; int gpu; } memory[SLOTS];
static long copies;
int direct, staged, held, streams, events;

static int gpu_of(const void *context) {
    int gpu = (int)((const char *)context - contexts);
    return gpu >= 0 && gpu < GPUS && retained[gpu] ? gpu : -1;
}

static int owner(const char *address, size_t size) {
    for (int at = 0; at < SLOTS; at++)
        if (memory[at].address && address >= memory[at].address
            && address + size <= memory[at].address + memory[at].size)
            return memory[at].gpu;
    return -1;
}

static int taken(void **address, size_t size, int gpu) {
    if (current < 0) return INVALID_CONTEXT;
    for (int at = 0; at < SLOTS; at++)
        if (!memory[at].address) {
            memory[at].address = *address = malloc(size);
            memory[at].size = size;
            memory[at].gpu = gpu;
            held++;
            return 0;
        }
    return 2;
}

static int given_back(char *address) {
    for (int at = 0; at < SLOTS; at++)
        if (memory[at].address == address) {
            free(address);
            memory[at].address = NULL;
            held--;
            return 0;
        }
    return INVALID_VALUE;
}

static int copied(char *to, const char *from, size_t size) {
    memcpy(to, from, size);
    long number = __atomic_add_fetch(&copies, 1, __ATOMIC_SEQ_CST);
    if (number >= SPOIL) to[number % size] ^= 1;
    if (number == END_AFTER) kill(getpid(), END_SIGNAL);
    return 0;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : 0; }
int cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < GPUS ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Double", size); return device < GPUS ? 0 : 101; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = !LONELY && device != other; return 0; }
int cuGetErrorString(int code, const char **words) {
    *words = code == ALREADY ? "peer access is already enabled" : "invalid argument";
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    retained[device]++;
    held++;
    *context = contexts + device;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) { retained[device]--; held--; return 0; }

int cuCtxSetCurrent(void *context) {
    current = gpu_of(context);
    return current < 0 ? INVALID_CONTEXT : 0;
}

int cuCtxSynchronize(void) { return current < 0 ? INVALID_CONTEXT : 0; }

int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
    int other = gpu_of(peer);
    if (flags || other < 0 || other == current || LONELY) return INVALID_VALUE;
    if (enabled[current][other]) return ALREADY;
    enabled[current][other] = 1;
    return 0;
}

int cuCtxDisablePeerAccess(void *peer) {
    int other = gpu_of(peer);
    if (other < 0 || !enabled[current][other]) return NOT_ENABLED;
    enabled[current][other] = 0;
    return 0;
}

int cuMemAlloc_v2(void **address, size_t size) { return taken(address, size, current); }
int cuMemFree_v2(void *address) { return owner(address, 1) == current ? given_back(address) : INVALID_VALUE; }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    return flags == 1 ? taken(address, size, -1) : INVALID_VALUE;
}
int cuMemFreeHost(void *address) { return given_back(address); }

int cuMemsetD8_v2(void *address, unsigned char byte, size_t size) {
    if (owner(address, size) != current) return INVALID_VALUE;
    memset(address, byte, size);
    return 0;
}

int cuMemcpyHtoDAsync_v2(char *to, const char *from, size_t size, void *stream) {
    if (!stream || owner(to, size) != current || owner(from, size) >= 0) return INVALID_VALUE;
    return copied(to, from, size);
}

int cuMemcpyDtoHAsync_v2(char *to, const char *from, size_t size, void *stream) {
    if (!stream || owner(from, size) != current || owner(to, size) >= 0) return INVALID_VALUE;
    return copied(to, from, size);
}

int cuMemcpyDtoDAsync_v2(char *to, const char *from, size_t size, void *stream) {
    if (!stream || owner(from, size) != current || owner(to, size) != current) return INVALID_VALUE;
    return copied(to, from, size);
}

int cuMemcpyPeerAsync(char *to, void *to_context, const char *from, void *from_context, size_t size, void *stream) {
    int target = gpu_of(to_context), source = gpu_of(from_context);
    if (!stream || source < 0 || target < 0 || owner(to, size) != target || owner(from, size) != source)
        return INVALID_VALUE;
    if (enabled[source][target] && enabled[target][source]) direct++;
    else staged++;
    return copied(to, from, size);
}

int cuStreamCreate(void **stream, unsigned flags) {
    if (current < 0 || flags != 1) return INVALID_VALUE;
    *stream = malloc(1);
    streams++;
    return 0;
}

int cuStreamDestroy_v2(void *stream) { free(stream); streams--; return 0; }
int cuStreamSynchronize(void *stream) { return stream && current >= 0 ? 0 : INVALID_CONTEXT; }

int cuEventCreate(void **event, unsigned flags) {
    if (current < 0 || flags) return INVALID_VALUE;
    *event = calloc(1, sizeof(struct timespec));
    events++;
    return 0;
}

int cuEventDestroy_v2(void *event) { free(event); events--; return 0; }
int cuEventRecord(void *event, void *stream) { return stream ? clock_gettime(CLOCK_MONOTONIC, event) : INVALID_VALUE; }

int cuEventElapsedTime(float *ms, const struct timespec *start, const struct timespec *end) {
    *ms = (end->tv_sec - start->tv_sec) * 1e3f + (end->tv_nsec - start->tv_nsec) * 1e-6f;
    return 0;
}
