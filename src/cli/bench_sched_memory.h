/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of `pkv bench sched`, from the C library's allocator. */
#ifndef PKV_CLI_BENCH_SCHED_MEMORY_H
#define PKV_CLI_BENCH_SCHED_MEMORY_H

#include "base/alloc.h"

/* [count], zeroed; NULL when there is none left, or count is 0. */
static inline void *sched_alloc(size_t count, size_t size) {
  const pkv_allocator a = pkv_allocator_default();
  return pkv_alloc_zeroed(&a, count, size);
}

static inline void sched_free(void *memory, size_t count, size_t size) {
  const pkv_allocator a = pkv_allocator_default();
  pkv_free(&a, memory, count * size);
}

#endif
