/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log of `pkv serve` on stderr, one record a line, as text or JSON. Whatever a message holds,
 * it stays on its line: control characters, line separators and bytes that are no UTF-8 are
 * escaped.
 */
#ifndef PKV_CLI_SERVE_LOG_H
#define PKV_CLI_SERVE_LOG_H

#include <stdbool.h>

#include "server/serve.h"

typedef struct pkv_serve_log {
  bool json;
  pkv_log_level level; /* the highest that is shown */
} pkv_serve_log;

/* A pkv_log_fn; user: the pkv_serve_log. Any thread. */
void pkv_serve_log_line(void *user, pkv_log_level level, const char *room, const char *text);
/* The record of one request, at info; of a probe, which comes every few seconds, at debug. */
void pkv_serve_log_access(const pkv_serve_log *log, const pkv_access *access);

#endif
