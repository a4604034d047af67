/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder as model hubs hand it out: config.json, generation_config.json, tokenizer.json,
 * tokenizer_config.json, chat_template.jinja, and weights in model.safetensors or in the files that
 * model.safetensors.index.json names. It becomes the same table of keys and tensors that a GGUF
 * file has, under GGUF's names, so that everything behind it knows one kind of model.
 *
 * Untrusted: file names in the index stay inside the folder; nothing in the folder is code that
 * runs (auto_map is not looked at). What would change the arithmetic and is not known here is
 * refused by name.
 */
#ifndef PKV_MODEL_FOLDER_H
#define PKV_MODEL_FOLDER_H

#include "model/gguf.h"

bool pkv_is_folder(const char *path);
/* tokenizer_only: tokenizer.json is required and weights are not looked for; else the other way
   round. */
pkv_status pkv_folder_open(pkv_gguf **out, const char *path, bool tokenizer_only,
                           const pkv_allocator *allocator, pkv_error *err);

/* The keys that config.json, or tokenizer.json where config is NULL, becomes: no tensors (tests,
   fuzzing). */
pkv_status pkv_folder_open_memory(pkv_gguf **out, const char *config, const char *tokenizer,
                                  size_t bytes, const pkv_allocator *allocator, pkv_error *err);

#endif
