/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every limit of the template interpreter, at the limit and one past it: steps, output, memory and
 * depth of a rendering, bytes and nesting of a source; and that templates made to exhaust the
 * machine meet a limit soon.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "template/template.h"

static pkv_status run(const char *source, const pkv_template_limits *limits, size_t *bytes,
                      pkv_error *err) {
  pkv_template *t = NULL;
  pkv_template_output out = {0};
  const pkv_template_value variables = {.kind = PKV_TEMPLATE_MAP};
  pkv_status status = pkv_template_compile(&t, source, strlen(source), NULL, err);
  if (status == PKV_OK) status = pkv_template_render(&out, t, &variables, -1, limits, err);
  if (bytes != NULL) *bytes = out.bytes;
  assert_true(status == PKV_OK || out.text == NULL);
  pkv_template_output_free(&out);
  pkv_template_destroy(t);
  return status;
}

typedef enum limit_kind { STEPS, OUTPUT, MEMORY, DEPTH } limit_kind;

static pkv_template_limits limit_of(limit_kind kind, uint64_t value) {
  pkv_template_limits l = {0};
  if (kind == STEPS) l.steps = value;
  if (kind == OUTPUT) l.output_bytes = value;
  if (kind == MEMORY) l.memory_bytes = value;
  if (kind == DEPTH) l.depth = (uint32_t)value;
  return l;
}

/* Whether the source gets through with this limit; if not, it must be this limit that says so. */
static bool passes(limit_kind kind, uint64_t value, const char *source) {
  static const char *const names[] = {"(limit steps)", "(limit output)", "(limit memory)",
                                      "(limit depth)"};
  const pkv_template_limits limits = limit_of(kind, value);
  char number[32];
  pkv_error err = {0};
  const pkv_status status = run(source, &limits, NULL, &err);
  if (status == PKV_OK) return true;
  (void)snprintf(number, sizeof number, "%llu", (unsigned long long)value);
  if (status != PKV_E_LIMIT || strstr(err.text, names[kind]) == NULL ||
      strstr(err.text, number) == NULL)
    fail_msg("%s with %s: %s \"%s\"", names[kind], number, pkv_status_name(status), err.text);
  return false;
}

/* The least value that lets the source through. */
static uint64_t least(limit_kind kind, const char *source) {
  uint64_t low = 0, high = 1u << 30; /* low fails (0 would be the default), high passes */
  assert_true(passes(kind, high, source));
  while (high - low > 1) {
    const uint64_t mid = low + (high - low) / 2;
    if (passes(kind, mid, source))
      high = mid;
    else
      low = mid;
  }
  return high;
}

static void test_steps(void **state) {
  (void)state;
  /* Each turn of a loop costs something; the list it goes over does as well. */
  const uint64_t ten = least(STEPS, "{% for i in range(10) %}{% set x = i %}{% endfor %}");
  const uint64_t eleven = least(STEPS, "{% for i in range(11) %}{% set x = i %}{% endfor %}");
  const uint64_t twenty = least(STEPS, "{% for i in range(20) %}{% set x = i %}{% endfor %}");
  assert_true(eleven > ten);
  assert_in_range(twenty - ten, 9 * (eleven - ten), 12 * (eleven - ten));
  assert_false(passes(STEPS, twenty - 1, "{% for i in range(20) %}{% set x = i %}{% endfor %}"));
  /* Long texts are work, too: a step for every 64 bytes. */
  const uint64_t brief = least(STEPS, "{% set x = 'a' * 64 %}");
  const uint64_t wide = least(STEPS, "{% set x = 'a' * 6400 %}");
  assert_true(wide >= brief + 99);
}

static void test_output(void **state) {
  (void)state;
  size_t bytes;
  pkv_error err = {0};
  assert_int_equal(least(OUTPUT, "{{ 'x' * 1000 }}"), 1000);
  assert_int_equal(least(OUTPUT, "{% for i in range(10) %}{{ i }},{% endfor %}"), 20);
  const pkv_template_limits exact = limit_of(OUTPUT, 1000);
  assert_int_equal(run("{{ 'x' * 1000 }}", &exact, &bytes, &err), PKV_OK);
  assert_int_equal(bytes, 1000);
  assert_int_equal(run("{{ 'x' * 1001 }}", &exact, &bytes, &err), PKV_E_LIMIT);
  /* The default: 32 MiB. */
  const char *const most =
      "{% set m = 'x' * 1024 * 1024 %}{% for i in range(32) %}{{ m }}{% endfor %}";
  if (run(most, NULL, &bytes, &err) != PKV_OK) fail_msg("%s", err.text);
  assert_int_equal(bytes, 33554432);
  assert_int_equal(
      run("{% set m = 'x' * 1024 * 1024 %}{% for i in range(32) %}{{ m }}{% endfor %}y", NULL,
          &bytes, &err),
      PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "33554432 bytes of output"));
}

static void test_memory(void **state) {
  (void)state;
  const uint64_t some = least(MEMORY, "{% set x = 'a' * 100000 %}");
  assert_true(some >= 100000 && some < 400000);
  const uint64_t twice = least(MEMORY, "{% set x = 'a' * 200000 %}");
  assert_true(twice >= some + 100000 && twice <= 2 * some);
  assert_false(passes(MEMORY, twice - 1, "{% set x = 'a' * 200000 %}"));
}

static void test_depth(void **state) {
  (void)state;
  static const char macro[] = "{%% macro m(n) %%}{%% if n %%}{{ m(n - 1) }}{%% endif %%}"
                              "{%% endmacro %%}{{ m(%d) }}";
  char source[128];
  uint64_t need[3];
  for (int i = 0; i < 3; i++) {
    (void)snprintf(source, sizeof source, macro, 10 + i);
    need[i] = least(DEPTH, source);
    assert_false(passes(DEPTH, need[i] - 1, source));
  }
  assert_true(need[1] > need[0]);
  assert_int_equal(need[2] - need[1], need[1] - need[0]); /* each call is equally deep */
  /* The default of 600 lets so many calls through, and no more. */
  const uint64_t calls = (600 - need[0]) / (need[1] - need[0]) + 10;
  pkv_error err = {0};
  (void)snprintf(source, sizeof source, macro, (int)calls);
  assert_int_equal(run(source, NULL, NULL, &err), PKV_OK);
  (void)snprintf(source, sizeof source, macro, (int)calls + 1);
  assert_int_equal(run(source, NULL, NULL, &err), PKV_E_LIMIT);
  assert_non_null(strstr(err.text, "nested more than 600 deep"));
}

/* {{ ((( ... 1 ... ))) }} of `levels` brackets, or that many nested ifs. */
static pkv_status nested(int levels, bool statements, pkv_error *err) {
  const size_t size = (size_t)levels * 32 + 64;
  char *const source = malloc(size);
  size_t n = 0;
  assert_non_null(source);
  if (!statements) n += (size_t)snprintf(source + n, size - n, "{{ ");
  for (int i = 0; i < levels; i++)
    n += (size_t)snprintf(source + n, size - n, statements ? "{%% if 1 %%}" : "[");
  n += (size_t)snprintf(source + n, size - n, "1");
  for (int i = 0; i < levels; i++)
    n += (size_t)snprintf(source + n, size - n, statements ? "{%% endif %%}" : "]");
  if (!statements) n += (size_t)snprintf(source + n, size - n, " }}");
  const pkv_status status = run(source, NULL, NULL, err);
  free(source);
  return status;
}

static void test_nesting(void **state) {
  (void)state;
  pkv_error err = {0};
  for (int statements = 0; statements < 2; statements++) {
    int most = 0;
    while (most < 1000 && nested(most + 1, statements != 0, &err) == PKV_OK)
      most++;
    print_message("%d %s nest\n", most, statements ? "statements" : "brackets");
    const unsigned want = statements ? PKV_TEMPLATE_NESTING : PKV_TEMPLATE_NESTING / 2;
    assert_in_range(most, want - 2, want);
    assert_int_equal(nested(most + 1, statements != 0, &err), PKV_E_LIMIT);
    assert_non_null(strstr(err.text, "150"));
    assert_int_equal(nested(20000, statements != 0, &err), PKV_E_LIMIT); /* no stack is lost */
  }
}

static void test_source_bytes(void **state) {
  (void)state;
  pkv_template *t;
  pkv_error err = {0};
  char *const source = malloc(PKV_TEMPLATE_SOURCE_BYTES + 1);
  assert_non_null(source);
  memset(source, 'x', PKV_TEMPLATE_SOURCE_BYTES + 1);
  assert_int_equal(pkv_template_compile(&t, source, PKV_TEMPLATE_SOURCE_BYTES, NULL, &err), PKV_OK);
  pkv_template_destroy(t);
  assert_int_equal(pkv_template_compile(&t, source, PKV_TEMPLATE_SOURCE_BYTES + 1, NULL, &err),
                   PKV_E_LIMIT);
  assert_null(t);
  free(source);
}

/* None of these may take long, whatever it asks for. */
static void test_hostile(void **state) {
  (void)state;
  static const char *const sources[] = {
      "{% for i in range(10**9) %}{% endfor %}",
      "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
      "{% set n = namespace(x='a') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
      "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
      "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(0) }}",
      "{{ 'x' * 10**12 }}",
      "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
      "{{ 'x'.center(10**12) }}",
      "{{ '%999999999d' % 1 }}",
      "{{ ('a' * 9999)|join('b' * 9999) }}",
      "{{ range(10**9)|list|length }}",
      "{{ ('ab' * 99999)|list|tojson|list|tojson }}",
      "{% for i in range(99999) %}{{ ('a' * 99999).find('b') }}{% endfor %}",
      "{% for i in range(99999) %}{{ ('a' * 99999)|upper|length }}{% endfor %}",
  };
  for (size_t i = 0; i < sizeof sources / sizeof sources[0]; i++) {
    pkv_error err = {0};
    const int64_t begin = pkv_clock_ns();
    const pkv_status status = run(sources[i], NULL, NULL, &err);
    const double seconds = (double)(pkv_clock_ns() - begin) * 1e-9;
    if (status == PKV_OK) fail_msg("%s gets through", sources[i]);
    if (status != PKV_E_LIMIT && status != PKV_E_FORMAT && status != PKV_E_UNSUPPORTED)
      fail_msg("%s: %s", sources[i], err.text);
    assert_non_null(strstr(err.text, "line 1, column"));
    assert_true(seconds < 20.0); /* milliseconds; a sanitizer and a busy machine take longer */
  }
}

static void test_arguments(void **state) {
  (void)state;
  pkv_template *t = NULL;
  pkv_template_output out;
  pkv_error err = {0};
  const pkv_template_value variables = {.kind = PKV_TEMPLATE_MAP};
  const pkv_template_value none = {.kind = PKV_TEMPLATE_NONE};
  assert_int_equal(pkv_template_compile(NULL, "a", 1, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_template_compile(&t, NULL, 1, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_template_compile(&t, NULL, 0, NULL, &err), PKV_OK);
  assert_int_equal(pkv_template_render(NULL, t, &variables, -1, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_template_render(&out, NULL, &variables, -1, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_template_render(&out, t, NULL, -1, NULL, &err), PKV_E_INVALID);
  assert_int_equal(pkv_template_render(&out, t, &none, -1, NULL, &err), PKV_E_INVALID);
  assert_string_equal(err.text, "the variables are no map");
  assert_int_equal(pkv_template_render(&out, t, &variables, -1, NULL, &err), PKV_OK);
  assert_int_equal(out.bytes, 0);
  pkv_template_output_free(&out);
  pkv_template_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_steps),   cmocka_unit_test(test_output),
      cmocka_unit_test(test_memory),  cmocka_unit_test(test_depth),
      cmocka_unit_test(test_nesting), cmocka_unit_test(test_source_bytes),
      cmocka_unit_test(test_hostile), cmocka_unit_test(test_arguments),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
