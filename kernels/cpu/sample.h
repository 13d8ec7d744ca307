/* Units of sampling, shared by its rules (sample.c) and its vector code (sample.inc).
 *
 * A token's weight is e^(scaled logit) as a whole number of 2^-43: the best token's is 2^43. Sums of whole numbers are
 * exact in any order, so that a draw depends on nothing but its row. `engine/sampler.py` says the same in torch.
 */
#ifndef PAGETIER_SAMPLE_H
#define PAGETIER_SAMPLE_H

#include "internal.h"

#define PT_SAMPLE_UNIT_BITS 43
#define PT_SAMPLE_MAX_VOCAB ((1 << 20) - 1) /* the most weights whose sum fits 63 bits */

#endif
