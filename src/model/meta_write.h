/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of a model that come from other files than GGUF, written in GGUF's form: so the one reader
 * of keys, with all of its checks, serves both. The first failure stays; later calls do nothing.
 */
#ifndef PKV_MODEL_META_WRITE_H
#define PKV_MODEL_META_WRITE_H

#include "base/text.h"
#include "model/gguf.h"

typedef struct pkv_meta {
  pkv_buffer out;
  uint64_t values;
  pkv_status status;
  pkv_error error;
} pkv_meta;

void pkv_meta_init(pkv_meta *m, const pkv_allocator *allocator);
void pkv_meta_deinit(pkv_meta *m);
void pkv_meta_int(pkv_meta *m, const char *key, int64_t value);
void pkv_meta_float(pkv_meta *m, const char *key, double value);
void pkv_meta_bool(pkv_meta *m, const char *key, bool value);
void pkv_meta_string(pkv_meta *m, const char *key, pkv_span text);
void pkv_meta_text(pkv_meta *m, const char *key, const char *text);
/* `count` elements of this type follow by the functions below, and nothing else before them. */
void pkv_meta_array(pkv_meta *m, const char *key, pkv_gguf_type element, size_t count);
void pkv_meta_add_string(pkv_meta *m, pkv_span text);
/* A string in two parts with `between` between them. */
void pkv_meta_add_joined(pkv_meta *m, pkv_span left, char between, pkv_span right);
void pkv_meta_add_i32(pkv_meta *m, int32_t value);
void pkv_meta_add_bool(pkv_meta *m, bool value);
/* What was written, as a file of keys without tensors. */
pkv_status pkv_meta_finish(pkv_gguf **out, pkv_meta *m, const pkv_allocator *allocator,
                           pkv_error *err);

#endif
