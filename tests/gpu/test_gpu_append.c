/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pkv_device_append against double and against the CPU's bytes: source types and strides, cache
 * types and layouts, scales, rotations; slots outside the cache; pools past 2^32 bytes; what was
 * appended is what attention then sees.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "gpu/gpu_case.h"
#include "support/append_case.h"

/* Device copies of a case's arrays. */
typedef struct on_device {
  pkv_append_args args;
  pkv_cache cache;
  pkv_rope rope;
  unsigned char *storage, *source;
  void *slots, *positions, *frequencies, *k_head_scale, *v_head_scale;
} on_device;

static void device_init(on_device *d, append_case *c) {
  const append_spec *s = &c->spec;
  const size_t scales = (size_t)s->kv_heads * sizeof(float);
  const int32_t dims = s->rope_dims > s->head_dim ? s->head_dim : s->rope_dims;
  d->args = append_case_args(c);
  d->cache = c->cache;
  d->rope = c->rope;
  d->storage = gpu_up(c->storage, c->storage_bytes);
  d->source = gpu_up(c->source, c->source_bytes);
  d->slots = gpu_up(c->slots, (size_t)s->tokens * sizeof(int64_t));
  d->positions = gpu_up(c->positions, (size_t)s->tokens * sizeof(int32_t));
  d->frequencies = gpu_up(c->frequencies, (size_t)(dims / 2) * sizeof(float));
  d->k_head_scale = gpu_up(c->k_head_scale, scales);
  d->v_head_scale = gpu_up(c->v_head_scale, scales);
  d->cache.k = d->storage + ((unsigned char *)c->cache.k - c->storage);
  d->cache.v = d->storage + ((unsigned char *)c->cache.v - c->storage);
  d->cache.k_head_scale = d->k_head_scale;
  d->cache.v_head_scale = d->v_head_scale;
  d->rope.positions = d->positions;
  d->rope.inverse_frequency = d->frequencies;
  d->args.cache = &d->cache;
  d->args.slots = d->slots;
  d->args.k = d->source + c->k_at;
  d->args.v = d->source + c->v_at;
  if (d->args.rope != NULL) d->args.rope = &d->rope;
}

static void device_deinit(on_device *d) {
  void *all[] = {d->storage,     d->source,       d->slots,       d->positions,
                 d->frequencies, d->k_head_scale, d->v_head_scale};
  for (size_t i = 0; i < COUNT(all); i++)
    pkv_device_free(gpu, all[i]);
}

/* Appends on the device; the storage comes back to `got`. */
static void device_append(const on_device *d, const append_case *c, unsigned char *got) {
  OK(pkv_device_append(gpu, &d->args, NULL, err));
  gpu_copy(got, d->storage, c->storage_bytes);
  OK(pkv_device_synchronize(gpu, NULL, err));
}

static void test_random_appends(void **state) {
  (void)state;
  NEED_GPU();
  const uint64_t cases = gpu_opt.small ? 30 : 600;
  pkv_executor *const cpu = attn_executor(PKV_ISA_AUTO, 1);
  size_t bytes = 0, different = 0;
  pkv_rng rng;
  pkv_rng_init(&rng, 91);
  for (uint64_t i = 0; i < cases; i++) {
    const append_spec s = append_draw(&rng, i);
    append_case c;
    on_device d;
    append_case_init(&c, &s);
    device_init(&d, &c);
    unsigned char *got = malloc(c.storage_bytes);
    device_append(&d, &c, got);
    append_check(&c, got, "device");
    const pkv_append_args args = append_case_args(&c);
    OK(pkv_append(cpu, &args, err));
    size_t here = 0;
    for (size_t k = 0; k < c.storage_bytes; k++)
      here += got[k] != c.storage[k];
    bytes += c.storage_bytes;
    different += here;
    if (s.rope_dims == 0 && here != 0)
      fail_msg("seed %llu: %zu bytes differ from the CPU's", (unsigned long long)i, here);
    free(got);
    device_deinit(&d);
    append_case_deinit(&c);
  }
  pkv_executor_destroy(cpu);
  printf("  %llu appends: %zu of %zu bytes differ from the CPU's, none without rope\n",
         (unsigned long long)cases, different, bytes);
  assert_true(different * 100000 < bytes); /* a cosine on the edge between two floats */
}

/* NaN, infinities and the largest values, every source type to every cache type. */
static void test_special_values(void **state) {
  (void)state;
  NEED_GPU();
  static const float values[] = {INFINITY, -INFINITY, NAN,      0.0f,   -0.0f,   65504.0f, 65519.0f,
                                 65520.0f, 448.0f,    464.0f,   465.0f, -1e30f,  1e-45f,   0x1p-24f,
                                 0x1p-25f, 0x1p-9f,   0x1p-10f, 1e-3f,  3.0e-8f, 240.0f};
  pkv_executor *const cpu = attn_executor(PKV_ISA_AUTO, 1);
  for (int from = 0; from < 3; from++)
    for (int to = 0; to < 4; to++) {
      append_spec s = {.seed = 3, .dtype = (pkv_dtype)from, .cache_dtype = (pkv_dtype)to};
      s.tokens = 2;
      s.kv_heads = 1;
      s.head_dim = 24;
      s.page_tokens = 4;
      s.pages = 3;
      append_case c;
      on_device d;
      append_case_init(&c, &s);
      for (size_t i = 0; i < COUNT(values); i++)
        pkv_store(c.source + c.k_at, s.dtype, (int64_t)i, values[i]);
      device_init(&d, &c);
      unsigned char *got = malloc(c.storage_bytes);
      device_append(&d, &c, got);
      const pkv_append_args args = append_case_args(&c);
      OK(pkv_append(cpu, &args, err));
      for (int64_t i = 0; i < (int64_t)(c.storage_bytes / pkv_dtype_bytes(s.cache_dtype)); i++) {
        const float want = pkv_load(c.storage, s.cache_dtype, i),
                    have = pkv_load(got, s.cache_dtype, i);
        if (!(isnan(want) ? isnan(have) : have == want && signbit(have) == signbit(want)))
          fail_msg("%s to %s [%lld]: got %g, the CPU has %g", pkv_dtype_name(s.dtype),
                   pkv_dtype_name(s.cache_dtype), (long long)i, (double)have, (double)want);
      }
      free(got);
      device_deinit(&d);
      append_case_deinit(&c);
    }
  pkv_executor_destroy(cpu);
}

/* What the host cannot see: slots outside the cache write nothing, the others are written. */
static void test_slots_outside(void **state) {
  (void)state;
  NEED_GPU();
  static const int64_t outside[] = {-2, INT64_MIN, INT64_MAX, INT32_MAX, (int64_t)1 << 32};
  append_spec s = {.seed = 6, .cache_dtype = PKV_DTYPE_F16, .tokens = 12, .kv_heads = 2};
  s.head_dim = 64;
  s.page_tokens = 4;
  s.pages = 9;
  append_case c;
  on_device d;
  append_case_init(&c, &s);
  int64_t slots[12];
  for (int i = 0; i < 12; i++) {
    c.slots[i] = i < 5 ? -1 : 3 * i;
    slots[i] = i < 5 ? outside[i] : 3 * i;
  }
  slots[11] = (int64_t)s.pages * s.page_tokens; /* the first one past the end */
  c.slots[11] = -1;
  device_init(&d, &c);
  gpu_copy(d.slots, slots, sizeof slots);
  unsigned char *got = malloc(c.storage_bytes);
  device_append(&d, &c, got);
  append_check(&c, got, "slots outside");
  free(got);
  device_deinit(&d);
  append_case_deinit(&c);
}

/* Complaint 16: the last pages of a pool past 2^31 elements and 2^32 bytes. */
static void test_c16_append_past_4_gib(void **state) {
  (void)state;
  NEED_GPU();
  for (int k = 0; k < 2; k++) {
    append_spec s = {.seed = 8, .dtype = PKV_DTYPE_BF16, .tokens = 20, .kv_heads = 8};
    s.cache_dtype = k == 0 ? PKV_DTYPE_F16 : PKV_DTYPE_FP8_E4M3;
    s.head_dim = 128;
    s.page_tokens = 16;
    s.pages = 3;
    s.rope_dims = 128;
    append_case c;
    on_device d;
    append_case_init(&c, &s);
    device_init(&d, &c);
    const int64_t pages = gpu_opt.fake || gpu_opt.small ? 500 : k == 0 ? 131300 : 262500;
    const size_t element = pkv_dtype_bytes(s.cache_dtype);
    const size_t near = (size_t)(s.pages * c.cache.k_page_stride) * element;
    const size_t skip = (size_t)((pages - s.pages) * c.cache.k_page_stride) * element;
    void *far[2] = {NULL, NULL};
    int64_t slots[20];
    for (int v = 0; v < 2; v++) {
      OK(pkv_device_alloc(&far[v], gpu, skip + near, err));
      gpu_copy((unsigned char *)far[v] + skip, v ? c.cache.v : c.cache.k, near);
    }
    for (int i = 0; i < 20; i++)
      slots[i] = c.slots[i] < 0 ? -1 : c.slots[i] + (pages - s.pages) * s.page_tokens;
    gpu_copy(d.slots, slots, sizeof slots);
    d.cache.k = far[0];
    d.cache.v = far[1];
    d.cache.pages = pages;
    OK(pkv_device_append(gpu, &d.args, NULL, err));
    unsigned char *got = malloc(c.storage_bytes);
    for (int v = 0; v < 2; v++)
      gpu_copy(got + ((unsigned char *)(v ? c.cache.v : c.cache.k) - c.storage),
               (unsigned char *)far[v] + skip, near);
    OK(pkv_device_synchronize(gpu, NULL, err));
    append_check(&c, got, "the pool's last pages");
    free(got);
    for (int v = 0; v < 2; v++)
      pkv_device_free(gpu, far[v]);
    device_deinit(&d);
    append_case_deinit(&c);
  }
}

/* A row's tokens appended one by one, attention after each: the answer over the tokens so far. */
static void test_append_then_attend(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t lens[] = {70, 33};
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++) {
    attn_spec s = gpu_spec(gpu_kv_dtypes[k], 15 + k, 2, lens);
    attn_case c;
    gpu_case g;
    attn_case_init(&c, &s);
    gpu_case_init(&g, &c);
    pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
    pkv_device_plan *plan = gpu_plan(&g, &options, 0);
    const size_t floats = (size_t)(2 * s.kv_heads * s.head_dim);
    float *fresh = calloc(2 * floats, sizeof *fresh);
    void *const on_gpu = gpu_up(fresh, 2 * floats * sizeof *fresh);
    void *const wide_slots = gpu_up(fresh, 2 * sizeof(int64_t));
    for (int32_t step = 6; step >= 0; step--) {
      /* what stands at the last positions moves out and comes back by append */
      const int32_t now[] = {lens[0] - step, lens[1] - step};
      int64_t slots[2];
      for (int32_t r = 0; r < 2; r++) {
        const int32_t t = now[r] - 1;
        slots[r] = (int64_t)c.table[r * c.table_stride + t / 16] * 16 + t % 16;
        for (int v = 0; v < 2; v++)
          for (int32_t h = 0; h < s.kv_heads; h++)
            for (int32_t i = 0; i < s.head_dim; i++) {
              const float scale = s.kv_dtype != PKV_DTYPE_FP8_E4M3 ? 1.0f
                                  : v                              ? s.v_scale
                                                                   : s.k_scale;
              fresh[(size_t)v * floats + (size_t)((r * s.kv_heads + h) * s.head_dim + i)] =
                  scale * pkv_load(attn_case_element(&c, v != 0, r, t, h), s.kv_dtype, i);
            }
      }
      gpu_copy(on_gpu, fresh, 2 * floats * sizeof *fresh);
      gpu_copy(wide_slots, slots, sizeof slots);
      pkv_append_args append = PKV_APPEND_ARGS_INIT;
      append.cache = &g.cache;
      append.tokens = 2;
      append.slots = wide_slots;
      append.k = on_gpu;
      append.v = (float *)on_gpu + floats;
      for (int32_t r = 0; r < 2; r++) /* the place is poisoned until then */
        for (int v = 0; v < 2; v++)
          for (int32_t h = 0; h < s.kv_heads; h++) {
            const unsigned char *const at = attn_case_element(&c, v != 0, r, now[r] - 1, h);
            gpu_fill((unsigned char *)g.storage + (at - c.storage), 0xff,
                     (size_t)s.head_dim * pkv_dtype_bytes(s.kv_dtype));
          }
      OK(pkv_device_append(gpu, &append, NULL, err));
      attn_case_set_lengths(&c, now);
      attn_case_answer(&c);
      gpu_case_refresh(&g);
      gpu_replan(&g, plan, &options);
      gpu_run(&g, plan);
      attn_check(&c, "appended");
      attn_case_set_lengths(&c, lens);
    }
    free(fresh);
    pkv_device_free(gpu, on_gpu);
    pkv_device_free(gpu, wide_slots);
    pkv_device_plan_destroy(plan);
    gpu_case_deinit(&g);
    attn_case_deinit(&c);
  }
}

int gpu_suite_append(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_appends),     cmocka_unit_test(test_special_values),
      cmocka_unit_test(test_slots_outside),      cmocka_unit_test(test_c16_append_past_4_gib),
      cmocka_unit_test(test_append_then_attend),
  };
  return cmocka_run_group_tests_name("append", tests, gpu_setup, gpu_teardown);
}
