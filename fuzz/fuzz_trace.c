/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of pkv_trace_parse: any text is either refused with a reason or gives a trace whose
 * every request, page and step is inside its bounds.
 */
#include "pkv/trace.h"

#include <stdio.h>
#include <stdlib.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

#define ACTIVE 5

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_trace_options options = PKV_TRACE_OPTIONS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  pkv_trace *trace = NULL;
  options.max_active = ACTIVE;
  options.requests = 1000;
  options.page_tokens = 1024; /* few pages: placing them is not what is tested */
  const pkv_status status = pkv_trace_parse(&trace, (const char *)data, size, &options, &err);
  if (status != PKV_OK) {
    REQUIRE(trace == NULL && err.text[0] != '\0');
    REQUIRE(status == PKV_E_FORMAT || status == PKV_E_LIMIT);
    return 0;
  }
  int32_t count = 0;
  const pkv_trace_request *r = pkv_trace_requests(trace, &count);
  REQUIRE(count >= 1 && count <= 1000);
  for (int32_t i = 0; i < count; i++) {
    REQUIRE(r[i].prompt_tokens >= 1024 && r[i].decode_tokens >= 1 && r[i].arrival >= 0);
    const int32_t *table = pkv_trace_table(trace, i);
    for (int32_t p = 0; p < r[i].pages; p++)
      REQUIRE(table[p] >= 0 && table[p] < pkv_trace_pages(trace));
  }
  int32_t step = pkv_trace_next_step(trace, 0);
  for (int i = 0; i < 50 && step >= 0; i++) {
    int32_t request[ACTIVE], length[ACTIVE];
    const int32_t active = pkv_trace_step(request, length, trace, step);
    REQUIRE(active >= 1 && active <= ACTIVE);
    for (int32_t row = 0; row < active; row++)
      REQUIRE(length[row] <= (int64_t)r[request[row]].pages * 1024);
    const int32_t next = pkv_trace_next_step(trace, step + 1);
    REQUIRE(next < 0 || next > step);
    step = next;
  }
  pkv_trace_destroy(trace);
  return 0;
}
