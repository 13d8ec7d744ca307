/* pt_sample: which token follows, for every row of logits. Rows are tasks; a row is worked on by one thread.
 *
 * Nothing is sorted. The peaks of blocks of logits bound the k-th best from below (k blocks have a token as good), so
 * that only blocks whose peak reaches the bound are looked at again, and of them few tokens remain to be counted. Those
 * are kept in the order of ids, in which the draw walks them.
 */
#include "sample.h"

#include <math.h>
#include <string.h>

#define FIRST_PEAKS 128 /* top_p looks at so many blocks, then at all */
#define MIN_SHARED (1 << 17)   /* logits below which waking the workers costs more than they save */
#define MIN_TEMPERATURE 1e-5   /* below it a temperature divides logits into infinities */
#define MAX_DIGIT_BITS 13

/* A row's distribution, and its candidates: some tokens, rising ids. */
typedef struct {
    const pt_kernels *kernels;
    const float *logits;
    const float *known; /* their peaks, NULL: yet to be found */
    int64_t vocab_size, num_blocks;
    float peak, temperature;
    float *peaks;    /* (num_blocks) of logits, after `begin` of scaled ones */
    float *summits;  /* (num_blocks / PT_SAMPLE_BLOCK, rounded up) of the peaks of logits */
    int64_t *masses; /* (num_blocks) */
    int32_t *ids;    /* (count) of vocab_size, and so are the next two */
    float *scaled;
    int64_t *weights;
    int64_t count;
} search;

typedef struct {
    const pt_kernels *kernels;
    pt_sample_row *rows;
    int64_t vocab_size;
    char *scratch;
    size_t worker_bytes;
} sampling;

/* Lays out a worker's scratch; its end. */
static size_t lay_out(int64_t vocab_size, char *base, search *s) {
    size_t at = 0, num_blocks = (size_t)pt_ceil(vocab_size, PT_SAMPLE_BLOCK), size = (size_t)vocab_size;
    size_t peaks = pt_take(&at, num_blocks * sizeof(float)), masses = pt_take(&at, num_blocks * sizeof(int64_t));
    size_t summits = pt_take(&at, (num_blocks + PT_SAMPLE_BLOCK - 1) / PT_SAMPLE_BLOCK * sizeof(float));
    size_t ids = pt_take(&at, size * sizeof(int32_t)), scaled = pt_take(&at, size * sizeof(float));
    size_t weights = pt_take(&at, size * sizeof(int64_t));
    if (s != NULL) {
        s->num_blocks = (int64_t)num_blocks;
        s->peaks = (float *)(base + peaks);
        s->summits = (float *)(base + summits);
        s->masses = (int64_t *)(base + masses);
        s->ids = (int32_t *)(base + ids);
        s->scaled = (float *)(base + scaled);
        s->weights = (int64_t *)(base + weights);
    }
    return at;
}

size_t pt_sample_scratch_bytes(int64_t vocab_size, const pt_threads *threads) {
    if (vocab_size < 1 || vocab_size > PT_SAMPLE_MAX_VOCAB) return 0;
    return lay_out(vocab_size, NULL, NULL) * (size_t)pt_num_workers(threads);
}

/* The smallest of the fewest best values, all at most 0, whose weights (NULL: 1 each) are together at least `needed`.
 * Digit by digit from the highest, since the bits of floats of one sign are in the order of their magnitudes. The first
 * digit of many values is a long one: it spreads them, and few are left for the next. */
static float least_of(const float *values, const int64_t *weights, int64_t count, int64_t needed) {
    static const int shifts[2][5] = {{31, 24, 16, 8, 0}, {31, 31 - MAX_DIGIT_BITS, 9, 0, 0}};
    const int *shift = shifts[count > 4096];
    uint32_t found = 0;
    do {
        const uint32_t last = (1u << (shift[0] - shift[1])) - 1;
        int64_t bins[1 << MAX_DIGIT_BITS];
        memset(bins, 0, (last + 1) * sizeof *bins);
        for (int64_t i = 0; i < count; i++) {
            uint32_t magnitude;
            memcpy(&magnitude, &values[i], 4);
            magnitude &= 0x7FFFFFFF;
            if ((magnitude ^ found) >> shift[0] == 0) bins[magnitude >> shift[1] & last] += weights == NULL ? 1 : weights[i];
        }
        uint32_t digit = 0;
        while (digit < last && bins[digit] < needed) needed -= bins[digit++];
        found |= digit << shift[1];
    } while (*++shift > 0);
    float magnitude;
    memcpy(&magnitude, &found, 4);
    return -magnitude;
}

/* At most the value of the k-th best token. */
static float bound_of(const search *s, int64_t k) {
    return k <= s->num_blocks ? least_of(s->peaks, NULL, s->num_blocks, k) : -INFINITY;
}

/* Candidates: every token of at least `least`. */
static void gather(search *s, float least) {
    if (least == -INFINITY) {
        s->count = s->vocab_size;
        s->kernels->scale(s->logits, s->count, s->peak, s->temperature, s->scaled);
        for (int64_t i = 0; i < s->count; i++) s->ids[i] = (int32_t)i;
        return;
    }
    s->count = 0;
    for (int64_t block = 0; block < s->num_blocks; block++) {
        if (s->peaks[block] < least) continue;
        float scaled[PT_SAMPLE_BLOCK];
        const int64_t first = block * PT_SAMPLE_BLOCK, count = pt_min(PT_SAMPLE_BLOCK, s->vocab_size - first);
        s->kernels->scale(s->logits + first, count, s->peak, s->temperature, scaled);
        for (int64_t i = 0; i < count; i++) {
            s->ids[s->count] = (int32_t)(first + i);
            s->scaled[s->count] = scaled[i];
            s->count += scaled[i] >= least;
        }
    }
}

/* Of the candidates only those of at least `least`. */
static void keep(search *s, float least) {
    int64_t kept = 0;
    for (int64_t i = 0; i < s->count; i++) {
        s->ids[kept] = s->ids[i];
        s->scaled[kept] = s->scaled[i];
        kept += s->scaled[i] >= least;
    }
    s->count = kept;
}

static int64_t sum_of(const int64_t *weights, int64_t count) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i];
    return sum;
}

/* The candidates' weights; their sum. */
static int64_t weigh(search *s) {
    s->kernels->weigh(s->scaled, s->count, s->weights);
    return sum_of(s->weights, s->count);
}

/* The first index whose weights up to and with it exceed *target, which is below their sum; *target: what is left. */
static int64_t index_of(const int64_t *weights, int64_t *target) {
    int64_t i = 0;
    for (; weights[i] <= *target; i++) *target -= weights[i];
    return i;
}

/* Scales the row, its peaks at once, logits where they are looked at. */
static void begin(search *s, double temperature) {
    s->temperature = (float)fmax(temperature, MIN_TEMPERATURE);
    s->kernels->scale(s->peaks, s->num_blocks, s->peak, s->temperature, s->peaks);
}

/* Candidates after min_p and top_k; 0: neither leaves any out, and there are no candidates. */
static int32_t keep_best(search *s, const pt_sample_row *row) {
    float least = row->min_p > 0.0 ? (float)log(row->min_p) : -INFINITY;
    if (row->top_k > 0 && row->top_k < s->vocab_size) {
        gather(s, bound_of(s, row->top_k));
        keep(s, fmaxf(least, least_of(s->scaled, NULL, s->count, row->top_k)));
        return 1;
    }
    if (least == -INFINITY) return 0;
    gather(s, least);
    return 1;
}

/* Candidates: the fewest best tokens with top_p of the mass, of all tokens or of the candidates. Their mass. */
static int64_t keep_nucleus(search *s, double top_p, int64_t total, int32_t has_candidates) {
    const int64_t needed = pt_min(total, (int64_t)ceil(top_p * (double)total));
    if (!has_candidates) {
        gather(s, bound_of(s, FIRST_PEAKS));
        if (weigh(s) < needed) {
            gather(s, -INFINITY);
            weigh(s);
        }
    }
    keep(s, least_of(s->scaled, s->weights, s->count, needed));
    return weigh(s);
}

/* The token at `number` of the kept distribution's cumulative sum in the order of ids. */
static int32_t draw(search *s, const pt_sample_row *row) {
    begin(s, row->temperature);
    int32_t has_candidates = keep_best(s, row);
    int64_t total;
    if (has_candidates) {
        total = weigh(s);
    } else {
        s->kernels->masses(s->logits, s->vocab_size, s->peak, s->temperature, s->masses);
        total = sum_of(s->masses, s->num_blocks);
    }
    if (row->top_p < 1.0) {
        total = keep_nucleus(s, row->top_p, total, has_candidates);
        has_candidates = 1;
    }
    int64_t target = (int64_t)((unsigned __int128)total * (uint64_t)(row->number * 0x1p52) >> 52);
    if (has_candidates) return s->ids[index_of(s->weights, &target)];
    const int64_t first = index_of(s->masses, &target) * PT_SAMPLE_BLOCK;
    s->count = pt_min(PT_SAMPLE_BLOCK, s->vocab_size - first);
    s->kernels->scale(s->logits + first, s->count, s->peak, s->temperature, s->scaled);
    weigh(s);
    return (int32_t)(first + index_of(s->weights, &target));
}

/* The first of a block's values that is `peak`, NaN included. */
static int64_t first_of(const float *block, float peak) {
    int64_t i = 0;
    while (isnan(peak) ? !isnan(block[i]) : block[i] != peak) i++;
    return i;
}

/* Finds the peak: the greatest logit, or NaN where there is one. The lowest id that has it. */
static int32_t find_peak(search *s) {
    if (s->known != NULL)
        memcpy(s->peaks, s->known, (size_t)s->num_blocks * sizeof(float));
    else
        s->kernels->peaks(s->logits, s->vocab_size, s->peaks);
    s->kernels->peaks(s->peaks, s->num_blocks, s->summits);
    s->peak = s->summits[0];
    for (int64_t i = 1; i < pt_ceil(s->num_blocks, PT_SAMPLE_BLOCK); i++)
        s->peak = s->summits[i] > s->peak || isnan(s->summits[i]) ? s->summits[i] : s->peak;
    int64_t at = first_of(s->summits, s->peak) * PT_SAMPLE_BLOCK;
    at = (at + first_of(s->peaks + at, s->peak)) * PT_SAMPLE_BLOCK;
    return (int32_t)(at + first_of(s->logits + at, s->peak));
}

/* One more than the tokens that are better than `token`. */
static int32_t rank_of(const search *s, int32_t token) {
    const float own = s->logits[token];
    int32_t rank = 1;
    for (int64_t block = 0; block < s->num_blocks; block++) {
        const int64_t end = pt_min(s->vocab_size, (block + 1) * PT_SAMPLE_BLOCK);
        if (s->peaks[block] > own)
            for (int64_t i = block * PT_SAMPLE_BLOCK; i < end; i++) rank += s->logits[i] > own;
    }
    return rank;
}

/* The best tokens, best first, equal ones by id. */
static void list_top(search *s, double log_total, pt_sample_row *row) {
    gather(s, bound_of(s, row->num_top));
    keep(s, least_of(s->scaled, NULL, s->count, row->num_top));
    for (int32_t place = 0; place < row->num_top; place++) {
        int64_t best = 0;
        for (int64_t i = 1; i < s->count; i++)
            if (s->logits[s->ids[i]] > s->logits[s->ids[best]]) best = i; /* scaled ones may have become equal */
        row->top_ids[place] = s->ids[best];
        row->top_logprobs[place] = (float)((double)s->scaled[best] - log_total);
        s->count--;
        memmove(s->ids + best, s->ids + best + 1, (size_t)(s->count - best) * sizeof *s->ids);
        memmove(s->scaled + best, s->scaled + best + 1, (size_t)(s->count - best) * sizeof *s->scaled);
    }
}

/* Log-probabilities by row->raw; NaN where it has no distribution. */
static void report(search *s, pt_sample_row *row) {
    s->known = row->raw == row->logits ? row->peaks : NULL;
    s->logits = row->raw;
    find_peak(s);
    row->rank = isfinite(s->peak) ? rank_of(s, row->token) : 1;
    row->logprob = NAN;
    if (!isfinite(s->peak)) {
        for (int32_t i = 0; i < row->num_top; i++) row->top_ids[i] = i, row->top_logprobs[i] = NAN;
        return;
    }
    begin(s, 1.0);
    s->kernels->masses(s->logits, s->vocab_size, s->peak, s->temperature, s->masses);
    const double log_total = log((double)sum_of(s->masses, s->num_blocks) * ldexp(1.0, -PT_SAMPLE_UNIT_BITS));
    row->logprob = (float)((double)(s->logits[row->token] - s->peak) - log_total);
    if (row->num_top > 0) list_top(s, log_total, row);
}

static void sample_row(void *arg, int64_t task, int32_t worker) {
    const sampling *all = arg;
    pt_sample_row *row = &all->rows[task];
    search s = {.kernels = all->kernels, .logits = row->logits, .known = row->peaks, .vocab_size = all->vocab_size};
    lay_out(all->vocab_size, all->scratch + (size_t)worker * all->worker_bytes, &s);
    row->token = find_peak(&s);
    if (row->temperature > 0.0 && isfinite(s.peak)) row->token = draw(&s, row);
    if (row->raw != NULL) report(&s, row);
}

static int32_t is_sound(const pt_sample_row *row, int64_t vocab_size) {
    return row->logits != NULL && row->number >= 0.0 && row->number < 1.0 && row->temperature >= 0.0 &&
           row->temperature < INFINITY && row->min_p >= 0.0 && row->min_p <= 1.0 && row->top_p > 0.0 &&
           row->top_p <= 1.0 && row->num_top >= 0 && row->num_top <= vocab_size &&
           (row->num_top == 0 || (row->raw != NULL && row->top_ids != NULL && row->top_logprobs != NULL));
}

int32_t pt_sample(int32_t isa, pt_sample_row *rows, int32_t num_rows, int64_t vocab_size, pt_threads *threads,
                  void *scratch) {
    sampling all = {.kernels = pt_kernels_of(isa), .rows = rows, .vocab_size = vocab_size, .scratch = scratch};
    if (all.kernels == NULL) return PT_ERR_ISA;
    if (num_rows < 0 || vocab_size < 1 || vocab_size > PT_SAMPLE_MAX_VOCAB) return PT_ERR_VOCAB;
    for (int32_t i = 0; i < num_rows; i++)
        if (!is_sound(&rows[i], vocab_size)) return PT_ERR_SAMPLING;
    all.worker_bytes = lay_out(vocab_size, NULL, NULL);
    if (num_rows * vocab_size < MIN_SHARED)
        for (int32_t i = 0; i < num_rows; i++) sample_row(&all, i, 0);
    else
        pt_parallel(threads, sample_row, &all, num_rows);
    return 0;
}
