/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reader of one safetensors file, untrusted: 8 bytes of header length, a JSON header, then the
 * tensors' bytes without holes. Refused: a header of more than 100,000,000 bytes, beyond the file,
 * or that does not start with '{' (blanks may follow its end); keys twice; unknown fields; products
 * that overflow; offsets that leave a hole, overlap, run backwards or do not add up to the file.
 *
 * Narrower than the format, each named: dtypes F32, F16 and BF16; at most 4 dimensions, none of
 * extent 0; at most 65,536 tensors. No dimensions mean one element.
 */
#ifndef PKV_MODEL_SAFETENSORS_H
#define PKV_MODEL_SAFETENSORS_H

#include "base/limits.h"
#include "model/gguf.h"

typedef struct pkv_safetensors pkv_safetensors; /* immutable once open */

pkv_status pkv_safetensors_open(pkv_safetensors **out, const char *path,
                                const pkv_allocator *allocator, pkv_error *err);
/* The same over bytes in memory, which must outlive it (tests, fuzzing). */
pkv_status pkv_safetensors_open_memory(pkv_safetensors **out, const void *bytes, size_t size,
                                       const pkv_allocator *allocator, pkv_error *err);
void pkv_safetensors_close(pkv_safetensors *file); /* NULL is allowed */

size_t pkv_safetensors_count(const pkv_safetensors *file);
/* In the order of their bytes. extent[0] is contiguous: the last of the header's shape. type is
   GGUF's number of F32, F16 or BF16. Names are borrowed from the file's header. */
const pkv_gguf_tensor *pkv_safetensors_at(const pkv_safetensors *file, size_t i);
size_t pkv_safetensors_file_bytes(const pkv_safetensors *file);
pkv_status pkv_safetensors_check_unchanged(const pkv_safetensors *file, pkv_error *err);
pkv_status pkv_safetensors_copy(pkv_safetensors *file, pkv_error *err); /* as pkv_mapped_copy */

#endif
