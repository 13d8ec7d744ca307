/* Disk bandwidth past the page cache: O_DIRECT, large blocks, one thread for each request in flight. The data differs
 * from block to block, so that nothing on the way can shorten it. The file is removed at the end. */
#include "limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    int fd;
    size_t block_bytes, num_blocks;
    _Atomic size_t next; /* block, counted on past the end of the file */
    _Atomic int error;
} file;

static void prepare(member *m) {
    file *f = m->team->shared;
    if (m->data == NULL && posix_memalign(&m->data, 4096, f->block_bytes) != 0) fail("not enough memory");
    uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(m->index + 1);
    for (size_t i = 0; i < f->block_bytes / 8; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        ((uint64_t *)m->data)[i] = state;
    }
}

static off_t next_offset(file *f, size_t *block) {
    *block = atomic_fetch_add(&f->next, 1);
    return (off_t)(*block % f->num_blocks * f->block_bytes);
}

static void ended(member *m, file *f, ssize_t done) {
    if (done == (ssize_t)f->block_bytes) {
        m->amount += f->block_bytes;
        return;
    }
    atomic_store(&f->error, done < 0 ? errno : EIO);
    atomic_store(&m->team->stop, 1);
}

static void write_block(member *m) {
    file *f = m->team->shared;
    size_t block;
    off_t offset = next_offset(f, &block);
    ((uint64_t *)m->data)[0] = block;
    ended(m, f, pwrite(f->fd, m->data, f->block_bytes, offset));
}

static void read_block(member *m) {
    file *f = m->team->shared;
    size_t block;
    off_t offset = next_offset(f, &block);
    ended(m, f, pread(f->fd, m->data, f->block_bytes, offset));
}

static double rate(team *t, file *f, void (*work)(member *)) {
    t->work = work;
    atomic_store(&f->next, 0);
    double found = team_rate(t, prepare);
    int error = atomic_load(&f->error);
    if (error) {
        fprintf(stderr, "limits: O_DIRECT %s: %s\n", work == read_block ? "read" : "write", strerror(error));
        exit(1);
    }
    return found;
}

static void fill(team *t, file *f) {
    for (size_t block = 0; block < f->num_blocks; block++) {
        ((uint64_t *)t->members[0].data)[0] = block;
        if (pwrite(f->fd, t->members[0].data, f->block_bytes, (off_t)(block * f->block_bytes)) < 0)
            fail("the disk is full");
    }
    if (fdatasync(f->fd) != 0) fail("fdatasync");
}

void measure_disk(const char *path, int depth, double seconds, int runs, size_t file_bytes, size_t block_bytes) {
    static team t;
    file f = {.block_bytes = block_bytes / 4096 * 4096};
    double reads[100], writes[100];
    f.num_blocks = file_bytes / f.block_bytes;
    if (f.num_blocks < 1) fail("the file is smaller than a block");
    f.fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
    if (f.fd < 0) {
        fprintf(stderr, "limits: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    unlink(path);
    t.num_threads = depth;
    t.seconds = seconds;
    t.shared = &f;
    t.members[0].team = &t;
    prepare(&t.members[0]);
    fill(&t, &f);
    for (int run = 0; run < runs; run++) {
        writes[run] = rate(&t, &f, write_block);
        reads[run] = rate(&t, &f, read_block);
    }
    close(f.fd);
    print_list("read_bytes_per_s", reads, runs);
    printf(", ");
    print_list("write_bytes_per_s", writes, runs);
}
