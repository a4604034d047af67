/* SPDX-License-Identifier: Apache-2.0 */
/* Vocabularies for tests. The byte alphabet is built as GPT-2 defines it: not the library's way. */
#include "support/vocab_build.h"

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>

#include <string.h>

#define LIMIT ((size_t)1 << 28)

static void append(pkv_buffer *b, const void *bytes, size_t count) {
  if (count > 0) assert_int_equal(pkv_buffer_append(b, bytes, count, NULL), PKV_OK);
}

static void add_string(vocab_build_list *list, const void *bytes, size_t count) {
  const uint64_t size = count;
  append(&list->strings, &size, sizeof size);
  append(&list->strings, bytes, count);
  list->count++;
}

/* Bytes that are printable in Latin-1 stand for themselves, the others follow from U+0100 on in
   the order of their values. */
static uint32_t alphabet_character(unsigned byte) {
  uint32_t next = 256;
  for (unsigned b = 0; b < 256; b++) {
    const bool itself = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae);
    if (b == byte) return itself ? b : next;
    if (!itself) next++;
  }
  return 0;
}

static void spell(pkv_buffer *out, const unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const uint32_t c = alphabet_character(bytes[i]);
    const unsigned char utf8[2] = {(unsigned char)(0xc0 | c >> 6),
                                   (unsigned char)(0x80 | (c & 0x3f))};
    const unsigned char ascii = (unsigned char)c;
    if (c < 0x80)
      append(out, &ascii, 1);
    else
      append(out, utf8, 2);
  }
}

void vocab_build_init_empty(vocab_build *v, const char *pre) {
  memset(v, 0, sizeof *v);
  gguf_build_init(&v->file);
  pkv_buffer_init(&v->tokens.strings, LIMIT, NULL);
  pkv_buffer_init(&v->merges.strings, LIMIT, NULL);
  pkv_buffer_init(&v->types, LIMIT, NULL);
  gguf_build_string(&v->file, "general.architecture", "llama");
  gguf_build_string(&v->file, "tokenizer.ggml.model", "gpt2");
  if (pre != NULL) gguf_build_string(&v->file, "tokenizer.ggml.pre", pre);
}

void vocab_build_init(vocab_build *v, const char *pre) {
  vocab_build_init_empty(v, pre);
  for (int b = 0; b < 256; b++) {
    const unsigned char byte = (unsigned char)b;
    (void)vocab_build_token_bytes(v, &byte, 1, 1);
  }
}

void vocab_build_deinit(vocab_build *v) {
  gguf_build_deinit(&v->file);
  pkv_buffer_deinit(&v->tokens.strings);
  pkv_buffer_deinit(&v->merges.strings);
  pkv_buffer_deinit(&v->types);
}

int32_t vocab_build_token_raw(vocab_build *v, const void *bytes, size_t count, int32_t type) {
  add_string(&v->tokens, bytes, count);
  append(&v->types, &type, sizeof type);
  return (int32_t)v->tokens.count - 1;
}

int32_t vocab_build_token_bytes(vocab_build *v, const void *bytes, size_t count, int32_t type) {
  if (type != 0 && type != 1 && type != 6) return vocab_build_token_raw(v, bytes, count, type);
  pkv_buffer out;
  pkv_buffer_init(&out, LIMIT, NULL);
  spell(&out, bytes, count);
  const int32_t id = vocab_build_token_raw(v, out.data, out.size, type);
  pkv_buffer_deinit(&out);
  return id;
}

int32_t vocab_build_token(vocab_build *v, const char *text, int32_t type) {
  return vocab_build_token_bytes(v, text, strlen(text), type);
}

void vocab_build_merge_raw(vocab_build *v, const void *line, size_t bytes) {
  add_string(&v->merges, line, bytes);
}

int32_t vocab_build_merge(vocab_build *v, const char *left, const char *right) {
  pkv_buffer line;
  pkv_buffer_init(&line, LIMIT, NULL);
  spell(&line, (const unsigned char *)left, strlen(left));
  append(&line, " ", 1);
  spell(&line, (const unsigned char *)right, strlen(right));
  vocab_build_merge_raw(v, line.data, line.size);
  pkv_buffer_clear(&line);
  append(&line, left, strlen(left));
  append(&line, right, strlen(right));
  const int32_t id = vocab_build_token_bytes(v, line.data, line.size, 1);
  pkv_buffer_deinit(&line);
  return id;
}

/* An array of strings: element type, count, strings. */
static void write_strings(gguf_build *b, const char *key, const vocab_build_list *list) {
  pkv_buffer payload;
  pkv_buffer_init(&payload, LIMIT, NULL);
  const uint32_t element = PKV_GGUF_STRING;
  const uint64_t count = list->count;
  append(&payload, &element, sizeof element);
  append(&payload, &count, sizeof count);
  append(&payload, list->strings.data, list->strings.size);
  gguf_build_value(b, key, PKV_GGUF_ARRAY, payload.data, payload.size);
  pkv_buffer_deinit(&payload);
}

void vocab_build_finish(vocab_build *v) {
  write_strings(&v->file, "tokenizer.ggml.tokens", &v->tokens);
  if (!v->no_types)
    gguf_build_array(&v->file, "tokenizer.ggml.token_type", PKV_GGUF_I32, v->types.data,
                     v->types.size / sizeof(int32_t), v->types.size);
  write_strings(&v->file, "tokenizer.ggml.merges", &v->merges);
  gguf_build_finish(&v->file);
  v->finished = true;
}

pkv_status vocab_build_try(pkv_tokenizer **out, vocab_build *v, const pkv_allocator *allocator,
                           pkv_error *err) {
  if (!v->finished) vocab_build_finish(v);
  *out = NULL;
  pkv_gguf *gguf;
  const pkv_status opened =
      pkv_gguf_open_memory(&gguf, v->file.file.data, v->file.file.size, allocator, err);
  if (opened != PKV_OK) return opened;
  const pkv_status status = pkv_tokenizer_create(out, gguf, allocator, err);
  pkv_gguf_close(gguf);
  return status;
}

pkv_tokenizer *vocab_build_open(vocab_build *v) {
  pkv_tokenizer *t;
  pkv_error err = {0};
  if (vocab_build_try(&t, v, NULL, &err) != PKV_OK) fail_msg("%s: %s", err.where, err.text);
  return t;
}
