/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file of a model, mapped for reading: weights stay where they lie. Tables of contents are read
 * with pkv_mapped_read instead, so that a file that shrinks meanwhile is an error and not a signal.
 */
#ifndef PKV_MODEL_MAPPED_FILE_H
#define PKV_MODEL_MAPPED_FILE_H

#include "base/status.h"

/* Immutable once open. */
typedef struct pkv_mapped {
  const unsigned char *bytes; /* [size], NULL = not open */
  size_t size;
  int fd; /* -1 = none */
} pkv_mapped;
#define PKV_MAPPED_NONE                                                                            \
  { NULL, 0, -1 }

/* E_IO: not there, or no regular file. E_FORMAT: empty. *out is closed or open, never between. */
pkv_status pkv_mapped_open(pkv_mapped *out, const char *path, pkv_error *err);
void pkv_mapped_close(pkv_mapped *file); /* a file that is not open is allowed */
/* The first `count` bytes, by read(); count <= size. E_IO when the file has become shorter. */
pkv_status pkv_mapped_read(unsigned char *to, const pkv_mapped *file, size_t count, pkv_error *err);
/* E_IO when the file on disk is shorter than when it was opened. */
pkv_status pkv_mapped_check_unchanged(const pkv_mapped *file, pkv_error *err);

#endif
