/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of tools in texts that come in pieces of any size (R12): what is one, and what is not. */
#include "server/tool_parse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"

typedef struct parse_case {
  pkv_tool_style style;
  bool demanded, single;
  const char *text;
  const char *content;
  const char *calls; /* name, arguments, ... as JSON */
} parse_case;

static const parse_case cases[] = {
    {PKV_TOOLS_TAGGED, false, false,
     "I look.\n<tool_call>\n{\"name\": \"find\", \"arguments\": {\"q\": \"a}\\\"b\", \"n\": [1, "
     "2]}}\n"
     "</tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>",
     "I look.\n",
     "[\"find\", \"{\\\"q\\\": \\\"a}\\\\\\\"b\\\", \\\"n\\\": [1, 2]}\", \"time\", \"{}\"]"},
    {PKV_TOOLS_TAGGED, true, false, "{\"name\": \"time\", \"arguments\": {\"zone\": \"UTC\"}}", "",
     "[\"time\", \"{\\\"zone\\\": \\\"UTC\\\"}\"]"},
    {PKV_TOOLS_TAGGED, false, true,
     "<tool_call>{\"name\":\"time\",\"arguments\":{}}</tool_call>"
     "<tool_call>{\"name\":\"find\",\"arguments\":{\"q\":1}}</tool_call>",
     "", "[\"time\", \"{}\"]"},
    {PKV_TOOLS_TAGGED, false, false,
     "<tool_call>{\"name\": \"time\"}</tool_call> <tool_call>{\"name\":\"time\",\"x\":1 }"
     "</tool_call>",
     "", "[\"time\", \"{}\", \"time\", \"{}\"]"},
    {PKV_TOOLS_LLAMA, false, false, "{\"name\": \"time\"}", "", "[\"time\", \"{}\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"name\": \"time\", ", "", "[\"time\", \"\"]"},
    {PKV_TOOLS_TAGGED, false, false, "a < b, <tool_cal, <tool_call> no",
     "a < b, <tool_cal, <tool_call> no", "[]"},
    {PKV_TOOLS_TAGGED, false, false, "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
     "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>", NULL},
    {PKV_TOOLS_TAGGED, false, false, "{\"name\": \"time\", \"arguments\": {}}",
     "{\"name\": \"time\", \"arguments\": {}}", "[]"},
    {PKV_TOOLS_LLAMA, false, false, " {\"name\": \"find\", \"parameters\": {\"q\": \"x\"}}", "",
     "[\"find\", \"{\\\"q\\\": \\\"x\\\"}\"]"},
    {PKV_TOOLS_LLAMA, false, false,
     "{\"type\": \"function\", \"parameters\": {\"q\": {\"name\": \"rm\"}}, \"name\": \"find\"}; "
     "{\"name\": \"time\", \"parameters\": {}}",
     "", "[\"find\", \"{\\\"q\\\": {\\\"name\\\": \\\"rm\\\"}}\", \"time\", \"{}\"]"},
    {PKV_TOOLS_LLAMA, false, false, "{\"answer\": 42}", "{\"answer\": 42}", "[]"},
    {PKV_TOOLS_LLAMA, false, false, "See {\"name\": \"time\"}", "See {\"name\": \"time\"}", "[]"},
    {PKV_TOOLS_MISTRAL, false, false,
     "[TOOL_CALLS] [{\"name\": \"time\", \"arguments\": {}}, {\"name\": \"find\", \"arguments\": "
     "{\"q\": \"]\"}}]",
     "", "[\"time\", \"{}\", \"find\", \"{\\\"q\\\": \\\"]\\\"}\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"name\": \"find\", \"arguments\": \"{\\\"q\\\": 1}\"}", "",
     "[\"find\", \"{\\\"q\\\": 1}\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"name\": \"find\", \"arguments\": {\"q\": \"cut", "",
     "[\"find\", \"{\\\"q\\\": \\\"cut\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"nam", "{\"nam", "[]"},
    /* found by fuzz_stream: of two arguments a client heard more in pieces than at once */
    {PKV_TOOLS_PLAIN, false, false,
     "{\"name\": \"find\", \"arguments\": {\"q\": 1}, \"parameters\": {\"q\": 2}}", "",
     "[\"find\", \"{\\\"q\\\": 1}\"]"},
    {PKV_TOOLS_PLAIN, false, false,
     "{\"arguments\": \"{}\", \"arguments\": {\"q\": 2}, \"name\": \"find\"}", "",
     "[\"find\", \"{}\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"name\": \"find\", \"arguments\": 5 ]", "",
     "[\"find\", \"5\"]"},
    {PKV_TOOLS_PLAIN, false, false, "{\"name\": \"find\", \"arguments\": x\"\\u0001]\"y]", "",
     "[\"find\", \"x\\\"\\\\u0001]\\\"y\"]"},
    {PKV_TOOLS_PLAIN, false, false, "", "", "[]"},
};

static json_t *two_tools(void) {
  return json_pack("[{s:s, s:{s:s}}, {s:s, s:{s:s}}]", "type", "function", "function", "name",
                   "find", "type", "function", "function", "name", "time");
}

/* Names and arguments of whole calls, in one list. */
static json_t *flatten(const json_t *calls) {
  json_t *const flat = json_array();
  size_t i;
  json_t *call;
  json_array_foreach(calls, i, call) {
    const json_t *const function = json_object_get(call, "function");
    assert_int_equal(json_string_length(json_object_get(call, "id")), 9);
    assert_string_equal(json_string_value(json_object_get(call, "type")), "function");
    (void)json_array_append(flat, json_object_get(function, "name"));
    (void)json_array_append(flat, json_object_get(function, "arguments"));
  }
  return flat;
}

/* Each index's first delta has id and name, no later one has. */
static void check_deltas(const json_t *deltas) {
  size_t i;
  json_t *delta;
  json_int_t seen = -1;
  json_array_foreach(deltas, i, delta) {
    const json_int_t index = json_integer_value(json_object_get(delta, "index"));
    const bool first = index > seen;
    assert_true(index == seen || index == seen + 1);
    assert_int_equal(json_object_get(delta, "id") != NULL, first);
    assert_int_equal(json_object_get(json_object_get(delta, "function"), "name") != NULL, first);
    seen = index;
  }
}

static void run_case(const parse_case *c, pkv_rng *rng) {
  pkv_tools tools = {two_tools(), c->style, c->demanded, !c->single, ""};
  pkv_tool_parser parser;
  pkv_tool_news news;
  const size_t size = strlen(c->text);
  pkv_tool_parser_init(&parser, &tools, 5);
  pkv_buffer_init(&news.content, 4096, NULL);
  news.deltas = json_array();
  for (size_t at = 0; at < size;) {
    size_t n = rng == NULL ? size : 1 + (size_t)pkv_rng_below(rng, 6);
    if (n > size - at) n = size - at;
    assert_int_equal(pkv_tool_parser_feed(&news, &parser, c->text + at, n), PKV_OK);
    at += n;
  }
  assert_int_equal(pkv_tool_parser_end(&news, &parser), PKV_OK);
  check_deltas(news.deltas);
  json_t *const calls = pkv_tool_calls(news.deltas), *const flat = flatten(calls);
  json_t *const want = json_loads(c->calls != NULL ? c->calls : "[]", 0, NULL);
  const char *const content = news.content.size > 0 ? news.content.data : "";
  if (!json_equal(flat, want) || (c->calls != NULL && strcmp(content, c->content) != 0)) {
    char *const got = json_dumps(flat, 0);
    fail_msg("'%s': content '%s', calls %s", c->text, content, got);
  }
  if (c->calls == NULL) assert_non_null(strstr(content, "\"name\": \"rm\""));
  json_decref(want);
  json_decref(flat);
  json_decref(calls);
  json_decref(news.deltas);
  json_decref(tools.list);
  pkv_buffer_deinit(&news.content);
  pkv_tool_parser_deinit(&parser);
}

static void test_cases(void **state) {
  pkv_rng rng;
  (void)state;
  pkv_rng_init(&rng, 3);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    run_case(&cases[i], NULL);
    for (int round = 0; round < 60; round++)
      run_case(&cases[i], &rng);
  }
}

/* A model may write a NUL: the whole answer has what the stream has. */
static void test_nul(void **state) {
  static const char text[] = "{\"name\": \"time\", \"arguments\": {\"a\": \"b\0c\"}}";
  static const char wanted[] = "{\"a\": \"b\0c\"}";
  pkv_tools tools = {two_tools(), PKV_TOOLS_PLAIN, false, true, ""};
  pkv_tool_parser parser;
  pkv_tool_news news;
  (void)state;
  pkv_tool_parser_init(&parser, &tools, 5);
  pkv_buffer_init(&news.content, 4096, NULL);
  news.deltas = json_array();
  assert_int_equal(pkv_tool_parser_feed(&news, &parser, text, 36), PKV_OK);
  assert_int_equal(pkv_tool_parser_feed(&news, &parser, text + 36, sizeof text - 37), PKV_OK);
  json_t *const calls = pkv_tool_calls(news.deltas);
  const json_t *const said =
      json_object_get(json_object_get(json_array_get(calls, 0), "function"), "arguments");
  assert_int_equal(json_string_length(said), sizeof wanted - 1);
  assert_memory_equal(json_string_value(said), wanted, sizeof wanted - 1);
  json_decref(calls);
  json_decref(news.deltas);
  json_decref(tools.list);
  pkv_buffer_deinit(&news.content);
  pkv_tool_parser_deinit(&parser);
}

/* Any bytes: nothing is lost where no call is made. */
static void test_random(void **state) {
  static const char alphabet[] = "{}[]\",:\\<tool_call>/ \nname:time";
  pkv_rng rng;
  (void)state;
  pkv_rng_init(&rng, 4);
  for (int round = 0; round < 20000; round++) {
    char text[64];
    const size_t size = (size_t)pkv_rng_below(&rng, sizeof text);
    for (size_t i = 0; i < size; i++)
      text[i] = alphabet[pkv_rng_below(&rng, sizeof alphabet - 1)];
    pkv_tools tools = {two_tools(), (pkv_tool_style)pkv_rng_below(&rng, 5), false, true, ""};
    pkv_tool_parser parser;
    pkv_tool_news news;
    pkv_tool_parser_init(&parser, &tools, 5);
    pkv_buffer_init(&news.content, 4096, NULL);
    news.deltas = json_array();
    assert_int_equal(pkv_tool_parser_feed(&news, &parser, text, size), PKV_OK);
    assert_int_equal(pkv_tool_parser_end(&news, &parser), PKV_OK);
    if (parser.calls == 0) {
      assert_int_equal(news.content.size, size);
      if (size > 0) assert_memory_equal(news.content.data, text, size);
    }
    json_decref(news.deltas);
    json_decref(tools.list);
    pkv_buffer_deinit(&news.content);
    pkv_tool_parser_deinit(&parser);
  }
}

/* References of a tool's schema follow it into the one schema of all; names are no keywords. */
static void test_schema(void **state) {
  (void)state;
  static const char parameters[] =
      "{\"type\": \"object\", \"$defs\": {\"const\": {\"type\": \"string\"}}, \"properties\": {"
      "\"default\": {\"$ref\": \"#/$defs/const\"}, \"$ref\": {\"$ref\": \"#/$defs/const\"},"
      "\"enum\": {\"items\": {\"$ref\": \"#\"}}, \"properties\": {\"default\": {\"$ref\": \"#a\"}, "
      "\"anyOf\": [{\"$ref\": \"#/$defs/const\"}]}}}";
  static const char wanted[] =
      "{\"type\": \"object\", \"$defs\": {\"const\": {\"type\": \"string\"}}, \"properties\": {"
      "\"default\": {\"$ref\": \"#/$defs/0/$defs/const\"}, \"$ref\": {\"$ref\": "
      "\"#/$defs/0/$defs/const\"}, \"enum\": {\"items\": {\"$ref\": \"#/$defs/0\"}}, "
      "\"properties\": {\"default\": {\"$ref\": \"#a\"}, \"anyOf\": [{\"$ref\": "
      "\"#/$defs/0/$defs/const\"}]}}}";
  pkv_tools tools = {json_pack("[{s:s, s:{s:s, s:o}}]", "type", "function", "function", "name", "f",
                               "parameters", json_loads(parameters, 0, NULL)),
                     PKV_TOOLS_TAGGED, true, true, ""};
  json_t *const schema = pkv_tools_schema(&tools), *const want = json_loads(wanted, 0, NULL);
  const json_t *const got = json_object_get(json_object_get(schema, "$defs"), "0");
  assert_non_null(want);
  if (!json_equal(got, want)) fail_msg("%s", json_dumps(got, 0));
  json_decref(schema);
  json_decref(want);
  pkv_tools_free(&tools);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_cases),
      cmocka_unit_test(test_nul),
      cmocka_unit_test(test_random),
      cmocka_unit_test(test_schema),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
