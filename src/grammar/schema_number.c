/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of numbers as digits. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "grammar/schema_parts.h"

/* Bounds beyond this one bound nothing: a number has fewer digits. */
#define MOST INT64_C(999999999999999)

static int32_t digits(pkv_syntax *t, size_t count) {
  return pkv_syntax_repeat(t, pkv_syntax_range(t, '0', '9'), (int32_t)count, (int32_t)count);
}

/* As many digits as s, and at least (`up`) or at most what it says. */
static int32_t beyond(pkv_syntax *t, const char *s, bool up) {
  const char edge = up ? '9' : '0';
  if (s[0] == '\0') return pkv_syntax_empty(t);
  int32_t node = pkv_syntax_join(t, pkv_syntax_text(t, s, 1), beyond(t, s + 1, up));
  if (s[0] == edge) return node;
  const int32_t other = up ? pkv_syntax_range(t, (uint32_t)s[0] + 1, '9')
                           : pkv_syntax_range(t, '0', (uint32_t)s[0] - 1);
  return pkv_syntax_either(t, node, pkv_syntax_join(t, other, digits(t, strlen(s + 1))));
}

/* From a to b, of the same number of digits. */
static int32_t between(pkv_syntax *t, const char *a, const char *b) {
  if (a[0] == '\0') return pkv_syntax_empty(t);
  const int32_t low = pkv_syntax_text(t, a, 1);
  if (a[0] == b[0]) return pkv_syntax_join(t, low, between(t, a + 1, b + 1));
  int32_t node = pkv_syntax_join(t, low, beyond(t, a + 1, true));
  node = pkv_syntax_either(t, node,
                           pkv_syntax_join(t, pkv_syntax_text(t, b, 1), beyond(t, b + 1, false)));
  if (b[0] - a[0] < 2) return node;
  const int32_t inside = pkv_syntax_range(t, (uint32_t)a[0] + 1, (uint32_t)b[0] - 1);
  return pkv_syntax_either(t, node, pkv_syntax_join(t, inside, digits(t, strlen(a + 1))));
}

/* 0 <= low <= high. */
static int32_t natural(pkv_syntax *t, int64_t low, int64_t high) {
  int32_t node = pkv_syntax_none(t);
  while (low <= high) {
    char a[24], b[24];
    int64_t top = 9; /* the largest with as many digits as low */
    while (top < low)
      top = top * 10 + 9;
    if (top > high) top = high;
    (void)snprintf(a, sizeof a, "%lld", (long long)low);
    (void)snprintf(b, sizeof b, "%lld", (long long)top);
    node = pkv_syntax_either(t, node, between(t, a, b));
    low = top + 1;
  }
  return node;
}

static int32_t whole_range(pkv_syntax *t, int64_t low, int64_t high) {
  int32_t node = natural(t, low > 0 ? low : 0, high);
  if (low >= 0) return node;
  const int64_t least = high < 0 ? -high : 1;
  return pkv_syntax_either(t, node,
                           pkv_syntax_join(t, pkv_syntax_string(t, "-"), natural(t, least, -low)));
}

/* A point and digits; `some`: not zeros alone, `zeros`: nothing else. */
static int32_t fraction(pkv_syntax *t, bool some, bool zeros) {
  const int32_t any = pkv_syntax_range(t, '0', zeros ? '0' : '9');
  int32_t node = pkv_syntax_repeat(t, any, some ? 0 : 1, PKV_JSON_DIGITS - some);
  if (some) node = pkv_syntax_join(t, node, pkv_syntax_range(t, '1', '9'));
  return pkv_syntax_join(t, pkv_syntax_string(t, "."), node);
}

/* Numbers of 0 <= low .. high, the ends themselves where they are closed. */
static int32_t positive(pkv_syntax *t, int64_t low, int64_t high, bool open_low, bool open_high) {
  const int32_t behind = pkv_syntax_optional(t, fraction(t, false, false));
  int32_t node = pkv_syntax_none(t);
  if (low + open_low <= high - 1)
    node = pkv_syntax_join(t, natural(t, low + open_low, high - 1), behind);
  if (open_low && low < high)
    node = pkv_syntax_either(t, node,
                             pkv_syntax_join(t, natural(t, low, low), fraction(t, true, false)));
  if (open_high || low > high || (open_low && low == high)) return node;
  const int32_t zeros = pkv_syntax_optional(t, fraction(t, false, true));
  return pkv_syntax_either(t, node, pkv_syntax_join(t, natural(t, high, high), zeros));
}

static int32_t real_range(pkv_syntax *t, int64_t low, int64_t high, bool open_low, bool open_high) {
  const bool negative = low < 0;
  int32_t node = pkv_syntax_none(t);
  if (high >= 0) node = positive(t, low > 0 ? low : 0, high, low >= 0 && open_low, open_high);
  if (!negative) return node;
  const int64_t least = high < 0 ? -high : 0;
  const int32_t below =
      positive(t, least, -low, high < 0 ? open_high : true, open_low); /* not -0 */
  return pkv_syntax_either(t, node, pkv_syntax_join(t, pkv_syntax_string(t, "-"), below));
}

typedef struct bound {
  bool given, open;
  double value;
} bound;

/* The tighter of two keywords: sign 1 for lower bounds, -1 for upper ones. */
static bound read_bound(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at,
                        const char *closed, const char *open, double sign) {
  bound b = {false, false, 0.0};
  const char *const words[] = {closed, open};
  for (int i = 0; i < 2; i++) {
    const json_t *const value = json_object_get(schema, words[i]);
    if (value == NULL) continue;
    if (!json_is_number(value)) {
      (void)pkv_schema_refuse(r, at, PKV_E_INVALID, "%s must be a number", words[i]);
      continue;
    }
    const double number = json_number_value(value);
    if (b.given && (number - b.value) * sign < 0.0) continue;
    b.open = i == 1;
    b.given = true;
    b.value = number;
  }
  return b;
}

static int64_t to_whole(double value) {
  return value >= (double)MOST ? MOST : value <= (double)-MOST ? -MOST : (int64_t)value;
}

static int32_t bounded_integer(pkv_schema_reader *r, const pkv_schema_place *at, bound low,
                               bound high) {
  int64_t from = -MOST, to = MOST;
  if (low.given) {
    if (low.value > (double)MOST) return pkv_syntax_none(r->tree);
    const double up = ceil(low.value);
    from = to_whole(up) + (low.open && up <= low.value);
  }
  if (high.given) {
    if (high.value < (double)-MOST) return pkv_syntax_none(r->tree);
    const double down = floor(high.value);
    to = to_whole(down) - (high.open && down >= high.value && down <= (double)MOST);
  }
  if (from > to)
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "no integer lies between its bounds");
  return whole_range(r->tree, from, to);
}

static int32_t bounded_number(pkv_schema_reader *r, const pkv_schema_place *at, bound low,
                              bound high) {
  const double most = (double)MOST;
  if ((low.given && floor(low.value) < low.value) || (high.given && floor(high.value) < high.value))
    return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED,
                             "of numbers only whole bounds are supported");
  const int64_t from = low.given ? to_whole(low.value) : -MOST;
  const int64_t to = high.given ? to_whole(high.value) : MOST;
  if ((low.given && low.value > most) || (high.given && high.value < -most) || from > to ||
      (from == to && (low.open || high.open)))
    return pkv_schema_refuse(r, at, PKV_E_INVALID, "no number lies between its bounds");
  return real_range(r->tree, from, to, low.open && low.value >= -most,
                    high.open && high.value <= most);
}

int32_t pkv_schema_number(pkv_schema_reader *r, const json_t *schema, const pkv_schema_place *at,
                          bool whole) {
  const bound low = read_bound(r, schema, at, "minimum", "exclusiveMinimum", 1.0);
  const bound high = read_bound(r, schema, at, "maximum", "exclusiveMaximum", -1.0);
  const json_t *const step = json_object_get(schema, "multipleOf");
  if (step != NULL && !(whole && json_is_number(step) && fabs(json_number_value(step) - 1.0) <= 0))
    return pkv_schema_refuse(r, at, PKV_E_UNSUPPORTED, "multipleOf is not supported");
  if (pkv_schema_failed(r)) return 0;
  if (!low.given && !high.given)
    return whole ? pkv_json_integer(r->rules) : pkv_json_number(r->rules);
  return whole ? bounded_integer(r, at, low, high) : bounded_number(r, at, low, high);
}
