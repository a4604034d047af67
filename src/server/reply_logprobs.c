/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_logprobs.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "server/json_out.h"

/* A token's bytes as text: what is no UTF-8 becomes U+FFFD, or \xHH behind "bytes:" where only the
 * string says what the token is. */
#define TOKEN_BYTES 512

typedef struct token_text {
  const char *bytes;
  size_t count;
  char text[4 * TOKEN_BYTES + 8];
} token_text;

static void read_token(token_text *out, const pkv_reply *reply, int32_t token, bool escape) {
  size_t used = 0;
  out->bytes = "";
  out->count = 0;
  if (pkv_token_text(&out->bytes, &out->count, reply->model, token, 1, NULL) != PKV_OK)
    out->count = 0;
  if (out->count > TOKEN_BYTES) out->count = TOKEN_BYTES;
  if (pkv_utf8_valid(out->bytes, out->count)) {
    memcpy(out->text, out->bytes, out->count);
    out->text[out->count] = '\0';
    return;
  }
  if (escape) used = (size_t)snprintf(out->text, sizeof out->text, "bytes:");
  for (size_t i = 0; i < out->count;) {
    size_t n = 1;
    while (n <= 4 && i + n <= out->count && !pkv_utf8_valid(out->bytes + i, n))
      n++;
    if (n <= 4 && i + n <= out->count && !escape) {
      memcpy(out->text + used, out->bytes + i, n);
      used += n;
      i += n;
    } else {
      const int put = escape ? snprintf(out->text + used, sizeof out->text - used, "\\x%02x",
                                        (unsigned)(unsigned char)out->bytes[i])
                             : snprintf(out->text + used, sizeof out->text - used, "\xef\xbf\xbd");
      used += put > 0 ? (size_t)put : 0;
      i++;
    }
  }
  out->text[used] = '\0';
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

static json_t *entry_json(const pkv_reply *reply, int32_t token, float logprob, bool id) {
  token_text t;
  read_token(&t, reply, token, false);
  json_t *entry = json_pack("{s:s, s:o, s:o}", "token", t.text, "logprob", number_json(logprob),
                            "bytes", bytes_json(&t));
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
    pkv_json_add(&tokens, json_string(t.text));
    pkv_json_add(&probs, number_json(all[i].logprob));
    pkv_json_add(&offsets, json_integer((json_int_t)all[i].text_at));
    json_t *top = isnan(all[i].logprob) ? json_null() : json_object();
    for (int32_t j = 0; j < all[i].top_count && json_is_object(top); j++) {
      read_token(&t, reply, all[i].top[j].token, true);
      pkv_json_set(&top, t.text, number_json(all[i].top[j].logprob));
    }
    pkv_json_add(&tops, top);
  }
  return json_pack("{s:o, s:o, s:o, s:o}", "tokens", tokens, "token_logprobs", probs,
                   "top_logprobs", tops, "text_offset", offsets);
}
