/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the prefix cache's file. The input is a patch: pairs of a position and a byte are
 * written over a good file, then, for an even first byte, its checksum is made right again, so that
 * what lies behind it is reached; the rest of the input may cut the file. Whatever comes, loading
 * takes all or nothing, the counts add up, and a request still has its answer's length.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "engine/cache_file.h"
#include "kv/prefix.h"
#include "support/small_llama.h"
#include "model/model.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define EVENTS     64
#define LARGEST    65536
#define HEADER     136 /* cache_file.c */
#define PAGE       4
#define PROMPT     21
#define MAX_PATCH  64
#define POOL_PAGES 16

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned char *model_bytes, file[LARGEST], patched[LARGEST];
static pkv_model *model;
static size_t file_size, entry_size;

static pkv_engine *open_engine(void) {
  pkv_engine_options o = PKV_ENGINE_OPTIONS_INIT;
  pkv_engine *engine = NULL;
  o.threads = 1;
  o.isa = PKV_ISA_SCALAR;
  o.page_tokens = PAGE;
  o.cache_tokens = POOL_PAGES * PAGE;
  o.max_seq_len = 48;
  o.max_rows = 2;
  REQUIRE(pkv_engine_create(&engine, model, &o, NULL) == PKV_OK);
  return engine;
}

/* How many tokens the answer to a prompt has; any end is allowed: K and V may be anything. */
static int ask(pkv_engine *engine, int32_t first) {
  int32_t prompt[PROMPT];
  pkv_event events[EVENTS];
  pkv_request r = PKV_REQUEST_INIT;
  int64_t id = 0;
  int tokens = 0;
  for (int i = 0; i < PROMPT; i++)
    prompt[i] = (first + i) % SMALL_LLAMA_TOKENS;
  r.prompt = prompt;
  r.prompt_tokens = PROMPT;
  r.max_tokens = 6;
  r.ignore_end = 1;
  REQUIRE(pkv_engine_submit(&id, engine, &r, NULL) == PKV_OK);
  for (int step = 0; pkv_engine_pending(engine) > 0; step++) {
    size_t count = 0;
    REQUIRE(step < 100 && pkv_engine_step(events, EVENTS, &count, engine, NULL) == PKV_OK);
    for (size_t i = 0; i < count; i++)
      tokens += events[i].token >= 0;
  }
  return tokens;
}

static void prepare(void) {
  small_llama shape = SMALL_LLAMA_INIT;
  size_t size = 0;
  int64_t pages = 0;
  model_bytes = small_llama_bytes(&shape, &size);
  REQUIRE(pkv_model_open_memory(&model, model_bytes, size, NULL, NULL) == PKV_OK);
  pkv_engine *const engine = open_engine();
  REQUIRE(ask(engine, 0) == 6 && ask(engine, 1) == 6);
  FILE *const out = fmemopen(file, sizeof file, "wb");
  REQUIRE(out != NULL && pkv_cache_write(&pages, engine, out, NULL) == PKV_OK && pages == 12);
  file_size = (size_t)ftell(out);
  (void)fclose(out);
  entry_size = (file_size - HEADER - 8) / (size_t)pages;
  pkv_engine_destroy(engine);
}

/* The chained hash over header and entries, as far as the file's bytes go. */
static void right_checksum(size_t size) {
  uint64_t hash = pkv_hash_bytes(patched, HEADER, 0);
  size_t at = HEADER;
  for (; at + entry_size + 8 <= size; at += entry_size)
    hash = pkv_hash_bytes(patched + at, entry_size, hash);
  for (int i = 0; at + 8 <= size && i < 8; i++)
    patched[at + (size_t)i] = (unsigned char)(hash >> (8 * i));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_engine_stats stats = PKV_ENGINE_STATS_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  int64_t pages = 7;
  if (model == NULL) prepare();
  memcpy(patched, file, file_size);
  size_t length = file_size;
  for (size_t i = 1; i + 3 <= size && i < 3 * MAX_PATCH; i += 3) {
    const size_t at = ((size_t)data[i] << 8 | data[i + 1]) % file_size;
    patched[at] = data[i + 2];
  }
  if (size > 0 && data[0] >= 0xf0) length = size % file_size + 1;
  if (size > 0 && data[0] % 2 == 0 && length >= HEADER) right_checksum(length);
  pkv_engine *const engine = open_engine();
  REQUIRE(ask(engine, 2) == 6);
  FILE *const in = fmemopen(patched, length, "rb");
  REQUIRE(in != NULL);
  const pkv_status status = pkv_cache_read(&pages, engine, in, &err);
  (void)fclose(in);
  REQUIRE(status == PKV_OK || (status == PKV_E_FORMAT && pages == 0 && err.text[0] != '\0'));
  pkv_engine_get_stats(&stats, engine);
  REQUIRE(stats.pages_in_use == 0);
  REQUIRE(stats.pages_cached + stats.pages_free == stats.pages_total);
  if (status == PKV_OK) REQUIRE(stats.pages_cached == pages);
  if (size == 0) REQUIRE(status == PKV_OK && pages == 12);
  const int tokens = ask(engine, 0); /* NaN from the file ends it */
  REQUIRE(tokens == 6 || status == PKV_OK);
  pkv_engine_destroy(engine);
  return 0;
}
