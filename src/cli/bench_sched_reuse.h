/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of what several rows read L2 still holds, for `pkv bench sched --simulate`.
 *
 * A plan like that of route balanced cuts the line of a batch's (row, KV head) segments into parts
 * of equal length that are read side by side, the last segment of a part first, at speeds that
 * differ by `spread`. So it is known when each place of a prefix is read by each row that has it,
 * and how many different bytes are read between one time and the next (the footprint; Xiang, Ding,
 * Luo, Bao 2013, "HOTL"). L2 still holds the place with the chance min(1, L2 / footprint).
 */
#ifndef PKV_CLI_BENCH_SCHED_REUSE_H
#define PKV_CLI_BENCH_SCHED_REUSE_H

#include "base/status.h"

#define SCHED_REUSE_READS (1 << 17) /* of places, rows and heads, that a walk looks at */

typedef struct sched_reuse sched_reuse;

/* A plan of so many parts over rows of so many KV heads; to be freed after a failure, too. */
pkv_status sched_reuse_init(sched_reuse **out, int32_t parts, int32_t heads, double spread,
                            pkv_error *err);
void sched_reuse_free(sched_reuse *reuse); /* NULL is allowed */

/* A batch, row by row, each followed by its places; what is beyond the limits is left out. */
void sched_reuse_begin(sched_reuse *reuse);
void sched_reuse_row(sched_reuse *reuse, double tokens);
/* `at` tokens behind the row's begin; rows that share this place have the same key. */
void sched_reuse_place(sched_reuse *reuse, uint64_t key, double at);

/*
 * The share of what is read again that comes from L2: rows share `shared` bytes, of which the
 * places stand for equal parts, and have `own` more; L2 holds `l2` bytes. Bytes are of one layer.
 * 1 where nothing is read again.
 */
double sched_reuse_share(sched_reuse *reuse, double shared, double own, double l2);

#endif
