/* SPDX-License-Identifier: Apache-2.0 */
/* `pkv tokenize`: the tokens of a text, as ids, as pieces, as JSON, or only counted. */
#include "cli/commands.h"

#include <stdio.h>
#include <string.h>

#include "base/json_memory.h"
#include "base/text.h"
#include "cli/prompt_text.h"
#include "pkv/engine.h"

typedef struct tokenize_options {
  const char *model, *text, *file;
  int32_t escape, special, add_special, chat, pieces, count, json;
} tokenize_options;

static const pkv_option options_table[] = {
    PKV_REQUIRED(tokenize_options, model, 'm', "model", "FILE",
                 "GGUF file, or folder of safetensors"),
    PKV_TEXT(tokenize_options, text, 'p', "prompt", "TEXT", NULL, "the text"),
    PKV_TEXT(tokenize_options, file, 'f', "file", "FILE", NULL,
             "read the text from a file; without one, or with -, from stdin"),
    PKV_FLAG(tokenize_options, escape, 'e', "escape", "replace \\n, \\t, \\xHH and so on"),
    PKV_FLAG(tokenize_options, special, 0, "special",
             "text that spells a control token becomes that token"),
    PKV_FLAG(tokenize_options, add_special, 0, "add-special",
             "add the tokens the model wants at the start and the end"),
    PKV_FLAG(tokenize_options, chat, 'c', "chat",
             "the text is a user's turn of the model's chat format"),
    PKV_FLAG(tokenize_options, pieces, 0, "pieces", "one token a line: id, tab, its text"),
    PKV_FLAG(tokenize_options, count, 0, "count", "print only how many there are"),
    PKV_FLAG(tokenize_options, json, 0, "json", "print one JSON object"),
};

/* What one call owns. */
typedef struct tokenize_state {
  const tokenize_options *options;
  pkv_model *model;
  pkv_buffer text, line;
  pkv_tokens tokens;
} tokenize_state;

/* Output is gathered to this many bytes before it is written. */
#define LINE_FLUSH ((size_t)64 << 10)

static pkv_status load(tokenize_state *s, pkv_error *err) {
  const tokenize_options *const o = s->options;
  pkv_model_options model_options = PKV_MODEL_OPTIONS_INIT;
  model_options.tokenizer_only = 1;
  PKV_TRY(pkv_model_open_named(&s->model, o->model, &model_options, err));
  if (o->text != NULL)
    PKV_TRY(pkv_buffer_append(&s->text, o->text, strlen(o->text), err));
  else
    PKV_TRY(pkv_prompt_read(&s->text, o->file != NULL ? o->file : "-", err));
  if (o->escape) PKV_TRY(pkv_prompt_unescape(&s->text, err));
  const char *const text = s->text.size > 0 ? s->text.data : "";
  if (o->chat) {
    PKV_CHECK(err, memchr(text, 0, s->text.size) == NULL, PKV_E_INVALID,
              "the text holds a zero byte, which --chat cannot take");
    const pkv_message message = {"user", text};
    return pkv_tokens_from_chat(&s->tokens, s->model, &message, 1, err);
  }
  const uint32_t flags =
      (o->special ? PKV_TEXT_PARSE_SPECIAL : 0u) | (o->add_special ? PKV_TEXT_ADD_SPECIAL : 0u);
  return pkv_tokens_from_text(&s->tokens, s->model, text, s->text.size, flags, err);
}

/* ------------------------------------------------------------------------------------------
 * Plain output
 * ------------------------------------------------------------------------------------------ */

static bool flush(tokenize_state *s, bool all) {
  if (s->line.size == 0 || (!all && s->line.size < LINE_FLUSH)) return true;
  const bool ok = pkv_cli_write(s->line.data, s->line.size);
  pkv_buffer_clear(&s->line);
  return ok;
}

/* A piece in quotes on one line: what would break it, and bytes that are no UTF-8, as \xHH. */
static pkv_status append_quoted(pkv_buffer *line, const char *piece, size_t bytes, pkv_error *err) {
  const bool utf8 = pkv_utf8_valid(piece, bytes);
  PKV_TRY(pkv_buffer_append(line, "\"", 1, err));
  for (size_t i = 0; i < bytes; i++) {
    const unsigned char c = (unsigned char)piece[i];
    if (c == '\n')
      PKV_TRY(pkv_buffer_append(line, "\\n", 2, err));
    else if (c == '\t')
      PKV_TRY(pkv_buffer_append(line, "\\t", 2, err));
    else if (c == '"' || c == '\\')
      PKV_TRY(pkv_buffer_printf(line, err, "\\%c", c));
    else if (c < 0x20 || c == 0x7f || (c >= 0x80 && !utf8))
      PKV_TRY(pkv_buffer_printf(line, err, "\\x%02x", (unsigned)c));
    else
      PKV_TRY(pkv_buffer_append(line, &piece[i], 1, err));
  }
  return pkv_buffer_append(line, "\"\n", 2, err);
}

static pkv_status print_plain(tokenize_state *s, pkv_error *err) {
  const tokenize_options *const o = s->options;
  const size_t n = s->tokens.count;
  if (o->count) PKV_TRY(pkv_buffer_printf(&s->line, err, "%zu\n", n));
  for (size_t i = 0; i < n && !o->count; i++) {
    const int32_t id = s->tokens.ids[i];
    if (!o->pieces) {
      PKV_TRY(pkv_buffer_printf(&s->line, err, "%d%c", (int)id, i + 1 < n ? ' ' : '\n'));
    } else {
      const char *piece = NULL;
      size_t bytes = 0;
      PKV_TRY(pkv_token_text(&piece, &bytes, s->model, id, 1, err));
      PKV_TRY(pkv_buffer_printf(&s->line, err, "%d\t", (int)id));
      PKV_TRY(append_quoted(&s->line, piece, bytes, err));
    }
    if (!flush(s, false)) return PKV_OK; /* nobody reads: main reports it */
  }
  (void)flush(s, true);
  return PKV_OK;
}

/* ------------------------------------------------------------------------------------------
 * JSON
 * ------------------------------------------------------------------------------------------ */

/* A string, or an array of byte values where the piece alone is no UTF-8. */
static json_t *piece_json(const char *piece, size_t bytes) {
  if (pkv_utf8_valid(piece, bytes)) return json_stringn(piece, bytes);
  json_t *array = json_array();
  for (size_t i = 0; i < bytes; i++)
    pkv_json_add(&array, json_integer((unsigned char)piece[i]));
  return array;
}

/* {count}, with ids, or with tokens [{id, piece}]. NULL when memory ran out. */
static json_t *result_json(const tokenize_state *s) {
  const tokenize_options *const o = s->options;
  json_t *object = json_pack("{s:I}", "count", (json_int_t)s->tokens.count), *list = json_array();
  for (size_t i = 0; i < s->tokens.count && !o->count; i++) {
    const int32_t id = s->tokens.ids[i];
    const char *piece = "";
    size_t bytes = 0;
    if (o->pieces && pkv_token_text(&piece, &bytes, s->model, id, 1, NULL) != PKV_OK) bytes = 0;
    pkv_json_add(
        &list, o->pieces ? json_pack("{s:i, s:o}", "id", (int)id, "piece", piece_json(piece, bytes))
                         : json_integer(id));
  }
  if (o->count)
    json_decref(list);
  else
    pkv_json_set(&object, o->pieces ? "tokens" : "ids", list);
  return object;
}

static int run(const pkv_cli *cli, const void *opaque) {
  tokenize_state s = {.options = opaque};
  pkv_error err = {PKV_OK, "", ""};
  int code = PKV_EXIT_OK;
  if (s.options->text != NULL && s.options->file != NULL)
    return pkv_cli_usage(cli, "--prompt and --file exclude each other");
  if (s.options->chat && (s.options->special || s.options->add_special))
    return pkv_cli_usage(cli, "--chat takes neither --special nor --add-special");
  pkv_buffer_init(&s.text, PKV_PROMPT_BYTES, NULL);
  pkv_buffer_init(&s.line, 2 * LINE_FLUSH + ((size_t)1 << 20), NULL);
  pkv_status status = load(&s, &err);
  if (status == PKV_OK && s.options->json)
    code = pkv_cli_json(cli, result_json(&s));
  else if (status == PKV_OK)
    status = print_plain(&s, &err);
  if (status != PKV_OK) code = pkv_cli_fail(cli, &err);
  pkv_tokens_free(&s.tokens);
  pkv_buffer_deinit(&s.line);
  pkv_buffer_deinit(&s.text);
  pkv_model_close(s.model);
  return code;
}

const pkv_command pkv_command_tokenize = {
    .name = "tokenize",
    .summary = "Show the tokens of a text",
    .details = "Prints the ids on one line, separated by blanks. Reads standard input unless "
               "--prompt or --file is given. Without --special a text that spells a control token "
               "is ordinary text, as it is for what a user types.",
    .options = options_table,
    .option_count = (int)(sizeof options_table / sizeof *options_table),
    .options_bytes = sizeof(tokenize_options),
    .run = run,
};
