/* The calls of libcuda that kvredis uses (storage/memory/cuda.py), over memfds and mmap: what crosses processes here are
   real descriptors, and what is copied are real bytes, on a machine without a GPU.

   STAND_IN_CUDA_DEVICES  how many GPUs there are, 2 without it
   STAND_IN_CUDA_BYTES    what each has for this process, 1 GiB without it
   STAND_IN_CUDA_NO_FDS   when set, memory cannot be shared by descriptors
   STAND_IN_CUDA_NO_PEER  when set, imported memory cannot be accessed
   STAND_IN_CUDA_FAILS    a file with a number: so many of the next copies fail, with -1 all of them */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2u << 20)

#define HANDLES_MAX 65536

static size_t taken, size_of[HANDLES_MAX]; /* size_of: of the memory that this process has made, by handle */
static __thread int depth;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text != NULL ? atol(text) : otherwise;
}

static int failing(void) {
    const char *path = getenv("STAND_IN_CUDA_FAILS");
    FILE *file = path != NULL ? fopen(path, "r+") : NULL;
    long left = 0;
    if (file == NULL) return 0;
    if (fscanf(file, "%ld", &left) == 1 && left > 0) {
        rewind(file);
        fprintf(file, "%ld \n", left - 1);
    }
    fclose(file);
    return left != 0;
}

int cuInit(unsigned flags) { return number("STAND_IN_CUDA_DEVICES", 2) > 0 ? 0 : 100; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = (int)number("STAND_IN_CUDA_DEVICES", 2); return 0; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= number("STAND_IN_CUDA_DEVICES", 2)) return 101;
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, length, "Stand-in %d", device) < 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int at = 0; at < 16; at++) uuid[at] = (unsigned char)(16 * device + at);
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute != 103 || getenv("STAND_IN_CUDA_NO_FDS") == NULL;
    return 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : code == 100 ? "no CUDA-capable device is detected"
          : code == 217 ? "peer access is not supported" : code == 719 ? "unspecified launch failure" : "failed";
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { depth++; return context == NULL ? 201 : 0; }
int cuCtxPopCurrent_v2(void **context) { depth--; return 0; }
int cuCtxSynchronize(void) { return depth < 1; }
int cuMemHostRegister_v2(void *address, size_t length, unsigned flags) { return 0; }
int cuMemHostUnregister(void *address) { return 0; }

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = (size_t)number("STAND_IN_CUDA_BYTES", 1L << 30);
    *free = *total > taken ? *total - taken : 0;
    return 0;
}
int cuMemGetAllocationGranularity(size_t *granularity, const void *properties, int option) {
    *granularity = GRANULARITY;
    return 0;
}
int cuMemCreate(unsigned long long *handle, size_t size, const void *properties, unsigned long long flags) {
    if (depth < 1) return 201;
    if (size % GRANULARITY) return 1;
    if (taken + size > (size_t)number("STAND_IN_CUDA_BYTES", 1L << 30)) return 2;
    int fd = memfd_create("stand-in-gpu", MFD_CLOEXEC);
    if (fd < 0 || fd >= HANDLES_MAX || ftruncate(fd, (off_t)size)) return 2;
    taken += size_of[fd] = size;
    *handle = (unsigned long long)fd;
    return 0;
}
int cuMemExportToShareableHandle(int *fd, unsigned long long handle, int type, unsigned long long flags) {
    *fd = fcntl((int)handle, F_DUPFD_CLOEXEC, 0);
    return *fd < 0;
}
int cuMemImportFromShareableHandle(unsigned long long *handle, void *fd, int type) {
    int mine = fcntl((int)(intptr_t)fd, F_DUPFD_CLOEXEC, 0);
    *handle = (unsigned long long)mine;
    return mine < 0;
}
int cuMemAddressReserve(unsigned long long *address, size_t size, size_t alignment, unsigned long long hint,
                        unsigned long long flags) {
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (unsigned long long)(uintptr_t)found;
    return found == MAP_FAILED;
}
int cuMemMap(unsigned long long address, size_t size, size_t offset, unsigned long long handle,
             unsigned long long flags) {
    return mmap((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)handle,
                (off_t)offset) == MAP_FAILED;
}
int cuMemSetAccess(unsigned long long address, size_t size, const void *access, size_t count) {
    return getenv("STAND_IN_CUDA_NO_PEER") != NULL ? 217 : 0;
}
int cuMemUnmap(unsigned long long address, size_t size) {
    return mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
                -1, 0) == MAP_FAILED;
}
int cuMemAddressFree(unsigned long long address, size_t size) { return munmap((void *)(uintptr_t)address, size) != 0; }
int cuMemRelease(unsigned long long handle) {
    taken -= size_of[handle];
    size_of[handle] = 0;
    return close((int)handle) != 0;
}

int cuStreamCreate(void **stream, unsigned flags) { *stream = (void *)1; return depth < 1; }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
static int copy(void *to, const void *from, size_t length) {
    if (depth < 1) return 201;
    if (failing()) return 719;
    memcpy(to, from, length);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t length, void *stream) {
    return copy(to, (const void *)(uintptr_t)from, length);
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t length, void *stream) {
    return copy((void *)(uintptr_t)to, from, length);
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t length, void *stream) {
    return copy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, length);
}
