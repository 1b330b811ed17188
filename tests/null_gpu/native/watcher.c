/* Finds ranks that stand. All processes of a job (NULL_GPU_JOB) keep a line in shared memory: what they wait for, and
 * how much they have done. If for PATIENCE seconds none has called anything or computed, while somebody waits, they
 * stand: each prints its line, and aborts, at which faulthandler writes its Python stack. */
#include "null_gpu.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const double PATIENCE = 5, IDLE_SHARE = 0.1;
enum { MOST_RANKS = 64 };

struct slot {
    int is_here;
    uint64_t calls;
    double cpu_seconds;
    char text[1200];
};
struct job {
    int has_failed;
    struct slot slots[MOST_RANKS];
};

static struct job *job;
static int own_rank;
static const char *host_wait, *waiting_for_text;
static char waiting_for[512];
static uint64_t calls;

void count_call(void) { __sync_fetch_and_add(&calls, 1); }
void tell_host_wait(const char *call) { host_wait = call; }
void tell_waiting_for(const char *text) {
    if (text) snprintf(waiting_for, sizeof waiting_for, "%s", text);
    waiting_for_text = text ? waiting_for : NULL;
}

static double cpu_seconds(void) {
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return used.tv_sec + used.tv_nsec / 1e9;
}

void stop_all(const char *reason) {
    fprintf(stderr, "null NCCL: rank %d: %s\n", own_rank, reason);
    if (job) job->has_failed = 1;
    abort();
}

static int tell_own(void) {
    struct slot *own = &job->slots[own_rank];
    char under_way[900] = "";
    int waits = describe_items(under_way, sizeof under_way) || waiting_for_text;
    snprintf(own->text, sizeof own->text, "%s%s%s%s", waiting_for_text ? waiting_for : under_way,
             waits ? "" : "waits for nothing", host_wait ? "; its host is in " : "; its host is in something else",
             host_wait ? host_wait : "");
    own->calls = calls;
    own->cpu_seconds = cpu_seconds();
    return waits;
}

static void *watch(void *unused) {
    struct slot then[MOST_RANKS];
    double since = seconds(), next = 0;
    memcpy(then, job->slots, sizeof then);
    for (;; usleep(500)) {
        if (advance_items()) count_call();
        if (seconds() < next) continue;
        next = seconds() + 0.1;
        int waits = tell_own(), has_moved = !waits;
        for (int rank = 0; rank < MOST_RANKS; rank++) {
            struct slot *slot = &job->slots[rank];
            double computed = slot->cpu_seconds - then[rank].cpu_seconds;
            has_moved |= slot->is_here != then[rank].is_here || slot->calls != then[rank].calls;
            has_moved |= computed > IDLE_SHARE * PATIENCE;
        }
        if (has_moved) memcpy(then, job->slots, sizeof then), since = seconds();
        if (seconds() - since < PATIENCE && !job->has_failed) continue;
        if (waits || job->has_failed) stop_all(job->slots[own_rank].text);
    }
    return NULL;
}

__attribute__((destructor)) static void leave(void) {
    if (job) job->slots[own_rank].is_here = 0;
}

static void start(void) {
    const char *id = getenv("NULL_GPU_JOB"), *rank = getenv("RANK");
    if (!id) return;
    char path[200];
    snprintf(path, sizeof path, "/dev/shm/null-gpu-%s", id);
    int file = open(path, O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof *job)) return perror(path);
    job = mmap(0, sizeof *job, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    own_rank = rank ? atoi(rank) : 0;
    job->slots[own_rank].is_here = 1;
    pthread_t thread;
    pthread_create(&thread, NULL, watch, NULL);
}

void start_watcher(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
}
