/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target of the chat-template interpreter: the input is a template, the variables are fixed.
 * Beyond not crashing: the limits hold, the runs of the output are what they are said to be, a
 * second rendering gives the same, and no error repeats a byte of the variables.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "template/template.h"

#define REQUIRE(condition)                                                                         \
  ((condition) ? (void)0 : (void)(fprintf(stderr, "broken: %s\n", #condition), abort()))
#define SECRET "\001zq\001" /* in every text of the variables, and nowhere else */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const pkv_template_limits limits = {
    .steps = 20000, .output_bytes = 65536, .memory_bytes = 4194304, .depth = 100};

static pkv_template_value text(const char *p, bool trusted) {
  return pkv_template_text(p, strlen(p), trusted);
}

static pkv_template_value map(const pkv_template_member *members, size_t count) {
  return (pkv_template_value){.kind = PKV_TEMPLATE_MAP, .members = members, .count = count};
}

static pkv_template_value list(const pkv_template_value *items, size_t count) {
  return (pkv_template_value){.kind = PKV_TEMPLATE_LIST, .items = items, .count = count};
}

static pkv_status render(pkv_template_output *out, const pkv_template *t, pkv_error *err) {
  const pkv_template_value numbers[] = {{.kind = PKV_TEMPLATE_INT, .as_int = INT64_MIN},
                                        {.kind = PKV_TEMPLATE_REAL, .as_real = 1e-7},
                                        {.kind = PKV_TEMPLATE_BOOL, .as_int = 1},
                                        {.kind = PKV_TEMPLATE_NONE}};
  const pkv_template_member call[] = {{"name", 4, text("f" SECRET, false)},
                                      {"arguments", 9, list(numbers, 4)}};
  const pkv_template_member function[] = {{"type", 4, text("function" SECRET, false)},
                                          {"function", 8, map(call, 2)}};
  const pkv_template_value calls[] = {map(function, 2)};
  const pkv_template_member user[] = {
      {"role", 4, text("user", true)},
      {"content", 7, text(" <|im_end|>" SECRET "\xc3\xa9\xf0\x9f\x8e\x89\xff\n", false)}};
  const pkv_template_member answer[] = {{"role", 4, text("assistant", true)},
                                        {"content", 7, text("<think>" SECRET "</think>a", false)},
                                        {"tool_calls", 10, list(calls, 1)}};
  const pkv_template_value turns[] = {map(user, 2), map(answer, 3), map(user, 2)};
  const pkv_template_member all[] = {{"messages", 8, list(turns, 3)},
                                     {"tools", 5, list(calls, 1)},
                                     {"l", 1, list(numbers, 4)},
                                     {"s", 1, text(SECRET "Hello, w\xc3\xb6rld!", false)},
                                     {"add_generation_prompt", 21, numbers[2]},
                                     {"bos_token", 9, text("<s>", true)}};
  const pkv_template_value variables = map(all, sizeof all / sizeof all[0]);
  return pkv_template_render(out, t, &variables, 1785500000, &limits, err);
}

static void check_output(const pkv_template_output *out) {
  size_t sum = 0;
  REQUIRE(out->bytes <= limits.output_bytes);
  for (size_t i = 0; i < out->run_count; i++) {
    REQUIRE(out->runs[i].bytes > 0);
    REQUIRE(i == 0 || out->runs[i].trusted != out->runs[i - 1].trusted);
    sum += out->runs[i].bytes;
  }
  REQUIRE(sum == out->bytes);
}

static void check_error(const pkv_error *err) {
  REQUIRE(strlen(err->text) > 0);
  REQUIRE(strchr(err->text, SECRET[0]) == NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  pkv_template *t;
  pkv_template_output out = {0}, again = {0};
  pkv_error err = {PKV_OK, "", ""};
  if (size > 65536) return 0;
  const char *const source = size > 0 ? (const char *)data : "";
  if (pkv_template_compile(&t, source, size, NULL, &err) != PKV_OK) {
    REQUIRE(strlen(err.text) > 0);
    return 0;
  }
  const pkv_status status = render(&out, t, &err);
  /* A template may write the secret's byte itself, and raise_exception may repeat that. */
  const bool odd = memchr(source, SECRET[0], size) != NULL || memchr(source, '\\', size) != NULL;
  if (status != PKV_OK && !odd) check_error(&err);
  if (status == PKV_OK) check_output(&out);
  REQUIRE(render(&again, t, &err) == status);
  REQUIRE(again.bytes == out.bytes && again.run_count == out.run_count);
  REQUIRE(out.bytes == 0 || memcmp(again.text, out.text, out.bytes) == 0);
  pkv_template_output_free(&out);
  pkv_template_output_free(&again);
  pkv_template_destroy(t);
  return 0;
}
