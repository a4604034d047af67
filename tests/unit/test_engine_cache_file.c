/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix cache in a file: warm after a restart, whole or not at all, refused where anything
 * differs or is damaged. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/cache_file.h"
#include "support/engine_drive.h"
#include "support/test_alloc.h"
#include "support/tiny_model.h"

#define PROMPT 120
#define VOCAB  320
#define KINDS  5

static tiny_model tiny;
static int32_t prompts[KINDS][PROMPT];
static drive_answer cold[KINDS], warm[KINDS];
static char folder[] = "/tmp/pkv-cache-XXXXXX", path[64];

static int open_all(void **state) {
  (void)state;
  tiny_model_options options = TINY_MODEL_INIT;
  options.spread = 1.0f;
  tiny_model_open(&tiny, &options);
  for (int i = 0; i < KINDS; i++) {
    drive_prompt(prompts[i], PROMPT, VOCAB, 70 + (uint64_t)i);
    if (i > 0) memcpy(prompts[i], prompts[0], 40 * sizeof(int32_t));
  }
  if (mkdtemp(folder) == NULL) return 1;
  (void)snprintf(path, sizeof path, "%s/cache", folder);
  return 0;
}

static int close_all(void **state) {
  (void)state;
  tiny_model_close(&tiny);
  (void)remove(path);
  return rmdir(folder); /* nothing else is left there */
}

static pkv_engine_options engine_options(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  o.threads = 2;
  o.max_rows = 4;
  o.cache_tokens = 1024;
  o.max_seq_len = 256;
  return o;
}

static void ask(pkv_engine *engine, drive_answer *answers) {
  for (int i = 0; i < KINDS; i++) {
    pkv_request r = PKV_REQUEST_INIT;
    r.prompt = prompts[i];
    r.prompt_tokens = PROMPT;
    r.max_tokens = 12;
    r.logprobs = 1;
    r.cache_salt = i == 4;
    drive_submit(engine, &r, &answers[i]);
    (void)drive_all(engine, 100);
  }
}

static pkv_engine_stats stats_of(const pkv_engine *engine) {
  pkv_engine_stats s = PKV_ENGINE_STATS_INIT;
  pkv_engine_get_stats(&s, engine);
  return s;
}

/* Fills a cache, saves it, returns how many pages. */
static int64_t save(const pkv_engine_options *o) {
  pkv_error err = {PKV_OK, "", ""};
  int64_t pages = 0;
  pkv_engine *const engine = drive_engine(tiny.model, o);
  ask(engine, cold);
  drive_ok(pkv_engine_save_cache(&pages, engine, path, &err), &err, "save");
  assert_int_equal(pages, stats_of(engine).pages_cached);
  drive_finish(engine);
  return pages;
}

static pkv_status load(const pkv_engine_options *o, const pkv_model *model, const char *text) {
  pkv_error err = {PKV_OK, "", ""};
  int64_t pages = 0;
  pkv_engine *const engine = drive_engine(model, o);
  const pkv_status status = pkv_engine_load_cache(&pages, engine, path, &err);
  if (status != PKV_OK) {
    assert_int_equal(pages, 0);
    assert_int_equal(stats_of(engine).pages_cached, 0);
    if (strstr(err.text, text) == NULL) fail_msg("wanted '%s', got: %s", text, err.text);
  }
  drive_finish(engine);
  return status;
}

static void test_warm_after_a_restart(void **state) {
  (void)state;
  static const pkv_dtype dtypes[] = {PKV_DTYPE_F16, PKV_DTYPE_FP8_E4M3};
  for (int k = 0; k < 4; k++) {
    pkv_error err = {PKV_OK, "", ""};
    pkv_engine_options o = engine_options();
    o.kv_dtype = dtypes[k % 2];
    o.page_tokens = k < 2 ? 16 : 3;
    const int64_t saved = save(&o);
    assert_true(saved > 20);
    int64_t pages = 0;
    o.threads = 1; /* not among what counts */
    o.max_rows = 2;
    pkv_engine *const engine = drive_engine(tiny.model, &o);
    drive_ok(pkv_engine_load_cache(&pages, engine, path, &err), &err, "load");
    assert_int_equal(pages, saved);
    assert_int_equal(stats_of(engine).pages_cached, saved);
    ask(engine, warm);
    for (int i = 0; i < KINDS; i++) {
      drive_equal(&warm[i], &cold[i], "after a restart");
      assert_int_equal(warm[i].cached_tokens, (PROMPT - 1) / o.page_tokens * o.page_tokens);
    }
    /* Again over what is there. */
    drive_ok(pkv_engine_load_cache(&pages, engine, path, &err), &err, "load again");
    assert_int_equal(stats_of(engine).pages_cached, saved);
    drive_finish(engine);
  }
}

/* A smaller cache takes what was used last, with all that stands before it. */
static void test_smaller_cache(void **state) {
  (void)state;
  pkv_engine_options o = engine_options();
  pkv_error err = {PKV_OK, "", ""};
  int64_t pages = 0;
  const int64_t saved = save(&o);
  o.cache_tokens = 16 * 10;
  o.max_seq_len = 140;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  drive_ok(pkv_engine_load_cache(&pages, engine, path, &err), &err, "load");
  assert_int_equal(pages, 10);
  assert_true(pages < saved);
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[4]; /* the last one asked */
  r.prompt_tokens = PROMPT;
  r.max_tokens = 12;
  r.logprobs = 1;
  r.cache_salt = 1;
  drive_submit(engine, &r, &warm[0]);
  (void)drive_all(engine, 100);
  assert_int_equal(warm[0].cached_tokens, 112);
  drive_equal(&warm[0], &cold[4], "from a smaller cache");
  drive_finish(engine);
}

static void test_other_engines_refuse(void **state) {
  (void)state;
  const pkv_engine_options good = engine_options();
  (void)save(&good);
  pkv_engine_options o = good;
  assert_int_equal(load(&o, tiny.model, ""), PKV_OK);
  o.kv_dtype = PKV_DTYPE_BF16;
  assert_int_equal(load(&o, tiny.model, "element type"), PKV_E_FORMAT);
  o = good;
  o.page_tokens = 32;
  assert_int_equal(load(&o, tiny.model, "page"), PKV_E_FORMAT);
  o = good;
  o.activations = PKV_ACTIVATIONS_F32;
  assert_int_equal(load(&o, tiny.model, "activations"), PKV_E_FORMAT);
  o = good;
  o.k_scale = 0.5f;
  assert_int_equal(load(&o, tiny.model, "k_scale"), PKV_E_FORMAT);
  o = good;
  o.isa = PKV_ISA_SCALAR;
  assert_int_equal(load(&o, tiny.model, "instruction set"), PKV_E_FORMAT);
  o = good;
  o.prefix_cache = 0;
  assert_int_equal(load(&o, tiny.model, "no prefix cache"), PKV_E_UNSUPPORTED);
  tiny_model_options options = TINY_MODEL_INIT;
  tiny_model other;
  options.seed = 2; /* one weight would do */
  tiny_model_open(&other, &options);
  assert_int_equal(load(&good, other.model, "model"), PKV_E_FORMAT);
  tiny_model_close(&other);
}

static unsigned char *read_all(size_t *size) {
  FILE *const f = fopen(path, "rb");
  assert_non_null(f);
  (void)fseek(f, 0, SEEK_END);
  *size = (size_t)ftell(f);
  (void)fseek(f, 0, SEEK_SET);
  unsigned char *const bytes = malloc(*size + 1);
  assert_non_null(bytes);
  assert_int_equal(fread(bytes, 1, *size, f), *size);
  (void)fclose(f);
  return bytes;
}

/* Any flipped bit, any cut, any byte more; and the cache that was there is still there. */
static void test_damage(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options();
  (void)save(&o);
  size_t size = 0;
  unsigned char *const bytes = read_all(&size);
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  ask(engine, cold);
  const int64_t cached = stats_of(engine).pages_cached;
  for (int k = 0; k < 400; k++) {
    pkv_error err = {PKV_OK, "", ""};
    int64_t pages = 0;
    size_t length = size;
    const size_t at = k < 150 ? (size_t)k : size * (size_t)(k - 150) / 250;
    if (k % 3 == 0) length = at < 1 ? 1 : at;
    if (k == 399) length = size + 1;
    bytes[at] ^= (unsigned char)(1u << (k % 8));
    FILE *const in = fmemopen(bytes, length, "rb");
    assert_non_null(in);
    const pkv_status status = pkv_cache_read(&pages, engine, in, &err);
    if (status != PKV_E_FORMAT)
      fail_msg("byte %zu, length %zu: %s %s", at, length, pkv_status_name(status), err.text);
    (void)fclose(in);
    bytes[at] ^= (unsigned char)(1u << (k % 8));
    assert_int_equal(stats_of(engine).pages_cached, cached);
  }
  ask(engine, warm);
  for (int i = 0; i < KINDS; i++) {
    assert_int_equal(warm[i].cached_tokens, 112);
    drive_equal(&warm[i], &cold[i], "after refused files");
  }
  free(bytes);
  drive_finish(engine);
}

/* Where it cannot be written, the old file stays, and nothing else. */
static void test_written_whole_or_not(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options();
  const int64_t saved = save(&o);
  size_t before = 0, after = 0;
  unsigned char *bytes = read_all(&before);
  free(bytes);
  pkv_error err = {PKV_OK, "", ""};
  int64_t pages = 5;
  pkv_engine *const engine = drive_engine(tiny.model, &o);
  ask(engine, warm);
  struct rlimit limit, tight; /* of a file's size */
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
  tight = limit;
  tight.rlim_cur = 1000;
  (void)signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const pkv_status cut = pkv_engine_save_cache(&pages, engine, path, &err);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  assert_int_equal(cut, PKV_E_IO);
  assert_int_equal(pages, 0);
  if (access("/dev/full", W_OK) == 0) { /* no room on the disk */
    FILE *const full = fopen("/dev/full", "wb");
    assert_non_null(full);
    assert_int_equal(pkv_cache_write(&pages, engine, full, &err), PKV_E_IO);
    assert_int_equal(pages, 0);
    (void)fclose(full);
  }
  bytes = read_all(&after);
  free(bytes);
  assert_int_equal(before, after);
  assert_int_equal(pkv_engine_load_cache(&pages, engine, "/nowhere/cache", &err), PKV_E_IO);
  /* Not while a request is there. */
  pkv_request r = PKV_REQUEST_INIT;
  r.prompt = prompts[0];
  r.prompt_tokens = 10;
  drive_submit(engine, &r, &warm[0]);
  assert_int_equal(pkv_engine_save_cache(&pages, engine, path, &err), PKV_E_STATE);
  assert_int_equal(pkv_engine_load_cache(&pages, engine, path, &err), PKV_E_STATE);
  (void)drive_all(engine, 100);
  drive_ok(pkv_engine_load_cache(&pages, engine, path, &err), &err, "load");
  assert_int_equal(pages, saved);
  drive_finish(engine);
}

static pkv_status save_and_load(void *ctx, const pkv_allocator *allocator) {
  pkv_engine_options o = engine_options();
  pkv_engine *engine = NULL;
  int64_t pages = 0;
  (void)ctx;
  o.threads = 1;
  o.allocator = allocator;
  pkv_status status = pkv_engine_create(&engine, tiny.model, &o, NULL);
  if (status == PKV_OK) status = pkv_engine_load_cache(&pages, engine, path, NULL);
  if (status == PKV_OK) status = pkv_engine_save_cache(&pages, engine, path, NULL);
  pkv_engine_destroy(engine);
  return status;
}

static void test_failing_allocations(void **state) {
  (void)state;
  const pkv_engine_options o = engine_options();
  (void)save(&o);
  assert_true(test_alloc_torture(save_and_load, NULL) > 20);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_warm_after_a_restart), cmocka_unit_test(test_smaller_cache),
      cmocka_unit_test(test_other_engines_refuse), cmocka_unit_test(test_damage),
      cmocka_unit_test(test_written_whole_or_not), cmocka_unit_test(test_failing_allocations),
  };
  return cmocka_run_group_tests(tests, open_all, close_all);
}
