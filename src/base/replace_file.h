/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are written anew as a whole. */
#ifndef PKV_BASE_REPLACE_FILE_H
#define PKV_BASE_REPLACE_FILE_H

#include <stdio.h>

#include "base/status.h"

/* Writes the whole content; what stdio could not write is found without its help. */
typedef pkv_status (*pkv_write_file_fn)(void *ctx, FILE *file, pkv_error *err);

/*
 * Has `write` write a file beside `path` ("path.new", or "path.new1" and so on while another
 * process writes that one), brings it to the disk and puts it in the place of `path`. Whatever
 * fails, what was there before is whole and nothing is left beside it. The mode of a file that is
 * there is kept (and its owner and group, or else the group's rights go), a symbolic link stays one
 * and its target is replaced or made; what is no file (a pipe, a device) is written to as it is.
 *
 * E_IO names what could not be written and why; what `write` returns comes back as it is.
 */
pkv_status pkv_replace_file(const char *path, pkv_write_file_fn write, void *ctx, pkv_error *err);

/* As a pkv_write_file_fn: `ctx` is a pkv_bytes. */
typedef struct pkv_bytes {
  const void *data;
  size_t size;
} pkv_bytes;
pkv_status pkv_write_bytes(void *ctx, FILE *file, pkv_error *err);

#endif
