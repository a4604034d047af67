/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of streamed answers: bytes as a model may write them, cut into pieces, become events.
 * First byte: whose interface (bits 0 and 1: completions, chat, llama.cpp's, chat again), tools
 * (bit 2), their style (bits 3 and 4), demanded (bit 5), several calls (bit 6), usage (bit 7); then
 * each piece is a byte with its length and its bytes. Every event is one line of JSON; the
 * text and the calls are those of a whole answer over the same bytes (R1, R4, R12).
 */
#include "server/reply_text.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define LIMIT ((size_t)1 << 22)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What a client puts together. */
typedef struct heard {
  pkv_buffer text;
  json_t *calls; /* [name, arguments] of each */
  int events, ends, dones;
} heard;

static void join_call(heard *h, const json_t *delta) {
  const json_t *const function = json_object_get(delta, "function");
  const size_t index = (size_t)json_integer_value(json_object_get(delta, "index"));
  const char *const name = json_string_value(json_object_get(function, "name"));
  const json_t *const more = json_object_get(function, "arguments");
  REQUIRE(index <= json_array_size(h->calls));
  if (index == json_array_size(h->calls)) {
    REQUIRE(name != NULL && json_object_get(delta, "id") != NULL);
    (void)json_array_append_new(h->calls, json_pack("[s, s]", name, ""));
  } else {
    REQUIRE(name == NULL && index + 1 == json_array_size(h->calls));
  }
  if (more == NULL) return;
  json_t *const call = json_array_get(h->calls, index);
  const json_t *const before = json_array_get(call, 1);
  pkv_buffer all;
  pkv_buffer_init(&all, LIMIT, NULL);
  REQUIRE(pkv_buffer_append(&all, json_string_value(before), json_string_length(before), NULL) ==
              PKV_OK &&
          pkv_buffer_append(&all, json_string_value(more), json_string_length(more), NULL) ==
              PKV_OK);
  (void)json_array_set_new(call, 1, json_stringn(all.size > 0 ? all.data : "", all.size));
  pkv_buffer_deinit(&all);
}

static void hear_event(heard *h, const json_t *root) {
  const json_t *const choice = json_array_get(json_object_get(root, "choices"), 0);
  const json_t *const delta = json_object_get(choice, "delta");
  const json_t *text = json_object_get(root, "content"); /* llama-server's */
  if (delta != NULL) text = json_object_get(delta, "content");
  if (choice != NULL && delta == NULL) text = json_object_get(choice, "text");
  if (choice == NULL && text == NULL) { /* the usage, asked for, and of all choices */
    REQUIRE(json_is_object(json_object_get(root, "usage")));
    return;
  }
  REQUIRE(h->ends == 0);
  h->ends += json_is_string(json_object_get(choice, "finish_reason")) ||
             json_is_true(json_object_get(root, "stop"));
  if (json_is_string(text))
    REQUIRE(pkv_buffer_append(&h->text, json_string_value(text), json_string_length(text), NULL) ==
            PKV_OK);
  const json_t *const calls = json_object_get(delta, "tool_calls");
  for (size_t i = 0; i < json_array_size(calls); i++)
    join_call(h, json_array_get(calls, i));
}

/* Reads events as a client does: "data: " up to a blank line. */
static void hear(heard *h, const pkv_buffer *out) {
  for (size_t at = 0; at < out->size;) {
    const char *const begin = out->data + at;
    const char *const end = memmem(begin, out->size - at, "\n\n", 2);
    REQUIRE(end != NULL && h->dones == 0);
    const size_t bytes = (size_t)(end - begin);
    REQUIRE(bytes > 6 && memcmp(begin, "data: ", 6) == 0);
    REQUIRE(memchr(begin, '\n', bytes) == NULL && memchr(begin, '\r', bytes) == NULL);
    if (bytes == 12 && memcmp(begin + 6, "[DONE]", 6) == 0) {
      h->dones++;
    } else {
      json_t *const root = json_loadb(begin + 6, bytes - 6, JSON_ALLOW_NUL, NULL);
      REQUIRE(json_is_object(root));
      hear_event(h, root);
      json_decref(root);
    }
    h->events++;
    at += bytes + 2;
  }
}

/* The events of the answer: pieces as the input cuts them, or one piece where `whole`. */
static void answer(heard *h, pkv_reply *reply, const uint8_t *data, size_t size, bool whole) {
  pkv_buffer out;
  pkv_text_stream stream;
  pkv_tool_parser parser;
  pkv_piece piece;
  pkv_choice_state state = {.done = true, .finish = PKV_FINISH_STOP, .stop = -1};
  size_t bytes = 0;
  memset(h, 0, sizeof *h);
  pkv_buffer_init(&h->text, LIMIT, NULL);
  h->calls = json_array();
  pkv_buffer_init(&out, LIMIT, NULL);
  pkv_text_stream_init(&stream, NULL, LIMIT);
  pkv_piece_init(&piece);
  if (reply->tools != NULL) pkv_reply_parser(&parser, reply, 0);
  REQUIRE(pkv_reply_open(&out, reply, 0, NULL) == PKV_OK);
  for (size_t at = 0; at <= size;) {
    const bool last = at == size;
    const size_t count = last ? 0 : data[at] < size - at - 1 ? data[at] : size - at - 1;
    REQUIRE((last ? pkv_text_stream_end(&stream, NULL)
                  : pkv_text_stream_bytes(&stream, (const char *)data + at + 1, count, NULL)) ==
            PKV_OK);
    at += last ? 1 : count + 1;
    if (whole && !last) continue;
    const char *const text = pkv_text_stream_take(&stream, &bytes);
    pkv_piece_clear(&piece);
    REQUIRE(pkv_buffer_append(&piece.text, text, bytes, NULL) == PKV_OK);
    REQUIRE(pkv_reply_delta(&out, reply, 0, &piece, &parser, NULL) == PKV_OK);
  }
  REQUIRE(pkv_reply_end(&out, reply, 0, &state, &parser, NULL) == PKV_OK);
  REQUIRE(pkv_reply_close(&out, reply, &state, 1, 1, NULL) == PKV_OK);
  hear(h, &out);
  if (reply->tools != NULL) pkv_tool_parser_deinit(&parser);
  pkv_piece_deinit(&piece);
  pkv_text_stream_deinit(&stream);
  pkv_buffer_deinit(&out);
}

static void forget(heard *h) {
  pkv_buffer_deinit(&h->text);
  json_decref(h->calls);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const pkv_tool_style styles[] = {PKV_TOOLS_TAGGED, PKV_TOOLS_LLAMA, PKV_TOOLS_MISTRAL,
                                          PKV_TOOLS_PLAIN};
  if (size == 0 || size > 65536) return 0;
  const unsigned flags = data[0];
  pkv_stops stops = {0};
  pkv_tools tools = {NULL, styles[flags >> 3 & 3], (flags >> 5 & 1) != 0, (flags >> 6 & 1) != 0,
                     ""};
  tools.list = json_pack("[{s:s, s:{s:s}}, {s:s, s:{s:s}}]", "type", "function", "function", "name",
                         "find", "type", "function", "function", "name", "time");
  pkv_reply reply = {.kind = flags & 3 ? PKV_API_CHAT : PKV_API_COMPLETIONS,
                     .include_usage = (flags >> 7 & 1) != 0,
                     .id = "chatcmpl-1",
                     .name = "m",
                     .stops = &stops};
  if ((flags & 3) == 2) reply.kind = PKV_API_LLAMA;
  if ((flags & 4) != 0 && reply.kind == PKV_API_CHAT) reply.tools = &tools;
  heard pieces, once;
  answer(&pieces, &reply, data + 1, size - 1, false);
  answer(&once, &reply, data + 1, size - 1, true);
  REQUIRE(pieces.ends == 1 && once.ends == 1);
  REQUIRE(pieces.dones == (reply.kind != PKV_API_LLAMA) && once.dones == pieces.dones);
  REQUIRE(pieces.text.size == once.text.size &&
          (once.text.size == 0 || memcmp(pieces.text.data, once.text.data, once.text.size) == 0));
  if (!json_equal(pieces.calls, once.calls)) {
    (void)json_dumpf(pieces.calls, stderr, 0);
    (void)json_dumpf(once.calls, stderr, 0);
  }
  REQUIRE(json_equal(pieces.calls, once.calls));
  forget(&pieces);
  forget(&once);
  json_decref(tools.list);
  return 0;
}
