/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of a folder's JSON: a file that starts with '{' is a tokenizer.json, any other is a
 * config.json behind its first byte. It is refused with a text, or becomes keys; a tokenizer then
 * turns a text into tokens of its vocabulary. The target aborts on a broken promise.
 */
#include "model/folder.h"

#include <stdio.h>
#include <stdlib.h>

#include "model/tokenizer.h"
#include "pkv/engine.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink;

static void refused(pkv_status status, const pkv_error *err) {
  REQUIRE(err->status == status && err->text[0] != '\0');
  REQUIRE(status == PKV_E_FORMAT || status == PKV_E_UNSUPPORTED || status == PKV_E_LIMIT ||
          status == PKV_E_NOMEM);
}

static void tokenize(const pkv_gguf *g) {
  static const char text[] = "It's 12 \xc3\xa9t\xcc\x81\n <s> \xff\xe2\x96\x81 \xf0\x9f\x99\x82";
  pkv_tokenizer *t = NULL;
  pkv_error err = {0};
  int32_t ids[256];
  size_t count = 0;
  pkv_status status = pkv_tokenizer_create(&t, g, NULL, &err);
  if (status != PKV_OK) {
    refused(status, &err);
    return;
  }
  status = pkv_tokenizer_encode(ids, 256, &count, t, text, sizeof text - 1,
                                PKV_TEXT_ADD_SPECIAL | PKV_TEXT_PARSE_SPECIAL, &err);
  if (status != PKV_OK) refused(status, &err);
  for (size_t i = 0; status == PKV_OK && i < count; i++) {
    const char *piece = NULL;
    size_t bytes = 0;
    REQUIRE(ids[i] >= 0 && ids[i] < pkv_tokenizer_vocab(t));
    REQUIRE(pkv_tokenizer_text(&piece, &bytes, t, ids[i], 1, NULL) == PKV_OK);
    for (size_t k = 0; k < bytes; k++)
      sink = sink + (unsigned char)piece[k];
  }
  pkv_tokenizer_destroy(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_gguf *g = NULL;
  pkv_error err = {0};
  if (size == 0) return 0;
  const char *text = (const char *)data;
  const bool tokenizer = text[0] == '{';
  const pkv_status status = tokenizer
                                ? pkv_folder_open_memory(&g, NULL, text, size, NULL, &err)
                                : pkv_folder_open_memory(&g, text + 1, NULL, size - 1, NULL, &err);
  if (status != PKV_OK) {
    REQUIRE(g == NULL);
    refused(status, &err);
    return 0;
  }
  if (tokenizer) tokenize(g);
  pkv_gguf_close(g);
  return 0;
}
