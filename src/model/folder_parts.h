/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the folder reader share; nobody else includes it. */
#ifndef PKV_MODEL_FOLDER_PARTS_H
#define PKV_MODEL_FOLDER_PARTS_H

#include "model/json_text.h"
#include "model/meta_write.h"

#define PKV_FOLDER_FACTORS 128 /* pairs of the largest head */

/* What the tensors need to know of config.json. */
typedef struct pkv_folder_config {
  const char *architecture; /* GGUF's word */
  bool gemma, tied;
  int32_t layers, vocab;
  int32_t factors; /* of rope_freqs.weight; 0 = none */
  float factor[PKV_FOLDER_FACTORS];
} pkv_folder_config;

/* config.json and generation_config.json (NULL = not there) into keys. */
pkv_status pkv_folder_read_config(pkv_folder_config *out, pkv_meta *meta, const json_t *config,
                                  const json_t *generation, pkv_error *err);
/* A config.json anywhere, into keys and what the tensors would need to know of it: no tensors, no
   tokenizer. */
pkv_status pkv_folder_open_config(pkv_gguf **out, pkv_folder_config *parsed, const char *path,
                                  const pkv_allocator *allocator, pkv_error *err);
/* tokenizer.json into keys; rows: of the embedding, 0 = not known. */
pkv_status pkv_folder_read_tokenizer(pkv_meta *meta, const json_t *tokenizer, int32_t rows,
                                     const pkv_allocator *allocator, pkv_error *err);
/* The tensors of the folder's files into g, under GGUF's names. */
pkv_status pkv_folder_bind(pkv_gguf *g, const char *path, const pkv_folder_config *config,
                           pkv_error *err);

#endif
