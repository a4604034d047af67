/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes, error details, and the macros that pass them on. */
#ifndef PKV_BASE_STATUS_H
#define PKV_BASE_STATUS_H

#include "pkv/pkv.h"

/*
 * Fills *err (may be NULL) and returns `status`, so that a check reads: return pkv_fail(err, ...,
 * "rows is %d", n). `where` is a static string, usually __func__. Text beyond PKV_ERROR_TEXT_BYTES
 * is cut.
 */
pkv_status pkv_fail(pkv_error *err, pkv_status status, const char *where, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#ifdef __clang_analyzer__ /* it cannot see that pkv_fail returns the status it is given */
#define PKV_FAIL(err, status, ...)                                                                 \
  ((void)pkv_fail((err), (status), __func__, __VA_ARGS__), (status))
#else
#define PKV_FAIL(err, status, ...) pkv_fail((err), (status), __func__, __VA_ARGS__)
#endif

/* Propagates a failure. */
#define PKV_TRY(expr)                                                                              \
  do {                                                                                             \
    const pkv_status pkv_try_status = (expr);                                                      \
    if (pkv_try_status != PKV_OK) return pkv_try_status;                                           \
  } while (0)

/* Refuses bad input. */
#define PKV_CHECK(err, condition, status, ...)                                                     \
  do {                                                                                             \
    if (!(condition)) return PKV_FAIL((err), (status), __VA_ARGS__);                               \
  } while (0)

/* Broken invariants, never input. On in debug, test and fuzz builds (PKV_ASSERTS), off in release.
 */
#ifdef PKV_ASSERTS
void pkv_assert_failed(const char *file, int line, const char *text);
#define PKV_ASSERT(condition)                                                                      \
  ((condition) ? (void)0 : pkv_assert_failed(__FILE__, __LINE__, #condition))
#else
#define PKV_ASSERT(condition) ((void)0)
#endif

/* Refuses an options or arguments struct that is NULL, or whose struct_size is not this library's:
 * a caller compiled against another header, or one who left the _INIT macro out. */
#define PKV_CHECK_STRUCT(err, pointer, type)                                                       \
  do {                                                                                             \
    if ((pointer) == NULL) return PKV_FAIL((err), PKV_E_INVALID, #pointer " is NULL");             \
    if ((pointer)->struct_size != sizeof(type))                                                    \
      return PKV_FAIL((err), PKV_E_INVALID,                                                        \
                      #pointer "->struct_size is %u, this library's " #type                        \
                               " has %zu (use its _INIT macro)",                                   \
                      (unsigned)(pointer)->struct_size, sizeof(type));                             \
  } while (0)

#endif
