/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times of whole steps of a Llama-3-8B shape with random bf16 weights: decode in the cells of the
 * published comparison, prefill of one prompt. Wall time of pkv_device_forward_run, as an engine
 * calls it: inputs up, the pass, tokens down. One line of CSV each: cell, ms, floor ms, their
 * ratio, tokens a second. Beside them the parts of a step alone, each in a graph of its own:
 * products, and attention with its plan. floor = bytes that must be read (weights without the
 * input embedding, K and V of the rows) at 4.63 TB/s.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cuda/dense_launchers.h"
#include "base/clock.h"
#include "base/rng.h"
#include "gpu/gpu_case.h"
#include "model/device_forward_parts.h"
#include "support/weight_blocks.h"

#define ROWS     64
#define PAGE     16
#define LONGEST  65600
#define PAGES    10240 /* 160K tokens */
#define CHUNK    2048
#define REPEATS  40
#define BYTES_US 4.63e6 /* a cold read's rate on the H200 */

/* Rows of random weights that packed matrices are made of, again and again. */
#define MADE 64

typedef struct bench {
  pkv_model *model;
  pkv_device_weights *weights;
  pkv_device_forward *forward;
  void *storage;
  pkv_cache *caches;
  int32_t *pages; /* [PAGES], permuted */
  int32_t *table; /* [ROWS, max_pages] */
  int32_t max_pages;
  size_t read_bytes; /* of weights in a step */
  void *packed;
} bench;

static void open_weights(bench *b) {
  OK(pkv_device_weights_create(&b->weights, b->model, gpu, ROWS, 0, NULL, err));
}

static void open_forward(bench *b) {
  pkv_device_forward_options o = {0};
  b->max_pages = (LONGEST + PAGE - 1) / PAGE;
  o.max_tokens = CHUNK + ROWS;
  o.max_logits = ROWS;
  o.max_rows[0] = ROWS;
  o.max_rows[6] = CHUNK / 64;
  o.max_seq_len = LONGEST;
  o.page_tokens = PAGE;
  o.max_pages = b->max_pages;
  o.sampled_vocab = b->model->hp.vocab;
  o.kv_dtype = PKV_DTYPE_BF16;
  const pkv_device_rank rank = {b->model, b->weights};
  OK(pkv_device_forward_create(&b->forward, &rank, 1, &o, err));
}

static void make_caches(bench *b) {
  const pkv_hparams *hp = &b->model->hp;
  const int64_t page = (int64_t)PAGE * hp->kv_heads * hp->head_dim, each = page * PAGES;
  pkv_rng rng;
  OK(pkv_device_alloc(&b->storage, gpu, (size_t)(2 * hp->layers * each) * 2, err));
  const pkv_dense_random_params any =
      pkv_dense_random_run(b->storage, PKV_DTYPE_BF16, 2 * hp->layers * each, 7, 1.0f);
  OK(gpu->dense->weight_random(gpu, &any, NULL, err));
  b->caches = calloc((size_t)hp->layers, sizeof *b->caches);
  b->pages = calloc(PAGES, sizeof *b->pages);
  b->table = calloc((size_t)ROWS * (size_t)b->max_pages, sizeof *b->table);
  for (int32_t i = 0; i < hp->layers; i++) {
    pkv_cache c = PKV_CACHE_INIT;
    c.dtype = PKV_DTYPE_BF16;
    c.pages = PAGES;
    c.page_tokens = PAGE;
    c.kv_heads = hp->kv_heads;
    c.head_dim = hp->head_dim;
    c.k_scale = c.v_scale = 1.0f;
    c.k_token_stride = c.v_token_stride = hp->head_dim;
    c.k_head_stride = c.v_head_stride = PAGE * hp->head_dim;
    c.k_page_stride = c.v_page_stride = page;
    c.k = (uint16_t *)b->storage + 2 * i * each;
    c.v = (uint16_t *)c.k + each;
    b->caches[i] = c;
  }
  pkv_rng_init(&rng, 3);
  for (int32_t i = 0; i < PAGES; i++)
    b->pages[i] = i;
  for (int32_t i = PAGES - 1; i > 0; i--) {
    const int32_t j = (int32_t)pkv_rng_below(&rng, (uint64_t)i + 1), swap = b->pages[i];
    b->pages[i] = b->pages[j];
    b->pages[j] = swap;
  }
  OK(pkv_device_synchronize(gpu, NULL, err));
}

/* ------------------------------------------------------------------ parts of a step */

static void multiply(const bench *b, const pkv_weight *w, int32_t m, const void *x, void *y,
                     bool adds, pkv_dense_gate gate) {
  pkv_dense_matmul_params p = {.w = *w,
                               .act = b->weights->act,
                               .m = m,
                               .x = x,
                               .x_stride = w->k,
                               .y = y,
                               .y_stride = gate                 ? w->n / 2
                                           : y == b->forward->x ? w->n
                                                                : b->forward->qkv_width,
                               .y_f32 = adds,
                               .accumulate = adds,
                               .gate = gate,
                               .gate_scratch = b->forward->gate_up};
  OK(gpu->dense->matmul(gpu, &p, b->forward->stream, err));
}

static void put_products(const bench *b, int32_t m) {
  const pkv_device_forward *f = b->forward;
  for (int32_t i = 0; i < b->weights->layer_count; i++) {
    const pkv_device_layer *l = &b->weights->layers[i];
    multiply(b, &l->qkv, m, f->normed, f->qkv, false, PKV_DENSE_NO_GATE);
    if (l->qkv_rest.n > 0)
      multiply(b, &l->qkv_rest, m, f->normed, (uint16_t *)f->qkv + l->qkv.n, false,
               PKV_DENSE_NO_GATE);
    multiply(b, &l->o, m, f->attended, f->x, true, PKV_DENSE_NO_GATE);
    multiply(b, &l->gate_up, m, f->normed, f->gated, false, PKV_DENSE_SILU);
    multiply(b, &l->down, m, f->gated, f->x, true, PKV_DENSE_NO_GATE);
  }
}

/* Which matrix of all layers put_matrix puts. */
static int matrix;
static const char *const matrices[] = {"qkv", "o", "gate_up", "down", "head"};

static void put_matrix(const bench *b, int32_t m) {
  const pkv_device_forward *f = b->forward;
  for (int32_t i = 0; i < b->weights->layer_count; i++) {
    const pkv_device_layer *l = &b->weights->layers[i];
    if (matrix == 0) multiply(b, &l->qkv, m, f->normed, f->qkv, false, PKV_DENSE_NO_GATE);
    if (matrix == 1) multiply(b, &l->o, m, f->attended, f->x, true, PKV_DENSE_NO_GATE);
    if (matrix == 2) multiply(b, &l->gate_up, m, f->normed, f->gated, false, PKV_DENSE_SILU);
    if (matrix == 3) multiply(b, &l->down, m, f->gated, f->x, true, PKV_DENSE_NO_GATE);
  }
  if (matrix < 4) return;
  pkv_dense_matmul_params p = {.w = b->weights->output,
                               .act = b->weights->act,
                               .m = m,
                               .x = f->last,
                               .x_stride = b->weights->output.k,
                               .y = f->logits,
                               .y_stride = f->logit_stride,
                               .y_f32 = 1};
  OK(gpu->dense->matmul(gpu, &p, f->stream, err));
}

/* What lies between the products, attention left out: two norms and a rotation a layer. */
static void put_between(const bench *b, int32_t m) {
  pkv_device_forward *f = b->forward;
  for (int32_t i = 0; i < b->weights->layer_count; i++) {
    OK(pkv_device_pass_norm(f, m, b->weights->layers[i].attn_norm, err));
    OK(pkv_device_pass_rotate(f, i, m, err));
    OK(pkv_device_pass_norm(f, m, b->weights->layers[i].ffn_norm, err));
  }
}

/* Milliseconds of a graph of what `put` puts on the stream, the least of a few runs. */
static double time_graph(const bench *b, void (*put)(const bench *, int32_t), int32_t m) {
  const pkv_device_forward *f = b->forward;
  void *graph = NULL;
  double least = 1e9;
  put(b, m);
  OK(pkv_device_synchronize(gpu, f->stream, err));
  OK(gpu->dense->graph_begin(gpu, f->stream, err));
  put(b, m);
  OK(gpu->dense->graph_end(&graph, gpu, f->stream, err));
  for (int i = 0; i < 12; i++) {
    const int64_t begin = pkv_clock_ns();
    OK(gpu->dense->graph_launch(gpu, graph, f->stream, err));
    OK(pkv_device_synchronize(gpu, f->stream, err));
    const double ms = (double)(pkv_clock_ns() - begin) * 1e-6;
    if (ms < least) least = ms;
  }
  gpu->dense->graph_destroy(gpu, graph);
  return least;
}

static void time_products(const bench *b, const char *by) {
  static const int32_t rows[] = {1, 2, 4, 8, 16, 32, 64};
  const double bytes = (double)(b->read_bytes - gpu->dense->weight_bytes(&b->weights->output));
  for (size_t i = 0; i < COUNT(rows); i++) {
    const double ms = time_graph(b, put_products, rows[i]), floor = bytes / BYTES_US / 1000.0;
    printf("products,m%d %s,%.3f,%.3f,%.3f,\n", (int)rows[i], by, ms, floor, ms / floor);
  }
}

static const pkv_weight *matrix_of(const bench *b, const pkv_device_layer *l) {
  return matrix == 0   ? &l->qkv
         : matrix == 1 ? &l->o
         : matrix == 2 ? &l->gate_up
         : matrix == 3 ? &l->down
                       : &b->weights->output;
}

/* Each matrix of all layers in a graph of its own. */
static void time_matrices(const bench *b, const char *by) {
  static const int32_t rows[] = {1, 8, 32, 64};
  for (size_t i = 0; i < COUNT(rows); i++) {
    for (matrix = 0; matrix < (int)COUNT(matrices); matrix++) {
      double bytes = 0.0;
      for (int32_t j = 0; j < (matrix < 4 ? b->weights->layer_count : 1); j++)
        bytes += (double)gpu->dense->weight_bytes(matrix_of(b, &b->weights->layers[j]));
      const double ms = time_graph(b, put_matrix, rows[i]), floor = bytes / BYTES_US / 1000.0;
      printf("matrix,%s m%d %s,%.3f,%.3f,%.3f,\n", matrices[matrix], (int)rows[i], by, ms, floor,
             ms / floor);
    }
    printf("between,m%d %s,%.3f,,,\n", (int)rows[i], by, time_graph(b, put_between, rows[i]));
  }
}

/* The rows that time_decode has left in the inputs. */
static void put_attention(const bench *b, int32_t rows) {
  const pkv_device_forward *f = b->forward;
  const pkv_device_class *c = &f->classes[0];
  OK(pkv_device_plan_build(c->plan, rows, f->device.seq_len[0], f->stream, err));
  pkv_device_plan_set_overlap(c->plan, 2);
  for (int32_t i = 0; i < b->weights->layer_count; i++) {
    pkv_attention_args args = PKV_ATTENTION_ARGS_INIT;
    args.cache = &f->caches[i];
    args.block_table = c->table;
    args.block_table_stride = f->options.max_pages;
    args.max_pages = f->options.max_pages;
    args.q_dtype = args.out_dtype = b->weights->act;
    args.q = f->qkv;
    args.q_token_stride = f->qkv_width;
    args.q_head_stride = b->model->hp.head_dim;
    args.out = f->attended;
    OK(pkv_device_attention(gpu, c->plan, &args, f->stream, err));
  }
}

static size_t layer_bytes(const pkv_device_layer *l) {
  const pkv_weight *const all[] = {&l->qkv, &l->qkv_rest, &l->o, &l->gate_up, &l->down};
  size_t bytes = 0;
  for (size_t k = 0; k < COUNT(all); k++)
    if (all[k]->n > 0) bytes += gpu->dense->weight_bytes(all[k]);
  return bytes;
}

static void count_bytes(bench *b) {
  b->read_bytes = gpu->dense->weight_bytes(&b->weights->output);
  for (int32_t i = 0; i < b->weights->layer_count; i++)
    b->read_bytes += layer_bytes(&b->weights->layers[i]);
}

/* Makes w a packed matrix of random weights at *at. */
static void pack_one(pkv_weight *w, unsigned char **at, pkv_wtype type) {
  pkv_rng rng;
  pkv_rng_init(&rng, (uint64_t)w->k);
  const pkv_weight host = {
      .type = type, .n = MADE, .k = w->k, .row_bytes = test_wtype_row_bytes(type, w->k)};
  const size_t some = pkv_dense_quant_bytes(type, MADE, w->k);
  const size_t all = pkv_dense_quant_bytes(type, w->n, w->k);
  unsigned char *const rows = malloc((size_t)(MADE * host.row_bytes)), *const image = malloc(some);
  pkv_weight from = host;
  test_weights_random(rows, type, MADE, w->k, &rng);
  from.data = rows;
  pkv_dense_quant_pack(image, &from, MADE, 0);
  *w = (pkv_weight){.type = type, .n = w->n, .k = w->k, .data = *at, .row_bytes = host.row_bytes};
  OK(pkv_device_copy(gpu, *at, image, some, NULL, err));
  for (size_t done = some; done < all; done *= 2)
    OK(pkv_device_copy(gpu, *at + done, *at, done < all - done ? done : all - done, NULL, err));
  OK(pkv_device_synchronize(gpu, NULL, err));
  *at += (all + 255) / 256 * 256;
  free(rows);
  free(image);
}

/* The mixture that is called Q4_K_M: v, down and the head are Q6_K, in every other layer here. */
static void quantise(bench *b) {
  const pkv_hparams *hp = &b->model->hp;
  OK(pkv_device_alloc(&b->packed, gpu, (size_t)7 << 30, err));
  unsigned char *at = b->packed;
  for (int32_t i = 0; i < b->weights->layer_count; i++) {
    pkv_device_layer *l = &b->weights->layers[i];
    const pkv_wtype other = i % 2 ? PKV_WTYPE_Q6_K : PKV_WTYPE_Q4_K;
    const int64_t v = (int64_t)hp->kv_heads * hp->head_dim;
    if (other != PKV_WTYPE_Q4_K) {
      l->qkv.n -= v;
      l->qkv_rest = (pkv_weight){.n = v, .k = l->qkv.k};
      pack_one(&l->qkv_rest, &at, other);
    }
    pack_one(&l->qkv, &at, PKV_WTYPE_Q4_K);
    pack_one(&l->o, &at, PKV_WTYPE_Q4_K);
    pack_one(&l->gate_up, &at, PKV_WTYPE_Q4_K);
    pack_one(&l->down, &at, other);
  }
  pack_one(&b->weights->output, &at, PKV_WTYPE_Q6_K);
  assert_true(at <= (unsigned char *)b->packed + ((size_t)7 << 30));
  count_bytes(b);
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static void report(const bench *b, const char *cell, double ms, int64_t kv_tokens, int64_t tokens) {
  const pkv_hparams *hp = &b->model->hp;
  const int64_t kv = (int64_t)hp->layers * 2 * hp->kv_heads * hp->head_dim * 2;
  const double floor = ((double)b->read_bytes + (double)kv * (double)kv_tokens) / BYTES_US / 1000.0;
  printf("step,%s,%.3f,%.3f,%.3f,%.0f\n", cell, ms, floor, ms / floor,
         (double)tokens / ms * 1000.0);
  (void)fflush(stdout);
}

/* lens[rows] in turn from a list that repeats. */
static void time_decode(bench *b, const char *cell, int32_t rows, const int32_t *lens,
                        int32_t kinds, float top_p) {
  pkv_dense_sample_row sample_rows[ROWS];
  int32_t ids[ROWS], positions[ROWS], logit_tokens[ROWS], seq_len[ROWS], sampled[ROWS];
  int64_t slots[ROWS], next = 0, kv_tokens = 0;
  double samples[REPEATS];
  for (int32_t r = 0; r < rows; r++) {
    int32_t *row = b->table + (int64_t)r * b->max_pages;
    seq_len[r] = lens[r % kinds];
    kv_tokens += seq_len[r];
    for (int32_t i = 0; i * PAGE < seq_len[r]; i++)
      row[i] = b->pages[next++ % PAGES];
    ids[r] = 1000 + r;
    positions[r] = seq_len[r] - 1;
    slots[r] = (int64_t)row[positions[r] / PAGE] * PAGE + positions[r] % PAGE;
    logit_tokens[r] = r;
    sample_rows[r] = (pkv_dense_sample_row){
        .temperature = top_p > 0.0f ? 1.0f : 0.0f, .top_p = top_p, .seed = (uint64_t)r};
  }
  const pkv_forward_group group = {.block_table = b->table,
                                   .block_table_stride = b->max_pages,
                                   .max_pages = b->max_pages,
                                   .rows = rows,
                                   .q_len = 1,
                                   .seq_len = seq_len};
  const pkv_forward_batch batch = {.tokens = rows,
                                   .ids = ids,
                                   .positions = positions,
                                   .slots = slots,
                                   .groups = &group,
                                   .group_count = 1,
                                   .logit_tokens = logit_tokens,
                                   .logit_count = rows,
                                   .sampled = sampled,
                                   .sample_rows = sample_rows};
  for (int i = -5; i < REPEATS; i++) {
    const int64_t begin = pkv_clock_ns();
    OK(pkv_device_forward_run(b->forward, &batch, err));
    if (i >= 0) samples[i] = (double)(pkv_clock_ns() - begin) * 1e-6;
  }
  qsort(samples, REPEATS, sizeof *samples, by_value);
  for (int32_t r = 0; r < rows; r++)
    assert_true(sampled[r] >= 0);
  report(b, cell, samples[REPEATS / 2], kv_tokens, rows);
  if (top_p > 0.0f) return;
  const double kv = (double)kv_tokens * 131072.0 / BYTES_US / 1000.0;
  const double ms = time_graph(b, put_attention, rows);
  printf("attention,%s,%.3f,%.3f,%.3f,\n", cell, ms, kv, ms / kv);
}

static void time_prefill(bench *b, int32_t tokens) {
  static int32_t ids[CHUNK], positions[CHUNK], seq_len[CHUNK / 64];
  static int64_t slots[CHUNK];
  int32_t last = CHUNK - 1, sampled;
  char cell[32];
  double ms = 0.0;
  for (int run = 0; run < 2; run++) {
    const int64_t begin = pkv_clock_ns();
    for (int32_t at = 0; at < tokens; at += CHUNK) {
      for (int32_t i = 0; i < CHUNK; i++) {
        ids[i] = (at + i) % 128000;
        positions[i] = at + i;
        slots[i] = (int64_t)b->pages[(at + i) / PAGE] * PAGE + (at + i) % PAGE;
      }
      for (int32_t r = 0; r < CHUNK / 64; r++) {
        seq_len[r] = at + 64 * (r + 1);
        memcpy(b->table + (int64_t)r * b->max_pages, b->pages,
               (size_t)((seq_len[r] + PAGE - 1) / PAGE) * sizeof *b->table);
      }
      const pkv_forward_group group = {.block_table = b->table,
                                       .block_table_stride = b->max_pages,
                                       .max_pages = b->max_pages,
                                       .rows = CHUNK / 64,
                                       .q_len = 64,
                                       .seq_len = seq_len};
      const pkv_forward_batch batch = {.tokens = CHUNK,
                                       .ids = ids,
                                       .positions = positions,
                                       .slots = slots,
                                       .groups = &group,
                                       .group_count = 1,
                                       .logit_tokens = &last,
                                       .logit_count = at + CHUNK == tokens,
                                       .sampled = &sampled};
      OK(pkv_device_forward_run(b->forward, &batch, err));
    }
    ms = (double)(pkv_clock_ns() - begin) * 1e-6;
  }
  (void)snprintf(cell, sizeof cell, "prefill_%d", (int)tokens);
  report(b, cell, ms, tokens, tokens);
}

static void test_llama_8b(void **state) {
  (void)state;
  static const int32_t k1[] = {1024}, k2[] = {2048}, k16[] = {16384}, k65[] = {65536},
                       mixed[] = {32768, 800};
  bench b = {0};
  NEED_GPU();
  int64_t begin = pkv_clock_ns();
  b.model = gpu_random_model(gpu_llama_8b, 1);
  open_weights(&b);
  open_forward(&b);
  count_bytes(&b);
  make_caches(&b);
  printf("made in %.1f s\n", (double)(pkv_clock_ns() - begin) * 1e-9);
  begin = pkv_clock_ns();
  OK(pkv_device_forward_attach(b.forward, b.caches, err));
  printf("captured in %.1f s\n", (double)(pkv_clock_ns() - begin) * 1e-9);
  time_decode(&b, "b1_1k", 1, k1, 1, 0.0f);
  time_decode(&b, "b1_16k", 1, k16, 1, 0.0f);
  time_decode(&b, "b1_65k", 1, k65, 1, 0.0f);
  time_decode(&b, "b8_32k_800", 8, mixed, 2, 0.0f);
  time_decode(&b, "b32_2k", 32, k2, 1, 0.0f);
  time_decode(&b, "b64_1k", 64, k1, 1, 0.0f);
  time_decode(&b, "b8_1k", 8, k1, 1, 0.0f);
  time_decode(&b, "b1_1k top_p", 1, k1, 1, 0.95f); /* of flat logits: tens of thousands of tokens */
  time_decode(&b, "b64_1k top_p", 64, k1, 1, 0.95f);
  time_products(&b, "16 bits");
  time_matrices(&b, "16 bits");
  time_prefill(&b, 2048);
  time_prefill(&b, 8192);
  pkv_device_forward_destroy(b.forward);
  quantise(&b);
  open_forward(&b);
  OK(pkv_device_forward_attach(b.forward, b.caches, err));
  time_decode(&b, "b1_1k q4_k_m", 1, k1, 1, 0.0f);
  time_decode(&b, "b8_1k q4_k_m", 8, k1, 1, 0.0f);
  time_decode(&b, "b64_1k q4_k_m", 64, k1, 1, 0.0f);
  time_products(&b, "q4_k_m");
  time_matrices(&b, "q4_k_m");
  time_prefill(&b, 2048);
  pkv_device_forward_destroy(b.forward);
  pkv_device_free(gpu, b.packed);
  pkv_device_free(gpu, b.storage);
  pkv_device_weights_destroy(b.weights);
  pkv_model_close(b.model);
  free(b.caches);
  free(b.pages);
  free(b.table);
}

int gpu_suite_steps(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_llama_8b)};
  return cmocka_run_group_tests_name("steps", tests, gpu_setup, gpu_teardown);
}
