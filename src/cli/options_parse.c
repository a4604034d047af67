/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing of a command's arguments by its option table: strict; messages name the option. */
#include "cli/command.h"

#include <stdio.h>
#include <string.h>

#include "base/text.h"

/* How far an unknown word may be from a known one to be suggested. */
#define NEAR_LIMIT 3
#define WORD_LIMIT 48

/* Edits (insert, delete, replace, swap of neighbours) between two words; WORD_LIMIT: too long. */
static int word_distance(const char *a, const char *b) {
  const int la = (int)strlen(a), lb = (int)strlen(b);
  int rows[3][WORD_LIMIT + 1];
  if (la >= WORD_LIMIT || lb >= WORD_LIMIT) return WORD_LIMIT;
  for (int j = 0; j <= lb; j++)
    rows[0][j] = j;
  for (int i = 1; i <= la; i++) {
    int *const now = rows[i % 3];
    const int *const last = rows[(i + 2) % 3], *const before = rows[(i + 1) % 3];
    now[0] = i;
    for (int j = 1; j <= lb; j++) {
      int best = last[j - 1] + (a[i - 1] != b[j - 1]);
      if (last[j] + 1 < best) best = last[j] + 1;
      if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
          before[j - 2] + 1 < best)
        best = before[j - 2] + 1;
      now[j] = best;
    }
  }
  return rows[la % 3][lb];
}

const char *pkv_nearest_word(const char *word, const char *const *candidates, int count) {
  const char *nearest = NULL;
  int best = NEAR_LIMIT + 1;
  const int third = (int)(strlen(word) / 3) + 1;
  for (int i = 0; i < count; i++) {
    int distance = word_distance(word, candidates[i]);
    /* A beginning that fits is as good as one slip. */
    if (strlen(word) >= 2 && strncmp(word, candidates[i], strlen(word)) == 0 && distance > 1)
      distance = 1;
    if (distance < best && distance <= third) {
      best = distance;
      nearest = candidates[i];
    }
  }
  return nearest;
}

static void store_int(const pkv_option *o, void *options, int64_t value) {
  unsigned char *const target = (unsigned char *)options + o->offset;
  if (o->bytes == sizeof(int64_t)) {
    memcpy(target, &value, sizeof value);
  } else {
    const int32_t small = (int32_t)value;
    memcpy(target, &small, sizeof small);
  }
}

static bool store_choice(const pkv_option *o, void *options, const char *text) {
  for (int i = 0; o->choices[i] != NULL; i++) {
    if (strcmp(o->choices[i], text) == 0) {
      store_int(o, options, i);
      return true;
    }
  }
  return false;
}

static bool store_flag(const pkv_option *o, void *options, const char *text) {
  const bool on = strcmp(text, "true") == 0 || strcmp(text, "1") == 0;
  if (!on && strcmp(text, "false") != 0 && strcmp(text, "0") != 0) return false;
  store_int(o, options, on);
  return true;
}

bool pkv_option_store(const pkv_option *o, void *options, const char *text) {
  unsigned char *const target = (unsigned char *)options + o->offset;
  int64_t whole = 0;
  double number = 0.0;
  switch (o->type) {
  case PKV_OPTION_INT:
    if (!pkv_parse_i64(&whole, text, o->lo, o->hi)) return false;
    store_int(o, options, whole);
    return true;
  case PKV_OPTION_NUMBER:
    if (!pkv_parse_f64(&number, text, o->low, o->high)) return false;
    memcpy(target, &number, sizeof number);
    return true;
  case PKV_OPTION_TEXT:
    memcpy(target, &text, sizeof text);
    return true;
  case PKV_OPTION_CHOICE:
    return store_choice(o, options, text);
  case PKV_OPTION_FLAG:
    return store_flag(o, options, text);
  }
  return false;
}

static void choice_words(char *out, size_t bytes, const pkv_option *o) {
  size_t used = 0;
  for (int i = 0; o->choices[i] != NULL && used < bytes; i++) {
    const int n = snprintf(out + used, bytes - used, "%s%s", i == 0 ? "" : ", ", o->choices[i]);
    used += n > 0 ? (size_t)n : 0;
  }
}

void pkv_option_bounds(char *out, size_t bytes, const pkv_option *o) {
  char list[256] = "";
  switch (o->type) {
  case PKV_OPTION_INT:
    (void)snprintf(out, bytes, "it takes a whole number from %lld to %lld", (long long)o->lo,
                   (long long)o->hi);
    return;
  case PKV_OPTION_NUMBER:
    (void)snprintf(out, bytes, "it takes a number from %g to %g", o->low, o->high);
    return;
  case PKV_OPTION_CHOICE:
    choice_words(list, sizeof list, o);
    (void)snprintf(out, bytes, "it may be one of %s", list);
    return;
  case PKV_OPTION_FLAG:
    (void)snprintf(out, bytes, "it may be true or false");
    return;
  case PKV_OPTION_TEXT:
    (void)snprintf(out, bytes, "it takes text");
    return;
  }
}

static int refuse_value(const pkv_cli *cli, const pkv_option *o, const char *text) {
  char bounds[320];
  pkv_option_bounds(bounds, sizeof bounds, o);
  return pkv_cli_usage(cli, "--%s is '%s'; %s", o->name, text, bounds);
}

const pkv_option *pkv_option_find(const pkv_command *command, const char *name, size_t length) {
  for (int i = 0; i < command->option_count; i++) {
    const pkv_option *const o = &command->options[i];
    if (strlen(o->name) == length && strncmp(o->name, name, length) == 0) return o;
  }
  return NULL;
}

static const pkv_option *find_letter(const pkv_command *command, char letter) {
  for (int i = 0; i < command->option_count; i++)
    if (command->options[i].letter == letter) return &command->options[i];
  return NULL;
}

static int unknown_long(const pkv_cli *cli, const char *name, size_t length) {
  const char *names[65];
  char word[WORD_LIMIT + 1];
  int count = 0;
  for (int i = 0; i < cli->command->option_count && count < 64; i++)
    names[count++] = cli->command->options[i].name;
  names[count++] = "help";
  (void)snprintf(word, sizeof word, "%.*s", (int)(length < WORD_LIMIT ? length : WORD_LIMIT), name);
  const char *const near = pkv_nearest_word(word, names, count);
  if (near != NULL)
    return pkv_cli_usage(cli, "unknown option '--%s'; did you mean '--%s'?", word, near);
  return pkv_cli_usage(cli, "unknown option '--%s'", word);
}

/* State of one pass over argv. */
typedef struct parse_state {
  pkv_cli *cli;
  void *options;
  bool *help;
  int argc, next;
  char **argv;
  uint64_t given; /* bit i: option i was given */
} parse_state;

static int take_value(parse_state *s, const pkv_option *o, const char *attached) {
  const char *text = attached;
  s->given |= UINT64_C(1) << (unsigned)(o - s->cli->command->options);
  if (o->type == PKV_OPTION_FLAG) {
    /* What a file of settings says can be taken back. */
    if (attached == NULL) text = "true";
    if (attached != NULL && s->cli->command->settings_of == NULL)
      return pkv_cli_usage(s->cli, "--%s takes no value, '%s' was given", o->name, attached);
  } else if (text == NULL) {
    if (s->next >= s->argc) return pkv_cli_usage(s->cli, "--%s needs a value", o->name);
    text = s->argv[s->next++];
  }
  return pkv_option_store(o, s->options, text) ? PKV_EXIT_OK : refuse_value(s->cli, o, text);
}

static int parse_long(parse_state *s, const char *word) {
  const char *const equals = strchr(word, '=');
  const size_t length = equals != NULL ? (size_t)(equals - word) : strlen(word);
  const pkv_option *const o = pkv_option_find(s->cli->command, word, length);
  if (o != NULL) return take_value(s, o, equals != NULL ? equals + 1 : NULL);
  if (strcmp(word, "help") == 0) {
    *s->help = true;
    return PKV_EXIT_OK;
  }
  return unknown_long(s->cli, word, length);
}

static int parse_letters(parse_state *s, const char *word) {
  for (const char *p = word; *p != '\0'; p++) {
    const pkv_option *const o = find_letter(s->cli->command, *p);
    if (o == NULL && *p == 'h') {
      *s->help = true;
      return PKV_EXIT_OK;
    }
    if (o == NULL) return pkv_cli_usage(s->cli, "unknown option '-%c'", *p);
    if (o->type != PKV_OPTION_FLAG) return take_value(s, o, p[1] != '\0' ? p + 1 : NULL);
    const int code = take_value(s, o, NULL);
    if (code != PKV_EXIT_OK) return code;
  }
  return PKV_EXIT_OK;
}

static int set_defaults(const pkv_cli *cli, void *options) {
  memset(options, 0, cli->command->options_bytes);
  for (int i = 0; i < cli->command->option_count; i++) {
    const pkv_option *const o = &cli->command->options[i];
    if (o->fallback != NULL && !pkv_option_store(o, options, o->fallback)) {
      pkv_cli_error(cli, "the default '%s' of --%s is out of its bounds", o->fallback, o->name);
      return PKV_EXIT_FAILURE;
    }
  }
  return PKV_EXIT_OK;
}

static int check_complete(const parse_state *s) {
  const pkv_command *const command = s->cli->command;
  for (int i = 0; i < command->option_count; i++) {
    const pkv_option *const o = &command->options[i];
    if (o->required && (s->given >> (unsigned)i & 1u) == 0u)
      return pkv_cli_usage(s->cli, "--%s %s is missing", o->name, o->value);
  }
  if (s->cli->operand_count < command->min_operands)
    return pkv_cli_usage(s->cli, "%s is missing", command->operands);
  if (s->cli->operand_count > command->max_operands)
    return pkv_cli_usage(s->cli, "'%s' is one argument too many",
                         s->cli->operands[command->max_operands]);
  return PKV_EXIT_OK;
}

int pkv_options_parse(pkv_cli *cli, void *options, bool *help, int argc, char **argv) {
  parse_state s = {cli, options, help, argc, 0, argv, 0};
  bool only_operands = false;
  int code = set_defaults(cli, options);
  cli->operands = argv;
  cli->operand_count = 0;
  while (code == PKV_EXIT_OK && s.next < argc && !*help) {
    char *const word = argv[s.next++];
    if (only_operands || word[0] != '-' || word[1] == '\0')
      argv[cli->operand_count++] = word;
    else if (strcmp(word, "--") == 0)
      only_operands = true;
    else if (word[1] == '-')
      code = parse_long(&s, word + 2);
    else
      code = parse_letters(&s, word + 1);
  }
  if (code != PKV_EXIT_OK || *help) return code;
  if (cli->command->settings_of != NULL) code = pkv_options_settings(cli, options, &s.given);
  return code == PKV_EXIT_OK ? check_complete(&s) : code;
}
