/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the GGUF reader share; nobody else includes it. */
#ifndef PKV_MODEL_GGUF_PARTS_H
#define PKV_MODEL_GGUF_PARTS_H

#include "base/limits.h"
#include "model/gguf.h"
#include "model/mapped_file.h"
#include "model/safetensors.h"

#define PKV_GGUF_HEADER_BYTES  24u /* magic, version, two counts */
#define PKV_GGUF_MIN_ALIGNMENT 8u

struct pkv_gguf {
  pkv_allocator allocator;
  size_t size; /* of the file */
  /* Header, keys and tensor table: a private copy (owned != NULL), or the caller's bytes. */
  const unsigned char *meta;
  unsigned char *owned;
  size_t owned_bytes;
  const unsigned char *bytes; /* the whole file: file.bytes or the caller's */
  pkv_mapped file;
  /* Files whose tensors are in the table too: further shards, or those of a folder. */
  pkv_gguf **parts;
  size_t part_count;
  pkv_safetensors **tensor_files;
  size_t tensor_file_count;
  void *extra; /* names and tensors that no file has */
  size_t extra_bytes;
  bool folder, joined; /* joined: the table holds all shards */
  uint32_t version, alignment;
  pkv_gguf_value *values;
  pkv_gguf_tensor *tensors;
  size_t value_count, tensor_count;     /* as declared, once checked */
  size_t tensor_room;                   /* entries that the tensor tables have memory for */
  uint32_t *value_order, *tensor_order; /* indices in the order of key, name */
  size_t meta_bytes;                    /* up to the end of the tensor table */
  size_t data_offset;
};

/*
 * Parses the first `have` bytes of a file of g->size bytes at g->meta into the tables. *starved
 * tells that the failure only means that more than `have` bytes are needed.
 */
pkv_status pkv_gguf_parse(pkv_gguf *g, size_t have, bool *starved, pkv_error *err);
/* An empty one; NULL = no memory. */
pkv_gguf *pkv_gguf_new(const pkv_allocator *allocator);
/* Fills the order of the tensor table and refuses a name that is there twice. */
pkv_status pkv_gguf_sort_tensors(pkv_gguf *g, pkv_error *err);
/* Bytewise order of names: < 0, 0, > 0. */
int pkv_gguf_compare(pkv_span a, pkv_span b);
size_t pkv_gguf_scalar_bytes(pkv_gguf_type type); /* 0 for strings, arrays and unknown types */
uint64_t pkv_gguf_load_le(const unsigned char *p, size_t bytes);
void pkv_gguf_free_tables(pkv_gguf *g);

#endif
