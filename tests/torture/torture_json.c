/* SPDX-License-Identifier: Apache-2.0 */
/* What is put together from JSON while memory may be missing: all of it, or a refusal that says so.
 * A part that is lost without a word would be another prompt, or a weaker constraint. */
#include <stdio.h>
#include <string.h>

#include "base/hash.h"
#include "model/model.h"
#include "server/api_keys.h"
#include "server/api_request.h"
#include "server/json_out.h"
#include "server/tool_parse.h"
#include "server/tools.h"
#include "support/grammar_drive.h"
#include "support/small_llama.h"
#include "support/vocab_build.h"
#include "torture/fault_shim.h"
#include "torture/torture_parts.h"

#define CHATS 2

static pkv_model *models[CHATS];
static unsigned char *bytes_of[CHATS];

/* Templates that show no tools, and those that do. */
static const char *const templates[CHATS] = {
    "{% for m in messages %}{{ m.role ~ ' ' ~ m.content }}{% endfor %}",
    "{% for t in tools %}{{ t|tojson }}{% endfor %}{% for m in messages %}{{ m.role ~ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function|tojson }}{% endfor %}{% endfor %}",
};

static const char body[] =
    "{\"messages\":[{\"role\":\"developer\",\"content\":\"b a\"},"
    "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
    "{\"type\":\"text\",\"text\":\"b\"}]},"
    "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"type\":"
    "\"function\",\"function\":{\"name\":\"ab\",\"arguments\":\"{\\\"a\\\": [\\\"b\\\"]}\"}},"
    "{\"id\":\"2\",\"type\":\"function\",\"function\":{\"name\":\"ab\",\"arguments\":\"{}\"}}]},"
    "{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"b\"},"
    "{\"role\":\"user\",\"content\":\"a a\"}],"
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"ab\",\"parameters\":{\"type\":"
    "\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/b\"}},\"required\":[\"a\"],"
    "\"additionalProperties\":false,\"$defs\":{\"b\":{\"type\":\"array\",\"items\":{\"type\":"
    "\"string\"}}}}}}],\"tool_choice\":\"required\",\"max_tokens\":4}";

static bool open_model(int k) {
  small_llama shape = SMALL_LLAMA_INIT;
  vocab_build v; /* every byte has a token: prompts hold JSON */
  size_t size = 0;
  vocab_build_init(&v, "smollm");
  shape.tokenizer = false;
  shape.skip_key = "general.architecture"; /* it is there already */
  shape.vocab = 256;
  small_llama_build(&v.file, &shape);
  gguf_build_string(&v.file, "tokenizer.chat_template", templates[k]);
  vocab_build_finish(&v);
  bytes_of[k] = gguf_build_exact(&v.file, &size);
  vocab_build_deinit(&v);
  pkv_error err;
  if (pkv_model_open_memory(&models[k], bytes_of[k], size, NULL, &err) == PKV_OK) return true;
  (void)fprintf(stderr, "torture: %s\n", err.text);
  return false;
}

bool torture_json_begin(void) {
  bool good = true;
  pkv_json_watch_memory();
  for (int k = 0; k < CHATS; k++)
    good = open_model(k) && good;
  return good;
}

void torture_json_end(void) {
  for (int k = 0; k < CHATS; k++) {
    pkv_model_close(models[k]);
    gguf_build_drop(bytes_of[k]);
  }
}

/* The prompt's tokens, and what a call has to be. */
static pkv_status look(uint64_t *seen, const pkv_api_request *r, pkv_error *err) {
  pkv_buffer text;
  pkv_buffer_init(&text, 1 << 20, NULL);
  const pkv_status status = pkv_json_append(&text, pkv_tools_schema(&r->tools), err);
  *seen = pkv_hash_bytes(r->prompts[0].ids, r->prompts[0].count * sizeof *r->prompts[0].ids, 1);
  if (status == PKV_OK) *seen = pkv_hash_bytes(text.data, text.size, *seen);
  pkv_buffer_deinit(&text);
  if (status == PKV_OK && r->job.constraint == NULL)
    return torture_wrong(err, "no constraint although a call is demanded");
  return status;
}

static pkv_status read_chat(uint64_t *seen, int k, pkv_error *err) {
  pkv_constraint_cache *cache = NULL;
  pkv_api_request request;
  pkv_api_error error;
  pkv_status status = pkv_constraint_cache_create(&cache, err);
  if (status != PKV_OK) return status;
  memset(&error, 0, sizeof error);
  if (pkv_api_read(&request, &error, models[k], cache, 4096, PKV_API_CHAT, body, sizeof body - 1)) {
    status = look(seen, &request, err);
    pkv_api_free(&request);
  } else {
    status = PKV_E_NOMEM;
    (void)snprintf(err->text, sizeof err->text, "%stemplate %d: %d %s: %.100s",
                   error.http == 503 ? "" : "wrong: ", k, error.http,
                   error.code != NULL ? error.code : "", error.message);
  }
  pkv_constraint_cache_destroy(cache);
  return status;
}

pkv_status torture_chats(pkv_error *err) {
  static uint64_t right[CHATS];
  for (int k = 0; k < CHATS; k++) {
    uint64_t seen = 0;
    const pkv_status status = read_chat(&seen, k, err);
    if (status != PKV_OK) return status;
    if (right[k] == 0) right[k] = seen;
    if (right[k] != seen) return torture_wrong(err, "another prompt, or another schema of calls");
  }
  return PKV_OK;
}

/* Merged, spread over anyOf and oneOf, with references; and texts that satisfy it or do not. */
pkv_status torture_schemas(pkv_error *err) {
  static const char schema[] =
      "{\"$defs\":{\"n\":{\"type\":[\"number\",\"string\"],\"minimum\":2}},\"allOf\":[{\"type\":"
      "\"object\",\"properties\":{\"a\":{\"$ref\":\"#/$defs/n\"},\"b\":{\"enum\":[1,2,\"x\"]}},"
      "\"required\":[\"a\"]},{\"properties\":{\"a\":{\"type\":\"integer\",\"maximum\":7},\"b\":{"
      "\"enum\":[2,\"x\",true]},\"d\":{\"oneOf\":[{\"type\":\"integer\",\"enum\":[1,2]},{\"type\":"
      "\"boolean\"},{\"type\":\"integer\",\"const\":3}]}},\"required\":[\"b\"],"
      "\"additionalProperties\":false}],\"anyOf\":[{\"properties\":{"
      "\"b\":{\"const\":2}}},{\"properties\":{\"b\":{\"const\":\"x\"},\"a\":{\"minimum\":3,"
      "\"maximum\":4}}}]}";
  static const struct {
    const char *text;
    bool good;
  } texts[] = {
      {"{\"a\":2,\"b\":2}", true},
      {"{\"a\":7,\"b\":2}", true},
      {"{\"a\":8,\"b\":2}", false},
      {"{\"a\":\"q\",\"b\":2}", false},
      {"{\"a\":1,\"b\":2}", false},
      {"{\"a\":3,\"b\":\"x\"}", true},
      {"{\"a\":5,\"b\":\"x\"}", false},
      {"{\"a\":2,\"b\":1}", false},
      {"{\"b\":2}", false},
      {"{\"a\":2,\"b\":2,\"c\":1}", false},
      {"{\"a\":2,\"b\":2,\"d\":3}", true},
      {"{\"a\":2,\"b\":2,\"d\":4}", false},
  };
  grammar_drive drive;
  schema_open(&drive, schema, NULL);
  pkv_status status = drive.status;
  *err = drive.err;
  if (status == PKV_OK) {
    (void)pkv_fault_disarm(); /* what states need at run time is another matter */
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
      if ((grammar_check(&drive, texts[i].text, strlen(texts[i].text)) == GRAMMAR_DONE) !=
          texts[i].good)
        status = torture_wrong(err, texts[i].text);
  } else if (status != PKV_E_NOMEM) {
    char text[sizeof err->text];
    (void)snprintf(text, sizeof text, "refused for another reason than memory: %.100s",
                   drive.err.text);
    status = torture_wrong(err, text);
  }
  grammar_close(&drive);
  return status;
}

/* Calls in a text that comes in two pieces: their arguments as an object, and as a string. */
static pkv_status read_calls(pkv_tool_news *news, pkv_tool_parser *parser) {
  static const char first[] = "{\"name\": \"ab\", \"arguments\": {\"a\": [1, ";
  static const char second[] = "2]}}; {\"name\": \"ab\", \"arguments\": \"{\\\"b\\\": 3}\"}";
  pkv_status status = news->deltas != NULL ? PKV_OK : PKV_E_NOMEM;
  if (status == PKV_OK) status = pkv_tool_parser_feed(news, parser, first, sizeof first - 1);
  if (status == PKV_OK) status = pkv_tool_parser_feed(news, parser, second, sizeof second - 1);
  return status == PKV_OK ? pkv_tool_parser_end(news, parser) : status;
}

pkv_status torture_calls(pkv_error *err) {
  static uint64_t right;
  pkv_tools tools = {NULL, PKV_TOOLS_LLAMA, false, true, ""};
  pkv_tool_parser parser;
  pkv_tool_news news;
  pkv_buffer text;
  pkv_status status = PKV_E_NOMEM;
  pkv_tool_parser_init(&parser, &tools, 5);
  pkv_buffer_init(&news.content, 4096, NULL);
  pkv_buffer_init(&text, 4096, NULL);
  tools.list = json_pack("[{s:s, s:{s:s}}]", "type", "function", "function", "name", "ab");
  news.deltas = json_array();
  if (tools.list != NULL) status = read_calls(&news, &parser);
  json_t *const calls = status == PKV_OK ? pkv_tool_calls(news.deltas) : NULL;
  if (status == PKV_OK) status = pkv_json_append(&text, calls, err); /* frees them */
  if (status == PKV_OK) {
    const uint64_t seen = pkv_hash_bytes(text.data, text.size, news.content.size);
    if (right == 0) right = seen;
    if (seen != right) status = torture_wrong(err, text.data);
  } else {
    (void)snprintf(err->text, sizeof err->text, "no memory for calls");
  }
  json_decref(tools.list);
  json_decref(news.deltas);
  pkv_buffer_deinit(&text);
  pkv_buffer_deinit(&news.content);
  pkv_tool_parser_deinit(&parser);
  return status;
}

pkv_status torture_keys(pkv_error *err) {
  pkv_api_keys keys = {0, NULL}, more = {0, NULL};
  pkv_status status = pkv_api_keys_add(&keys, "one,two", err);
  if (status == PKV_OK && pkv_api_keys_find(&keys, "Bearer two") != 2)
    status = torture_wrong(err, "a key is not known");
  if (status == PKV_OK) status = pkv_api_keys_add(&more, "three", err);
  if (status == PKV_OK && pkv_api_keys_find(&more, "Bearer two") != -1)
    status = torture_wrong(err, "a key of another list is known");
  pkv_api_keys_free(&keys);
  pkv_api_keys_free(&more);
  return status;
}
