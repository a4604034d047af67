/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `pkv inspect`: what is in a model file, and whether we can use it. Facts are collected as JSON
 * first; text is a second way to print them.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/prompt_text.h"
#include "cli/safe_text.h"
#include "cli/sandbox.h"
#include "pkv/engine.h"

#define SHOWN_ELEMENTS 8   /* of an array, without --full */
#define SHOWN_BYTES    100 /* of a text, without --full */

typedef struct inspect_options {
  int32_t full, summary, json, sandbox;
} inspect_options;

static const pkv_option options_table[] = {
    PKV_FLAG(inspect_options, full, 'f', "full", "whole arrays, and whole texts"),
    PKV_FLAG(inspect_options, summary, 's', "summary", "no keys, no tensors"),
    PKV_FLAG(inspect_options, json, 0, "json", "print one JSON object"),
    PKV_FLAG(inspect_options, sandbox, 0, "sandbox",
             "open no file but the model's, start no program, connect nowhere"),
};

/* ---- collecting ---- */

typedef struct collection {
  json_t *root, *keys, *tensors, *types; /* borrowed from root, which is ours */
  json_t *values;                        /* of the array that is being visited */
  bool failed;                           /* out of memory */
} collection;

/* A failed json_pack or set shows here, once. */
static int32_t keep(collection *c, bool good) {
  if (!good) c->failed = true;
  return c->failed;
}

static json_t *model_json(const pkv_model_info *m) {
  if (m == NULL) return json_null();
  return json_pack("{s:o, s:o, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:I, s:I, s:i, s:i}",
                   "architecture", pkv_safe_json(m->architecture, strlen(m->architecture)), "name",
                   pkv_safe_json(m->name, strlen(m->name)), "layers", (int)m->layers, "width",
                   (int)m->width, "feed_forward", (int)m->feed_forward, "query_heads",
                   (int)m->query_heads, "kv_heads", (int)m->kv_heads, "head_dim", (int)m->head_dim,
                   "vocab", (int)m->vocab, "context", (int)m->context, "parameters",
                   (json_int_t)m->parameters, "weight_bytes", (json_int_t)m->weight_bytes, "bos",
                   (int)m->bos, "eos", (int)m->eos);
}

static int32_t on_file(void *user, const pkv_inspect_file *f) {
  collection *const c = user;
  json_t *const facts = json_pack(
      "{s:s, s:I, s:I, s:I, s:I, s:I, s:b, s:o, s:o}", "format", f->format, "version",
      (json_int_t)f->version, "alignment", (json_int_t)f->alignment, "file_bytes",
      (json_int_t)f->file_bytes, "data_offset", (json_int_t)f->data_offset, "tensor_bytes",
      (json_int_t)f->tensor_bytes, "usable", f->usable == PKV_OK, "problem",
      f->usable == PKV_OK ? json_null() : pkv_safe_json(f->problem, strlen(f->problem)), "model",
      model_json(f->model));
  bool good = facts != NULL && json_object_update(c->root, facts) == 0;
  json_decref(facts);
  c->types = json_array();
  c->keys = json_array();
  c->tensors = json_array();
  good = json_object_set_new(c->root, "types", c->types) == 0 && good;
  good = json_object_set_new(c->root, "keys", c->keys) == 0 && good;
  good = json_object_set_new(c->root, "tensors", c->tensors) == 0 && good;
  return keep(c, good);
}

static int32_t on_key(void *user, const pkv_inspect_key *k) {
  collection *const c = user;
  json_t *const key =
      json_pack("{s:o, s:s}", "name", pkv_safe_json(k->name, k->name_bytes), "type", k->type);
  bool good = key != NULL;
  c->values = NULL;
  if (good && strcmp(k->type, "array") == 0) {
    c->values = json_array();
    good = json_object_set_new(key, "element_type", json_string(k->element_type)) == 0 &&
           json_object_set_new(key, "count", json_integer((json_int_t)k->count)) == 0 &&
           json_object_set_new(key, "value", c->values) == 0;
  }
  return keep(c, json_array_append_new(c->keys, key) == 0 && good);
}

/* JSON has no NaN, no infinity, and integers to 2^63 here: such values become text. */
static json_t *element_json(const pkv_inspect_element *e) {
  char text[32];
  switch (e->kind) {
  case PKV_INSPECT_TEXT:
    return pkv_safe_json(e->text, e->text_bytes);
  case PKV_INSPECT_BOOL:
    return json_boolean(e->as_int != 0);
  case PKV_INSPECT_FLOAT:
    if (isfinite(e->as_float)) return json_real(e->as_float);
    (void)snprintf(text, sizeof text, "%g", e->as_float);
    return json_string(text);
  case PKV_INSPECT_UINT:
    if (e->as_uint <= INT64_MAX) return json_integer((json_int_t)e->as_uint);
    (void)snprintf(text, sizeof text, "%llu", (unsigned long long)e->as_uint);
    return json_string(text);
  case PKV_INSPECT_INT:
    break;
  }
  return json_integer((json_int_t)e->as_int);
}

static int32_t on_element(void *user, const pkv_inspect_key *k, int64_t index,
                          const pkv_inspect_element *e) {
  collection *const c = user;
  (void)k;
  (void)index;
  json_t *const value = element_json(e);
  if (c->values != NULL) return keep(c, json_array_append_new(c->values, value) == 0);
  json_t *const key = json_array_get(c->keys, json_array_size(c->keys) - 1);
  return keep(c, json_object_set_new(key, "value", value) == 0);
}

static json_int_t number(const json_t *object, const char *name) {
  return json_integer_value(json_object_get(object, name));
}

/* One row a tensor type: how many, how large, whether we compute with it. */
static bool count_type(collection *c, const pkv_inspect_tensor *t) {
  json_t *row = NULL;
  for (size_t i = 0; i < json_array_size(c->types) && row == NULL; i++) {
    json_t *const one = json_array_get(c->types, i);
    if (strcmp(json_string_value(json_object_get(one, "type")), t->type) == 0) row = one;
  }
  if (row == NULL) {
    row = json_pack("{s:s, s:i, s:i, s:i, s:b}", "type", t->type, "tensors", 0, "elements", 0,
                    "bytes", 0, "supported", (int)t->supported);
    if (json_array_append_new(c->types, row) != 0) return false;
  }
  return json_object_set_new(row, "tensors", json_integer(number(row, "tensors") + 1)) == 0 &&
         json_object_set_new(row, "elements",
                             json_integer(number(row, "elements") + t->elements)) == 0 &&
         json_object_set_new(row, "bytes", json_integer(number(row, "bytes") + t->bytes)) == 0;
}

static int32_t on_tensor(void *user, const pkv_inspect_tensor *t) {
  collection *const c = user;
  json_t *const shape = json_array();
  bool good = shape != NULL && count_type(c, t);
  for (int32_t d = 0; d < t->dims; d++)
    good = json_array_append_new(shape, json_integer((json_int_t)t->extent[d])) == 0 && good;
  json_t *const tensor = json_pack(
      "{s:o, s:s, s:o, s:I, s:I, s:I, s:b}", "name", pkv_safe_json(t->name, t->name_bytes), "type",
      t->type, "shape", shape, "elements", (json_int_t)t->elements, "bytes", (json_int_t)t->bytes,
      "offset", (json_int_t)t->offset, "supported", (int)t->supported);
  return keep(c, json_array_append_new(c->tensors, tensor) == 0 && good);
}

/* ---- text ---- */

/* 98362432 -> "98,362,432" */
static const char *grouped(char out[32], json_int_t value) {
  char digits[32];
  size_t at = 0;
  const int count = snprintf(digits, sizeof digits, "%lld", (long long)value);
  for (int i = 0; i < count; i++) {
    if (i > 0 && (count - i) % 3 == 0 && digits[i - 1] != '-') out[at++] = ',';
    out[at++] = digits[i];
  }
  out[at] = '\0';
  return out;
}

typedef struct printer {
  const inspect_options *options;
  pkv_buffer line;
  pkv_error err;
  pkv_status status;
} printer;

static void add_text(printer *p, const json_t *text, bool quoted) {
  const char *const bytes = json_string_value(text);
  const size_t count = json_string_length(text);
  size_t shown = count;
  if (!p->options->full && count > SHOWN_BYTES) shown = SHOWN_BYTES;
  while (shown < count && shown > 0 && ((unsigned char)bytes[shown] & 0xc0) == 0x80)
    shown--; /* not in the middle of a character */
  const char *const quote = quoted ? "\"" : "";
  if (p->status == PKV_OK) p->status = pkv_buffer_printf(&p->line, &p->err, "%s", quote);
  if (p->status == PKV_OK) p->status = pkv_safe_append(&p->line, bytes, shown, &p->err);
  if (p->status == PKV_OK) p->status = pkv_buffer_printf(&p->line, &p->err, "%s", quote);
  if (p->status == PKV_OK && shown < count)
    p->status = pkv_buffer_printf(&p->line, &p->err, "... (%zu bytes)", count);
}

/* A value that came from 32 bits in the digits that 32 bits have. */
static void format_real(char *out, size_t size, double value) {
  if ((double)(float)value == value)
    (void)snprintf(out, size, "%.7g", value);
  else
    (void)snprintf(out, size, "%.15g", value);
}

static void add_value(printer *p, const json_t *value, bool is_text) {
  char text[48];
  if (json_is_string(value)) {
    add_text(p, value, is_text);
    return;
  }
  if (json_is_boolean(value))
    (void)snprintf(text, sizeof text, "%s", json_is_true(value) ? "true" : "false");
  else if (json_is_real(value))
    format_real(text, sizeof text, json_real_value(value));
  else
    (void)snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value));
  if (p->status == PKV_OK) p->status = pkv_buffer_printf(&p->line, &p->err, "%s", text);
}

static const char *text_of(const json_t *object, const char *name) {
  const char *const text = json_string_value(json_object_get(object, name));
  return text != NULL ? text : "";
}

static void put(printer *p, const char *text) {
  if (p->status == PKV_OK) p->status = pkv_buffer_printf(&p->line, &p->err, "%s", text);
}

/* Writes the line; false when it is time to stop. */
static bool flush(printer *p) {
  put(p, "\n");
  const bool written = p->status == PKV_OK && pkv_cli_write(p->line.data, p->line.size);
  pkv_buffer_clear(&p->line);
  return written && !pkv_cli_interrupted();
}

static void pad_to(printer *p, size_t column) {
  do {
    put(p, " ");
  } while (p->status == PKV_OK && p->line.size < column);
}

static bool print_key(printer *p, const json_t *key) {
  const json_t *const value = json_object_get(key, "value");
  put(p, "  ");
  add_text(p, json_object_get(key, "name"), false);
  pad_to(p, 42);
  if (!json_is_array(value)) {
    put(p, text_of(key, "type"));
    pad_to(p, 50);
    add_value(p, value, strcmp(text_of(key, "type"), "string") == 0);
    return flush(p);
  }
  const bool is_text = strcmp(text_of(key, "element_type"), "string") == 0;
  char count[32];
  put(p, text_of(key, "element_type"));
  pad_to(p, 50);
  put(p, grouped(count, number(key, "count")));
  put(p, " of [");
  for (size_t i = 0; i < json_array_size(value); i++) {
    if (i > 0) put(p, ", ");
    add_value(p, json_array_get(value, i), is_text);
  }
  put(p, (json_int_t)json_array_size(value) < number(key, "count") ? ", ...]" : "]");
  return flush(p);
}

static bool print_tensor(printer *p, const json_t *tensor) {
  const json_t *const shape = json_object_get(tensor, "shape");
  char text[32];
  put(p, "  ");
  add_text(p, json_object_get(tensor, "name"), false);
  pad_to(p, 42);
  put(p, text_of(tensor, "type"));
  pad_to(p, 50);
  for (size_t i = 0; i < json_array_size(shape); i++) {
    if (i > 0) put(p, " x ");
    (void)snprintf(text, sizeof text, "%lld",
                   (long long)json_integer_value(json_array_get(shape, i)));
    put(p, text);
  }
  if (json_array_size(shape) == 0) put(p, "scalar");
  pad_to(p, 66);
  put(p, grouped(text, number(tensor, "bytes")));
  put(p, " bytes at ");
  put(p, grouped(text, number(tensor, "offset")));
  if (!json_is_true(json_object_get(tensor, "supported"))) put(p, "  (not supported)");
  return flush(p);
}

static bool print_type(printer *p, const json_t *type) {
  char tensors[32], elements[32], bytes[32], line[192];
  (void)snprintf(line, sizeof line, "  %-8s %6s tensors %16s elements %16s bytes%s",
                 text_of(type, "type"), grouped(tensors, number(type, "tensors")),
                 grouped(elements, number(type, "elements")), grouped(bytes, number(type, "bytes")),
                 json_is_true(json_object_get(type, "supported")) ? "" : "  (not supported)");
  put(p, line);
  return flush(p);
}

static bool print_model(printer *p, const json_t *model) {
  char line[320], parameters[32];
  if (!json_is_object(model)) return true;
  put(p, "model   ");
  add_text(p, json_object_get(model, "architecture"), false);
  put(p, " ");
  add_text(p, json_object_get(model, "name"), true);
  (void)snprintf(line, sizeof line, ", %s parameters",
                 grouped(parameters, number(model, "parameters")));
  put(p, line);
  if (!flush(p)) return false;
  (void)snprintf(line, sizeof line,
                 "        %lld layers of width %lld, %lld query heads and %lld KV heads of %lld, "
                 "feed-forward %lld, vocabulary %lld, context %lld",
                 number(model, "layers"), number(model, "width"), number(model, "query_heads"),
                 number(model, "kv_heads"), number(model, "head_dim"),
                 number(model, "feed_forward"), number(model, "vocab"), number(model, "context"));
  put(p, line);
  return flush(p);
}

static bool print_head(printer *p, const json_t *root) {
  char line[160], a[32], b[32], c[32];
  put(p, "file    ");
  add_text(p, json_object_get(root, "file"), false);
  if (!flush(p)) return false;
  (void)snprintf(line, sizeof line, "format  %s version %lld, alignment %lld",
                 text_of(root, "format"), number(root, "version"), number(root, "alignment"));
  put(p, line);
  if (!flush(p)) return false;
  (void)snprintf(line, sizeof line, "size    %s bytes; tensors %s bytes from %s on",
                 grouped(a, number(root, "file_bytes")), grouped(b, number(root, "tensor_bytes")),
                 grouped(c, number(root, "data_offset")));
  put(p, line);
  if (!flush(p) || !print_model(p, json_object_get(root, "model"))) return false;
  put(p, "usable  ");
  put(p, json_is_true(json_object_get(root, "usable")) ? "yes" : "no: ");
  if (json_is_string(json_object_get(root, "problem")))
    add_text(p, json_object_get(root, "problem"), false);
  return flush(p);
}

static bool print_list(printer *p, const json_t *root, const char *name,
                       bool (*print)(printer *, const json_t *)) {
  const json_t *const list = json_object_get(root, name);
  char line[64], count[32];
  (void)snprintf(line, sizeof line, "\n%s (%s)", name,
                 grouped(count, (json_int_t)json_array_size(list)));
  put(p, line);
  if (!flush(p)) return false;
  for (size_t i = 0; i < json_array_size(list); i++)
    if (!print(p, json_array_get(list, i))) return false;
  return true;
}

static int print_text(const pkv_cli *cli, const inspect_options *options, const json_t *root) {
  printer p = {.options = options, .status = PKV_OK};
  pkv_buffer_init(&p.line, SIZE_MAX / 4, NULL);
  bool more = print_head(&p, root) && print_list(&p, root, "types", print_type);
  if (more && !options->summary)
    more = print_list(&p, root, "keys", print_key) && print_list(&p, root, "tensors", print_tensor);
  pkv_buffer_deinit(&p.line);
  if (p.status != PKV_OK) return pkv_cli_fail(cli, &p.err);
  return !more && pkv_cli_interrupted() ? PKV_EXIT_INTERRUPTED : PKV_EXIT_OK;
}

static pkv_status enter_sandbox(const char *path, pkv_error *err) {
  const pkv_status status = pkv_sandbox_files(path, NULL, 0, err);
  return status == PKV_OK ? pkv_sandbox_calls(err) : status;
}

static int run(const pkv_cli *cli, const void *given) {
  const inspect_options *const options = given;
  const char *const path = cli->operands[0];
  collection c = {.root = json_object()};
  pkv_inspector visitor = PKV_INSPECTOR_INIT;
  pkv_error err = {PKV_OK, NULL, {0}};
  if (options->sandbox && enter_sandbox(path, &err) != PKV_OK) {
    json_decref(c.root);
    return pkv_cli_fail(cli, &err);
  }
  visitor.user = &c;
  visitor.max_elements = options->full ? 0 : SHOWN_ELEMENTS;
  visitor.file = on_file;
  visitor.key = on_key;
  visitor.element = on_element;
  visitor.tensor = on_tensor;
  c.failed = json_object_set_new(c.root, "file", pkv_safe_json(path, strlen(path))) != 0;
  int code = PKV_EXIT_FAILURE;
  if (pkv_model_inspect(path, &visitor, NULL, &err) != PKV_OK) {
    pkv_error named;
    (void)pkv_fail_named(&named, &err, path);
    code = pkv_cli_fail(cli, &named);
  } else if (c.failed) {
    pkv_cli_error(cli, "out of memory");
  } else {
    if (options->summary) {
      (void)json_object_del(c.root, "keys");
      (void)json_object_del(c.root, "tensors");
    }
    code =
        options->json ? pkv_cli_json(cli, json_incref(c.root)) : print_text(cli, options, c.root);
  }
  json_decref(c.root);
  return code;
}

const pkv_command pkv_command_inspect = {
    .name = "inspect",
    .summary = "Show what is in a model file, and whether it can be used",
    .details =
        "Keys, tensors, sizes and types of a GGUF file. Files of architectures or weight types "
        "that pkv does not run are shown too; 'usable' then says why. Text of the file is escaped "
        "(\\n, \\xHH, \\u{HHHH}), so that no file can write to the terminal what it wants.\n\n"
        "With --json, bytes that are not UTF-8 become U+FFFD, and numbers that JSON cannot hold "
        "(NaN, infinities, beyond 2^63) are strings.\n\n"
        "With --sandbox the kernel refuses this process all files but the model's, new programs "
        "and "
        "connections while the file is read; see `pkv serve --help`.\n\n"
        "The exit code is 0 for every file that could be read, usable or not, and 1 where not "
        "even the table of contents is sound.",
    .operands = "MODEL",
    .min_operands = 1,
    .max_operands = 1,
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(inspect_options),
    .run = run,
};
