/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes GGUF files in memory for tests: keys and tensors in the order of the calls, data aligned
 * to `alignment`. Anything may be wrong on purpose: nothing is checked against anything.
 *
 *   gguf_build b;
 *   gguf_build_init(&b);
 *   gguf_build_string(&b, "general.architecture", "llama");
 *   gguf_build_u32(&b, "llama.block_count", 2);
 *   gguf_build_tensor(&b, "output_norm.weight", 0, 1, (const int64_t[]){64}, data, 256);
 *   gguf_build_finish(&b);          b.file.data, b.file.size; aligned to 64
 *   gguf_build_deinit(&b);
 *
 * A call that runs out of memory fails the test.
 */
#ifndef PKV_TEST_GGUF_BUILD_H
#define PKV_TEST_GGUF_BUILD_H

#include <stdbool.h>

#include "base/text.h"

typedef struct gguf_build {
  pkv_buffer values, tensors, data; /* the three parts so far */
  pkv_buffer file;                  /* after gguf_build_finish */
  uint64_t value_count, tensor_count;
  uint32_t version, alignment; /* 3 and 32; change before the first tensor */
  /* Added to the counts that the header claims, to make it lie. */
  uint64_t value_count_off, tensor_count_off;
} gguf_build;

void gguf_build_init(gguf_build *b);
void gguf_build_deinit(gguf_build *b);

/* Any value: `type` as in the format, `bytes` of payload as they stand in the file. */
void gguf_build_value(gguf_build *b, const char *key, uint32_t type, const void *payload,
                      size_t bytes);
/* The same with a key of any bytes. */
void gguf_build_raw(gguf_build *b, const char *key, size_t key_bytes, uint32_t type,
                    const void *payload, size_t bytes);
void gguf_build_u8(gguf_build *b, const char *key, uint8_t value);
void gguf_build_i8(gguf_build *b, const char *key, int8_t value);
void gguf_build_u16(gguf_build *b, const char *key, uint16_t value);
void gguf_build_i16(gguf_build *b, const char *key, int16_t value);
void gguf_build_u32(gguf_build *b, const char *key, uint32_t value);
void gguf_build_i32(gguf_build *b, const char *key, int32_t value);
void gguf_build_u64(gguf_build *b, const char *key, uint64_t value);
void gguf_build_i64(gguf_build *b, const char *key, int64_t value);
void gguf_build_f32(gguf_build *b, const char *key, float value);
void gguf_build_f64(gguf_build *b, const char *key, double value);
void gguf_build_bool(gguf_build *b, const char *key, bool value);
void gguf_build_string(gguf_build *b, const char *key, const char *text);
void gguf_build_strings(gguf_build *b, const char *key, const char *const *texts, size_t count);
void gguf_build_array_i32(gguf_build *b, const char *key, const int32_t *values, size_t count);
void gguf_build_array_f32(gguf_build *b, const char *key, const float *values, size_t count);
/* count elements of a type without strings, `bytes` bytes in all. */
void gguf_build_array(gguf_build *b, const char *key, uint32_t element, const void *elements,
                      size_t count, size_t bytes);

/* extent[0] is contiguous. The data (NULL: zeros) goes to the next aligned offset. */
void gguf_build_tensor(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                       const int64_t *extent, const void *data, size_t bytes);
/* The same with an offset of the caller's choice; the data is not added. */
void gguf_build_tensor_at(gguf_build *b, const char *name, uint32_t type, uint32_t dims,
                          const int64_t *extent, uint64_t offset);
/* Only an entry of the table, every field as given; of more than 8 extents the first 8. */
void gguf_build_raw_tensor(gguf_build *b, const char *name, size_t name_bytes, uint32_t dims,
                           const uint64_t *extent, uint32_t type, uint64_t offset);

void gguf_build_finish(gguf_build *b);
/* Finishes and gives the file as a block of exactly *size bytes, aligned to 64, so that ASan sees a
   read behind its end; gguf_build_drop frees it. */
unsigned char *gguf_build_exact(gguf_build *b, size_t *size);
unsigned char *gguf_build_exact_copy(const unsigned char *bytes, size_t size);
void gguf_build_drop(unsigned char *exact);
/* Where in a finished file the bytes behind the string `name` start: a key's type, or a tensor's
   number of dimensions. The first match; none fails the test. */
size_t gguf_build_behind(const unsigned char *bytes, size_t size, const char *name);

#endif
