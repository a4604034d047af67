/* SPDX-License-Identifier: Apache-2.0 */
/* What the demo asks: documents that every Debian has, questions about them, and their tokens. */
#ifndef PKV_CLI_DEMO_REQUESTS_H
#define PKV_CLI_DEMO_REQUESTS_H

#include "cli/prompt_text.h"

#define PKV_DEMO_GROUPS   8
#define PKV_DEMO_REQUESTS 256

typedef struct pkv_demo_request {
  int group;
  const char *document; /* short name */
  char question[160];
  pkv_tokens prompt;
} pkv_demo_request;

/*
 * Request i belongs to group i % groups. Each group's prompt starts with the first `prefix` tokens
 * of its own document. E_IO names the folder when there are fewer than `groups` documents.
 */
pkv_status pkv_demo_requests(pkv_demo_request *requests, int count, int groups, int prefix,
                             const pkv_model *model, pkv_error *err);
void pkv_demo_requests_free(pkv_demo_request *requests, int count);

#endif
