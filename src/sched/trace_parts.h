/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the room: the trace's memory, and how requests reach it. */
#ifndef PKV_SCHED_TRACE_PARTS_H
#define PKV_SCHED_TRACE_PARTS_H

#include "base/alloc.h"
#include "pkv/trace.h"

#define PKV_TRACE_MAX_REQUESTS (1 << 20)
#define PKV_TRACE_MAX_PROMPT   (1 << 24)
#define PKV_TRACE_MAX_DECODE   (1 << 20)
#define PKV_TRACE_MAX_ARRIVAL  (1 << 30)
#define PKV_TRACE_MAX_PAGES    (1 << 26)
#define PKV_TRACE_MAX_FILE     (64u << 20)

struct pkv_trace {
  pkv_allocator allocator;
  pkv_trace_options options; /* resolved */
  pkv_trace_request *requests;
  int64_t *first_page; /* [count + 1], into pages */
  int32_t *pages;      /* [physical_pages], the permutation */
  int32_t count, capacity;
  int64_t physical_pages;
};

/* A trace without requests: options checked and resolved. */
pkv_status pkv_trace_begin(pkv_trace **out, const pkv_trace_options *options, pkv_error *err);
/* Adds a request; the prompt is rounded up to a page. Values are checked; E_LIMIT. */
pkv_status pkv_trace_add(pkv_trace *trace, int64_t prompt, int64_t decode, int64_t arrival,
                         pkv_error *err);
/* Places the pages. The trace is complete then. */
pkv_status pkv_trace_finish(pkv_trace *trace, pkv_error *err);

#endif
