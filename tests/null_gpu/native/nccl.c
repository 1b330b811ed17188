/* NCCL between processes of one machine, as far as order goes. Calls of one communicator run one after the other, in
 * the order in which a rank makes them. A collective ends when every rank has begun it, a send and a receive when both
 * have begun: real NCCL may end some earlier, and a program must not rest on that. What ranks call must match. */
#include "null_gpu.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { REMEMBERED = 4096, REMEMBERED_MESSAGES = 64 };

struct signature {
    char name[16];
    size_t count;
    int type, reduction, root;
};

/* What ranks of a communicator tell each other, in shared memory: [n] and [n, n] of these. */
struct member {
    uint32_t has_come, begun;
    struct signature calls[REMEMBERED];
};
struct pair {
    uint32_t sent, received;
    size_t sent_bytes[REMEMBERED_MESSAGES], received_bytes[REMEMBERED_MESSAGES];
};

struct ncclComm {
    int ranks, rank;
    char id[33], name[64];
    struct member *members;
    struct pair *pairs;
    struct item *last;
    int is_alone; /* its other ranks are imagined */
    uint32_t next_call;
};

enum kind { COLLECTIVE, SEND, RECEIVE };
struct operation {
    enum kind kind;
    struct signature signature; /* its root is the peer of a message */
    uint32_t index;
};
struct operations {
    struct ncclComm *communicator;
    int count;
    struct operation each[];
};

static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static const char *name_of(int type) {
    static const char *names[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                  "fp16", "fp32",  "fp64",  "bf16",   "fp8",   "fp8"};
    return names[type];
}

static void describe(struct signature *call, char *text, size_t size) {
    snprintf(text, size, "%s of %zu %s", call->name, call->count, name_of(call->type));
}

/* ---- communicators */

static void *map_shared(const char *path, size_t size) {
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, size)) return perror(path), abort(), NULL;
    void *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return memory;
}

/* The ranks that have not come, or have not begun a call, as text. */
static void list_missing(struct ncclComm *communicator, uint32_t call, int is_init, char *text, size_t size) {
    text[0] = 0;
    for (int rank = 0; rank < communicator->ranks; rank++) {
        struct member *member = &communicator->members[rank];
        size_t length = strlen(text);
        if (is_init ? !member->has_come : member->begun <= call) snprintf(text + length, size - length, " %d", rank);
    }
}

PUBLIC ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return 0;
}
PUBLIC ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    unsigned char random[16];
    int file = open("/dev/urandom", O_RDONLY);
    if (read(file, random, sizeof random) < 0) perror("/dev/urandom");
    close(file);
    memset(id, 0, sizeof *id);
    for (int i = 0; i < 16; i++) snprintf(id->internal + 2 * i, 3, "%02x", random[i]);
    return 0;
}
PUBLIC ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t *config) {
    struct ncclComm *communicator = *out = calloc(1, sizeof **out);
    communicator->ranks = ranks, communicator->rank = rank;
    memcpy(communicator->id, id.internal, 32);
    int has_name = config && config->commName && (intptr_t)config->commName != NCCL_CONFIG_UNDEF_INT;
    snprintf(communicator->name, sizeof communicator->name, "%s", has_name ? config->commName : communicator->id + 24);
    communicator->is_alone = getenv("NULL_GPU_ALONE") != NULL;
    if (communicator->is_alone) return 0;
    size_t members = ranks * sizeof(struct member), pairs = (size_t)ranks * ranks * sizeof(struct pair);
    char path[80];
    snprintf(path, sizeof path, "/dev/shm/null-nccl-%s", communicator->id);
    communicator->members = map_shared(path, members + pairs);
    communicator->pairs = (struct pair *)((char *)communicator->members + members);
    start_watcher();
    __sync_fetch_and_add(&communicator->members[rank].has_come, 1);
    for (char missing[256];;) {
        list_missing(communicator, 0, 1, missing, sizeof missing);
        if (!missing[0]) break;
        char text[512];
        snprintf(text, sizeof text, "rank %d of %d of group %s waits in ncclCommInitRank for rank%s", rank, ranks,
                 communicator->name, missing);
        tell_waiting_for(text);
        tell_host_wait("ncclCommInitRank");
        usleep(500);
    }
    tell_waiting_for(NULL);
    tell_host_wait(NULL);
    if (!rank) unlink(path); /* all have it open */
    return 0;
}
PUBLIC ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, ranks, id, rank, NULL);
}
PUBLIC ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int ranks, int rank, int ids, ncclUniqueId *id,
                                             ncclConfig_t *config) {
    return ncclCommInitRankConfig(out, ranks, id[0], rank, config);
}
PUBLIC ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t *out, ncclConfig_t *config) {
    fprintf(stderr, "null NCCL: ncclCommSplit is not built\n");
    return ncclInvalidUsage;
}
PUBLIC ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error) {
    *error = 0;
    return 0;
}
PUBLIC ncclResult_t ncclCommCount(ncclComm_t communicator, int *ranks) {
    *ranks = communicator->ranks;
    return 0;
}
PUBLIC ncclResult_t ncclCommUserRank(ncclComm_t communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}
PUBLIC const char *ncclGetErrorString(ncclResult_t error) { return error ? "error of the null NCCL" : "no error"; }
PUBLIC const char *ncclGetLastError(ncclComm_t communicator) { return ""; }

/* ---- calls under way (under the lock of streams.c) */

static struct pair *pair_of(struct ncclComm *communicator, struct operation *operation) {
    int other = operation->signature.root, from = operation->kind == SEND ? communicator->rank : other;
    int to = operation->kind == SEND ? other : communicator->rank;
    return &communicator->pairs[from * communicator->ranks + to];
}

void begin_operations(struct operations *operations) {
    struct ncclComm *communicator = operations->communicator;
    if (communicator->is_alone) return;
    struct member *own = &communicator->members[communicator->rank];
    for (int i = 0; i < operations->count; i++) {
        struct operation *operation = &operations->each[i];
        size_t bytes = operation->signature.count * size_of(operation->signature.type);
        if (operation->kind == COLLECTIVE) {
            operation->index = communicator->next_call++;
            own->calls[operation->index % REMEMBERED] = operation->signature;
            __sync_fetch_and_add(&own->begun, 1);
        } else {
            struct pair *pair = pair_of(communicator, operation);
            uint32_t *begun = operation->kind == SEND ? &pair->sent : &pair->received;
            size_t *sizes = operation->kind == SEND ? pair->sent_bytes : pair->received_bytes;
            operation->index = *begun;
            sizes[operation->index % REMEMBERED_MESSAGES] = bytes;
            __sync_fetch_and_add(begun, 1);
        }
    }
}

static void check_collective(struct ncclComm *communicator, struct operation *operation) {
    struct signature *own = &operation->signature;
    for (int rank = 0; rank < communicator->ranks; rank++) {
        struct signature *other = &communicator->members[rank].calls[operation->index % REMEMBERED];
        if (!memcmp(own, other, sizeof *own)) continue;
        char text[400], ours[100], theirs[100];
        describe(own, ours, sizeof ours);
        describe(other, theirs, sizeof theirs);
        snprintf(text, sizeof text, "group %s, call %u: rank %d calls %s, rank %d %s", communicator->name,
                 operation->index, communicator->rank, ours, rank, theirs);
        stop_all(text);
    }
}

static void check_message(struct ncclComm *communicator, struct operation *operation) {
    struct pair *pair = pair_of(communicator, operation);
    size_t sent = pair->sent_bytes[operation->index % REMEMBERED_MESSAGES];
    size_t received = pair->received_bytes[operation->index % REMEMBERED_MESSAGES];
    if (sent == received) return;
    char text[400];
    snprintf(text, sizeof text,
             "group %s: message %u between ranks %d and %d is sent with %zu bytes and received with %zu: another order "
             "of messages",
             communicator->name, operation->index, communicator->rank, operation->signature.root, sent, received);
    stop_all(text);
}

static int is_operation_done(struct ncclComm *communicator, struct operation *operation) {
    if (operation->kind != COLLECTIVE) {
        struct pair *pair = pair_of(communicator, operation);
        return pair->sent > operation->index && pair->received > operation->index;
    }
    for (int rank = 0; rank < communicator->ranks; rank++)
        if (communicator->members[rank].begun <= operation->index) return 0;
    return 1;
}

int are_operations_done(struct operations *operations) {
    struct ncclComm *communicator = operations->communicator;
    if (communicator->is_alone) return 1;
    for (int i = 0; i < operations->count; i++)
        if (!is_operation_done(communicator, &operations->each[i])) return 0;
    for (int i = 0; i < operations->count; i++)
        if (operations->each[i].kind == COLLECTIVE)
            check_collective(communicator, &operations->each[i]);
        else
            check_message(communicator, &operations->each[i]);
    return 1;
}

void describe_operations(struct operations *operations, char *text, size_t size) {
    struct ncclComm *communicator = operations->communicator;
    for (int i = 0; i < operations->count; i++) {
        struct operation *operation = &operations->each[i];
        if (is_operation_done(communicator, operation)) continue;
        char call[100], missing[256];
        describe(&operation->signature, call, sizeof call);
        if (operation->kind == COLLECTIVE)
            list_missing(communicator, operation->index, 0, missing, sizeof missing);
        else
            snprintf(missing, sizeof missing, " %d", operation->signature.root);
        snprintf(text, size, "rank %d of group %s: call %u, %s, waits for rank%s", communicator->rank,
                 communicator->name, operation->index, call, missing);
        return;
    }
}

/* ---- calls */

static __thread int group_depth;
static __thread struct operations *grouped;
static __thread struct stream *grouped_stream;

static void queue_grouped(void) {
    if (!grouped) return;
    queue_operations(grouped_stream, &grouped->communicator->last, grouped);
    grouped = NULL;
}

static ncclResult_t call(enum kind kind, const char *name, size_t count, int type, int reduction, int root,
                         ncclComm_t communicator, cudaStream_t stream) {
    if (grouped && grouped->communicator != communicator) queue_grouped();
    int before = grouped ? grouped->count : 0;
    struct operations *operations = calloc(1, sizeof *operations + (before + 1) * sizeof(struct operation));
    if (grouped) memcpy(operations, grouped, sizeof *operations + before * sizeof(struct operation));
    free(grouped);
    operations->communicator = communicator;
    operations->count = before + 1;
    struct operation *operation = &operations->each[before];
    operation->kind = kind;
    operation->signature = (struct signature){
        .count = count, .type = type, .reduction = reduction < ncclNumOps ? reduction : ncclNumOps, .root = root};
    strncpy(operation->signature.name, name, sizeof operation->signature.name - 1);
    grouped = operations;
    grouped_stream = stream_of(stream);
    if (!group_depth) queue_grouped();
    return 0;
}

PUBLIC ncclResult_t ncclGroupStart(void) {
    group_depth++;
    return 0;
}
PUBLIC ncclResult_t ncclGroupEnd(void) {
    if (!--group_depth) queue_grouped();
    return 0;
}
PUBLIC ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
    return call(COLLECTIVE, "all_reduce", count, type, op, 0, comm, stream);
}
PUBLIC ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                               ncclComm_t comm, cudaStream_t stream) {
    return call(COLLECTIVE, "reduce", count, type, op, root, comm, stream);
}
PUBLIC ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return call(COLLECTIVE, "all_gather", count, type, 0, 0, comm, stream);
}
PUBLIC ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      ncclComm_t comm, cudaStream_t stream) {
    return call(COLLECTIVE, "reduce_scatter", count, type, op, 0, comm, stream);
}
PUBLIC ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return call(COLLECTIVE, "broadcast", count, type, 0, root, comm, stream);
}
PUBLIC ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
    return call(COLLECTIVE, "all_to_all", count, type, 0, 0, comm, stream);
}
PUBLIC ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return call(SEND, "send", count, type, 0, peer, comm, stream);
}
PUBLIC ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return call(RECEIVE, "recv", count, type, 0, peer, comm, stream);
}
