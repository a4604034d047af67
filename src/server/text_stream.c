/* SPDX-License-Identifier: Apache-2.0 */
#include "server/text_stream.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

void pkv_text_stream_init(pkv_text_stream *stream, const pkv_model *model, size_t limit) {
  memset(stream, 0, sizeof *stream);
  stream->model = model;
  stream->shown = -1;
  pkv_buffer_init(&stream->text, limit, NULL);
}

void pkv_text_stream_deinit(pkv_text_stream *stream) {
  pkv_buffer_deinit(&stream->text);
}

/* Length of the well-formed sequence at the start of bytes[count], or 0. */
static size_t sequence_length(const char *bytes, size_t count) {
  for (size_t n = 1; n <= 4 && n <= count; n++)
    if (pkv_utf8_valid(bytes, n)) return n;
  return 0;
}

pkv_status pkv_text_stream_bytes(pkv_text_stream *stream, const char *bytes, size_t count,
                                 pkv_error *err) {
  for (size_t i = 0; i < count; i++) {
    stream->held[stream->held_bytes++] = bytes[i];
    while (stream->held_bytes > 0) {
      const size_t whole = sequence_length(stream->held, stream->held_bytes);
      if (whole == stream->held_bytes) {
        PKV_TRY(pkv_buffer_append(&stream->text, stream->held, whole, err));
        stream->held_bytes = 0;
      } else if (pkv_utf8_incomplete_tail(stream->held, stream->held_bytes) == stream->held_bytes) {
        break; /* wait for the rest */
      } else {
        PKV_TRY(pkv_buffer_append(&stream->text, replacement, sizeof replacement - 1, err));
        stream->held_bytes--;
        memmove(stream->held, stream->held + 1, stream->held_bytes);
      }
    }
  }
  return PKV_OK;
}

pkv_status pkv_text_stream_token(pkv_text_stream *stream, int32_t token, pkv_error *err) {
  const char *bytes = NULL;
  size_t count = 0;
  PKV_TRY(pkv_token_text(&bytes, &count, stream->model, token, token == stream->shown, err));
  return pkv_text_stream_bytes(stream, bytes, count, err);
}

pkv_status pkv_text_stream_end(pkv_text_stream *stream, pkv_error *err) {
  const bool cut = stream->held_bytes > 0;
  stream->held_bytes = 0;
  if (!cut) return PKV_OK;
  return pkv_buffer_append(&stream->text, replacement, sizeof replacement - 1, err);
}

const char *pkv_text_stream_take(pkv_text_stream *stream, size_t *bytes) {
  const size_t from = stream->taken;
  *bytes = stream->text.size - from;
  stream->taken = stream->text.size;
  return *bytes > 0 ? stream->text.data + from : "";
}

const char *pkv_finish_text(pkv_finish finish) {
  static const char *const names[] = {"none", "stop", "length", "cancelled", "error"};
  return (int)finish >= 0 && (int)finish <= 4 ? names[finish] : "?";
}
