/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the tokenizer. The first byte chooses: the rule (bits 0-1), the flags (bits
 * 2-3), and whether the rest is a text (bit 7 clear) or a vocabulary, which is then tried on its
 * own bytes.
 *
 * Promises: counts agree between the two calls, ids are in the vocabulary, nothing becomes a
 * control token that may not, and the joined bytes of the tokens are the text.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer.h"
#include "pkv/engine.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define FILE_BYTES 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const rules[] = {"gpt-2", "smollm", "llama-bpe", "llama3"};

/* ------------------------------------------------------------------------------------------
 * A GGUF file in a fixed block
 * ------------------------------------------------------------------------------------------ */

typedef struct writer {
  uint8_t bytes[FILE_BYTES];
  size_t size, count_at; /* count_at: where the open array's element count stands */
  uint64_t keys, elements;
} writer;

static void put(writer *w, const void *bytes, size_t count) {
  REQUIRE(count <= FILE_BYTES - w->size);
  if (count > 0) memcpy(w->bytes + w->size, bytes, count);
  w->size += count;
}

static void put_u32(writer *w, uint32_t x) {
  put(w, &x, sizeof x);
}

static void put_string(writer *w, const void *text, size_t count) {
  const uint64_t n = count;
  put(w, &n, sizeof n);
  put(w, text, count);
}

static void put_key(writer *w, const char *key, uint32_t type) {
  put_string(w, key, strlen(key));
  put_u32(w, type);
  w->keys++;
}

static void begin_array(writer *w, const char *key, uint32_t element) {
  put_key(w, key, 9);
  put_u32(w, element);
  w->count_at = w->size;
  w->elements = 0;
  put(w, &w->elements, sizeof w->elements);
}

static void end_array(writer *w) {
  memcpy(w->bytes + w->count_at, &w->elements, sizeof w->elements);
}

static void put_element(writer *w, const void *text, size_t count) {
  put_string(w, text, count);
  w->elements++;
}

static void begin_file(writer *w, const char *rule) {
  const uint64_t none = 0;
  w->size = 0;
  w->keys = 0;
  put(w, "GGUF\3\0\0\0", 8);
  put(w, &none, 8);
  put(w, &none, 8);
  put_key(w, "tokenizer.ggml.model", 8);
  put_string(w, "gpt2", 4);
  put_key(w, "tokenizer.ggml.pre", 8);
  put_string(w, rule, strlen(rule));
}

static pkv_status open_file(pkv_tokenizer **out, writer *w) {
  static const uint8_t zeros[64];
  pkv_error err = {PKV_OK, "", ""};
  pkv_gguf *gguf = NULL;
  memcpy(w->bytes + 16, &w->keys, 8);
  put(w, zeros, 64 - w->size % 64);
  *out = NULL;
  pkv_status status = pkv_gguf_open_memory(&gguf, w->bytes, w->size, NULL, &err);
  if (status != PKV_OK) return status;
  status = pkv_tokenizer_create(out, gguf, NULL, &err);
  pkv_gguf_close(gguf);
  REQUIRE((status == PKV_OK) == (*out != NULL));
  REQUIRE(status == PKV_OK || err.text[0] != '\0');
  return status;
}

/* ------------------------------------------------------------------------------------------
 * A known vocabulary: every byte, a few merges and special tokens
 * ------------------------------------------------------------------------------------------ */

/* The spelling of a byte in GPT-2's alphabet; returns its length. */
static size_t spell(char out[2], unsigned byte) {
  unsigned next = 256, c = byte;
  for (unsigned b = 0; b <= byte; b++) {
    const int itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    if (b == byte) c = itself ? b : next;
    if (!itself) next++;
  }
  if (c < 128) {
    out[0] = (char)c;
    return 1;
  }
  out[0] = (char)(unsigned char)(0xc0 | c >> 6);
  out[1] = (char)(unsigned char)(0x80 | (c & 63));
  return 2;
}

static const char *const merges[] = {"a a", "aa aa", "a b", "b a", "1 1", "t h", "th e", "' s"};
static const char *const specials[] = {"<|im_start|>", "<|im_end|>", "<|", "<s>"};
static const uint32_t special_types[] = {3, 3, 4, 3};

static pkv_tokenizer *known(unsigned rule) {
  static pkv_tokenizer *made[4];
  static writer w;
  if (made[rule] != NULL) return made[rule];
  begin_file(&w, rules[rule]);
  begin_array(&w, "tokenizer.ggml.tokens", 8);
  for (unsigned b = 0; b < 256; b++) {
    char text[2];
    put_element(&w, text, spell(text, b));
  }
  for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
    const char *blank = strchr(merges[i], ' ');
    char joined[16];
    const size_t left = (size_t)(blank - merges[i]), right = strlen(blank + 1);
    memcpy(joined, merges[i], left);
    memcpy(joined + left, blank + 1, right);
    put_element(&w, joined, left + right);
  }
  const uint64_t ordinary = w.elements;
  for (size_t i = 0; i < 4; i++)
    put_element(&w, specials[i], strlen(specials[i]));
  end_array(&w);
  begin_array(&w, "tokenizer.ggml.token_type", 5);
  for (uint64_t i = 0; i < ordinary; i++)
    put_u32(&w, 1);
  for (size_t i = 0; i < 4; i++)
    put_u32(&w, special_types[i]);
  w.elements = ordinary + 4;
  end_array(&w);
  begin_array(&w, "tokenizer.ggml.merges", 8);
  for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++)
    put_element(&w, merges[i], strlen(merges[i]));
  end_array(&w);
  put_key(&w, "tokenizer.ggml.bos_token_id", 4);
  put_u32(&w, (uint32_t)ordinary + 3);
  put_key(&w, "tokenizer.ggml.add_bos_token", 7);
  put(&w, "\1", 1);
  REQUIRE(open_file(&made[rule], &w) == PKV_OK);
  return made[rule];
}

/* ------------------------------------------------------------------------------------------
 * Checks
 * ------------------------------------------------------------------------------------------ */

/* Joined bytes are the text; `skip` tokens in front were added. */
static void check_bytes(const pkv_tokenizer *t, const int32_t *ids, size_t count, size_t skip,
                        const char *text, size_t bytes) {
  size_t at = 0;
  for (size_t i = skip; i < count; i++) {
    const char *piece = NULL;
    size_t n = 0;
    REQUIRE(pkv_tokenizer_text(&piece, &n, t, ids[i], 1, NULL) == PKV_OK);
    REQUIRE(n <= bytes - at && memcmp(text + at, piece, n) == 0);
    at += n;
  }
  REQUIRE(at == bytes);
}

static void check_text(const pkv_tokenizer *t, const char *text, size_t bytes, uint32_t flags) {
  size_t count = 0, again = 0;
  pkv_status status = pkv_tokenizer_encode(NULL, 0, &count, t, text, bytes, flags, NULL);
  REQUIRE(status == (count > 0 ? PKV_E_TOO_SMALL : PKV_OK));
  REQUIRE(count <= bytes + 1);
  int32_t *ids = malloc((count + 1) * sizeof *ids);
  if (ids == NULL) return;
  ids[count] = -7;
  status = pkv_tokenizer_encode(ids, count, &again, t, text, bytes, flags, NULL);
  REQUIRE(status == PKV_OK && again == count && ids[count] == -7);
  const int32_t bos = pkv_tokenizer_bos(t);
  /* A bos that the text itself spells is not added a second time. */
  const int added =
      (flags & PKV_TEXT_ADD_SPECIAL) != 0 &&
      !((flags & PKV_TEXT_PARSE_SPECIAL) != 0 && bytes >= 3 && memcmp(text, "<s>", 3) == 0);
  if (added) REQUIRE(count > 0 && ids[0] == bos);
  for (size_t i = (size_t)added; i < count; i++) {
    REQUIRE(ids[i] >= 0 && ids[i] < pkv_tokenizer_vocab(t));
    REQUIRE((flags & PKV_TEXT_PARSE_SPECIAL) != 0 || !pkv_tokenizer_is_control(t, ids[i]));
  }
  check_bytes(t, ids, count, (size_t)added, text, bytes);
  free(ids);
}

/* A trusted piece between two that are not: control tokens come from the middle only. */
static void check_pieces(const pkv_tokenizer *t, const char *text, size_t bytes) {
  const size_t a = bytes / 3, b = bytes - bytes / 3;
  const pkv_text_piece pieces[] = {
      {text, a, false}, {text + a, b - a, true}, {text + b, bytes - b, false}};
  size_t count = 0;
  int32_t *ids = malloc((bytes + 1) * sizeof *ids);
  if (ids == NULL) return;
  REQUIRE(pkv_tokenizer_encode_pieces(ids, bytes + 1, &count, t, pieces, 3, false, false, NULL) ==
          PKV_OK);
  check_bytes(t, ids, count, 0, text, bytes);
  size_t at = 0;
  for (size_t i = 0; i < count; i++) {
    const char *piece = NULL;
    size_t n = 0;
    REQUIRE(pkv_tokenizer_text(&piece, &n, t, ids[i], 1, NULL) == PKV_OK);
    REQUIRE(!pkv_tokenizer_is_control(t, ids[i]) || (at >= a && at + n <= b));
    at += n;
  }
  free(ids);
}

/*
 * data: tokens, each with a type digit in front, then after an empty one merges; separated by
 * 0xff. What loads must encode its own bytes or say which byte it lacks.
 */
static void try_vocabulary(const char *rule, const uint8_t *data, size_t size) {
  static writer w;
  uint32_t types[512];
  uint32_t count = 0;
  if (size > 8192) return;
  begin_file(&w, rule);
  begin_array(&w, "tokenizer.ggml.tokens", 8);
  size_t at = 0;
  while (at < size && count < 512) {
    const uint8_t *end = memchr(data + at, 0xff, size - at);
    const size_t n = end != NULL ? (size_t)(end - data) - at : size - at;
    if (n == 0) break;
    types[count++] = (uint32_t)data[at] % 8;
    put_element(&w, data + at + 1, n - 1);
    at += n + 1;
  }
  end_array(&w);
  begin_array(&w, "tokenizer.ggml.token_type", 5);
  put(&w, types, count * sizeof types[0]);
  w.elements = count;
  end_array(&w);
  begin_array(&w, "tokenizer.ggml.merges", 8);
  for (at++; at < size;) {
    const uint8_t *end = memchr(data + at, 0xff, size - at);
    const size_t n = end != NULL ? (size_t)(end - data) - at : size - at;
    put_element(&w, data + at, n);
    at += n + 1;
  }
  end_array(&w);
  pkv_tokenizer *t = NULL;
  if (open_file(&t, &w) != PKV_OK) return;
  int32_t *ids = malloc((3 * size + 1) * sizeof *ids);
  size_t n = 0;
  if (ids != NULL) {
    const pkv_status status = pkv_tokenizer_encode(ids, 3 * size, &n, t, (const char *)data, size,
                                                   PKV_TEXT_PARSE_SPECIAL, NULL);
    REQUIRE(status == PKV_OK || status == PKV_E_UNSUPPORTED);
    for (size_t i = 0; status == PKV_OK && i < n; i++)
      REQUIRE(ids[i] >= 0 && ids[i] < pkv_tokenizer_vocab(t));
  }
  free(ids);
  pkv_tokenizer_destroy(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const unsigned choice = data[0];
  if (choice & 0x80) {
    try_vocabulary(rules[choice & 3], data + 1, size - 1);
    return 0;
  }
  const pkv_tokenizer *t = known(choice & 3);
  check_text(t, (const char *)data + 1, size - 1, choice >> 2 & 3);
  check_pieces(t, (const char *)data + 1, size - 1);
  return 0;
}
