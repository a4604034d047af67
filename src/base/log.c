/* SPDX-License-Identifier: Apache-2.0 */
/* The process's log sink: silent until a host installs one. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

/* Set before other threads start (pkv.h says so), read by all of them. */
static pkv_log_fn log_fn;
static void *log_user;

void pkv_log_set(pkv_log_fn fn, void *user) {
  log_fn = fn;
  log_user = user;
}

void pkv_log(pkv_log_level level, const char *room, const char *format, ...) {
  if (log_fn == NULL) return;
  char text[1024];
  va_list args;
  va_start(args, format);
  const int n = vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (n < 0) return;
  /* One call is one line: a newline that comes from data must not forge a second one. */
  for (char *c = text; *c != '\0'; c++)
    if (*c == '\n' || *c == '\r') *c = ' ';
  log_fn(log_user, level, room, text);
}
