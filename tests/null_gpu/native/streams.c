/* Streams and events. An item of a stream is done once the item before it is, and what it was told to wait for; only
 * NCCL's calls ever take time. All of this is under one lock. */
#include "null_gpu.h"
#include <pthread.h>
#include <time.h>
#include <unistd.h>

PUBLIC uint64_t null_kernels, null_products, null_host_syncs, null_mallocs, null_pageable_copies;
PUBLIC void (*null_on_host_sync)(const char *call);

struct event {
    double at;
    struct item *item;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream default_stream;
static struct item *under_way;                     /* items with NCCL calls that are not done */
static struct item everything = {.references = 1}; /* stands for all that is under way, to wait for */

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

struct stream *stream_of(cudaStream_t handle) {
    return (uintptr_t)handle <= 2 ? &default_stream : (struct stream *)handle; /* 0, legacy and per-thread default */
}

static void release(struct item *item) {
    if (!item || --item->references) return;
    for (int i = 0; i < 2; i++) release(item->after[i]);
    free(item->operations);
    free(item);
}

static struct item *keep(struct item *item) {
    if (item) item->references++;
    return item;
}

static void replace(struct item **place, struct item *item) {
    struct item *before = *place;
    *place = keep(item);
    release(before);
}

/* Whether an item is done; one that waits for others only is done when those are. */
static int is_done(struct item *item) {
    if (!item || item->is_done) return 1;
    for (int i = 0; i < 2; i++) {
        if (!is_done(item->after[i])) return 0;
        replace(&item->after[i], NULL);
    }
    item->is_done = !item->operations;
    return item->is_done;
}

static struct item *new_item(struct item *first, struct item *second) {
    struct item *item = calloc(1, sizeof *item);
    item->after[0] = keep(first);
    item->after[1] = keep(second);
    return item;
}

int advance_items(void) {
    int moved = 0;
    pthread_mutex_lock(&lock);
    for (struct item **place = &under_way; *place;) {
        struct item *item = *place;
        int may_begin = is_done(item->after[0]) && is_done(item->after[1]);
        if (may_begin && !item->has_begun) {
            begin_operations(item->operations);
            item->has_begun = moved = 1;
        }
        if (item->has_begun && are_operations_done(item->operations)) {
            item->is_done = moved = 1;
            *place = item->next;
            release(item);
        } else
            place = &item->next;
    }
    pthread_mutex_unlock(&lock);
    return moved;
}

int describe_items(char *text, size_t size) {
    int any = 0;
    pthread_mutex_lock(&lock);
    text[0] = 0;
    for (struct item *item = under_way; item; item = item->next)
        if (item->has_begun) {
            size_t length = strlen(text);
            if (any) snprintf(text + length, size - length, "; "), length = strlen(text);
            describe_operations(item->operations, text + length, size - length);
            any = 1;
        }
    pthread_mutex_unlock(&lock);
    return any;
}

void queue_operations(struct stream *stream, struct item **communicator_last, struct operations *operations) {
    pthread_mutex_lock(&lock);
    struct item *item = new_item(stream->last, *communicator_last);
    item->operations = operations;
    replace(&stream->last, item);
    replace(communicator_last, item);
    struct item **end = &under_way;
    while (*end) end = &(*end)->next;
    *end = keep(item);
    pthread_mutex_unlock(&lock);
    advance_items();
}

void count_host_sync(const char *call) {
    __sync_fetch_and_add(&null_host_syncs, 1);
    if (null_on_host_sync) null_on_host_sync(call);
}

static int must_wait(struct item *item) {
    pthread_mutex_lock(&lock);
    int waits = 0;
    if (item == &everything)
        waits = under_way != NULL;
    else if (item)
        waits = !is_done(item);
    else
        for (struct item *each = under_way; each; each = each->next) waits |= each->has_begun;
    pthread_mutex_unlock(&lock);
    return waits;
}

void host_waits(const char *call, struct item *item) {
    pthread_mutex_lock(&lock);
    keep(item);
    pthread_mutex_unlock(&lock);
    if (must_wait(item)) {
        tell_host_wait(call);
        while (must_wait(item))
            if (!advance_items()) usleep(300);
        tell_host_wait(NULL);
    }
    pthread_mutex_lock(&lock);
    release(item);
    pthread_mutex_unlock(&lock);
}

PUBLIC cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof(struct stream));
    return 0;
}
PUBLIC cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
PUBLIC cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return 0;
}
PUBLIC cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return 0;
}
PUBLIC cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = 0;
    return 0;
}
PUBLIC cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count) {
    *status = 0;
    if (id) *id = 0;
    if (count) *count = 0;
    return 0;
}
PUBLIC cudaError_t cudaStreamQuery(cudaStream_t stream) {
    advance_items();
    return must_wait(stream_of(stream)->last) && stream_of(stream)->last ? cudaErrorNotReady : 0;
}
PUBLIC cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count_host_sync("cudaStreamSynchronize");
    if (stream_of(stream)->last) host_waits("cudaStreamSynchronize", stream_of(stream)->last);
    return 0;
}
PUBLIC cudaError_t cudaDeviceSynchronize(void) {
    count_host_sync("cudaDeviceSynchronize");
    host_waits("cudaDeviceSynchronize", &everything);
    return 0;
}

PUBLIC cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(struct event));
    return 0;
}
PUBLIC cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
PUBLIC cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    struct event *event = (struct event *)handle;
    event->at = seconds();
    pthread_mutex_lock(&lock);
    replace(&event->item, is_done(stream_of(stream)->last) ? NULL : stream_of(stream)->last);
    pthread_mutex_unlock(&lock);
    return 0;
}
PUBLIC cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
PUBLIC cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    pthread_mutex_lock(&lock);
    replace(&((struct event *)handle)->item, NULL);
    pthread_mutex_unlock(&lock);
    free(handle);
    return 0;
}
PUBLIC cudaError_t cudaEventQuery(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    advance_items();
    return event->item && must_wait(event->item) ? cudaErrorNotReady : 0;
}
PUBLIC cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    struct event *event = (struct event *)handle;
    count_host_sync("cudaEventSynchronize");
    if (event->item) host_waits("cudaEventSynchronize", event->item);
    return 0;
}
PUBLIC cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = (((struct event *)to)->at - ((struct event *)from)->at) * 1e3;
    return 0;
}
PUBLIC cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    struct event *event = (struct event *)handle;
    pthread_mutex_lock(&lock);
    if (!is_done(event->item)) replace(&stream_of(stream)->last, new_item(stream_of(stream)->last, event->item));
    pthread_mutex_unlock(&lock);
    return 0;
}
PUBLIC cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return 0;
}
