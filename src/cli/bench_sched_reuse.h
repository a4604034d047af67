/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of what several rows read L2 still holds, for `pkv bench sched --simulate`.
 *
 * A plan like that of route balanced cuts the line of (row, KV head) segments into equal parts that
 * are read side by side at one speed, the last segment of a part first. So it is known when each
 * place of a prefix is read by each row that has it, and how many different bytes are read between
 * one time and the next (the footprint; Xiang, Ding, Luo, Bao 2013, "HOTL"). L2 still holds the
 * place with the chance min(1, L2 / footprint). Times and the part of all bytes that a footprint is
 * depend on counts alone, so one walk serves all sizes: it is kept as a short table.
 */
#ifndef PKV_CLI_BENCH_SCHED_REUSE_H
#define PKV_CLI_BENCH_SCHED_REUSE_H

#include "base/status.h"

typedef struct sched_reuse sched_reuse;

/* A plan of so many parts over rows of so many KV heads; released by sched_reuse_free. E_NOMEM. */
pkv_status sched_reuse_init(sched_reuse **out, int32_t parts, int32_t heads, pkv_error *err);
void sched_reuse_free(sched_reuse *reuse); /* NULL is allowed */

/*
 * The share of what is read again that comes from L2: `groups` prefixes of `shared` bytes in all,
 * each of `rows` >= 2 rows that lie side by side in the batch, and `own` bytes that one row alone
 * has; L2 holds `l2` bytes. Bytes are of one layer. Rows beyond what a walk holds count as fewer.
 */
double sched_reuse_share(sched_reuse *reuse, int32_t groups, int32_t rows, double shared,
                         double own, double l2);

#endif
