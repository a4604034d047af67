/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which chunks the rows of a simulated batch hold: counted here once more, apart from the scheduler
 * that is judged by the result.
 */
#ifndef PKV_CLI_BENCH_SCHED_CHUNKS_H
#define PKV_CLI_BENCH_SCHED_CHUNKS_H

#include "cli/bench_sched_work.h"

typedef struct sched_chunk {
  uint64_t hash;
  int32_t rows; /* of the batch that hold it */
  int8_t used;
  int8_t seen; /* some request had it before */
} sched_chunk;

typedef struct sched_chunks {
  sched_chunk *slots; /* [mask + 1] */
  size_t mask;
  int64_t unique, shared; /* tokens in chunks that a row, or more than one, holds */
} sched_chunks;

pkv_status sched_chunks_init(sched_chunks *out, const sched_work *work, pkv_error *err);
void sched_chunks_free(sched_chunks *chunks);

/* Tokens of the job's longest prefix that the batch holds; ever: that any job has brought. */
int32_t sched_chunks_prefix(const sched_chunks *chunks, const sched_work *work,
                            const sched_job *job, bool ever);
/* A row joins (by = 1) or leaves (-1). */
void sched_chunks_add(sched_chunks *chunks, const sched_work *work, const sched_job *job, int by);

#endif
