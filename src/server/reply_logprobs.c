/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_logprobs.h"

#include <math.h>

#include "base/status.h"
#include "base/text.h"
#include "server/json_out.h"

/* A token's bytes, whole, and as text: what is no UTF-8 becomes U+FFFD, or \xHH behind "bytes:"
 * where only the string says what the token is. */
typedef struct token_text {
  const char *bytes, *text;
  size_t count, text_count;
  pkv_buffer made; /* the text, where it is not the bytes themselves */
} token_text;

/* From `at` on: a whole character's bytes, or 0. */
static size_t character(const token_text *t, size_t at) {
  for (size_t n = 1; n <= 4 && at + n <= t->count; n++)
    if (pkv_utf8_valid(t->bytes + at, n)) return n;
  return 0;
}

static pkv_status make_text(token_text *t, bool escape) {
  if (escape) PKV_TRY(pkv_buffer_append(&t->made, "bytes:", 6, NULL));
  for (size_t i = 0; i < t->count;) {
    const size_t n = escape ? 0 : character(t, i);
    if (n > 0)
      PKV_TRY(pkv_buffer_append(&t->made, t->bytes + i, n, NULL));
    else if (escape)
      PKV_TRY(pkv_buffer_printf(&t->made, NULL, "\\x%02x", (unsigned)(unsigned char)t->bytes[i]));
    else
      PKV_TRY(pkv_buffer_append(&t->made, "\xef\xbf\xbd", 3, NULL));
    i += n > 0 ? n : 1;
  }
  t->text = t->made.data;
  t->text_count = t->made.size;
  return PKV_OK;
}

/* Without memory the text is NULL, and so is what JSON makes of it. Release it afterwards. */
static void read_token(token_text *t, const pkv_reply *reply, int32_t token, bool escape) {
  *t = (token_text){.bytes = ""};
  pkv_buffer_init(&t->made, SIZE_MAX, NULL);
  if (pkv_token_text(&t->bytes, &t->count, reply->model, token, 1, NULL) != PKV_OK) t->count = 0;
  if (pkv_utf8_valid(t->bytes, t->count)) {
    t->text = t->bytes;
    t->text_count = t->count;
  } else if (make_text(t, escape) != PKV_OK) {
    t->text = NULL;
  }
}

static void release_token(token_text *t) {
  pkv_buffer_deinit(&t->made);
}

static json_t *text_json(const token_text *t) {
  return t->text == NULL ? NULL : json_stringn(t->text, t->text_count);
}

static json_t *bytes_json(const token_text *t) {
  json_t *list = json_array();
  for (size_t i = 0; i < t->count; i++)
    pkv_json_add(&list, json_integer((unsigned char)t->bytes[i]));
  return list;
}

/* JSON has no infinity: a token that cannot come is as unlikely as OpenAI's clients know. */
static json_t *number_json(float logprob) {
  if (isnan(logprob)) return json_null();
  return json_real(logprob < -9999.0f ? -9999.0 : (double)logprob);
}

static void set_top(json_t **top, const token_text *t, float logprob) {
  json_t *const number = number_json(logprob);
  if (t->text != NULL && json_object_setn_new(*top, t->text, t->text_count, number) == 0) return;
  if (t->text == NULL) json_decref(number);
  json_decref(*top);
  *top = NULL;
}

static json_t *entry_json(const pkv_reply *reply, int32_t token, float logprob, bool id) {
  token_text t;
  read_token(&t, reply, token, false);
  json_t *entry = json_pack("{s:o, s:o, s:o}", "token", text_json(&t), "logprob",
                            number_json(logprob), "bytes", bytes_json(&t));
  release_token(&t);
  if (id) pkv_json_set(&entry, "id", json_integer(token));
  return entry;
}

static json_t *list_json(const pkv_reply *reply, const pkv_piece *piece, bool id) {
  const pkv_token_record *const all = (const void *)piece->records.data;
  const size_t count = piece->records.size / sizeof *all;
  json_t *list = json_array();
  for (size_t i = 0; i < count; i++) {
    json_t *entry = entry_json(reply, all[i].token, all[i].logprob, id), *top = json_array();
    for (int32_t j = 0; j < all[i].top_count; j++)
      pkv_json_add(&top, entry_json(reply, all[i].top[j].token, all[i].top[j].logprob, id));
    pkv_json_set(&entry, "top_logprobs", top);
    pkv_json_add(&list, entry);
  }
  return list;
}

json_t *pkv_logprobs_chat(const pkv_reply *reply, const pkv_piece *piece) {
  if (!reply->logprobs) return json_null();
  return json_pack("{s:o, s:n}", "content", list_json(reply, piece, false), "refusal");
}

json_t *pkv_logprobs_llama(const pkv_reply *reply, const pkv_piece *piece) {
  return list_json(reply, piece, true);
}

json_t *pkv_logprobs_legacy(const pkv_reply *reply, const pkv_piece *piece) {
  const pkv_token_record *const all = (const void *)piece->records.data;
  const size_t count = piece->records.size / sizeof *all;
  if (!reply->logprobs) return json_null();
  json_t *tokens = json_array(), *probs = json_array(), *tops = json_array(),
         *offsets = json_array();
  for (size_t i = 0; i < count; i++) {
    token_text t;
    read_token(&t, reply, all[i].token, true);
    pkv_json_add(&tokens, text_json(&t));
    release_token(&t);
    pkv_json_add(&probs, number_json(all[i].logprob));
    pkv_json_add(&offsets, json_integer((json_int_t)all[i].text_at));
    json_t *top = isnan(all[i].logprob) ? json_null() : json_object();
    for (int32_t j = 0; j < all[i].top_count && json_is_object(top); j++) {
      read_token(&t, reply, all[i].top[j].token, true);
      set_top(&top, &t, all[i].top[j].logprob);
      release_token(&t);
    }
    pkv_json_add(&tops, top);
  }
  return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", probs,
                   "top_logprobs", tops, "text_offset", offsets);
}
