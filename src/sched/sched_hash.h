/* SPDX-License-Identifier: Apache-2.0 */
/* Digests by a scheduler's own options. */
#ifndef PKV_SCHED_HASH_H
#define PKV_SCHED_HASH_H

#include "sched/sched_parts.h"

/* ceil(count / chunk_tokens) cumulative digests, by options->hash_fn where there is one. */
void pkv_sched_hash_prompt(uint64_t *digests, const pkv_sched *s, const int32_t *tokens,
                           size_t count);

#endif
