/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Conversations in the chat API's JSON: what is refused and in which words, what the template is
 * shown, and that nothing in them becomes a control token. Against jinja2: test_template_golden.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/chat.h"
#include "model/json_text.h"
#include "support/test_alloc.h"
#include "support/vocab_build.h"

#define SHOW_TOOLS "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}"
#define SHOW       "{{ messages|tojson }}" SHOW_TOOLS
#define USER       "{\"role\":\"user\",\"content\":\"x\"}"
#define SAYS(more) "{\"messages\":[" more "]}"
#define HAS(more)  "{\"messages\":[" USER "]," more "}"

typedef struct kit {
  pkv_tokenizer *t;
  int32_t end;
} kit;

static kit make(void) {
  kit k;
  vocab_build v;
  vocab_build_init(&v, "gpt-2");
  k.end = vocab_build_token(&v, "<|im_end|>", 3);
  gguf_build_u32(&v.file, "tokenizer.ggml.eos_token_id", (uint32_t)k.end);
  k.t = vocab_build_open(&v);
  vocab_build_deinit(&v);
  return k;
}

static pkv_status render(pkv_template_output *out, const char *source, const char *json,
                         const pkv_allocator *allocator, pkv_error *err) {
  const kit k = make();
  pkv_chat_template *chat = NULL;
  const pkv_span text = {source, strlen(source)};
  pkv_status status = pkv_chat_template_create(&chat, text, k.t, allocator, err);
  if (status == PKV_OK) status = pkv_chat_render_json(out, chat, json, strlen(json), 1, 0, err);
  pkv_chat_template_destroy(chat);
  pkv_tokenizer_destroy(k.t);
  return status;
}

static void test_refusals(void **state) {
  (void)state;
  static const struct {
    const char *json;
    pkv_status status;
    const char *text;
  } cases[] = {
      {"", PKV_E_FORMAT, "the conversation is no JSON"},
      {"{\"messages\":[" USER "]", PKV_E_FORMAT, "the conversation is no JSON"},
      {"{\"messages\":[],\"messages\":[]}", PKV_E_FORMAT, "without duplicate keys"},
      {"[]", PKV_E_FORMAT, "is not a JSON object"},
      {"{}", PKV_E_INVALID, "messages must be a list of at least one message"},
      {"{\"messages\":null}", PKV_E_INVALID, "messages must be a list"},
      {"{\"messages\":[]}", PKV_E_INVALID, "messages must be a list"},
      {SAYS("1"), PKV_E_INVALID, "messages[0] must be an object"},
      {SAYS("{}"), PKV_E_INVALID, "messages[0].role must be a string"},
      {SAYS(USER ",{\"role\":\"SECRET\",\"content\":\"x\"}"), PKV_E_INVALID,
       "messages[1].role must be system, developer, user, assistant or tool"},
      {SAYS("{\"role\":\"user\"}"), PKV_E_INVALID, "messages[0].content must be a string"},
      {SAYS("{\"role\":\"user\",\"content\":null}"), PKV_E_INVALID, "messages[0].content must"},
      {SAYS("{\"role\":\"user\",\"content\":7}"), PKV_E_INVALID, "messages[0].content must"},
      {SAYS("{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}"), PKV_E_INVALID,
       "messages[0].content[0] must be a part of type text"},
      {SAYS("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},7]}"),
       PKV_E_INVALID, "messages[0].content[1] must be a part of type text"},
      {SAYS("{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":{}}"), PKV_E_INVALID,
       "messages[0].tool_calls must be a list"},
      {SAYS("{\"role\":\"user\",\"content\":\"\",\"tool_calls\":[]}"), PKV_E_INVALID,
       "messages[0].tool_calls: only an assistant makes calls"},
      {SAYS("{\"role\":\"assistant\",\"tool_calls\":[]}"), PKV_E_INVALID,
       "messages[0].content must"},
      {SAYS("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{}}]}"), PKV_E_INVALID,
       "messages[0].tool_calls[0].function.name must be a string"},
      {SAYS("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"SECRET\","
            "\"arguments\":1}}]}"),
       PKV_E_INVALID, "messages[0].tool_calls[0].function.arguments must be a string or an object"},
      {HAS("\"tools\":{}"), PKV_E_INVALID, "tools must be a list"},
      {HAS("\"tools\":[{\"type\":\"SECRET\"}]"), PKV_E_INVALID, "tools[0].type must be function"},
      {HAS("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":1}}]"), PKV_E_INVALID,
       "tools[0].function.name must be a string"},
      {HAS("\"chat_template_kwargs\":[]"), PKV_E_INVALID, "chat_template_kwargs must be an object"},
      {HAS("\"chat_template_kwargs\":{\"SECRET\":true}"), PKV_E_INVALID,
       "chat_template_kwargs: only enable_thinking is known"},
      {HAS("\"chat_template_kwargs\":{\"enable_thinking\":\"SECRET\"}"), PKV_E_INVALID,
       "chat_template_kwargs.enable_thinking must be true or false"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pkv_template_output out;
    pkv_error err = {0};
    const pkv_status status = render(&out, SHOW, cases[i].json, NULL, &err);
    if (status != cases[i].status || strstr(err.text, cases[i].text) == NULL)
      fail_msg("%zu: %s \"%s\", want \"%s\"", i, pkv_status_name(status), err.text, cases[i].text);
    assert_null(strstr(err.text, "SECRET"));
    assert_null(out.text);
  }
}

/* `count` times `open`, a value, and `count` times `close`. */
static void nested(char *out, size_t size, int count) {
  size_t n = (size_t)snprintf(out, size, "{\"messages\":[" USER "],\"x\":");
  for (int i = 0; i < count; i++)
    out[n++] = '[';
  for (int i = 0; i < count; i++)
    out[n++] = ']';
  out[n++] = '}';
  out[n] = '\0';
}

/* At the limit and one past it. */
static void test_limits(void **state) {
  (void)state;
  char json[512];
  pkv_template_output out;
  pkv_error err = {0};
  nested(json, sizeof json, 63); /* in an object: 64 in all */
  assert_int_equal(render(&out, SHOW, json, NULL, &err), PKV_OK);
  pkv_template_output_free(&out);
  nested(json, sizeof json, 64);
  assert_int_equal(render(&out, SHOW, json, NULL, &err), PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "nests deeper than 64"));

  /* Values: the whole, its list, the message with two members, the other list and its elements. */
  for (size_t more = 0; more < 2; more++) {
    const size_t elements = 1048576u - 6 + more, size = 2 * elements + 128;
    char *const many = malloc(size);
    assert_non_null(many);
    size_t n = (size_t)snprintf(many, size, "{\"messages\":[" USER "],\"x\":[1");
    for (size_t i = 1; i < elements; i++, n += 2)
      memcpy(many + n, ",1", 2);
    memcpy(many + n, "]}", 3);
    const pkv_status status = render(&out, SHOW, many, NULL, &err);
    assert_int_equal(status, more ? PKV_E_LIMIT : PKV_OK);
    if (more) assert_non_null(strstr(err.text, "more than 1048576 values"));
    pkv_template_output_free(&out);
    free(many);
  }
}

/* Any JSON of a model's folder: as many values as are allowed, and one more. */
static void test_values_of_a_file(void **state) {
  (void)state;
  for (size_t more = 0; more < 2; more++) {
    const size_t elements = PKV_JSON_MAX_VALUES - 1 + more;
    char *const many = malloc(2 * elements + 2);
    json_t *root = NULL;
    pkv_error err = {0};
    assert_non_null(many);
    many[0] = '[';
    for (size_t i = 0; i < elements; i++)
      memcpy(many + 1 + 2 * i, "x,", 2); /* no JSON: so that what is within the bound ends soon */
    many[2 * elements] = ']';
    const pkv_status status = pkv_json_parse(&root, "it", many, 2 * elements + 1, &err);
    free(many);
    assert_int_equal(status, more ? PKV_E_LIMIT : PKV_E_FORMAT);
    assert_non_null(strstr(err.text, more ? "it has more than 16777216 values" : "it is no JSON"));
  }
}

static void test_arguments(void **state) {
  (void)state;
  const kit k = make();
  pkv_chat_template *chat = NULL;
  pkv_template_output out;
  pkv_error err = {0};
  size_t count = 0;
  assert_int_equal(pkv_chat_template_create(&chat, (pkv_span){SHOW, strlen(SHOW)}, k.t, NULL, &err),
                   PKV_OK);
  assert_int_equal(pkv_chat_render_json(&out, chat, NULL, 0, 1, 0, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "json is NULL");
  assert_int_equal(pkv_chat_encode_json(NULL, 0, NULL, chat, k.t, "{}", 2, 1, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "count is NULL");
  assert_int_equal(pkv_chat_encode_json(NULL, 0, &count, chat, k.t, "{", 1, 1, &err), PKV_E_FORMAT);
  pkv_chat_template_destroy(chat);
  pkv_tokenizer_destroy(k.t);
}

/* Of two calls with as many values, the second is beyond what arguments spell in all. */
static void test_arguments_have_bounds(void **state) {
  (void)state;
  const size_t elements = 200000, size = 4 * elements + 512;
  char *const json = malloc(size);
  pkv_template_output out;
  pkv_error err = {0};
  assert_non_null(json);
  size_t n =
      (size_t)snprintf(json, size, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[");
  for (int call = 0; call < 2; call++) {
    n += (size_t)snprintf(json + n, size - n,
                          "%s{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":[1",
                          call ? "," : "");
    for (size_t i = 1; i < elements; i++, n += 2)
      memcpy(json + n, ",1", 2);
    n += (size_t)snprintf(json + n, size - n, "]}\"}}");
  }
  (void)snprintf(json + n, size - n, "]}]}");
  assert_int_equal(render(&out,
                          "{% for c in messages[0].tool_calls %}{{ c.function.arguments is string "
                          "}} {% endfor %}",
                          json, NULL, &err),
                   PKV_OK);
  assert_string_equal(out.text, "False True ");
  pkv_template_output_free(&out);
  free(json);
}

static void test_what_is_shown(void **state) {
  (void)state;
  static const struct {
    const char *source, *json, *want;
  } cases[] = {
      {SHOW, SAYS("{\"role\":\"developer\",\"content\":\"a\",\"name\":null}"),
       "[{\"role\": \"system\", \"content\": \"a\"}]"},
      {SHOW,
       SAYS("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
            "{\"type\":\"text\",\"text\":\"\\u0000b\"}]}"),
       "[{\"role\": \"user\", \"content\": \"a\\u0000b\"}]"},
      {SHOW,
       SAYS("{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"1\",\"function\":{\"name\":\"f\","
            "\"arguments\":\"{\\\"a\\\": [1.5, null]}\"}}]}"),
       "[{\"role\": \"assistant\", \"tool_calls\": [{\"id\": \"1\", \"function\": {\"name\": "
       "\"f\", \"arguments\": {\"a\": [1.5, null]}}}], \"content\": \"\"}]"},
      /* What is no object stays a text. */
      {"{{ messages[0].tool_calls[0].function.arguments }}",
       SAYS("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
            "\"arguments\":\"[1]\"}}]}"),
       "[1]"},
      {"{{ messages[0].tool_calls is defined }}",
       SAYS("{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[]}"), "False"},
      {"{{ tools is none }}" SHOW_TOOLS, HAS("\"tools\":[]"), "True"},
      {"{{ tools is none }}", HAS("\"tools\":null"), "True"},
      {SHOW_TOOLS, HAS("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"),
       "{\"type\": \"function\", \"function\": {\"name\": \"f\"}}"},
      {"{{ enable_thinking is defined }}", HAS("\"chat_template_kwargs\":{}"), "False"},
      {"{{ enable_thinking }}", HAS("\"chat_template_kwargs\":{\"enable_thinking\":false}"),
       "False"},
      {"{{ enable_thinking }}", HAS("\"chat_template_kwargs\":{\"enable_thinking\":true}"), "True"},
      {"{{ temperature is defined }}", HAS("\"temperature\":1"), "False"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    pkv_template_output out;
    pkv_error err = {0};
    if (render(&out, cases[i].source, cases[i].json, NULL, &err) != PKV_OK)
      fail_msg("%zu: %s", i, err.text);
    assert_string_equal(out.text, cases[i].want);
    pkv_template_output_free(&out);
  }
}

/* A template that has no place for tools would leave them out without a word. */
static void test_no_place_for_tools(void **state) {
  (void)state;
  pkv_template_output out;
  pkv_error err = {0};
  const char *const json = HAS("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]");
  assert_int_equal(render(&out, "{{ messages }}", json, NULL, &err), PKV_E_UNSUPPORTED);
  assert_string_equal(err.text, "the model's chat format has no place for tools");
}

static void test_no_control_tokens(void **state) {
  (void)state;
  const kit k = make();
  pkv_chat_template *chat = NULL;
  pkv_error err = {0};
  int32_t ids[1024];
  size_t count = 0, ends = 0;
  static const char source[] = SHOW "{{ messages[0].content }}{{ messages[1].tool_calls[0].id }}"
                                    "{{ tools[0].function.name }}<|im_end|>";
  static const char json[] =
      "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\",\"name\":\"<|im_end|>\"},"
      "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"<|im_end|>\",\"function\":{\"name\":"
      "\"<|im_end|>\",\"arguments\":\"{\\\"<|im_end|>\\\": \\\"<|im_end|>\\\"}\"}}]},"
      "{\"role\":\"tool\",\"content\":\"<|im_end|>\"}],\"tools\":[{\"type\":\"function\","
      "\"<|im_end|>\":0,\"function\":{\"name\":\"<|im_end|>\"}}]}";
  const pkv_span text = {source, strlen(source)};
  assert_int_equal(pkv_chat_template_create(&chat, text, k.t, NULL, &err), PKV_OK);
  assert_int_equal(pkv_chat_encode_json(ids, 1024, &count, chat, k.t, json, strlen(json), 1, &err),
                   PKV_OK);
  for (size_t i = 0; i < count; i++)
    ends += ids[i] == k.end;
  assert_int_equal(ends, 1); /* the template's own */
  assert_int_equal(ids[count - 1], k.end);
  pkv_chat_template_destroy(chat);
  pkv_tokenizer_destroy(k.t);
}

static pkv_status torture(void *ctx, const pkv_allocator *allocator) {
  pkv_template_output out = {0};
  pkv_error err = {0};
  const pkv_status status = render(&out, SHOW, ctx, allocator, &err);
  pkv_template_output_free(&out);
  return status;
}

static void test_no_memory(void **state) {
  (void)state;
  char json[] = SAYS("{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\","
                     "\"arguments\":\"{\\\"a\\\": 1}\"}}]}");
  assert_true(test_alloc_torture(torture, json) > 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refusals),
      cmocka_unit_test(test_limits),
      cmocka_unit_test(test_values_of_a_file),
      cmocka_unit_test(test_arguments),
      cmocka_unit_test(test_what_is_shown),
      cmocka_unit_test(test_no_place_for_tools),
      cmocka_unit_test(test_no_control_tokens),
      cmocka_unit_test(test_no_memory),
      cmocka_unit_test(test_arguments_have_bounds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
