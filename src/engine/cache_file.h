/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache as a stream of bytes; what pkv_engine_save_cache and _load_cache do with the
 * stream of a file. */
#ifndef PKV_ENGINE_CACHE_FILE_H
#define PKV_ENGINE_CACHE_FILE_H

#include <stdio.h>

#include "pkv/engine.h"

pkv_status pkv_cache_write(int64_t *pages, const pkv_engine *engine, FILE *out, pkv_error *err);
/* Reads the stream twice: all of it is checked before anything is changed. */
pkv_status pkv_cache_read(int64_t *pages, pkv_engine *engine, FILE *in, pkv_error *err);

#endif
