/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/prompt_text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

pkv_status pkv_fail_named(pkv_error *err, const pkv_error *plain, const char *path) {
  const bool has_path = strstr(plain->text, path) != NULL;
  return pkv_fail(err, plain->status, plain->where, "%s%s%s", has_path ? "" : path,
                  has_path ? "" : ": ", plain->text);
}

const char *const pkv_weights_choices[] = {"auto", "mapped", "copied", NULL};

pkv_model_options pkv_model_options_for(int32_t weights, int32_t device) {
  pkv_model_options options = PKV_MODEL_OPTIONS_INIT;
  options.weights = (pkv_weights)weights;
  if (options.weights == PKV_WEIGHTS_AUTO && device != PKV_DEVICE_CPU)
    options.weights = PKV_WEIGHTS_MAPPED; /* a device copies them anyway */
  return options;
}

pkv_status pkv_model_open_named(pkv_model **out, const char *path, const pkv_model_options *options,
                                pkv_error *err) {
  pkv_error plain = {PKV_OK, "", ""};
  const pkv_status status = pkv_model_open(out, path, options, &plain);
  return status == PKV_OK ? status : pkv_fail_named(err, &plain, path);
}

pkv_status pkv_prompt_read(pkv_buffer *text, const char *path, pkv_error *err) {
  char block[16384];
  if (strcmp(path, "-") != 0) return pkv_buffer_read_file(text, path, err);
  for (;;) {
    const size_t count = fread(block, 1, sizeof block, stdin);
    if (count > 0) PKV_TRY(pkv_buffer_append(text, block, count, err));
    if (count < sizeof block) break;
  }
  PKV_CHECK(err, !ferror(stdin), PKV_E_IO, "cannot read standard input: %s", strerror(errno));
  return PKV_OK;
}

static int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

/* The byte that the text behind a backslash stands for; *used characters of it. -1: none. */
static int escaped_byte(const char *text, size_t *used) {
  static const char names[] = "ntr\\\"'", bytes[] = "\n\t\r\\\"'";
  *used = 1;
  const char *const at = text[0] != '\0' ? strchr(names, text[0]) : NULL;
  if (at != NULL) return bytes[at - names];
  if (text[0] != 'x' || hex_digit(text[1]) < 0 || hex_digit(text[2]) < 0) return -1;
  *used = 3;
  return hex_digit(text[1]) * 16 + hex_digit(text[2]);
}

pkv_status pkv_prompt_unescape(pkv_buffer *text, pkv_error *err) {
  size_t to = 0;
  for (size_t from = 0; from < text->size;) {
    if (text->data[from] != '\\') {
      text->data[to++] = text->data[from++];
      continue;
    }
    size_t used = 0;
    const int byte = escaped_byte(text->data + from + 1, &used);
    PKV_CHECK(err, byte >= 0, PKV_E_FORMAT,
              "'\\%.1s' at byte %zu of the prompt is no escape sequence (\\n \\t \\r \\\\ \\\" \\' "
              "\\xHH)",
              text->data + from + 1, from);
    text->data[to++] = (char)byte;
    from += 1 + used;
  }
  text->size = to;
  if (text->data != NULL) text->data[to] = '\0';
  return PKV_OK;
}
