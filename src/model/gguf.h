/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reader of GGUF v2 and v3: an untrusted file becomes a table of keys and tensors, every size
 * checked against the bytes that are there. Limits: strings 16 MiB, arrays 64 Mi elements,
 * 4 dimensions, 65,536 tensors and keys, tensor names 64 bytes, keys 65,535 bytes, keys and tensor
 * table together 1 GiB, and never more than what is left of the file. Nothing is allocated from a
 * count before that check.
 *
 * Decisions
 *   - A tensor of 0 dimensions is one element; an extent of 0 is refused. Holes between tensors are
 *     allowed, overlaps are not. A file without tensors (a vocabulary) opens; one shard of a split
 *     model opens too: pkv_gguf_check_whole tells them apart from a whole model.
 *   - What a file that shrinks while it is open can do. Keys and tensor table are a private copy:
 *     they stay readable whatever happens to the file. Tensor data stays in the map, and touching a
 *     page behind the new end raises SIGBUS, and a library must not own signal handlers. So either
 *     weights are copied (pkv_gguf_copy), or the rule is: replace model files by rename, and call
 *     pkv_gguf_check_unchanged before long work; it narrows the window and cannot close it.
 */
#ifndef PKV_MODEL_GGUF_H
#define PKV_MODEL_GGUF_H

#include <stdbool.h>

#include "backend/backend.h"

typedef enum pkv_gguf_type {
  PKV_GGUF_U8 = 0,
  PKV_GGUF_I8 = 1,
  PKV_GGUF_U16 = 2,
  PKV_GGUF_I16 = 3,
  PKV_GGUF_U32 = 4,
  PKV_GGUF_I32 = 5,
  PKV_GGUF_F32 = 6,
  PKV_GGUF_BOOL = 7,
  PKV_GGUF_STRING = 8,
  PKV_GGUF_ARRAY = 9,
  PKV_GGUF_U64 = 10,
  PKV_GGUF_I64 = 11,
  PKV_GGUF_F64 = 12
} pkv_gguf_type;

/* Borrowed from the open file; not terminated. */
typedef struct pkv_span {
  const char *data;
  size_t size;
} pkv_span;

typedef struct pkv_gguf_value {
  pkv_span key;
  pkv_gguf_type type; /* ARRAY: element_type and count say what */
  pkv_gguf_type element_type;
  uint64_t count; /* 1 for scalars */
  const unsigned char
      *data; /* little-endian bytes; strings: u64 length + bytes, one after another */
} pkv_gguf_value;

typedef struct pkv_gguf_tensor {
  pkv_span name;
  uint32_t type; /* GGUF's type number; pkv_wtype where we can compute with it */
  int32_t dims;
  int64_t extent[4]; /* extent[0] is contiguous; unused ones are 1 */
  const unsigned char *data;
  size_t bytes, offset; /* offset in the file */
} pkv_gguf_tensor;

typedef struct pkv_gguf pkv_gguf; /* immutable once open */

pkv_status pkv_gguf_open(pkv_gguf **out, const char *path, const pkv_allocator *allocator,
                         pkv_error *err);
/* As pkv_gguf_open, and of one shard of several (NAME-00002-of-00003.gguf) all of them: keys of
   the first, tensors of all. */
pkv_status pkv_gguf_open_whole(pkv_gguf **out, const char *path, const pkv_allocator *allocator,
                               pkv_error *err);
/* pkv_gguf_open over bytes in memory, which must outlive it (tests, fuzzing). */
pkv_status pkv_gguf_open_memory(pkv_gguf **out, const void *bytes, size_t size,
                                const pkv_allocator *allocator, pkv_error *err);
void pkv_gguf_close(pkv_gguf *gguf); /* NULL is allowed */

/* E_UNSUPPORTED for one shard of several, and, when need_tensors is set, for a vocabulary file. */
pkv_status pkv_gguf_check_whole(const pkv_gguf *gguf, bool need_tensors, pkv_error *err);
/* E_IO when the file on disk is shorter than when it was opened. One fstat; always OK in memory. */
pkv_status pkv_gguf_check_unchanged(const pkv_gguf *gguf, pkv_error *err);
/* All its files into memory of huge pages, as pkv_mapped_copy: addresses stay. After an error some
   may be copied and some mapped. */
pkv_status pkv_gguf_copy(pkv_gguf *gguf, pkv_error *err);

/* 1: keys and tensors of a folder of safetensors, in GGUF's words (model/folder.h). */
bool pkv_gguf_is_folder(const pkv_gguf *gguf);

uint32_t pkv_gguf_version(const pkv_gguf *gguf);
size_t pkv_gguf_file_bytes(const pkv_gguf *gguf);
size_t pkv_gguf_value_count(const pkv_gguf *gguf);
const pkv_gguf_value *pkv_gguf_value_at(const pkv_gguf *gguf, size_t i);
const pkv_gguf_value *pkv_gguf_find(const pkv_gguf *gguf, const char *key); /* NULL = absent */
size_t pkv_gguf_tensor_count(const pkv_gguf *gguf);
const pkv_gguf_tensor *pkv_gguf_tensor_at(const pkv_gguf *gguf, size_t i);
const pkv_gguf_tensor *pkv_gguf_find_tensor(const pkv_gguf *gguf, const char *name);
size_t pkv_gguf_data_offset(const pkv_gguf *gguf); /* where tensor data starts in the file */
uint32_t pkv_gguf_alignment(const pkv_gguf *gguf);
/* Name, block elements and bytes of any type number the format knows ("Q4_K", 256, 144). false =
   unknown (*name NULL) or removed from the format (*name set). Each out may be NULL. */
bool pkv_gguf_type_info(uint32_t type, const char **name, int64_t *block, int64_t *block_bytes);
const char *pkv_gguf_type_name(pkv_gguf_type type); /* of a key's value: "u32", "string" */

/*
 * Elements. Bounds and lengths were checked at opening, so these cannot fail; i < value->count.
 * int: any integer type or bool (u64 above INT64_MAX wraps); float: f32, f64 or any integer.
 * next_string: *cursor starts at value->data and moves to the next string of the array.
 */
int64_t pkv_gguf_element_int(const pkv_gguf_value *value, uint64_t i);
double pkv_gguf_element_float(const pkv_gguf_value *value, uint64_t i);
pkv_span pkv_gguf_next_string(const unsigned char **cursor);

/* Text of the file made fit for an error message: cut, and bytes outside printable ASCII become
   '?'. Returns out. */
#define PKV_GGUF_QUOTE_BYTES 52
const char *pkv_gguf_quote(char out[PKV_GGUF_QUOTE_BYTES], pkv_span text);

/*
 * Typed reads. Absent: *out keeps its value and OK comes back when `required` is false, else
 * E_FORMAT naming the key.
 * Wrong type or outside lo .. hi: E_FORMAT naming key, type and value. Integers of any width are
 * accepted.
 */
pkv_status pkv_gguf_get_int(int64_t *out, const pkv_gguf *gguf, const char *key, bool required,
                            int64_t lo, int64_t hi, pkv_error *err);
pkv_status pkv_gguf_get_float(double *out, const pkv_gguf *gguf, const char *key, bool required,
                              double lo, double hi, pkv_error *err);
pkv_status pkv_gguf_get_string(pkv_span *out, const pkv_gguf *gguf, const char *key, bool required,
                               pkv_error *err);
pkv_status pkv_gguf_get_bool(bool *out, const pkv_gguf *gguf, const char *key, bool required,
                             pkv_error *err);

#endif
