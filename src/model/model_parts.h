/* SPDX-License-Identifier: Apache-2.0 */
/* What a model consists of. Private to src/model: model.c owns it, hparams.c and weights.c fill it,
   forward.c reads it. */
#ifndef PKV_MODEL_MODEL_PARTS_H
#define PKV_MODEL_MODEL_PARTS_H

#include "model/chat.h"
#include "model/gguf.h"
#include "model/model.h"
#include "model/tokenizer.h"

/* One transformer layer. Matrices are [outputs, inputs]; norms and biases are float, a bias may be
   NULL. */
typedef struct pkv_layer {
  const float *attn_norm, *ffn_norm;     /* [width] */
  pkv_weight q, k, v, o, gate, up, down; /* borrowed from the file */
  const float *q_bias, *k_bias, *v_bias, *o_bias;
  /* NULL where the family has none: of the heads [head_dim] (qwen3, gemma3), and of what goes back
     to the stream [width] (gemma3). */
  const float *q_norm, *k_norm, *attn_post_norm, *ffn_post_norm;
  bool local; /* sees hp.window tokens only; gemma3: rotates by local_base */
} pkv_layer;

/* rope.scaling.type yarn; factor 0 = not. Rotations of few turns within `original` tokens slow
   down, those of many do not. */
typedef struct pkv_yarn {
  double factor, original, fast, slow;
} pkv_yarn;

/* Where the rows of q (columns of o), those of k and v, the columns of the feed-forward and the
   head's rows begin in the whole model's: of a rank's part (model_shard.h); else all 0. */
typedef struct pkv_model_origin {
  int64_t q, kv, feed_forward, vocab;
} pkv_model_origin;

/* Floats that are not in the file as they are used; one after another, freed with the model. */
typedef struct pkv_model_block {
  struct pkv_model_block *next;
  size_t bytes;
} pkv_model_block;

/* model_trie.c */
typedef struct pkv_lazy_trie pkv_lazy_trie;
pkv_status pkv_lazy_trie_create(pkv_lazy_trie **out, const pkv_allocator *allocator,
                                pkv_error *err);
void pkv_lazy_trie_destroy(pkv_lazy_trie *lazy, const pkv_allocator *allocator);

struct pkv_model {
  pkv_allocator allocator;
  pkv_lazy_trie *lazy_trie;
  pkv_gguf *gguf;
  pkv_tokenizer *tokenizer; /* NULL: the file has none */
  pkv_chat_template *chat;  /* NULL: see chat_error */
  pkv_error chat_error;
  pkv_hparams hp;
  pkv_model_origin origin;
  bool gemma;           /* architecture gemma3 */
  bool head_norms;      /* qwen3, gemma3 */
  bool norm_plus_one;   /* norms are stored less 1 */
  float embed_scale;    /* of the embeddings' rows; 1 = none */
  float attn_scale;     /* of the scores; 0 = 1 / sqrt(head_dim) */
  int32_t global_every; /* every so-manieth layer is not local; 0 = none */
  float local_base;     /* gemma: of the rotations of local layers */
  float rope_factor;    /* positions are divided by it; 1 = no scaling */
  pkv_yarn yarn;
  pkv_model_block *blocks;
  const float *rope_freqs;  /* [rope_dim / 2] or NULL: each frequency is divided by its entry */
  pkv_weight embed, output; /* output is embed where the file ties them */
  const float *output_norm; /* [width] */
  pkv_layer *layers;        /* [hp.layers]; NULL when only the tokenizer was wanted */
  int64_t parameters, weight_bytes;
  char architecture[32], name[96];
};

/* Reads and validates every hyper-parameter but the vocabulary's size before anything uses one. */
pkv_status pkv_hparams_read(pkv_model *model, pkv_error *err);
/* Finds every tensor by name, with its exact shape and a type we compute with; nothing else may be
   in the file. Sets hp.vocab. */
pkv_status pkv_weights_bind(pkv_model *model, pkv_error *err);
/* random_model.c: layers of random matrices in place of those of a file. */
pkv_status pkv_random_open(pkv_model *model, const char *config, bool on_device, pkv_error *err);
/* Whether this layer is local. */
bool pkv_hparams_is_local(const pkv_model *model, int32_t layer);
/* forward.c: how many rotations there are (2: local layers have their own), their frequencies
   [tables, rope_dim / 2] in radians a position, and the length of the rotated pairs. */
int32_t pkv_rope_tables(const pkv_model *model);
void pkv_rope_frequencies(double *frequency, const pkv_model *model);
double pkv_rope_length(const pkv_model *model);
/* Whether products and embeddings take weights of this GGUF type. */
bool pkv_weights_computable(uint32_t type);
/* E_FORMAT naming the first tensor that holds a NaN or an infinity, in block scales too. */
pkv_status pkv_weights_check(const pkv_model *model, pkv_error *err);

/* forward.c: the numbers of a batch, before any is used as an index. `limit` is what the caller's
   option of `positions` is called. */
pkv_status pkv_batch_check_counts(const pkv_forward_batch *batch, int32_t max_tokens,
                                  int32_t max_logits, pkv_error *err);
pkv_status pkv_batch_check_tokens(const pkv_forward_batch *batch, int32_t vocab, int32_t positions,
                                  const char *limit, pkv_error *err);

#endif
