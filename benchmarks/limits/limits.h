/* Shared by the parts of the limits program: threads that start together, time, buffers. */
#ifndef PAGETIER_LIMITS_H
#define PAGETIER_LIMITS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_THREADS 1024

/* One measurement: every thread repeats its unit of work until `stop`, and counts what it did. */
typedef struct team team;
typedef struct {
    team *team;
    int index;
    void *data;      /* the thread's own, see each part */
    uint64_t amount; /* bytes or operations done while the clock ran */
    pthread_t thread;
} member;

struct team {
    int num_threads;
    int pinned; /* thread i to the i-th CPU that this process may use */
    double seconds;
    void (*work)(member *); /* one unit; adds to `amount` */
    void *shared;
    _Atomic int stop;
    pthread_barrier_t start;
    member members[MAX_THREADS];
};

double now_s(void);
/* Zeroed by the kernel on first touch, huge pages asked for. Ends the program when there is none to be had. */
void *new_buffer(size_t bytes);
void fail(const char *what);

/* Amount per second of all threads together, over `seconds`. `prepare` runs on each thread before the clock. */
double team_rate(team *t, void (*prepare)(member *));

/* Each prints the values of one JSON object, without its braces. */
void measure_memory(int copies, int num_threads, int pinned, double seconds, int runs, size_t bytes);
void measure_peak(int num_threads, int pinned, double seconds, int runs);
void measure_disk(const char *path, int depth, double seconds, int runs, size_t file_bytes, size_t block_bytes);

void print_list(const char *name, const double *values, int count);

#endif
