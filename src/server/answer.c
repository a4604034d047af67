/* SPDX-License-Identifier: Apache-2.0 */
#include "server/answer.h"

#include <string.h>

#include "base/status.h"

/* So much of what was handed out is kept at most. */
#define KEPT_BYTES ((size_t)64 << 10)

void pkv_answer_init(pkv_answer *answer, const pkv_model *model) {
  memset(answer, 0, sizeof *answer);
  pkv_text_stream_init(&answer->stream, model, PKV_ANSWER_BYTES);
}

void pkv_answer_deinit(pkv_answer *answer) {
  pkv_text_stream_deinit(&answer->stream);
}

/* Text that was handed out is not looked at again. */
static void drop_taken(pkv_answer *a) {
  pkv_buffer *const text = &a->stream.text;
  if (a->taken < KEPT_BYTES) return;
  text->size -= a->taken;
  memmove(text->data, text->data + a->taken, text->size + 1); /* with its zero byte */
  a->ready -= a->taken;
  a->dropped += a->taken;
  a->taken = 0;
}

/* Moves `ready` forward. What was ready before holds no beginning of a stop string. */
static void look(pkv_answer *a, const pkv_stops *stops, bool last) {
  const pkv_buffer *const text = &a->stream.text;
  for (size_t at = a->ready; at < text->size; at++) {
    const size_t left = text->size - at;
    for (int32_t i = 0; i < stops->count; i++) {
      const size_t length = strlen(stops->text[i]);
      const size_t compared = length < left ? length : left;
      if (memcmp(text->data + at, stops->text[i], compared) != 0) continue;
      if (compared == length) {
        a->stopped = true;
        return;
      }
      if (!last) return; /* may become one */
    }
    a->ready = at + 1;
  }
}

pkv_status pkv_answer_token(pkv_answer *answer, const pkv_stops *stops, int32_t token,
                            pkv_error *err) {
  if (answer->stopped) return PKV_OK;
  drop_taken(answer);
  PKV_TRY(pkv_text_stream_token(&answer->stream, token, err));
  look(answer, stops, false);
  return PKV_OK;
}

pkv_status pkv_answer_prompt(pkv_answer *answer, int32_t token, pkv_error *err) {
  drop_taken(answer);
  PKV_TRY(pkv_text_stream_token(&answer->stream, token, err));
  answer->ready = answer->stream.text.size;
  return PKV_OK;
}

pkv_status pkv_answer_end(pkv_answer *answer, const pkv_stops *stops, pkv_error *err) {
  if (answer->stopped) return PKV_OK;
  PKV_TRY(pkv_text_stream_end(&answer->stream, err));
  look(answer, stops, true);
  return PKV_OK;
}

const char *pkv_answer_take(pkv_answer *answer, size_t *bytes) {
  const size_t from = answer->taken;
  *bytes = answer->ready - from;
  answer->taken = answer->ready;
  return *bytes > 0 ? answer->stream.text.data + from : "";
}

size_t pkv_answer_size(const pkv_answer *answer) {
  return answer->dropped + answer->stream.text.size;
}

size_t pkv_answer_ready(const pkv_answer *answer) {
  return answer->dropped + answer->ready;
}
