/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bad arguments to every function of device.h: the status, a text that names the argument, results
 * NULL or unchanged, and a device that works as before. On the invented device also: each call that
 * can fail fails once, and nothing is lost.
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

#include "gpu/gpu_case.h"
#include "plan/plan.h"
#include "support/fake_device.h"

/* One refusal: `call` sees err. */
#define REFUSED(call, wanted, word)                                                                \
  do {                                                                                             \
    pkv_error refused_error = {0};                                                                 \
    pkv_error *const err = &refused_error;                                                         \
    const pkv_status got = (call);                                                                 \
    expect_refused(#call, got, err, (wanted), (word));                                             \
  } while (0)

static void expect_refused(const char *call, pkv_status got, const pkv_error *err,
                           pkv_status wanted, const char *word) {
  if (got != wanted || err->status != wanted || strstr(err->text, word) == NULL)
    fail_msg("%s: got %s \"%s\", wanted %s with \"%s\"", call, pkv_status_name(got), err->text,
             pkv_status_name(wanted), word);
}

static const int32_t lens[] = {100, 200};

/* A case that works, and executors that are wrong for it. */
typedef struct fixture {
  attn_case c;
  gpu_case g;
  pkv_plan_options options;
  pkv_device_plan *plan;
  pkv_executor *cpu;
} fixture;

static void fixture_init(fixture *f) {
  const attn_spec s = gpu_spec(PKV_DTYPE_F16, 2, 2, lens);
  attn_case_init(&f->c, &s);
  attn_case_answer(&f->c);
  gpu_case_init(&f->g, &f->c);
  f->options = (pkv_plan_options)PKV_PLAN_OPTIONS_INIT;
  f->plan = gpu_plan(&f->g, &f->options, 0);
  f->cpu = attn_executor(PKV_ISA_SCALAR, 1);
}

/* The case still gives its answer: nothing was left behind. */
static void fixture_deinit(fixture *f) {
  gpu_run(&f->g, f->plan);
  attn_check(&f->c, "after refusals");
  pkv_executor_destroy(f->cpu);
  pkv_device_plan_destroy(f->plan);
  gpu_case_deinit(&f->g);
  attn_case_deinit(&f->c);
}

static void test_memory(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  int here[4] = {1, 2, 3, 4};
  void *p = here;
  REFUSED(pkv_device_alloc(NULL, gpu, 64, err), PKV_E_INVALID, "out is NULL");
  REFUSED(pkv_device_alloc(&p, NULL, 64, err), PKV_E_INVALID, "executor is NULL");
  assert_null(p);
  REFUSED(pkv_device_alloc(&p, f.cpu, 64, err), PKV_E_INVALID, "CPU");
  REFUSED(pkv_device_alloc(&p, gpu, 0, err), PKV_E_INVALID, "bytes is 0");
  p = here;
  REFUSED(pkv_device_alloc(&p, gpu, (size_t)1 << 46, err), PKV_E_NOMEM, "free");
  assert_null(p);
  REFUSED(pkv_device_alloc(&p, gpu, SIZE_MAX, err), PKV_E_NOMEM, "bytes");
  assert_int_equal(pkv_device_alloc(&p, gpu, SIZE_MAX, NULL), PKV_E_NOMEM); /* no error wanted */
  OK(pkv_device_alloc(&p, gpu, 1, err));                                    /* no error sticks */
  REFUSED(pkv_device_copy(NULL, p, here, 1, NULL, err), PKV_E_INVALID, "executor is NULL");
  REFUSED(pkv_device_copy(f.cpu, p, here, 1, NULL, err), PKV_E_INVALID, "CPU");
  REFUSED(pkv_device_copy(gpu, NULL, here, 1, NULL, err), PKV_E_INVALID, "to is NULL");
  REFUSED(pkv_device_copy(gpu, p, NULL, 1, NULL, err), PKV_E_INVALID, "from is NULL");
  OK(pkv_device_copy(gpu, NULL, NULL, 0, NULL, err));
  REFUSED(pkv_device_synchronize(NULL, NULL, err), PKV_E_INVALID, "executor is NULL");
  REFUSED(pkv_device_synchronize(f.cpu, NULL, err), PKV_E_INVALID, "CPU");
  pkv_device_free(NULL, NULL);
  pkv_device_free(gpu, NULL);
  pkv_device_free(f.cpu, NULL);
  pkv_device_free(gpu, p);
  fixture_deinit(&f);
}

static void test_parts(void **state) {
  (void)state;
  NEED_GPU();
  static const int32_t dims[] = {0, -8, 7, 12, 264, INT32_MAX, INT32_MIN};
  int32_t parts = 5;
  pkv_shape s = PKV_SHAPE_INIT;
  s.query_heads = 8;
  s.kv_heads = 2;
  s.head_dim = 64;
  pkv_executor *cpu = attn_executor(PKV_ISA_SCALAR, 1);
  REFUSED(pkv_device_parts(NULL, gpu, &s, PKV_DTYPE_F16, err), PKV_E_INVALID, "parts is NULL");
  REFUSED(pkv_device_parts(&parts, NULL, &s, PKV_DTYPE_F16, err), PKV_E_INVALID, "executor");
  REFUSED(pkv_device_parts(&parts, cpu, &s, PKV_DTYPE_F16, err), PKV_E_INVALID, "CPU");
  REFUSED(pkv_device_parts(&parts, gpu, NULL, PKV_DTYPE_F16, err), PKV_E_INVALID, "shape");
  REFUSED(pkv_device_parts(&parts, gpu, &s, PKV_DTYPE_F32, err), PKV_E_UNSUPPORTED, "f32");
  REFUSED(pkv_device_parts(&parts, gpu, &s, (pkv_dtype)17, err), PKV_E_INVALID, "kv_dtype is 17");
  for (size_t i = 0; i < COUNT(dims); i++) {
    s.head_dim = dims[i];
    REFUSED(pkv_device_parts(&parts, gpu, &s, PKV_DTYPE_F16, err), PKV_E_UNSUPPORTED,
            "multiples of 8");
  }
  assert_int_equal(parts, 0);
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int32_t d = 8; d <= 256; d += 8) {
      s.head_dim = d;
      OK(pkv_device_parts(&parts, gpu, &s, gpu_kv_dtypes[k], err));
      assert_true(parts > 0);
    }
  pkv_executor_destroy(cpu);
}

/* Parts that a plan has by itself are those that pkv_device_parts says of its shape. */
static void test_own_parts(void **state) {
  (void)state;
  NEED_GPU();
  const pkv_plan_options plain = PKV_PLAN_OPTIONS_INIT;
  int32_t few, many;
  void *memory = aligned_alloc(64, 1 << 16);
  for (size_t k = 0; k < COUNT(gpu_kv_dtypes); k++)
    for (int32_t d = 64; d <= 256; d *= 2)
      for (int32_t q_len = 1; q_len <= 4; q_len += 3) {
        pkv_shape s = PKV_SHAPE_INIT;
        s.query_heads = 8;
        s.kv_heads = 2;
        s.head_dim = d;
        s.q_len = q_len;
        size_t bytes;
        int32_t parts, length = 7;
        pkv_device_plan *plan = NULL;
        OK(pkv_device_parts(&parts, gpu, &s, gpu_kv_dtypes[k], err));
        *(q_len == 1 ? &few : &many) = parts;
        OK(pkv_device_plan_create(&plan, gpu, &s, &plain, gpu_kv_dtypes[k], 1, 7, err));
        void *seq_len = gpu_up(&length, sizeof length);
        OK(pkv_device_plan_build(plan, 1, seq_len, NULL, err));
        OK(pkv_device_plan_download(memory, 1 << 16, &bytes, plan, NULL, err));
        assert_int_equal(((const pkv_plan *)memory)->parts, parts);
        pkv_device_free(gpu, seq_len);
        pkv_device_plan_destroy(plan);
        if (q_len > 1) assert_true(few >= many); /* smaller tiles: as many CTAs an SM, or more */
      }
  free(memory);
}

static void test_create(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  const pkv_shape good = attn_case_shape(&f.c);
  const pkv_plan_options plain = PKV_PLAN_OPTIONS_INIT;
  pkv_shape shape = good;
  pkv_plan_options options = plain;
  pkv_dtype dtype = PKV_DTYPE_F16;
  int32_t rows = 4, longest = 100;
  pkv_device_plan *made = f.plan;
#define CREATE(change, status, word)                                                               \
  do {                                                                                             \
    change;                                                                                        \
    made = f.plan;                                                                                 \
    REFUSED(pkv_device_plan_create(&made, gpu, &shape, &options, dtype, rows, longest, err),       \
            status, word);                                                                         \
    assert_null(made);                                                                             \
    shape = good;                                                                                  \
    options = plain;                                                                               \
    dtype = PKV_DTYPE_F16;                                                                         \
    rows = 4;                                                                                      \
    longest = 100;                                                                                 \
  } while (0)
  REFUSED(pkv_device_plan_create(NULL, gpu, &good, &plain, dtype, 4, 100, err), PKV_E_INVALID,
          "out is NULL");
  REFUSED(pkv_device_plan_create(&made, NULL, &good, &plain, dtype, 4, 100, err), PKV_E_INVALID,
          "executor is NULL");
  assert_null(made);
  REFUSED(pkv_device_plan_create(&made, f.cpu, &good, &plain, dtype, 4, 100, err), PKV_E_INVALID,
          "CPU");
  REFUSED(pkv_device_plan_create(&made, gpu, NULL, &plain, dtype, 4, 100, err), PKV_E_INVALID,
          "shape is NULL");
  REFUSED(pkv_device_plan_create(&made, gpu, &good, NULL, dtype, 4, 100, err), PKV_E_INVALID,
          "options is NULL");
  CREATE(shape.struct_size = 4, PKV_E_INVALID, "shape->struct_size is 4");
  CREATE(options.struct_size = 99, PKV_E_INVALID, "options->struct_size is 99");
  CREATE(shape.kv_heads = 0, PKV_E_INVALID, "kv_heads");
  CREATE(shape.kv_heads = -2, PKV_E_INVALID, "kv_heads");
  CREATE(shape.query_heads = 3, PKV_E_INVALID, "query_heads");
  CREATE(shape.query_heads = 66, PKV_E_UNSUPPORTED, "at most 32");
  CREATE(shape.head_dim = 9, PKV_E_UNSUPPORTED, "head_dim");
  CREATE(shape.head_dim = 512, PKV_E_UNSUPPORTED, "head_dim");
  CREATE(shape.page_tokens = 0, PKV_E_UNSUPPORTED, "page_tokens");
  CREATE(shape.page_tokens = 1025, PKV_E_UNSUPPORTED, "page_tokens");
  CREATE(shape.q_len = 0, PKV_E_INVALID, "q_len");
  CREATE(shape.q_len = (1 << 20) + 1, PKV_E_UNSUPPORTED, "q_len");
  CREATE(shape.window = -1, PKV_E_INVALID, "window");
  CREATE(options.route = PKV_ROUTE_FLASHINFER, PKV_E_UNSUPPORTED, "flashinfer");
  CREATE(options.route = (pkv_route)40, PKV_E_INVALID, "route is 40");
  CREATE(options.flags = 0x80u, PKV_E_INVALID, "flags is 0x80");
  CREATE((options.route = PKV_ROUTE_SPLIT, options.flags = PKV_PLAN_BATCH_INVARIANT),
         PKV_E_UNSUPPORTED, "batch-invariant");
  CREATE(options.parts = -1, PKV_E_INVALID, "parts is -1");
  CREATE(options.parts = INT32_MAX, PKV_E_INVALID, "parts is");
  CREATE(options.splits = -3, PKV_E_INVALID, "splits is -3");
  CREATE((options.flags = PKV_PLAN_BATCH_INVARIANT, options.chunk_tokens = 65), PKV_E_INVALID,
         "chunk_tokens is 65");
  CREATE(dtype = PKV_DTYPE_F32, PKV_E_UNSUPPORTED, "f32");
  CREATE(dtype = (pkv_dtype)-1, PKV_E_INVALID, "kv_dtype is -1");
  CREATE(rows = -1, PKV_E_RANGE, "max_rows is -1");
  CREATE(rows = INT32_MAX, PKV_E_RANGE, "max_rows is");
  CREATE(longest = -7, PKV_E_INVALID, "max_seq_len is -7");
  /* More than any device has; the parts that were there are given back. */
  CREATE((options.flags = PKV_PLAN_BATCH_INVARIANT, options.parts = 4096, rows = 100000,
          longest = 51200000),
         PKV_E_NOMEM, "bytes");
#undef CREATE
  fixture_deinit(&f);
}

static void test_build(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  const int32_t *seq_len = f.g.seq_len;
  REFUSED(pkv_device_plan_build(NULL, 2, seq_len, NULL, err), PKV_E_INVALID, "plan is NULL");
  REFUSED(pkv_device_plan_build(f.plan, -1, seq_len, NULL, err), PKV_E_RANGE, "rows is -1");
  REFUSED(pkv_device_plan_build(f.plan, 3, seq_len, NULL, err), PKV_E_RANGE, "0 to 2");
  REFUSED(pkv_device_plan_build(f.plan, 2, NULL, NULL, err), PKV_E_INVALID, "seq_len is NULL");
  REFUSED(pkv_device_plan_build(
              f.plan, 2, (const int32_t *)(const void *)((const char *)seq_len + 1), NULL, err),
          PKV_E_INVALID, "aligned");
  OK(pkv_device_plan_build(f.plan, 0, NULL, NULL, err));
  gpu_replan(&f.g, f.plan, &f.options);
  pkv_plan_options seed = PKV_PLAN_OPTIONS_INIT;
  seed.route = PKV_ROUTE_WORKQUEUE;
  pkv_device_plan *other = gpu_plan(&f.g, &seed, 0);
  REFUSED(pkv_device_plan_build(other, 2, seq_len, NULL, err), PKV_E_UNSUPPORTED, "workqueue");
  pkv_device_plan_destroy(other);
  pkv_device_plan_destroy(NULL);
  pkv_device_plan_set_overlap(NULL, 1);
  pkv_device_plan_set_fused(NULL, 1);
  fixture_deinit(&f);
}

static void test_upload(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  pkv_plan_options split = PKV_PLAN_OPTIONS_INIT;
  split.route = PKV_ROUTE_SPLIT;
  attn_plan host;
  attn_plan_init(&host, &f.c, &split);
  const pkv_shape shape = attn_case_shape(&f.c);
  pkv_device_plan *to = NULL, *small = NULL, *other = NULL;
  OK(pkv_device_plan_create(&to, gpu, &shape, &split, PKV_DTYPE_F16, 2, 200, err));
  OK(pkv_device_plan_create(&small, gpu, &shape, &split, PKV_DTYPE_F16, 1, 10, err));
  pkv_shape wider = shape;
  wider.query_heads *= 2;
  OK(pkv_device_plan_create(&other, gpu, &wider, &split, PKV_DTYPE_F16, 2, 200, err));
  _Alignas(64) static const uint32_t junk[64] = {1, 2, 3};
  REFUSED(pkv_device_plan_upload(NULL, host.plan, NULL, err), PKV_E_INVALID, "out is NULL");
  REFUSED(pkv_device_plan_upload(to, NULL, NULL, err), PKV_E_INVALID, "not a built plan");
  REFUSED(pkv_device_plan_upload(to, (const pkv_plan *)(const void *)junk, NULL, err),
          PKV_E_INVALID, "not a built plan");
  REFUSED(pkv_device_plan_upload(to, (const pkv_plan *)(const void *)((const char *)host.plan + 4),
                                 NULL, err),
          PKV_E_INVALID, "not a built plan");
  REFUSED(pkv_device_plan_upload(small, host.plan, NULL, err), PKV_E_TOO_SMALL, "room for");
  REFUSED(pkv_device_plan_upload(other, host.plan, NULL, err), PKV_E_INVALID, "another shape");
  REFUSED(pkv_device_attention(gpu, to, &f.g.args, NULL, err), PKV_E_STATE, "not been built");
  OK(pkv_device_plan_upload(to, host.plan, NULL, err));
  gpu_run(&f.g, to);
  attn_check(&f.c, "uploaded after refusals");
  pkv_device_plan_destroy(to);
  pkv_device_plan_destroy(small);
  pkv_device_plan_destroy(other);
  attn_plan_deinit(&host);
  fixture_deinit(&f);
}

static void test_download_and_fault(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  const pkv_shape shape = attn_case_shape(&f.c);
  pkv_device_plan *fresh = NULL;
  size_t bytes = 0;
  int32_t row = 77;
  OK(pkv_device_plan_create(&fresh, gpu, &shape, &f.options, PKV_DTYPE_F16, 2, 200, err));
  REFUSED(pkv_device_plan_download(&row, 4, &bytes, NULL, NULL, err), PKV_E_INVALID, "plan");
  REFUSED(pkv_device_plan_download(&row, 4, NULL, f.plan, NULL, err), PKV_E_INVALID, "bytes");
  REFUSED(pkv_device_plan_download(&row, 4, &bytes, fresh, NULL, err), PKV_E_STATE, "not been");
  REFUSED(pkv_device_plan_download(NULL, 0, &bytes, f.plan, NULL, err), PKV_E_TOO_SMALL, "0 bytes");
  assert_true(bytes > 0);
  const size_t need = bytes;
  unsigned char *memory = malloc(need);
  REFUSED(pkv_device_plan_download(memory, need - 1, &bytes, f.plan, NULL, err), PKV_E_TOO_SMALL,
          "memory");
  REFUSED(pkv_device_plan_download(NULL, need, &bytes, f.plan, NULL, err), PKV_E_TOO_SMALL,
          "memory");
  OK(pkv_device_plan_download(memory, need, &bytes, f.plan, NULL, err));
  assert_int_equal(bytes, need);
  free(memory);
  REFUSED(pkv_device_plan_fault(NULL, f.plan, NULL, err), PKV_E_INVALID, "row is NULL");
  REFUSED(pkv_device_plan_fault(&row, NULL, NULL, err), PKV_E_INVALID, "plan is NULL");
  OK(pkv_device_plan_fault(&row, fresh, NULL, err)); /* no run yet: no fault */
  assert_int_equal(row, -1);
  pkv_device_plan_destroy(fresh);
  fixture_deinit(&f);
}

static void test_attention_handles(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  pkv_attention_args a = f.g.args;
  const fake_device before = fake_device_state;
  pkv_executor_options options = PKV_EXECUTOR_OPTIONS_INIT;
  pkv_executor *second = NULL;
  options.device = PKV_DEVICE_CUDA;
  if (gpu_opt.fake)
    second = fake_device_create();
  else
    OK(pkv_executor_create(&second, &options, err));
  REFUSED(pkv_device_attention(NULL, f.plan, &a, NULL, err), PKV_E_INVALID, "executor is NULL");
  REFUSED(pkv_device_attention(f.cpu, f.plan, &a, NULL, err), PKV_E_INVALID, "CPU");
  REFUSED(pkv_device_attention(second, f.plan, &a, NULL, err), PKV_E_INVALID, "another executor");
  REFUSED(pkv_device_attention(gpu, NULL, &a, NULL, err), PKV_E_INVALID, "plan is NULL");
  REFUSED(pkv_device_attention(gpu, f.plan, NULL, NULL, err), PKV_E_INVALID, "args is NULL");
  REFUSED(pkv_attention_run(gpu, &a, err), PKV_E_INVALID, "pkv_device_attention");
  a.struct_size = 16;
  REFUSED(pkv_device_attention(gpu, f.plan, &a, NULL, err), PKV_E_INVALID, "struct_size is 16");
  a = f.g.args;
  attn_plan host;
  attn_plan_init(&host, &f.c, &f.options);
  a.plan = host.plan;
  REFUSED(pkv_device_attention(gpu, f.plan, &a, NULL, err), PKV_E_INVALID, "args->plan is set");
  attn_plan_deinit(&host);
  pkv_executor_destroy(second);
  fake_device_state = before;
  fixture_deinit(&f);
}

static void test_attention_arguments(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  pkv_cache cache = f.g.cache;
  pkv_attention_args a = f.g.args;
#define RUN(change, status, word)                                                                  \
  do {                                                                                             \
    a.cache = &cache;                                                                              \
    change;                                                                                        \
    REFUSED(pkv_device_attention(gpu, f.plan, &a, NULL, err), status, word);                       \
    cache = f.g.cache;                                                                             \
    a = f.g.args;                                                                                  \
  } while (0)
  RUN(a.cache = NULL, PKV_E_INVALID, "cache is NULL");
  RUN(cache.struct_size = 3, PKV_E_INVALID, "struct_size");
  RUN(cache.k = NULL, PKV_E_INVALID, "k is NULL");
  RUN(cache.v = (char *)f.g.cache.v + 1, PKV_E_INVALID, "aligned");
  RUN(cache.dtype = PKV_DTYPE_BF16, PKV_E_INVALID, "created for f16");
  RUN(cache.dtype = (pkv_dtype)44, PKV_E_INVALID, "dtype");
  RUN(cache.kv_heads = 1, PKV_E_INVALID, "kv_heads");
  RUN(cache.head_dim = 72, PKV_E_INVALID, "head_dim");
  RUN(cache.page_tokens = 8, PKV_E_INVALID, "page_tokens");
  RUN(cache.pages = 0, PKV_E_INVALID, "pages");
  RUN(cache.pages = (int64_t)INT32_MAX + 1, PKV_E_INVALID, "pages");
  RUN(cache.k_page_stride = INT64_MAX, PKV_E_INVALID, "stride");
  RUN(cache.v_token_stride = 3, PKV_E_INVALID, "stride");
  RUN(cache.k_head_stride = -64, PKV_E_INVALID, "stride");
  RUN(a.q = NULL, PKV_E_INVALID, "q is NULL");
  RUN(a.out = NULL, PKV_E_INVALID, "out is NULL");
  RUN(a.q = (const char *)f.g.q + 1, PKV_E_INVALID, "aligned");
  RUN(a.q_dtype = PKV_DTYPE_FP8_E4M3, PKV_E_UNSUPPORTED, "q_dtype");
  RUN(a.out_dtype = (pkv_dtype)7, PKV_E_UNSUPPORTED, "out_dtype is 7");
  RUN(a.q_token_stride = 8, PKV_E_INVALID, "q strides");
  RUN(a.out_head_stride = -1, PKV_E_INVALID, "out strides");
  RUN(a.q_head_stride = INT64_MAX / 2, PKV_E_INVALID, "q");
  RUN(a.block_table = NULL, PKV_E_INVALID, "block_table is NULL");
  RUN(a.block_table = (const int32_t *)(const void *)((const char *)f.g.table + 2), PKV_E_INVALID,
      "aligned");
  RUN(a.max_pages = -1, PKV_E_INVALID, "max_pages is -1");
  RUN(a.block_table_stride = 1, PKV_E_INVALID, "block_table_stride is 1");
  RUN(a.block_table_stride = INT64_MAX, PKV_E_INVALID, "overflows");
  RUN(a.lse = (float *)(void *)((char *)f.g.lse + 2), PKV_E_INVALID, "aligned");
  RUN(a.lse_token_stride = 1, PKV_E_INVALID, "lse_token_stride is 1");
  RUN(a.lse_token_stride = INT64_MAX, PKV_E_INVALID, "overflows");
  RUN(a.scale = NAN, PKV_E_INVALID, "scale");
  RUN(a.soft_cap = -1.0f, PKV_E_INVALID, "soft_cap");
  RUN(a.soft_cap = INFINITY, PKV_E_INVALID, "soft_cap");
  RUN(a.sinks = (const float *)(const void *)((const char *)f.g.q + 1), PKV_E_INVALID, "aligned");
#undef RUN
  fixture_deinit(&f);
}

static void test_append(void **state) {
  (void)state;
  NEED_GPU();
  fixture f;
  fixture_init(&f);
  pkv_append_args good = PKV_APPEND_ARGS_INIT;
  good.cache = &f.g.cache;
  good.tokens = 1;
  good.slots = f.g.out; /* aligned device memory; none of these calls reads it */
  good.k = good.v = f.g.q;
  good.dtype = PKV_DTYPE_F16;
  pkv_rope rope = PKV_ROPE_INIT;
  pkv_append_args a = good;
  pkv_cache cache = f.g.cache;
#define APPEND(change, status, word)                                                               \
  do {                                                                                             \
    a.cache = &cache;                                                                              \
    change;                                                                                        \
    REFUSED(pkv_device_append(gpu, &a, NULL, err), status, word);                                  \
    a = good;                                                                                      \
    cache = f.g.cache;                                                                             \
    rope = (pkv_rope)PKV_ROPE_INIT;                                                                \
  } while (0)
  REFUSED(pkv_device_append(NULL, &a, NULL, err), PKV_E_INVALID, "executor is NULL");
  REFUSED(pkv_device_append(f.cpu, &a, NULL, err), PKV_E_INVALID, "CPU");
  REFUSED(pkv_append(gpu, &a, err), PKV_E_INVALID, "pkv_device_append");
  REFUSED(pkv_device_append(gpu, NULL, NULL, err), PKV_E_INVALID, "args is NULL");
  APPEND(a.struct_size = 1, PKV_E_INVALID, "struct_size is 1");
  APPEND(a.cache = NULL, PKV_E_INVALID, "cache is NULL");
  APPEND(cache.k = NULL, PKV_E_INVALID, "k is NULL");
  APPEND(cache.k_token_stride = 1, PKV_E_INVALID, "stride");
  APPEND(a.tokens = -1, PKV_E_INVALID, "tokens is -1");
  APPEND(a.tokens = (int64_t)INT32_MAX + 1, PKV_E_RANGE, "tokens is");
  APPEND(a.slots = NULL, PKV_E_INVALID, "slots is NULL");
  APPEND(a.slots = (const int64_t *)(const void *)((const char *)f.g.out + 4), PKV_E_INVALID,
         "aligned to 8");
  APPEND(a.k = NULL, PKV_E_INVALID, "k is NULL");
  APPEND(a.v = (const char *)f.g.q + 1, PKV_E_INVALID, "aligned to 2");
  APPEND(a.dtype = PKV_DTYPE_FP8_E4M3, PKV_E_UNSUPPORTED, "f32, f16 or bf16");
  APPEND((a.tokens = 2, a.v_token_stride = 10), PKV_E_INVALID, "v_token_stride is 10");
  APPEND(a.k_head_stride = -64, PKV_E_INVALID, "k_head_stride");
  APPEND((a.rope = &rope, rope.dims = 3), PKV_E_INVALID, "dims is 3");
  APPEND(a.rope = &rope, PKV_E_INVALID, "positions is NULL");
  APPEND((a.rope = &rope, rope.positions = f.g.seq_len, rope.base = -2.0), PKV_E_INVALID, "base");
  APPEND((a.rope = &rope, rope.positions = f.g.seq_len,
          rope.inverse_frequency = (const float *)(const void *)((const char *)f.g.q + 2)),
         PKV_E_INVALID, "aligned to 4");
#undef APPEND
  a.tokens = 0; /* nothing to do, nothing needed */
  a.slots = NULL;
  a.k = a.v = NULL;
  OK(pkv_device_append(gpu, &a, NULL, err));
  fixture_deinit(&f);
}

/* Each call of a whole use fails once: the error comes out, and all memory goes back. */
static void test_each_call_fails_once(void **state) {
  (void)state;
  NEED_GPU();
  if (!gpu_opt.fake) return; /* the invented device alone fails when told to */
  const attn_spec s = gpu_spec(PKV_DTYPE_F16, 2, 2, lens);
  attn_case c;
  gpu_case g;
  attn_case_init(&c, &s);
  gpu_case_init(&g, &c);
  const pkv_shape shape = attn_case_shape(&c);
  const pkv_plan_options options = PKV_PLAN_OPTIONS_INIT;
  const int32_t live = fake_device_state.live;
  pkv_status status = PKV_E_DEVICE;
  int32_t n = 0;
  while (status != PKV_OK) {
    pkv_device_plan *plan = NULL;
    pkv_error err = {0};
    int32_t fault = 0;
    fake_device_state.calls = 0;
    fake_device_state.fail_at = ++n;
    status = pkv_device_plan_create(&plan, gpu, &shape, &options, PKV_DTYPE_F16, 2, 200, &err);
    if (status == PKV_OK) status = pkv_device_plan_build(plan, 2, g.seq_len, NULL, &err);
    if (status == PKV_OK) status = pkv_device_attention(gpu, plan, &g.args, NULL, &err);
    if (status == PKV_OK) status = pkv_device_plan_fault(&fault, plan, NULL, &err);
    if (status != PKV_OK) {
      assert_int_equal(status, PKV_E_DEVICE);
      assert_non_null(strstr(err.text, "told to fail"));
    }
    pkv_device_plan_destroy(plan);
    assert_int_equal(fake_device_state.live, live);
    assert_true(n < 100);
  }
  assert_true(n > 8); /* parts, sizes, four allocations, build, attention, copy, synchronize */
  fake_device_state.fail_at = 0;
  gpu_case_deinit(&g);
  attn_case_deinit(&c);
}

int gpu_suite_args(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_own_parts),
      cmocka_unit_test(test_create),
      cmocka_unit_test(test_build),
      cmocka_unit_test(test_upload),
      cmocka_unit_test(test_download_and_fault),
      cmocka_unit_test(test_attention_handles),
      cmocka_unit_test(test_attention_arguments),
      cmocka_unit_test(test_append),
      cmocka_unit_test(test_each_call_fails_once),
  };
  return cmocka_run_group_tests_name("args", tests, gpu_setup, gpu_teardown);
}
