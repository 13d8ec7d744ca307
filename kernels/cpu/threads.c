/* The library's own workers: they spin briefly for the next piece of a step, then sleep on a futex.
 *
 * A parallel section is a generation number plus a range of tasks for each worker, which takes them in order and then
 * helps with the others': neighbouring tasks read neighbouring memory. The caller takes part and waits for stragglers. A
 * worker that the kernel has put aside holds back at most the task it runs.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "internal.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 100000 /* long enough to bridge the serial gap between two ops and two steps' planning */

typedef struct {
    _Alignas(64) _Atomic int64_t next_task; /* of this worker's range */
    pt_threads *threads;
    int32_t index;
    pthread_t thread;
} pt_worker;

struct pt_threads {
    int32_t num_workers; /* the caller is worker 0 */
    int32_t caller_cpu;  /* where a thread that calls is bound to, -1: nowhere */
    pt_worker *workers;
    _Atomic uint32_t num_active; /* the first so many take part in sections; the others sleep until it changes */
    /* The current section: written by the caller before `generation` is raised. */
    pt_task_fn fn;
    void *arg;
    int64_t num_tasks;
    _Alignas(64) _Atomic uint32_t generation;
    _Alignas(64) _Atomic int32_t num_inside; /* workers that may still touch the section */
    _Atomic int32_t num_sleeping;
    _Atomic int32_t stop;
};

static void futex_wait(_Atomic uint32_t *at, uint32_t expected) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0); }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* The first task of a worker's range. */
static int64_t range_start(int64_t num_tasks, int64_t worker, int64_t num_active) {
    return num_tasks * worker / num_active;
}

static void take_tasks(pt_threads *threads, pt_task_fn fn, void *arg, int64_t num_tasks, int32_t worker) {
    const int32_t num_active = (int32_t)atomic_load_explicit(&threads->num_active, memory_order_relaxed);
    for (int32_t i = 0; i < num_active; i++) {
        const int32_t owner = (worker + i) % num_active;
        const int64_t end = range_start(num_tasks, owner + 1, num_active);
        for (;;) {
            int64_t task = atomic_fetch_add_explicit(&threads->workers[owner].next_task, 1, memory_order_relaxed);
            if (task >= end) break;
            fn(arg, task, worker);
        }
    }
}

/* Wait until the generation differs from `seen`; the new one. */
static uint32_t await_section(pt_threads *threads, uint32_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            uint32_t generation = atomic_load_explicit(&threads->generation, memory_order_acquire);
            if (generation != seen) return generation;
            pause_cpu();
        }
        if (now_ns() < until) continue;
        atomic_fetch_add(&threads->num_sleeping, 1);
        futex_wait(&threads->generation, seen);
        atomic_fetch_sub(&threads->num_sleeping, 1);
        until = now_ns() + SPIN_NS;
    }
}

static void *run_worker(void *at) {
    pt_worker *worker = at;
    pt_threads *threads = worker->threads;
    uint32_t seen = 0;
    for (;;) {
        const uint32_t num_active = atomic_load(&threads->num_active);
        if ((uint32_t)worker->index >= num_active) {
            futex_wait(&threads->num_active, num_active);
            continue;
        }
        seen = await_section(threads, seen);
        if (atomic_load(&threads->stop)) return NULL;
        /* Enter only while the section is open: the caller closes it by taking num_inside from 0 to -1. */
        int32_t inside = atomic_load(&threads->num_inside);
        while (inside >= 0 && !atomic_compare_exchange_weak(&threads->num_inside, &inside, inside + 1)) {
        }
        if (inside < 0) continue;
        if ((uint32_t)worker->index < atomic_load(&threads->num_active))
            take_tasks(threads, threads->fn, threads->arg, threads->num_tasks, worker->index);
        atomic_fetch_sub_explicit(&threads->num_inside, 1, memory_order_release);
    }
}

static void pin(pthread_t thread, int32_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

pt_threads *pt_threads_create(int32_t num_threads, const int32_t *cpus) {
    if (num_threads < 1 || num_threads > 1024) return NULL;
    pt_threads *threads = aligned_alloc(64, pt_ceil(sizeof *threads, 64) * 64);
    if (threads == NULL) return NULL;
    *threads = (pt_threads){.num_workers = 1, .caller_cpu = cpus == NULL ? -1 : cpus[0]};
    atomic_init(&threads->num_inside, -1);
    threads->workers = aligned_alloc(64, (size_t)num_threads * sizeof *threads->workers);
    if (threads->workers == NULL) {
        free(threads);
        return NULL;
    }
    for (int32_t i = 0; i < num_threads; i++) threads->workers[i] = (pt_worker){.threads = threads, .index = i};
    for (int32_t i = 1; i < num_threads; i++) {
        pt_worker *worker = &threads->workers[i];
        if (pthread_create(&worker->thread, NULL, run_worker, worker) != 0) break;
        if (cpus != NULL) pin(worker->thread, cpus[i]);
        threads->num_workers++;
    }
    pt_threads_use(threads, threads->num_workers);
    return threads;
}

void pt_threads_use(pt_threads *threads, int32_t num_active) {
    const uint32_t value = (uint32_t)pt_max(1, pt_min(num_active, threads->num_workers));
    if (atomic_exchange(&threads->num_active, value) != value) futex_wake(&threads->num_active);
}

void pt_threads_destroy(pt_threads *threads) {
    if (threads == NULL) return;
    atomic_store(&threads->stop, 1);
    pt_threads_use(threads, threads->num_workers);
    atomic_fetch_add(&threads->generation, 1);
    futex_wake(&threads->generation);
    for (int32_t i = 1; i < threads->num_workers; i++) pthread_join(threads->workers[i].thread, NULL);
    free(threads->workers);
    free(threads);
}

void pt_bind_caller(const pt_threads *threads) {
    static _Thread_local int32_t bound = -1;
    if (threads->caller_cpu == bound) return;
    bound = threads->caller_cpu;
    if (bound >= 0) pin(pthread_self(), bound);
}

int32_t pt_num_workers(const pt_threads *threads) { return threads->num_workers; }

void pt_parallel(pt_threads *threads, pt_task_fn fn, void *arg, int64_t num_tasks) {
    const int32_t num_active = (int32_t)atomic_load_explicit(&threads->num_active, memory_order_relaxed);
    if (num_active == 1 || num_tasks <= 1) {
        for (int64_t task = 0; task < num_tasks; task++) fn(arg, task, 0);
        return;
    }
    threads->fn = fn;
    threads->arg = arg;
    threads->num_tasks = num_tasks;
    for (int32_t i = 0; i < num_active; i++)
        atomic_store_explicit(&threads->workers[i].next_task, range_start(num_tasks, i, num_active), memory_order_relaxed);
    atomic_store(&threads->num_inside, 0);
    atomic_fetch_add(&threads->generation, 1);
    if (atomic_load(&threads->num_sleeping) > 0) futex_wake(&threads->generation);
    take_tasks(threads, fn, arg, num_tasks, 0);
    /* Close the section: from here on nobody enters; wait for those inside. */
    for (int32_t spins = 0;; spins++) {
        int32_t none = 0;
        if (atomic_compare_exchange_weak(&threads->num_inside, &none, -1)) return;
        pause_cpu();
        if (spins > 2000) sched_yield(); /* a worker was put aside in the middle of a task */
    }
}
