/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Profiles as text: one "key values" a line, the version first, "end" last. The file may come from
 * anywhere: printable ASCII only, each key once, each number strict and within its range, nothing
 * taken over before all of it was read.
 */
#include "policy/cost.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/text.h"
#include "policy/shape.h"

#define HEAD       "pkv-profile 2"
#define MOST_WORDS (PKV_COST_FEATURES + 8)
#define LINE_BYTES 1024
#define MOST_US    1e12

/* --- writing ---------------------------------------------------------------------------------- */

typedef struct writer {
  char *text;
  size_t capacity, used; /* used counts what does not fit, too */
} writer;

static void __attribute__((format(printf, 2, 3))) put(writer *w, const char *format, ...) {
  const bool room = w->used < w->capacity;
  va_list args;
  va_start(args, format);
  const int more =
      vsnprintf(room ? w->text + w->used : NULL, room ? w->capacity - w->used : 0, format, args);
  va_end(args);
  if (more > 0) w->used += (size_t)more;
}

static void put_numbers(writer *w, const char *what, int32_t kind, const double *numbers) {
  put(w, "%s %s", what, pkv_cost_kind_name(kind));
  for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
    put(w, " %.9g", numbers[i]);
  put(w, "\n");
}

static void put_model(writer *w, const pkv_cost_model *m) {
  const pkv_shape *s = &m->shape;
  put(w, "device %s\ndriver %s\nlibrary %s\ndate %s\n", m->device, m->driver, m->library, m->date);
  put(w, "shape %d %d %d %d %d %d\n", s->query_heads, s->kv_heads, s->head_dim, s->page_tokens,
      s->q_len, s->window);
  put(w, "kv_dtype %s\nparts %d\nfeatures", pkv_dtype_name(m->kv_dtype), m->parts);
  for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
    put(w, " %s", pkv_cost_feature_name(i));
  put(w, "\n");
  for (int32_t kind = 1; kind < PKV_COST_KINDS; kind++) {
    const pkv_route_cost *c = &m->cost[kind];
    if (c->points == 0) continue;
    put(w, "cost %s %d %.6g %.6g\n", pkv_cost_kind_name(kind), c->points, c->error_mean,
        c->error_worst);
    put_numbers(w, "attend", kind, c->attend);
    put_numbers(w, "plan", kind, c->plan);
  }
}

static bool printable(const char *text, size_t size) {
  for (size_t i = 0; i < size && text[i] != '\0'; i++)
    if (text[i] < ' ' || text[i] > '~') return false;
  return memchr(text, '\0', size) != NULL && text[0] != '\0' && text[0] != ' ';
}

pkv_status pkv_profile_format(char *text, size_t capacity, size_t *bytes,
                              const pkv_profile *profile, pkv_error *err) {
  pkv_policy_device device;
  writer w = {text, capacity, 0};
  PKV_CHECK(err, text && bytes && profile, PKV_E_INVALID, "text, bytes or profile is NULL");
  PKV_TRY(pkv_policy_device_init(&device, profile, err));
  const pkv_cost_model *m = profile->model;
  PKV_CHECK(err, m, PKV_E_INVALID, "profile->model is NULL");
  PKV_CHECK(err,
            printable(m->device, sizeof m->device) && printable(m->driver, sizeof m->driver) &&
                printable(m->library, sizeof m->library) && printable(m->date, sizeof m->date),
            PKV_E_INVALID, "profile->model: device, driver, library and date must be plain text");
  put(&w, HEAD "\n");
  put(&w, "read_gb_s %.9g\nlaunch_us %.9g\nsms %d\nmin_ctas %d\nroutes %u\n",
      device.read_bytes_us * 1e-3, device.launch_us, device.sms, device.min_ctas,
      (unsigned)device.routes);
  put_model(&w, m);
  put(&w, "end\n");
  *bytes = w.used;
  PKV_CHECK(err, w.used < capacity, PKV_E_TOO_SMALL, "capacity is %zu, %zu bytes are needed",
            capacity, w.used + 1);
  return PKV_OK;
}

/* --- reading ---------------------------------------------------------------------------------- */

enum {
  SEEN_READ = 1,
  SEEN_LAUNCH = 2,
  SEEN_SMS = 4,
  SEEN_CTAS = 8,
  SEEN_ROUTES = 16,
  SEEN_DEVICE = 32,
  SEEN_DRIVER = 64,
  SEEN_LIBRARY = 128,
  SEEN_DATE = 256,
  SEEN_SHAPE = 512,
  SEEN_DTYPE = 1024,
  SEEN_PARTS = 2048,
  SEEN_FEATURES = 4096,
  SEEN_ALL = 8191
};

typedef struct reader {
  pkv_profile profile;
  pkv_cost_model model;
  const char *at, *end;
  int32_t line;
  uint32_t seen;
  uint32_t costs[3]; /* kinds whose cost, attend, plan line was met */
  char copy[LINE_BYTES];
  char *word[MOST_WORDS];
  int32_t words;
  const char *rest; /* after the first word */
} reader;

#define BAD(...) PKV_FAIL(err, PKV_E_FORMAT, __VA_ARGS__)

/* The next line into copy[], cut into words; E_FORMAT at the end of the text. */
static pkv_status next_line(reader *r, pkv_error *err) {
  const size_t left = (size_t)(r->end - r->at);
  const char *stop = left > 0 ? memchr(r->at, '\n', left) : NULL;
  r->line++;
  if (stop == NULL) return BAD("line %d: the text ends before 'end'", r->line);
  const size_t size = (size_t)(stop - r->at);
  if (size >= LINE_BYTES) return BAD("line %d: %zu bytes, at most %d", r->line, size, LINE_BYTES);
  for (size_t i = 0; i < size; i++)
    if (r->at[i] < ' ' || r->at[i] > '~')
      return BAD("line %d: byte 0x%02x at %zu", r->line, (unsigned)(unsigned char)r->at[i], i + 1);
  memcpy(r->copy, r->at, size);
  r->copy[size] = '\0';
  const char *blank = memchr(r->at, ' ', size);
  r->rest = blank ? blank + 1 : stop;
  r->at = stop + 1;
  r->words = 0;
  for (char *p = r->copy; *p != '\0';) {
    if (r->words == MOST_WORDS) return BAD("line %d: more than %d words", r->line, MOST_WORDS);
    r->word[r->words++] = p;
    p += strcspn(p, " ");
    if (*p == ' ') *p++ = '\0';
  }
  if (r->words == 0) return BAD("line %d is empty", r->line);
  return PKV_OK;
}

static pkv_status whole(int32_t *out, const reader *r, int32_t word, int64_t lo, int64_t hi,
                        pkv_error *err) {
  int64_t value;
  if (word >= r->words) return BAD("line %d: %s: a number is missing", r->line, r->word[0]);
  if (!pkv_parse_i64(&value, r->word[word], lo, hi))
    return BAD("line %d: %s: '%.40s' is no whole number from %" PRId64 " to %" PRId64, r->line,
               r->word[0], r->word[word], lo, hi);
  *out = (int32_t)value;
  return PKV_OK;
}

static pkv_status number(double *out, const reader *r, int32_t word, double lo, double hi,
                         pkv_error *err) {
  if (word >= r->words) return BAD("line %d: %s: a number is missing", r->line, r->word[0]);
  if (!pkv_parse_f64(out, r->word[word], lo, hi))
    return BAD("line %d: %s: '%.40s' is no number from %g to %g", r->line, r->word[0],
               r->word[word], lo, hi);
  return PKV_OK;
}

/* What stands after the key, as text. */
static pkv_status plain(char *out, size_t size, const reader *r, pkv_error *err) {
  const size_t length = (size_t)(r->at - 1 - r->rest);
  if (length == 0 || length >= size || r->rest[0] == ' ')
    return BAD("line %d: %s: 1 to %zu characters are needed", r->line, r->word[0], size - 1);
  memcpy(out, r->rest, length);
  out[length] = '\0';
  return PKV_OK;
}

static pkv_status read_shape(reader *r, pkv_error *err) {
  pkv_shape *s = &r->model.shape;
  int32_t *const fields[] = {&s->query_heads, &s->kv_heads, &s->head_dim,
                             &s->page_tokens, &s->q_len,    &s->window};
  pkv_error why = {PKV_OK, NULL, {0}};
  for (int32_t i = 0; i < 6; i++)
    PKV_TRY(whole(fields[i], r, i + 1, 0, 1 << 24, err));
  if (pkv_shape_check(s, &why) != PKV_OK) return BAD("line %d: %s", r->line, why.text);
  return PKV_OK;
}

static pkv_status read_features(const reader *r, pkv_error *err) {
  if (r->words != PKV_COST_FEATURES + 1)
    return BAD("line %d: %d features, this library has %d", r->line, r->words - 1,
               PKV_COST_FEATURES);
  for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
    if (strcmp(r->word[i + 1], pkv_cost_feature_name(i)) != 0)
      return BAD("line %d: feature %d is '%.40s', this library has '%s'", r->line, i + 1,
                 r->word[i + 1], pkv_cost_feature_name(i));
  return PKV_OK;
}

static pkv_status read_dtype(reader *r, pkv_error *err) {
  for (int d = PKV_DTYPE_F32; d <= PKV_DTYPE_FP8_E4M3; d++)
    if (r->words > 1 && strcmp(r->word[1], pkv_dtype_name((pkv_dtype)d)) == 0) {
      r->model.kv_dtype = (pkv_dtype)d;
      return PKV_OK;
    }
  return BAD("line %d: kv_dtype: no known type", r->line);
}

static pkv_status read_cost(reader *r, int32_t which, pkv_error *err) {
  int32_t kind = 1, expected = which == 0 ? 5 : PKV_COST_FEATURES + 2;
  while (kind < PKV_COST_KINDS &&
         (r->words < 2 || strcmp(r->word[1], pkv_cost_kind_name(kind)) != 0))
    kind++;
  if (kind == PKV_COST_KINDS) return BAD("line %d: %s: no known route", r->line, r->word[0]);
  if (r->costs[which] >> kind & 1u)
    return BAD("line %d: a second %s %s", r->line, r->word[0], r->word[1]);
  if (r->words != expected)
    return BAD("line %d: %s: %d words, %d are needed", r->line, r->word[0], r->words, expected);
  r->costs[which] |= 1u << kind;
  pkv_route_cost *c = &r->model.cost[kind];
  if (which == 0) {
    PKV_TRY(whole(&c->points, r, 2, 1, INT32_MAX, err));
    PKV_TRY(number(&c->error_mean, r, 3, 0, MOST_US, err));
    return number(&c->error_worst, r, 4, 0, MOST_US, err);
  }
  for (int32_t i = 0; i < PKV_COST_FEATURES; i++)
    PKV_TRY(number(which == 1 ? &c->attend[i] : &c->plan[i], r, i + 2, 0, MOST_US, err));
  return PKV_OK;
}

/* A line with a key of its own. */
static pkv_status read_key(reader *r, uint32_t key, pkv_error *err) {
  pkv_profile *p = &r->profile;
  pkv_cost_model *m = &r->model;
  int32_t routes = 0;
  switch (key) {
  case SEEN_READ:
    return number(&p->read_gb_s, r, 1, 1e-6, 1e9, err);
  case SEEN_LAUNCH:
    return number(&p->launch_us, r, 1, 1e-6, 1e9, err);
  case SEEN_SMS:
    return whole(&p->sms, r, 1, 1, 65536, err);
  case SEEN_CTAS:
    return whole(&p->min_ctas, r, 1, 1, 64, err);
  case SEEN_ROUTES:
    PKV_TRY(whole(&routes, r, 1, 1, 0xff, err));
    p->routes = (uint32_t)routes;
    if (routes & 1) return BAD("line %d: routes: %d has bit 0 set", r->line, routes);
    return PKV_OK;
  case SEEN_DEVICE:
    return plain(m->device, sizeof m->device, r, err);
  case SEEN_DRIVER:
    return plain(m->driver, sizeof m->driver, r, err);
  case SEEN_LIBRARY:
    return plain(m->library, sizeof m->library, r, err);
  case SEEN_DATE:
    return plain(m->date, sizeof m->date, r, err);
  case SEEN_SHAPE:
    return read_shape(r, err);
  case SEEN_DTYPE:
    return read_dtype(r, err);
  case SEEN_PARTS:
    return whole(&m->parts, r, 1, 0, 65536, err);
  default:
    return read_features(r, err);
  }
}

static pkv_status read_line(reader *r, pkv_error *err) {
  static const char *const keys[] = {"read_gb_s", "launch_us", "sms",     "min_ctas", "routes",
                                     "device",    "driver",    "library", "date",     "shape",
                                     "kv_dtype",  "parts",     "features"};
  static const char *const costs[] = {"cost", "attend", "plan"};
  static const int32_t words[] = {2, 2, 2, 2, 2, 0, 0, 0, 0, 7, 2, 2, PKV_COST_FEATURES + 1};
  for (int32_t i = 0; i < 3; i++)
    if (strcmp(r->word[0], costs[i]) == 0) return read_cost(r, i, err);
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    const uint32_t key = 1u << i;
    if (strcmp(r->word[0], keys[i]) != 0) continue;
    if (r->seen & key) return BAD("line %d: a second %s", r->line, keys[i]);
    if (words[i] > 0 && r->words != words[i])
      return BAD("line %d: %s: %d words, %d are needed", r->line, keys[i], r->words, words[i]);
    r->seen |= key;
    return read_key(r, key, err);
  }
  return BAD("line %d: '%.40s' is no key of a profile", r->line, r->word[0]);
}

pkv_status pkv_profile_parse(pkv_profile *out, pkv_cost_model *model, const char *text,
                             size_t bytes, pkv_error *err) {
  reader r = {.profile = PKV_PROFILE_INIT, .at = text, .end = text ? text + bytes : NULL};
  PKV_CHECK(err, out && model && text, PKV_E_INVALID, "out, model or text is NULL");
  if (bytes > PKV_PROFILE_MAX_BYTES)
    return BAD("%zu bytes, a profile has at most %d", bytes, PKV_PROFILE_MAX_BYTES);
  r.model.struct_size = sizeof r.model;
  r.model.shape = (pkv_shape)PKV_SHAPE_INIT;
  PKV_TRY(next_line(&r, err));
  if (r.words != 2 || strcmp(r.word[0], "pkv-profile") != 0)
    return BAD("line 1: not a profile: '" HEAD "' is expected");
  if (strcmp(r.word[1], "2") != 0)
    return BAD("line 1: version '%.40s', this library reads 2", r.word[1]);
  for (;;) {
    PKV_TRY(next_line(&r, err));
    if (strcmp(r.word[0], "end") == 0) break;
    PKV_TRY(read_line(&r, err));
  }
  if (r.words != 1 || r.at != r.end) return BAD("line %d: text after 'end'", r.line);
  if (r.seen != SEEN_ALL)
    return BAD("line %d: keys are missing (0x%x)", r.line, (unsigned)(SEEN_ALL & ~r.seen));
  if (r.costs[0] == 0 || r.costs[0] != r.costs[1] || r.costs[0] != r.costs[2])
    return BAD("line %d: each route needs a line cost, attend and plan", r.line);
  (void)snprintf(r.profile.name, sizeof r.profile.name, "%.63s", r.model.device);
  *model = r.model;
  r.profile.model = model;
  *out = r.profile;
  return PKV_OK;
}
