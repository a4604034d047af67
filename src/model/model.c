/* SPDX-License-Identifier: Apache-2.0 */
/* A model file opened: its parts put together, and the public functions that ask them. */
#include "model/model.h"

#include <string.h>

#include "base/cgroup.h"
#include "base/status.h"
#include "model/chat.h"
#include "model/folder.h"
#include "model/model_parts.h"

static const pkv_model_options default_options = PKV_MODEL_OPTIONS_INIT;

/* A file may leave its tokenizer out, or say that it has none. */
static bool has_tokenizer(const pkv_gguf *gguf) {
  pkv_span model = {"", 0};
  if (pkv_gguf_get_string(&model, gguf, "tokenizer.ggml.model", false, NULL) != PKV_OK) return true;
  if (model.size == 0) return false;
  return !((model.size == 4 && memcmp(model.data, "none", 4) == 0) ||
           (model.size == 8 && memcmp(model.data, "no_vocab", 8) == 0));
}

static pkv_status open_text(pkv_model *m, bool required, pkv_error *err) {
  m->chat_error.status = PKV_E_UNSUPPORTED;
  m->chat_error.where = "pkv_chat_tokenize";
  if (!has_tokenizer(m->gguf)) {
    PKV_CHECK(err, !required, PKV_E_FORMAT, "the file has no tokenizer (tokenizer.ggml.model)");
    return PKV_OK;
  }
  PKV_TRY(pkv_tokenizer_create(&m->tokenizer, m->gguf, &m->allocator, err));
  pkv_span source = {"", 0};
  PKV_TRY(pkv_gguf_get_string(&source, m->gguf, "tokenizer.chat_template", false, err));
  /* A model whose chat format is not known still completes text: the failure is kept for those
     who ask for a chat. */
  const pkv_status status =
      pkv_chat_template_create(&m->chat, source, m->tokenizer, &m->allocator, &m->chat_error);
  if (status == PKV_E_NOMEM && err) *err = m->chat_error;
  return status == PKV_E_NOMEM ? status : PKV_OK;
}

/* Weights that are copied may fill one part in so many of the memory that is free: the rest is for
   the cache, and for others. */
#define FREE_MEMORY_PARTS 2

static pkv_status place_weights(pkv_gguf *gguf, pkv_weights weights, pkv_error *err) {
  const int64_t bytes = (int64_t)pkv_gguf_file_bytes(gguf);
  if (weights == PKV_WEIGHTS_MAPPED) return PKV_OK;
  if (weights == PKV_WEIGHTS_COPIED) return pkv_gguf_copy(gguf, err);
  if (bytes > pkv_host_memory_left() / FREE_MEMORY_PARTS) return PKV_OK;
  const pkv_status status = pkv_gguf_copy(gguf, err);
  return status == PKV_E_NOMEM ? PKV_OK : status; /* what is not copied serves from its map */
}

static pkv_status open_parts(pkv_model *m, const pkv_model_options *options, pkv_error *err) {
  /* First, because the parts of such a file lack all kinds of keys. */
  PKV_TRY(pkv_gguf_check_whole(m->gguf, options->tokenizer_only == 0, err));
  PKV_TRY(open_text(m, options->tokenizer_only != 0, err));
  if (options->tokenizer_only) {
    m->hp.vocab = pkv_tokenizer_vocab(m->tokenizer);
    return PKV_OK;
  }
  PKV_TRY(pkv_hparams_read(m, err));
  PKV_TRY(place_weights(m->gguf, options->weights, err));
  PKV_TRY(pkv_weights_bind(m, err));
  if (m->tokenizer) {
    PKV_CHECK(err, pkv_tokenizer_vocab(m->tokenizer) == m->hp.vocab, PKV_E_FORMAT,
              "the tokenizer has %d tokens, token_embd.weight has %d rows",
              (int)pkv_tokenizer_vocab(m->tokenizer), (int)m->hp.vocab);
  }
  return options->check_tensors ? pkv_weights_check(m, err) : PKV_OK;
}

/* A model with nothing in it yet. */
static pkv_status make(pkv_model **out, const pkv_model_options *options, pkv_error *err) {
  PKV_CHECK_STRUCT(err, options, pkv_model_options);
  PKV_CHECK(err, options->weights >= PKV_WEIGHTS_AUTO && options->weights <= PKV_WEIGHTS_COPIED,
            PKV_E_INVALID, "weights is %d, which is none of pkv_weights", (int)options->weights);
  const pkv_allocator allocator = pkv_allocator_or_default(options->allocator);
  *out = pkv_alloc_zeroed(&allocator, 1, sizeof **out);
  PKV_CHECK(err, *out, PKV_E_NOMEM, "no memory for a model");
  (*out)->allocator = allocator;
  return PKV_OK;
}

static pkv_status open_any(pkv_model **out, const char *path, const void *bytes, size_t size,
                           const pkv_model_options *options, pkv_error *err) {
  pkv_model *m = NULL;
  pkv_status status;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  if (!options) options = &default_options;
  PKV_TRY(make(&m, options, err));
  if (!path)
    status = pkv_gguf_open_memory(&m->gguf, bytes, size, &m->allocator, err);
  else if (pkv_is_folder(path))
    status = pkv_folder_open(&m->gguf, path, options->tokenizer_only != 0, &m->allocator, err);
  else
    status = pkv_gguf_open_whole(&m->gguf, path, &m->allocator, err);
  if (status == PKV_OK) status = pkv_lazy_trie_create(&m->lazy_trie, &m->allocator, err);
  if (status == PKV_OK) status = open_parts(m, options, err);
  if (status != PKV_OK) {
    pkv_model_close(m);
    return status;
  }
  *out = m;
  return PKV_OK;
}

pkv_status pkv_model_open(pkv_model **out, const char *path, const pkv_model_options *options,
                          pkv_error *err) {
  if (out) *out = NULL;
  PKV_CHECK(err, path, PKV_E_INVALID, "path is NULL");
  return open_any(out, path, NULL, 0, options, err);
}

pkv_status pkv_model_open_random(pkv_model **out, const char *config, int32_t on_device,
                                 const pkv_model_options *options, pkv_error *err) {
  pkv_model *m = NULL;
  PKV_CHECK(err, out, PKV_E_INVALID, "out is NULL");
  *out = NULL;
  PKV_CHECK(err, config, PKV_E_INVALID, "config is NULL");
  PKV_TRY(make(&m, options ? options : &default_options, err));
  const pkv_status status = pkv_random_open(m, config, on_device != 0, err);
  if (status != PKV_OK) {
    pkv_model_close(m);
    return status;
  }
  *out = m;
  return PKV_OK;
}

pkv_status pkv_model_open_memory(pkv_model **out, const void *bytes, size_t size,
                                 const pkv_model_options *options, pkv_error *err) {
  return open_any(out, NULL, bytes, size, options, err);
}

void pkv_model_close(pkv_model *m) {
  if (!m) return;
  const pkv_allocator allocator = m->allocator;
  pkv_free(&allocator, m->layers, (size_t)m->hp.layers * sizeof *m->layers);
  pkv_lazy_trie_destroy(m->lazy_trie, &allocator);
  pkv_chat_template_destroy(m->chat);
  pkv_tokenizer_destroy(m->tokenizer);
  pkv_gguf_close(m->gguf);
  while (m->blocks) {
    pkv_model_block *block = m->blocks;
    m->blocks = block->next;
    pkv_free(&allocator, block, block->bytes);
  }
  pkv_free(&allocator, m, sizeof *m);
}

const pkv_hparams *pkv_model_hparams(const pkv_model *m) {
  return &m->hp;
}

const pkv_tokenizer *pkv_model_tokenizer(const pkv_model *m) {
  return m->tokenizer;
}

void pkv_model_get_info(pkv_model_info *out, const pkv_model *m) {
  if (out == NULL || m == NULL || out->struct_size != sizeof *out) return;
  const pkv_hparams *hp = &m->hp;
  *out = (pkv_model_info)PKV_MODEL_INFO_INIT;
  memcpy(out->architecture, m->architecture, sizeof out->architecture);
  memcpy(out->name, m->name, sizeof out->name);
  out->layers = hp->layers;
  out->width = hp->width;
  out->feed_forward = hp->feed_forward;
  out->query_heads = hp->query_heads;
  out->kv_heads = hp->kv_heads;
  out->head_dim = hp->head_dim;
  out->vocab = hp->vocab;
  out->context = hp->context;
  out->parameters = m->parameters;
  out->weight_bytes = m->weight_bytes;
  out->file_bytes = (int64_t)pkv_gguf_file_bytes(m->gguf);
  out->bos = m->tokenizer ? pkv_tokenizer_bos(m->tokenizer) : -1;
  out->eos = m->tokenizer ? pkv_tokenizer_eos(m->tokenizer) : -1;
}

int32_t pkv_model_is_end(const pkv_model *m, int32_t token) {
  return m != NULL && m->tokenizer && pkv_tokenizer_is_end(m->tokenizer, token) ? 1 : 0;
}

pkv_status pkv_tokenize(int32_t *ids, size_t capacity, size_t *count, const pkv_model *model,
                        const char *text, size_t bytes, uint32_t flags, pkv_error *err) {
  PKV_CHECK(err, model, PKV_E_INVALID, "model is NULL");
  PKV_CHECK(err, model->tokenizer, PKV_E_UNSUPPORTED, "the model's file has no tokenizer");
  return pkv_tokenizer_encode(ids, capacity, count, model->tokenizer, text, bytes, flags, err);
}

pkv_status pkv_token_text(const char **text, size_t *bytes, const pkv_model *model, int32_t token,
                          int32_t special, pkv_error *err) {
  PKV_CHECK(err, model, PKV_E_INVALID, "model is NULL");
  PKV_CHECK(err, model->tokenizer, PKV_E_UNSUPPORTED, "the model's file has no tokenizer");
  return pkv_tokenizer_text(text, bytes, model->tokenizer, token, special, err);
}

/* Whether the model can chat; if not, why. */
static pkv_status check_chat(const pkv_model *model, pkv_error *err) {
  PKV_CHECK(err, model, PKV_E_INVALID, "model is NULL");
  PKV_CHECK(err, model->tokenizer, PKV_E_UNSUPPORTED, "the model's file has no tokenizer");
  if (!model->chat && err) *err = model->chat_error;
  return model->chat ? PKV_OK : model->chat_error.status;
}

pkv_status pkv_chat_tokenize(int32_t *ids, size_t capacity, size_t *count, const pkv_model *model,
                             const pkv_message *messages, size_t message_count,
                             int32_t add_generation, pkv_error *err) {
  PKV_TRY(check_chat(model, err));
  return pkv_chat_encode(ids, capacity, count, model->chat, model->tokenizer, messages,
                         message_count, add_generation, err);
}

pkv_status pkv_chat_tokenize_json(int32_t *ids, size_t capacity, size_t *count,
                                  const pkv_model *model, const char *json, size_t bytes,
                                  int32_t add_generation, pkv_error *err) {
  PKV_TRY(check_chat(model, err));
  return pkv_chat_encode_json(ids, capacity, count, model->chat, model->tokenizer, json, bytes,
                              add_generation, err);
}
