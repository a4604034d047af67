/* SPDX-License-Identifier: Apache-2.0 */
/* A command line from filled options: what a result file says it was made by. */
#include "cli/command.h"

#include <string.h>

#include "base/text.h"

#define PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./@%"

/* As a shell reads it back. */
static pkv_status append_word(pkv_buffer *b, const char *word, pkv_error *err) {
  if (word[0] != '\0' && word[strspn(word, PLAIN)] == '\0')
    return pkv_buffer_append(b, word, strlen(word), err);
  PKV_TRY(pkv_buffer_append(b, "'", 1, err));
  for (; *word != '\0'; word++) {
    const char c = *word == '\n' || *word == '\r' ? ' ' : *word;
    PKV_TRY(c == '\'' ? pkv_buffer_append(b, "'\\''", 4, err) : pkv_buffer_append(b, &c, 1, err));
  }
  return pkv_buffer_append(b, "'", 1, err);
}

static int64_t whole(const pkv_option *o, const unsigned char *target) {
  int64_t big = 0;
  int32_t small = 0;
  if (o->bytes == sizeof big) {
    memcpy(&big, target, sizeof big);
    return big;
  }
  memcpy(&small, target, sizeof small);
  return small;
}

static pkv_status append_option(pkv_buffer *b, const pkv_option *o, const void *options,
                                pkv_error *err) {
  const unsigned char *const target = (const unsigned char *)options + o->offset;
  const char *text = NULL;
  char number[48] = "";
  double value;
  switch (o->type) {
  case PKV_OPTION_FLAG:
    return whole(o, target) ? pkv_buffer_printf(b, err, " --%s", o->name) : PKV_OK;
  case PKV_OPTION_INT:
    (void)snprintf(number, sizeof number, "%lld", (long long)whole(o, target));
    text = number;
    break;
  case PKV_OPTION_NUMBER:
    memcpy(&value, target, sizeof value);
    (void)snprintf(number, sizeof number, "%.17g", value);
    text = number;
    break;
  case PKV_OPTION_TEXT:
    memcpy(&text, target, sizeof text);
    break;
  case PKV_OPTION_CHOICE:
    text = o->choices[whole(o, target)];
    break;
  }
  if (text == NULL || (o->fallback != NULL && strcmp(text, o->fallback) == 0)) return PKV_OK;
  PKV_TRY(pkv_buffer_printf(b, err, " --%s ", o->name));
  return append_word(b, text, err);
}

pkv_status pkv_options_text(pkv_buffer *out, const pkv_command *command, const void *options,
                            const char *without, pkv_error *err) {
  PKV_TRY(pkv_buffer_printf(out, err, "%s", command->name));
  for (int i = 0; i < command->option_count; i++) {
    const pkv_option *o = &command->options[i];
    const char *found = without;
    const size_t size = strlen(o->name);
    while ((found = strstr(found, o->name)) != NULL &&
           ((found > without && found[-1] != ',') || (found[size] != ',' && found[size] != '\0')))
      found += size;
    if (found == NULL) PKV_TRY(append_option(out, o, options, err));
  }
  return PKV_OK;
}
