/* What this machine can do at most, as one JSON object on stdout:
 *
 *   limits read   THREADS PINNED SECONDS RUNS BYTES           streaming read, bytes/s; BYTES a thread
 *   limits copy   THREADS PINNED SECONDS RUNS BYTES           streaming copy, likewise; each byte counts once
 *   limits peak   THREADS PINNED SECONDS RUNS                 multiply-adds fed from L2, floating-point operations/s
 *   limits disk   DEPTH SECONDS RUNS BYTES BLOCK_BYTES PATH   O_DIRECT write and read of a new file PATH, bytes/s
 *
 * Figures are lists, one value a run. PINNED is 0 or 1. A fault ends the program with one line on stderr. */
#include "limits.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void fail(const char *what) {
    fprintf(stderr, "limits: %s\n", what);
    exit(1);
}

void *new_buffer(size_t bytes) {
    void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) fail("not enough memory");
    madvise(data, bytes, MADV_HUGEPAGE);
    return data;
}

static void pin(int index) {
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int seen = 0, count = CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed) || seen++ != index % count) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
}

typedef struct {
    member *member;
    void (*prepare)(member *);
} start_of;

static void *run_member(void *at) {
    start_of *start = at;
    member *m = start->member;
    if (m->team->pinned) pin(m->index);
    start->prepare(m);
    pthread_barrier_wait(&m->team->start);
    while (!atomic_load_explicit(&m->team->stop, memory_order_relaxed)) m->team->work(m);
    return NULL;
}

double team_rate(team *t, void (*prepare)(member *)) {
    start_of starts[MAX_THREADS];
    atomic_store(&t->stop, 0);
    pthread_barrier_init(&t->start, NULL, (unsigned)t->num_threads + 1);
    for (int i = 0; i < t->num_threads; i++) {
        t->members[i].team = t;
        t->members[i].index = i;
        t->members[i].amount = 0;
        starts[i] = (start_of){&t->members[i], prepare};
        if (pthread_create(&t->members[i].thread, NULL, run_member, &starts[i]) != 0) fail("cannot start a thread");
    }
    pthread_barrier_wait(&t->start);
    double start = now_s();
    struct timespec pause = {(time_t)t->seconds, (long)(1e9 * (t->seconds - (double)(time_t)t->seconds))};
    nanosleep(&pause, NULL);
    atomic_store(&t->stop, 1);
    uint64_t amount = 0;
    for (int i = 0; i < t->num_threads; i++) {
        pthread_join(t->members[i].thread, NULL);
        amount += t->members[i].amount;
    }
    double elapsed = now_s() - start; /* the last unit of each thread is in it */
    pthread_barrier_destroy(&t->start);
    return (double)amount / elapsed;
}

void print_list(const char *name, const double *values, int count) {
    printf("\"%s\": [", name);
    for (int i = 0; i < count; i++) printf("%s%.6g", i ? ", " : "", values[i]);
    printf("]");
}

static double number(const char *text, double least, double most) {
    char *end;
    double value = strtod(text, &end);
    if (*end != '\0' || !(value >= least && value <= most)) fail("an argument is no number in range");
    return value;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if ((!strcmp(what, "read") || !strcmp(what, "copy")) && argc == 7) {
        printf("{");
        measure_memory(!strcmp(what, "copy"), (int)number(argv[2], 1, MAX_THREADS), (int)number(argv[3], 0, 1),
                       number(argv[4], 1e-3, 60), (int)number(argv[5], 1, 100), (size_t)number(argv[6], 1 << 16, 1e12));
    } else if (!strcmp(what, "peak") && argc == 6) {
        printf("{");
        measure_peak((int)number(argv[2], 1, MAX_THREADS), (int)number(argv[3], 0, 1), number(argv[4], 1e-3, 60),
                     (int)number(argv[5], 1, 100));
    } else if (!strcmp(what, "disk") && argc == 8) {
        printf("{");
        measure_disk(argv[7], (int)number(argv[2], 1, MAX_THREADS), number(argv[3], 1e-3, 60),
                     (int)number(argv[4], 1, 100), (size_t)number(argv[5], 4096, 1e13),
                     (size_t)number(argv[6], 4096, 1 << 30));
    } else {
        fail("usage: read|copy THREADS PINNED SECONDS RUNS BYTES | peak THREADS PINNED SECONDS RUNS | "
             "disk DEPTH SECONDS RUNS BYTES BLOCK_BYTES PATH");
    }
    printf("}\n");
    return 0;
}
