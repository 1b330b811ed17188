/* A GPU that computes nothing. Memory is address space, kernels and matrix products do nothing, streams and events keep
 * the order that CUDA gives them, and NCCL's calls end when all ranks of their communicator have made them. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#define __CUDA_FP16_H__ /* nccl.h includes these, and needs nothing of them */
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

/* Counters that Python reads, and whom it has told of each wait of the host. */
extern uint64_t null_kernels, null_products, null_host_syncs, null_mallocs;
extern uint64_t null_pageable_copies; /* from the device; CUDA's return when they are done */
extern void (*null_on_host_sync)(const char *call);

/* ---- streams (streams.c): what is queued on the device, as far as anybody can wait for it */

struct operations;

/* Something queued: done when what it waits for is, and then its NCCL calls, if it has some. */
struct item {
    int references, is_done, has_begun;
    struct item *after[2];
    struct operations *operations;
    struct item *next; /* of the items with NCCL calls */
};

struct stream {
    struct item *last;
};

struct stream *stream_of(cudaStream_t handle);
void queue_operations(struct stream *stream, struct item **communicator_last, struct operations *operations);
/* Make the host wait for an item; NULL: for all NCCL calls that have begun. */
void host_waits(const char *call, struct item *item);
void count_host_sync(const char *call);
double seconds(void);

/* ---- NCCL (nccl.c) */

void begin_operations(struct operations *operations);
int are_operations_done(struct operations *operations);
void describe_operations(struct operations *operations, char *text, size_t size);

/* ---- who stands (watcher.c) */

void start_watcher(void);
/* What this rank's host waits in; NULL: in nothing. */
void tell_host_wait(const char *call);
void tell_waiting_for(const char *text);
void count_call(void);
void stop_all(const char *reason);
/* Begin what may begin, and end what has ended; whether anything did. */
int advance_items(void);
/* What NCCL calls are under way here, as text; whether there are any. */
int describe_items(char *text, size_t size);
