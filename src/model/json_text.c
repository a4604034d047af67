/* SPDX-License-Identifier: Apache-2.0 */
#include "model/json_text.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json_bounds.h"
#include "base/json_memory.h"
#include "model/mapped_file.h"

pkv_status pkv_json_parse(json_t **out, const char *file, const char *text, size_t bytes,
                          pkv_error *err) {
  json_error_t where;
  *out = NULL;
  switch (pkv_json_check_bounds(text, bytes, PKV_JSON_MAX_VALUES)) {
  case PKV_JSON_TOO_DEEP:
    return PKV_FAIL(err, PKV_E_LIMIT, "%s nests deeper than %d", file, PKV_JSON_DEPTH);
  case PKV_JSON_TOO_MANY:
    return PKV_FAIL(err, PKV_E_LIMIT, "%s has more than %u values", file, PKV_JSON_MAX_VALUES);
  case PKV_JSON_FITS:
    break;
  }
  bool lost;
  json_t *root = pkv_json_load(&lost, text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &where);
  PKV_CHECK(err, !lost, PKV_E_NOMEM, "no memory for the values of %s", file);
  PKV_CHECK(err, root, PKV_E_FORMAT,
            "%s is no JSON (in UTF-8, without duplicate keys): line %d, column %d", file,
            where.line, where.column);
  if (!json_is_object(root)) {
    json_decref(root);
    return PKV_FAIL(err, PKV_E_FORMAT, "%s is not a JSON object", file);
  }
  *out = root;
  return PKV_OK;
}

static pkv_status read_text(json_t **out, const pkv_mapped *mapped, const char *file,
                            size_t max_bytes, const pkv_allocator *allocator, pkv_error *err) {
  PKV_CHECK(err, mapped->size <= max_bytes, PKV_E_LIMIT,
            "%s has %zu bytes, at most %zu are allowed", file, mapped->size, max_bytes);
  char *text = pkv_alloc(allocator, mapped->size);
  PKV_CHECK(err, text, PKV_E_NOMEM, "no memory for %zu bytes of %s", mapped->size, file);
  pkv_status status = pkv_mapped_read((unsigned char *)text, mapped, mapped->size, err);
  if (status == PKV_OK) status = pkv_json_parse(out, file, text, mapped->size, err);
  pkv_free(allocator, text, mapped->size);
  return status;
}

pkv_status pkv_json_read(json_t **out, const char *folder, const char *file, bool required,
                         size_t max_bytes, const pkv_allocator *allocator, pkv_error *err) {
  char path[PATH_MAX];
  pkv_mapped mapped;
  *out = NULL;
  const int n = snprintf(path, sizeof path, "%s/%s", folder, file);
  PKV_CHECK(err, n > 0 && (size_t)n < sizeof path, PKV_E_LIMIT,
            "the folder's name is longer than %d bytes", PATH_MAX);
  if (!required && access(path, F_OK) != 0) return PKV_OK;
  PKV_TRY(pkv_mapped_open(&mapped, path, err));
  const pkv_status status = read_text(out, &mapped, file, max_bytes, allocator, err);
  pkv_mapped_close(&mapped);
  return status;
}

/* ---- by key ---- */

const json_t *pkv_json_get(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  return value && json_is_null(value) ? NULL : value;
}

/* *value is NULL when the key is absent and need not be there. */
static pkv_status get(const json_t **value, const json_t *object, const char *file, const char *key,
                      bool required, pkv_error *err) {
  *value = pkv_json_get(object, key);
  PKV_CHECK(err, *value || !required, PKV_E_FORMAT, "%s: \"%s\" is missing", file, key);
  return PKV_OK;
}

pkv_status pkv_json_get_int(int64_t *out, const json_t *object, const char *file, const char *key,
                            bool required, int64_t lo, int64_t hi, pkv_error *err) {
  const json_t *value;
  PKV_TRY(get(&value, object, file, key, required, err));
  if (!value) return PKV_OK;
  PKV_CHECK(err, json_is_integer(value), PKV_E_FORMAT, "%s: \"%s\" is not an integer", file, key);
  const int64_t number = json_integer_value(value);
  PKV_CHECK(err, number >= lo && number <= hi, PKV_E_FORMAT, "%s: \"%s\" is %lld, not %lld .. %lld",
            file, key, (long long)number, (long long)lo, (long long)hi);
  *out = number;
  return PKV_OK;
}

pkv_status pkv_json_get_float(double *out, const json_t *object, const char *file, const char *key,
                              bool required, double lo, double hi, pkv_error *err) {
  const json_t *value;
  PKV_TRY(get(&value, object, file, key, required, err));
  if (!value) return PKV_OK;
  PKV_CHECK(err, json_is_number(value), PKV_E_FORMAT, "%s: \"%s\" is not a number", file, key);
  const double number = json_number_value(value);
  PKV_CHECK(err, number >= lo && number <= hi, PKV_E_FORMAT, "%s: \"%s\" is %g, not %g .. %g", file,
            key, number, lo, hi);
  *out = number;
  return PKV_OK;
}

pkv_status pkv_json_get_bool(bool *out, const json_t *object, const char *file, const char *key,
                             pkv_error *err) {
  const json_t *value = pkv_json_get(object, key);
  if (!value) return PKV_OK;
  PKV_CHECK(err, json_is_boolean(value), PKV_E_FORMAT, "%s: \"%s\" is neither true nor false", file,
            key);
  *out = json_is_true(value);
  return PKV_OK;
}

pkv_status pkv_json_get_string(pkv_span *out, const json_t *object, const char *file,
                               const char *key, bool required, pkv_error *err) {
  const json_t *value;
  PKV_TRY(get(&value, object, file, key, required, err));
  if (!value) return PKV_OK;
  PKV_CHECK(err, json_is_string(value), PKV_E_FORMAT, "%s: \"%s\" is not a string", file, key);
  *out = (pkv_span){json_string_value(value), json_string_length(value)};
  return PKV_OK;
}

bool pkv_json_says(const json_t *object, const char *key, const char *text) {
  const json_t *value = json_object_get(object, key);
  return json_is_string(value) && strcmp(json_string_value(value), text) == 0 &&
         json_string_length(value) == strlen(text);
}
