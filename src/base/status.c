/* SPDX-License-Identifier: Apache-2.0 */
/* Names of the status codes, error details, version. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#ifdef PKV_ASSERTS
#include <stdlib.h>
#endif

pkv_status pkv_fail(pkv_error *err, pkv_status status, const char *where, const char *format, ...) {
  if (err == NULL) return status;
  err->status = status;
  err->where = where;
  va_list args;
  va_start(args, format);
  const int n = vsnprintf(err->text, sizeof err->text, format, args);
  va_end(args);
  if (n < 0) err->text[0] = '\0';
  return status;
}

const char *pkv_status_name(pkv_status status) {
  switch (status) {
#define PKV_STATUS_NAME(name, value, text)                                                         \
  case PKV_##name:                                                                                 \
    return #name;
    PKV_STATUS_MAP(PKV_STATUS_NAME)
#undef PKV_STATUS_NAME
  }
  return "E_UNKNOWN";
}

const char *pkv_status_text(pkv_status status) {
  switch (status) {
#define PKV_STATUS_TEXT(name, value, text)                                                         \
  case PKV_##name:                                                                                 \
    return text;
    PKV_STATUS_MAP(PKV_STATUS_TEXT)
#undef PKV_STATUS_TEXT
  }
  return "unknown status";
}

#define PKV_STRING_(x) #x
#define PKV_STRING(x)  PKV_STRING_(x)

const char *pkv_version(void) {
  return PKV_STRING(PKV_VERSION_MAJOR) "." PKV_STRING(PKV_VERSION_MINOR) "." PKV_STRING(
      PKV_VERSION_PATCH);
}

int32_t pkv_version_number(void) {
  return PKV_VERSION_MAJOR * 1000000 + PKV_VERSION_MINOR * 1000 + PKV_VERSION_PATCH;
}

#ifdef PKV_ASSERTS
void pkv_assert_failed(const char *file, int line, const char *text) {
  fprintf(stderr, "%s:%d: invariant broken: %s\n", file, line, text);
  abort();
}
#endif
