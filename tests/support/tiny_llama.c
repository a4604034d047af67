/* SPDX-License-Identifier: Apache-2.0 */
#include "support/tiny_llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/weight_blocks.h"

/* ---- numbers ----------------------------------------------------------------------------- */

static uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

/* Number `index` of stream `stream` of a seed. */
static uint64_t draw(uint32_t seed, uint32_t stream, uint64_t index) {
  return mix(mix((uint64_t)seed << 32 | stream) + index);
}

static int32_t pick(uint32_t seed, uint64_t index, int32_t count) {
  return (int32_t)(draw(seed, 0, index) % (uint64_t)count);
}

tiny_llama tiny_llama_make(uint32_t seed) {
  static const float bases[3] = {10000.0f, 100000.0f, 500000.0f};
  tiny_llama m = {.seed = seed};
  m.layers = 1 + pick(seed, 0, 3);
  m.head_dim = 8 * (1 + pick(seed, 1, 8));
  m.kv_heads = 1 + pick(seed, 2, 4);
  const int32_t most = 8 / m.kv_heads;
  m.query_heads = m.kv_heads * (1 + pick(seed, 3, most));
  m.width = 32 * (1 + pick(seed, 4, 8));
  m.feed_forward = 32 * (1 + pick(seed, 5, 10));
  m.rope_dim = 2 * (1 + pick(seed, 6, m.head_dim / 2));
  if (pick(seed, 7, 2)) m.rope_dim = m.head_dim;
  m.vocab = 16 + pick(seed, 8, 48);
  m.tied = pick(seed, 9, 2);
  m.biases = pick(seed, 10, 4) == 0;
  m.rope_freqs = pick(seed, 11, 4) == 0;
  m.rope_base = bases[pick(seed, 12, 3)];
  m.rope_factor = pick(seed, 13, 4) == 0 ? 4.0f : 1.0f;
  m.eps = pick(seed, 14, 2) ? 1e-5f : 1e-6f;
  m.tokens = 1 + pick(seed, 15, TINY_MAX_TOKENS);
  for (int32_t i = 0; i < m.tokens; i++)
    m.ids[i] = pick(seed, 100 + (uint64_t)i, m.vocab);
  return m;
}

/* ---- tensors ----------------------------------------------------------------------------- */

static int32_t bits_of(int64_t k) {
  int32_t bits = 0;
  while (k > 1) {
    k /= 2;
    bits++;
  }
  return bits;
}

static void put_half(unsigned char *p, uint32_t half) {
  p[0] = (unsigned char)half;
  p[1] = (unsigned char)(half >> 8);
}

/* A whole number from -128 to 127 over 2^shift, in a float type. */
static void put_float(unsigned char *p, pkv_wtype type, int32_t whole, int32_t shift) {
  const float f = (float)whole / (float)(1 << shift);
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  if (type == PKV_WTYPE_F32) {
    memcpy(p, &f, sizeof f);
  } else if (type == PKV_WTYPE_BF16) {
    put_half(p, bits >> 16);
  } else { /* F16: at most 8 significant bits, exponents within the normal halves */
    const uint32_t exponent = bits >> 23 & 255u;
    const uint32_t magnitude = whole == 0 ? 0u : (exponent - 112u) << 10 | (bits >> 13 & 1023u);
    put_half(p, (bits >> 16 & 0x8000u) | magnitude);
  }
}

/* One quantised block: scale 2^-e (1 + fraction), codes as drawn, minima that centre the codes. */
static void put_block(unsigned char *p, pkv_wtype type, int32_t bits, uint32_t seed,
                      uint32_t stream, uint64_t block) {
  const int32_t extra = type == PKV_WTYPE_Q8_0                             ? 6
                        : type == PKV_WTYPE_Q5_0 || type == PKV_WTYPE_Q5_1 ? 3
                                                                           : 2;
  const bool with_min = type == PKV_WTYPE_Q4_1 || type == PKV_WTYPE_Q5_1;
  const uint32_t e = (uint32_t)(extra + bits / 2);
  const uint32_t fraction = (uint32_t)(draw(seed, stream, block * 8) & 1023u);
  const int64_t size = test_wtype_block_bytes(type);
  int64_t at = 2;
  put_half(p, (15u - e) << 10 | fraction);
  if (with_min) {
    put_half(p + 2, 0x8000u | (15u - e + (type == PKV_WTYPE_Q4_1 ? 3u : 4u)) << 10 | fraction);
    at = 4;
  }
  for (uint64_t word = 1; at < size; word++) {
    const uint64_t v = draw(seed, stream, block * 8 + word);
    for (int i = 0; i < 8 && at < size; i++)
      p[at++] = (unsigned char)(v >> (8 * i));
  }
}

static void fill_matrix(unsigned char *bytes, pkv_wtype type, int64_t k, int64_t n, uint32_t seed,
                        uint32_t stream) {
  const int64_t blocks = n * (k / test_wtype_block(type));
  for (int64_t b = 0; b < blocks; b++) {
    unsigned char *p = bytes + b * test_wtype_block_bytes(type);
    if (test_wtype_is_float(type))
      put_float(p, type, (int32_t)(draw(seed, stream, (uint64_t)b) & 255u) - 128,
                6 + bits_of(k) / 2);
    else
      put_block(p, type, bits_of(k), seed, stream, (uint64_t)b);
  }
}

typedef struct writer {
  gguf_build *b;
  const tiny_llama *m;
  const tiny_change *changes;
  size_t count;
  bool used[32];
  uint32_t stream; /* of the next tensor */
} writer;

static const tiny_change *change_of(writer *w, const char *name) {
  for (size_t i = 0; i < w->count; i++) {
    if (strcmp(w->changes[i].name, name) == 0) {
      w->used[i] = true;
      return &w->changes[i];
    }
  }
  return NULL;
}

/* The type of a matrix: any of the eight where k is whole blocks, else a float one. */
static pkv_wtype type_of(uint32_t seed, uint32_t stream, int64_t k) {
  const uint64_t r = draw(seed, stream, UINT64_C(1) << 40);
  return test_wtypes[k % 32 == 0 ? r % 8 : r % 3];
}

static void put_tensor(writer *w, const char *name, pkv_wtype type, int64_t k, int64_t n,
                       const void *bytes, size_t size) {
  const tiny_change *c = change_of(w, name);
  int64_t extent[2] = {k, n};
  uint32_t said = (uint32_t)type;
  if (c && c->kind == TINY_WITHOUT) return;
  if (c && c->kind == TINY_TYPE) said = (uint32_t)c->number;
  if (c && c->kind == TINY_ROWS) extent[1] = (int64_t)c->number;
  gguf_build_tensor(w->b, name, said, extent[1] == 1 ? 1 : 2, extent, bytes, size);
}

static void matrix(writer *w, const char *name, int64_t k, int64_t n) {
  const uint32_t stream = w->stream++;
  const pkv_wtype type = type_of(w->m->seed, stream, k);
  const size_t size = (size_t)(n * test_wtype_row_bytes(type, k));
  unsigned char *bytes = malloc(size);
  fill_matrix(bytes, type, k, n, w->m->seed, stream);
  put_tensor(w, name, type, k, n, bytes, size);
  free(bytes);
}

/* base + (-128 .. 127) / 512 */
static void vector(writer *w, const char *name, int64_t count, float base) {
  const uint32_t stream = w->stream++;
  float *v = malloc((size_t)count * sizeof *v);
  for (int64_t i = 0; i < count; i++)
    v[i] = base + (float)((int32_t)(draw(w->m->seed, stream, (uint64_t)i) & 255u) - 128) / 512.0f;
  put_tensor(w, name, PKV_WTYPE_F32, count, 1, v, (size_t)count * sizeof *v);
  free(v);
}

static void layer(writer *w, int32_t index) {
  const tiny_llama *m = w->m;
  const int64_t q = (int64_t)m->query_heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
  const struct {
    const char *name;
    int64_t k, n; /* k 0: a vector */
    bool bias;
  } parts[] = {{"attn_norm.weight", 0, m->width, false},
               {"attn_q.weight", m->width, q, false},
               {"attn_k.weight", m->width, kv, false},
               {"attn_v.weight", m->width, kv, false},
               {"attn_output.weight", q, m->width, false},
               {"ffn_norm.weight", 0, m->width, false},
               {"ffn_gate.weight", m->width, m->feed_forward, false},
               {"ffn_up.weight", m->width, m->feed_forward, false},
               {"ffn_down.weight", m->feed_forward, m->width, false},
               {"attn_q.bias", 0, q, true},
               {"attn_k.bias", 0, kv, true},
               {"attn_v.bias", 0, kv, true},
               {"attn_output.bias", 0, m->width, true}};
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    char name[64];
    if (parts[i].bias && !m->biases) continue;
    (void)snprintf(name, sizeof name, "blk.%d.%s", (int)index, parts[i].name);
    if (parts[i].k == 0)
      vector(w, name, parts[i].n, parts[i].bias ? 0.0f : 1.0f);
    else
      matrix(w, name, parts[i].k, parts[i].n);
  }
}

/* ---- keys -------------------------------------------------------------------------------- */

static void put_change(writer *w, const tiny_change *c) {
  if (c->kind == TINY_U32) gguf_build_u32(w->b, c->name, (uint32_t)c->number);
  if (c->kind == TINY_U64) gguf_build_u64(w->b, c->name, c->number);
  if (c->kind == TINY_F32) gguf_build_f32(w->b, c->name, c->real);
  if (c->kind == TINY_STRING) gguf_build_string(w->b, c->name, c->text);
}

static void key_u32(writer *w, const char *key, int32_t value) {
  const tiny_change *c = change_of(w, key);
  if (c)
    put_change(w, c);
  else
    gguf_build_u32(w->b, key, (uint32_t)value);
}

static void key_f32(writer *w, const char *key, float value) {
  const tiny_change *c = change_of(w, key);
  if (c)
    put_change(w, c);
  else
    gguf_build_f32(w->b, key, value);
}

static void key_string(writer *w, const char *key, const char *value) {
  const tiny_change *c = change_of(w, key);
  if (c)
    put_change(w, c);
  else
    gguf_build_string(w->b, key, value);
}

static void keys(writer *w) {
  const tiny_llama *m = w->m;
  key_string(w, "general.architecture", "llama");
  key_string(w, "general.name", "tiny");
  key_u32(w, "llama.block_count", m->layers);
  key_u32(w, "llama.context_length", 64);
  key_u32(w, "llama.embedding_length", m->width);
  key_u32(w, "llama.feed_forward_length", m->feed_forward);
  key_u32(w, "llama.attention.head_count", m->query_heads);
  key_u32(w, "llama.attention.head_count_kv", m->kv_heads);
  key_u32(w, "llama.attention.key_length", m->head_dim);
  key_u32(w, "llama.attention.value_length", m->head_dim);
  key_u32(w, "llama.rope.dimension_count", m->rope_dim);
  key_f32(w, "llama.rope.freq_base", m->rope_base);
  key_f32(w, "llama.attention.layer_norm_rms_epsilon", m->eps);
  if (m->rope_factor != 1.0f) {
    key_string(w, "llama.rope.scaling.type", "linear");
    key_f32(w, "llama.rope.scaling.factor", m->rope_factor);
  }
}

static void rope_freqs(writer *w) {
  float v[256];
  for (int32_t i = 0; i < w->m->rope_dim / 2; i++)
    v[i] = 1.0f + (float)(draw(w->m->seed, 0, 1000 + (uint64_t)i) % 8u) / 4.0f;
  put_tensor(w, "rope_freqs.weight", PKV_WTYPE_F32, w->m->rope_dim / 2, 1, v,
             (size_t)(w->m->rope_dim / 2) * sizeof *v);
}

void tiny_llama_write(gguf_build *b, const tiny_llama *m, const tiny_change *changes,
                      size_t count) {
  writer w = {.b = b, .m = m, .changes = changes, .count = count, .stream = 1};
  keys(&w);
  matrix(&w, "token_embd.weight", m->width, m->vocab);
  vector(&w, "output_norm.weight", m->width, 1.0f);
  if (!m->tied) matrix(&w, "output.weight", m->width, m->vocab);
  if (m->rope_freqs) rope_freqs(&w);
  for (int32_t i = 0; i < m->layers; i++)
    layer(&w, i);
  for (size_t i = 0; i < count; i++) {
    if (!w.used[i]) put_change(&w, &changes[i]);
  }
}
