/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A file of a model, mapped for reading: weights stay where they lie, or are copied to memory of
 * huge pages at the same address. Tables of contents are read with pkv_mapped_read instead, so that
 * a file that shrinks meanwhile is an error and not a signal.
 */
#ifndef PKV_MODEL_MAPPED_FILE_H
#define PKV_MODEL_MAPPED_FILE_H

#include <stdbool.h>

#include "base/status.h"

/* Immutable once open and, where that is wanted, copied. */
typedef struct pkv_mapped {
  const unsigned char *bytes; /* [size], NULL = not open; where a huge page could begin */
  size_t size;
  void *space; /* of addresses, in which they lie */
  int fd;      /* -1 = none */
  bool copied; /* bytes are this process's own memory, what happens to the file is of no matter */
} pkv_mapped;
#define PKV_MAPPED_NONE                                                                            \
  { NULL, 0, NULL, -1, false }

/* E_IO: not there, or no regular file. E_FORMAT: empty. *out is closed or open, never between. */
pkv_status pkv_mapped_open(pkv_mapped *out, const char *path, pkv_error *err);
void pkv_mapped_close(pkv_mapped *file); /* a file that is not open is allowed */
/* The first `count` bytes, by read(); count <= size. E_IO when the file has become shorter. */
pkv_status pkv_mapped_read(unsigned char *to, const pkv_mapped *file, size_t count, pkv_error *err);
/* Puts a copy of the file, on huge pages where the system has them, in the map's place: addresses
   stay. Nobody may read the map meanwhile. E_NOMEM: the map is as it was. E_IO: the file could not
   be read, and only closing it is left. Nothing to do for a file that is copied or not open. */
pkv_status pkv_mapped_copy(pkv_mapped *file, pkv_error *err);
/* E_IO when the file on disk is shorter than when it was opened, and not copied. */
pkv_status pkv_mapped_check_unchanged(const pkv_mapped *file, pkv_error *err);

#endif
