/* A libcudart without a GPU, for tests: it copies at once, and notes what it was called with.
   FAIL_INDEX: the signature of CUDA 12.8 and 12.9; VERSION: what it says it is; REFUSE: what a batch answers. */
#include <stddef.h>
#include <string.h>

int batches, singles, last_errors_taken;
long last_stream, last_order;

struct location { int type, id; };
struct attributes { int order; struct location source, target; unsigned flags; };
struct pointer { int type, device; void *on_device, *on_host; long reserved[8]; };

int cudaRuntimeGetVersion(int *version) { *version = VERSION; return 0; }
const char *cudaGetErrorString(int code) { return code == 1 ? "invalid argument" : "other"; }
int cudaGetLastError(void) { last_errors_taken++; return 0; }

int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    if (kind != 4) return 1;
    singles++;
    last_stream = (long)stream;
    memcpy(to, from, size);
    return 0;
}

int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, struct attributes *how, size_t *which,
                         size_t ways,
#ifdef FAIL_INDEX
                         size_t *fail_index,
#endif
                         void *stream) {
    if (REFUSE) return REFUSE;
    if (ways != 1 || which[0] != 0 || how->flags || how->source.type || how->target.type) return 1;
#ifdef FAIL_INDEX
    if (!fail_index) return 1;
    *fail_index = 0;
#endif
    batches++;
    last_stream = (long)stream;
    last_order = how->order;
    for (size_t at = 0; at < count; at++) memcpy(to[at], from[at], sizes[at]);
    return 0;
}

int cudaPointerGetAttributes(struct pointer *found, const void *address) {
    memset(found, 0, sizeof *found);
    found->type = ((const char *)address)[0] == 'L' ? 1 : ((const char *)address)[0] == 'D' ? 2 : 0;
    return address ? 0 : 1;
}

/* An event is passed when PASSED is set, and remembers the stream it marks; a wait notes which stream waits for what. */
struct event { void *stream; };
static struct event events[8];
int events_made, events_passed, query_error;
long waiting_stream, waited_for;

int cudaEventCreateWithFlags(void **event, unsigned flags) {
    if (flags != 2) return 1;
    *event = &events[events_made++];
    return 0;
}

int cudaEventRecord(struct event *event, void *stream) {
    event->stream = stream;
    return 0;
}

int cudaStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    waiting_stream = (long)stream;
    waited_for = (long)event->stream;
    return flags ? 1 : 0;
}

int cudaEventQuery(struct event *event) {
    if (query_error) return query_error;
    return event->stream && events_passed ? 0 : 600;
}

int cudaEventSynchronize(struct event *event) {
    events_passed = event->stream != 0;
    return events_passed ? 0 : 1;
}
