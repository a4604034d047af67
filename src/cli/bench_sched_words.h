/* SPDX-License-Identifier: Apache-2.0 */
/* The lists on the command line of `pkv bench sched`. */
#ifndef PKV_CLI_BENCH_SCHED_WORDS_H
#define PKV_CLI_BENCH_SCHED_WORDS_H

#include <stdbool.h>
#include <stdint.h>

#define SCHED_WORDS 16

typedef struct sched_list {
  int32_t count, value[SCHED_WORDS];
} sched_list;

/* "100,1K,10K": whole numbers lo .. hi, K for a thousand. groups: also "none" and "chain". */
bool sched_list_numbers(sched_list *out, const char *text, int32_t lo, int32_t hi, bool groups);
/* Names as name(0 .. count-1) gives them, separated by commas; "all" = each. */
bool sched_list_names(sched_list *out, const char *text, const char *(*name)(int32_t),
                      int32_t count);
/* "200" or "1-200" (K as above). */
bool sched_range(int32_t range[2], const char *text, int32_t lo, int32_t hi);

#endif
