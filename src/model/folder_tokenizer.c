/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokenizer.json as GGUF's keys: vocabulary, merges, added tokens, and what its normalizers,
 * pre-tokenizers and post-processors amount to. The parts are a list of steps in any combination;
 * the combinations that models use are known here, every other is refused by name.
 */
#include <string.h>

#include "model/folder_parts.h"
#include "model/tokenizer_chars.h"

#define FILE_NAME "tokenizer.json"
#define MAX_STEPS 8
#define LOW_LINE  "\xe2\x96\x81" /* U+2581, a space in SentencePiece's spelling */

typedef struct steps {
  const json_t *step[MAX_STEPS];
  size_t count;
} steps;

typedef struct token {
  pkv_span text;
  uint8_t type;
} token;

typedef struct reader {
  pkv_meta *meta;
  const json_t *root, *model;
  pkv_allocator allocator;
  token *tokens; /* [room] by id */
  size_t room, count;
  bool bytes; /* byte-level, else by characters */
  bool byte_fallback, nfc, replace;
  bool split;  /* Metaspace: words start at their spaces */
  int prefix;  /* pkv_space_prefix */
  bool strict; /* the normalizer changes text, so that added tokens must not pass through it */
  pkv_error *err;
} reader;

/* ---- lists of steps ---- */

static const char *type_of(const json_t *step) {
  const json_t *type = json_object_get(step, "type");
  return json_is_string(type) ? json_string_value(type) : "";
}

/* A step, or a Sequence of them under `list`; null is none. */
static pkv_status flatten(steps *out, const reader *r, const char *key, const char *list) {
  const json_t *value = pkv_json_get(r->root, key);
  out->count = 0;
  if (!value) return PKV_OK;
  PKV_CHECK(r->err, json_is_object(value), PKV_E_FORMAT, FILE_NAME ": \"%s\" is not an object",
            key);
  if (strcmp(type_of(value), "Sequence") != 0) {
    out->step[out->count++] = value;
    return PKV_OK;
  }
  const json_t *inner = json_object_get(value, list);
  PKV_CHECK(r->err, json_is_array(inner), PKV_E_FORMAT, FILE_NAME ": %s.%s is not a list", key,
            list);
  PKV_CHECK(r->err, json_array_size(inner) <= MAX_STEPS, PKV_E_UNSUPPORTED,
            FILE_NAME ": %s has %zu steps, at most %d are supported", key, json_array_size(inner),
            MAX_STEPS);
  for (size_t i = 0; i < json_array_size(inner); i++)
    out->step[out->count++] = json_array_get(inner, i);
  return PKV_OK;
}

static pkv_status unknown_step(const reader *r, const char *key, const json_t *step) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  const char *type = type_of(step);
  return PKV_FAIL(r->err, PKV_E_UNSUPPORTED,
                  FILE_NAME ": %s of type \"%s\" is not supported here, or not with these options",
                  key, pkv_gguf_quote(quoted, (pkv_span){type, strlen(type)}));
}

/* pattern.String or pattern.Regex. */
static const char *pattern_of(const json_t *step, const char *kind) {
  const json_t *text = json_object_get(json_object_get(step, "pattern"), kind);
  return json_is_string(text) ? json_string_value(text) : "";
}

/* ---- normalizer ---- */

static pkv_status read_normalizer(reader *r) {
  steps s;
  PKV_TRY(flatten(&s, r, "normalizer", "normalizers"));
  for (size_t i = 0; i < s.count; i++) {
    const json_t *step = s.step[i];
    if (strcmp(type_of(step), "NFC") == 0 && !r->replace && r->prefix == PKV_PREFIX_NONE) {
      r->nfc = true;
    } else if (strcmp(type_of(step), "Prepend") == 0 && pkv_json_says(step, "prepend", LOW_LINE) &&
               !r->replace) {
      r->prefix = PKV_PREFIX_EACH;
    } else if (strcmp(type_of(step), "Replace") == 0 &&
               strcmp(pattern_of(step, "String"), " ") == 0 &&
               pkv_json_says(step, "content", LOW_LINE)) {
      r->replace = true;
    } else {
      return unknown_step(r, "normalizer", step);
    }
  }
  r->strict = r->replace || r->prefix != PKV_PREFIX_NONE;
  PKV_CHECK(r->err, r->replace || r->prefix == PKV_PREFIX_NONE, PKV_E_UNSUPPORTED,
            FILE_NAME ": a normalizer that prepends " LOW_LINE " but keeps spaces");
  return PKV_OK;
}

/* ---- pre-tokenizer ---- */

#define ENDINGS_ANY "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LETTERS     "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"

/* Rules that are written as one pattern, as the files of these families have it. */
static const char *rule_of_pattern(const char *pattern) {
  static const struct {
    const char *pattern, *rule;
  } known[] = {
      {ENDINGS_ANY "|" LETTERS "|\\p{N}{1,3}|" TAIL, "llama-bpe"},
      {ENDINGS_ANY "|" LETTERS "|\\p{N}|" TAIL, "qwen2"},
      {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
       "gpt-2"},
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(pattern, known[i].pattern) == 0) return known[i].rule;
  }
  return NULL;
}

/* Isolated matches, or what is not matched removed: the same for patterns that match all text. */
static bool keeps_all(const json_t *split) {
  const bool invert = json_is_true(json_object_get(split, "invert"));
  return invert ? pkv_json_says(split, "behavior", "Removed")
                : pkv_json_says(split, "behavior", "Isolated");
}

static const char *byte_rule(const steps *s) {
  const json_t *last = s->step[s->count - 1], *first = s->step[0];
  const json_t *use_regex = pkv_json_get(last, "use_regex");
  const bool regex = !use_regex || json_is_true(use_regex);
  if (strcmp(type_of(last), "ByteLevel") != 0 ||
      !json_is_false(json_object_get(last, "add_prefix_space")))
    return NULL;
  if (s->count == 1) return regex ? "gpt-2" : NULL;
  if (s->count != 2) return NULL;
  if (regex) {
    const bool single = json_is_true(json_object_get(first, "individual_digits"));
    return strcmp(type_of(first), "Digits") == 0 && single ? "smollm" : NULL;
  }
  if (strcmp(type_of(first), "Split") != 0 || !keeps_all(first)) return NULL;
  return rule_of_pattern(pattern_of(first, "Regex"));
}

static pkv_status read_metaspace(reader *r, const json_t *step) {
  const json_t *scheme = pkv_json_get(step, "prepend_scheme"), *split = pkv_json_get(step, "split");
  const json_t *old = pkv_json_get(step, "add_prefix_space");
  if (r->replace || r->prefix != PKV_PREFIX_NONE || !pkv_json_says(step, "replacement", LOW_LINE))
    return unknown_step(r, "pre_tokenizer", step);
  r->replace = true;
  r->split = !split || json_is_true(split);
  r->prefix = old && json_is_false(old) ? PKV_PREFIX_NONE : PKV_PREFIX_MISSING;
  if (!scheme) return PKV_OK;
  if (pkv_json_says(step, "prepend_scheme", "never"))
    r->prefix = PKV_PREFIX_NONE;
  else if (pkv_json_says(step, "prepend_scheme", "first"))
    r->prefix = PKV_PREFIX_FIRST;
  else if (pkv_json_says(step, "prepend_scheme", "always"))
    r->prefix = PKV_PREFIX_MISSING;
  else
    return unknown_step(r, "pre_tokenizer", step);
  return PKV_OK;
}

static pkv_status read_pre_tokenizer(reader *r) {
  steps s;
  PKV_TRY(flatten(&s, r, "pre_tokenizer", "pretokenizers"));
  for (size_t i = 0; i < s.count; i++)
    r->bytes = r->bytes || strcmp(type_of(s.step[i]), "ByteLevel") == 0;
  if (r->bytes) {
    const char *rule = byte_rule(&s);
    if (!rule || r->strict) return unknown_step(r, "pre_tokenizer", s.step[0]);
    pkv_meta_text(r->meta, "tokenizer.ggml.pre", rule);
    return PKV_OK;
  }
  PKV_CHECK(r->err, s.count <= 1, PKV_E_UNSUPPORTED,
            FILE_NAME ": a pre_tokenizer of %zu steps without ByteLevel", s.count);
  if (s.count == 0) return PKV_OK;
  if (strcmp(type_of(s.step[0]), "Metaspace") == 0) return read_metaspace(r, s.step[0]);
  /* Cuts at spaces, of which the normalizer has left none. */
  const bool idle = strcmp(type_of(s.step[0]), "Split") == 0 && r->replace &&
                    strcmp(pattern_of(s.step[0], "String"), " ") == 0;
  return idle ? PKV_OK : unknown_step(r, "pre_tokenizer", s.step[0]);
}

/* ---- post-processor: one token before the text, one behind it ---- */

static pkv_status special_id(int64_t *id, const reader *r, const json_t *step, const json_t *item) {
  const json_t *name = json_object_get(json_object_get(item, "SpecialToken"), "id");
  const json_t *entry =
      json_is_string(name)
          ? json_object_get(json_object_get(step, "special_tokens"), json_string_value(name))
          : NULL;
  const json_t *ids = json_object_get(entry, "ids");
  PKV_CHECK(r->err,
            json_is_array(ids) && json_array_size(ids) == 1 &&
                json_is_integer(json_array_get(ids, 0)),
            PKV_E_UNSUPPORTED, FILE_NAME ": post_processor: a special token that is not one token");
  *id = json_integer_value(json_array_get(ids, 0));
  PKV_CHECK(r->err, *id >= 0 && *id < (int64_t)r->count, PKV_E_FORMAT,
            FILE_NAME ": post_processor: token %lld is not in the vocabulary", (long long)*id);
  return PKV_OK;
}

static pkv_status read_template(const reader *r, const json_t *step, int64_t *before,
                                int64_t *behind) {
  const json_t *single = json_object_get(step, "single");
  bool text = false;
  PKV_CHECK(r->err, json_is_array(single) && json_array_size(single) <= 3, PKV_E_UNSUPPORTED,
            FILE_NAME ": post_processor: \"single\" is not a list of up to 3");
  for (size_t i = 0; i < json_array_size(single); i++) {
    const json_t *item = json_array_get(single, i);
    if (json_object_get(item, "Sequence")) {
      PKV_CHECK(r->err, !text, PKV_E_UNSUPPORTED, FILE_NAME ": post_processor repeats the text");
      text = true;
      continue;
    }
    int64_t *to = text ? behind : before;
    PKV_CHECK(r->err, *to < 0, PKV_E_UNSUPPORTED,
              FILE_NAME ": post_processor adds more than one token on a side");
    PKV_TRY(special_id(to, r, step, item));
  }
  PKV_CHECK(r->err, text, PKV_E_FORMAT, FILE_NAME ": post_processor leaves the text out");
  return PKV_OK;
}

static pkv_status read_post_processor(const reader *r) {
  steps s;
  int64_t before = -1, behind = -1;
  PKV_TRY(flatten(&s, r, "post_processor", "processors"));
  for (size_t i = 0; i < s.count; i++) {
    if (strcmp(type_of(s.step[i]), "ByteLevel") == 0) continue; /* offsets only */
    if (strcmp(type_of(s.step[i]), "TemplateProcessing") != 0)
      return unknown_step(r, "post_processor", s.step[i]);
    PKV_TRY(read_template(r, s.step[i], &before, &behind));
  }
  if (before >= 0) pkv_meta_int(r->meta, "tokenizer.ggml.bos_token_id", before);
  if (behind >= 0) pkv_meta_int(r->meta, "tokenizer.ggml.eos_token_id", behind);
  pkv_meta_bool(r->meta, "tokenizer.ggml.add_bos_token", before >= 0);
  pkv_meta_bool(r->meta, "tokenizer.ggml.add_eos_token", behind >= 0);
  return PKV_OK;
}

/* ---- tokens ---- */

static pkv_status token_id(size_t *id, const reader *r, const json_t *value) {
  const int64_t n = json_is_integer(value) ? json_integer_value(value) : -1;
  PKV_CHECK(r->err, n >= 0 && (uint64_t)n < r->room, PKV_E_FORMAT,
            FILE_NAME ": a token has the id %lld, not 0 .. %zu", (long long)n, r->room - 1);
  *id = (size_t)n;
  return PKV_OK;
}

static pkv_status put_token(reader *r, size_t id, pkv_span text, uint8_t type, bool replace) {
  char a[PKV_GGUF_QUOTE_BYTES], b[PKV_GGUF_QUOTE_BYTES];
  token *t = &r->tokens[id];
  const bool same =
      t->text.data && t->text.size == text.size && memcmp(t->text.data, text.data, text.size) == 0;
  PKV_CHECK(r->err, !t->text.data || (replace && same), PKV_E_FORMAT,
            FILE_NAME ": \"%s\" and \"%s\" are both token %zu", pkv_gguf_quote(a, t->text),
            pkv_gguf_quote(b, text), id);
  *t = (token){text, type};
  if (id >= r->count) r->count = id + 1;
  return PKV_OK;
}

static bool is_byte_name(pkv_span s) {
  static const char digits[] = "0123456789ABCDEF";
  return s.size == 6 && memcmp(s.data, "<0x", 3) == 0 && s.data[5] == '>' && s.data[3] != '\0' &&
         s.data[4] != '\0' && strchr(digits, s.data[3]) && strchr(digits, s.data[4]);
}

static pkv_status read_vocab(reader *r) {
  json_t *vocab = json_object_get(r->model, "vocab");
  PKV_CHECK(r->err, json_is_object(vocab) && json_object_size(vocab) > 0, PKV_E_FORMAT,
            FILE_NAME ": model.vocab is missing, empty or no object");
  for (void *at = json_object_iter(vocab); at != NULL; at = json_object_iter_next(vocab, at)) {
    const char *name = json_object_iter_key(at);
    const pkv_span text = {name, json_object_iter_key_len(at)};
    size_t id = 0;
    PKV_TRY(token_id(&id, r, json_object_iter_value(at)));
    const bool byte = !r->bytes && r->byte_fallback && is_byte_name(text);
    PKV_TRY(put_token(r, id, text, byte ? PKV_TOKEN_BYTE : PKV_TOKEN_NORMAL, false));
  }
  return PKV_OK;
}

static pkv_status read_added(reader *r) {
  const json_t *added = pkv_json_get(r->root, "added_tokens");
  char quoted[PKV_GGUF_QUOTE_BYTES];
  if (!added) return PKV_OK;
  PKV_CHECK(r->err, json_is_array(added), PKV_E_FORMAT, FILE_NAME ": added_tokens is not a list");
  for (size_t i = 0; i < json_array_size(added); i++) {
    const json_t *entry = json_array_get(added, i);
    pkv_span text = {"", 0};
    size_t id = 0;
    PKV_CHECK(r->err, json_is_object(entry), PKV_E_FORMAT,
              FILE_NAME ": added_tokens[%zu] is not an object", i);
    PKV_TRY(token_id(&id, r, json_object_get(entry, "id")));
    PKV_TRY(pkv_json_get_string(&text, entry, FILE_NAME, "content", true, r->err));
    const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    for (size_t k = 0; k < 3; k++)
      PKV_CHECK(r->err, !json_is_true(json_object_get(entry, flags[k])), PKV_E_UNSUPPORTED,
                FILE_NAME ": added token \"%s\" has %s, which is not supported",
                pkv_gguf_quote(quoted, text), flags[k]);
    PKV_CHECK(r->err, !r->strict || !json_is_true(json_object_get(entry, "normalized")),
              PKV_E_UNSUPPORTED,
              FILE_NAME ": added token \"%s\" passes through the normalizer (normalized), which is "
                        "not supported",
              pkv_gguf_quote(quoted, text));
    const bool special = json_is_true(json_object_get(entry, "special"));
    PKV_TRY(put_token(r, id, text, special ? PKV_TOKEN_CONTROL : PKV_TOKEN_USER, true));
  }
  return PKV_OK;
}

static pkv_status write_unknown(const reader *r) {
  pkv_span unknown = {NULL, 0};
  bool fuse = false;
  PKV_TRY(pkv_json_get_string(&unknown, r->model, FILE_NAME, "unk_token", false, r->err));
  PKV_TRY(pkv_json_get_bool(&fuse, r->model, FILE_NAME, "fuse_unk", r->err));
  pkv_meta_bool(r->meta, "pkv.fuse_unknown", fuse);
  if (!unknown.data || r->bytes) return PKV_OK;
  const json_t *id =
      json_object_getn(json_object_get(r->model, "vocab"), unknown.data, unknown.size);
  PKV_CHECK(r->err, json_is_integer(id), PKV_E_FORMAT,
            FILE_NAME ": model.unk_token is not in model.vocab");
  pkv_meta_int(r->meta, "tokenizer.ggml.unknown_token_id", json_integer_value(id));
  return PKV_OK;
}

static void write_tokens(const reader *r) {
  pkv_meta_array(r->meta, "tokenizer.ggml.tokens", PKV_GGUF_STRING, r->count);
  for (size_t i = 0; i < r->count; i++)
    pkv_meta_add_string(r->meta, r->tokens[i].text);
  pkv_meta_array(r->meta, "tokenizer.ggml.token_type", PKV_GGUF_I32, r->count);
  for (size_t i = 0; i < r->count; i++)
    pkv_meta_add_i32(r->meta, r->tokens[i].text.data ? r->tokens[i].type : PKV_TOKEN_UNUSED);
}

/* ---- merges: lines of two parts, or pairs ---- */

static pkv_status write_merges(const reader *r) {
  const json_t *merges = json_object_get(r->model, "merges");
  PKV_CHECK(r->err, json_is_array(merges), PKV_E_FORMAT,
            FILE_NAME ": model.merges is missing or no list");
  const size_t count = json_array_size(merges);
  pkv_meta_array(r->meta, "tokenizer.ggml.merges", PKV_GGUF_STRING, count);
  for (size_t i = 0; i < count; i++) {
    const json_t *merge = json_array_get(merges, i);
    if (json_is_string(merge)) {
      pkv_meta_add_string(r->meta, (pkv_span){json_string_value(merge), json_string_length(merge)});
      continue;
    }
    const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
    PKV_CHECK(r->err, json_array_size(merge) == 2 && json_is_string(left) && json_is_string(right),
              PKV_E_FORMAT, FILE_NAME ": model.merges[%zu] is neither a line nor a pair", i);
    pkv_meta_add_joined(r->meta, (pkv_span){json_string_value(left), json_string_length(left)}, ' ',
                        (pkv_span){json_string_value(right), json_string_length(right)});
  }
  return PKV_OK;
}

/* ---- all of it ---- */

static pkv_status check_model(reader *r) {
  char quoted[PKV_GGUF_QUOTE_BYTES];
  r->model = json_object_get(r->root, "model");
  PKV_CHECK(r->err, json_is_object(r->model), PKV_E_FORMAT,
            FILE_NAME ": \"model\" is missing or no object");
  pkv_span type = {"BPE", 3}, text = {"", 0};
  PKV_TRY(pkv_json_get_string(&type, r->model, FILE_NAME, "type", false, r->err));
  PKV_CHECK(r->err, strcmp(type.data, "BPE") == 0, PKV_E_UNSUPPORTED,
            FILE_NAME ": model.type is \"%s\", only BPE is supported",
            pkv_gguf_quote(quoted, type));
  const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
  for (size_t i = 0; i < 2; i++) {
    PKV_TRY(pkv_json_get_string(&text, r->model, FILE_NAME, affixes[i], false, r->err));
    PKV_CHECK(r->err, text.size == 0, PKV_E_UNSUPPORTED, FILE_NAME ": model.%s is not supported",
              affixes[i]);
  }
  double dropout = 0.0;
  PKV_TRY(pkv_json_get_float(&dropout, r->model, FILE_NAME, "dropout", false, 0.0, 1.0, r->err));
  PKV_CHECK(r->err, dropout == 0.0, PKV_E_UNSUPPORTED, FILE_NAME ": model.dropout is %g", dropout);
  return pkv_json_get_bool(&r->byte_fallback, r->model, FILE_NAME, "byte_fallback", r->err);
}

static pkv_status read_all(reader *r) {
  bool ignore_merges = false;
  PKV_TRY(check_model(r));
  PKV_TRY(read_normalizer(r));
  PKV_TRY(read_pre_tokenizer(r));
  PKV_TRY(read_vocab(r));
  PKV_TRY(read_added(r));
  PKV_TRY(pkv_json_get_bool(&ignore_merges, r->model, FILE_NAME, "ignore_merges", r->err));
  pkv_meta_text(r->meta, "tokenizer.ggml.model", r->bytes ? "gpt2" : PKV_TOKENIZER_BY_CHARACTERS);
  pkv_meta_bool(r->meta, "pkv.ignore_merges", ignore_merges);
  pkv_meta_bool(r->meta, "pkv.nfc", r->nfc);
  pkv_meta_bool(r->meta, "pkv.replace_spaces", r->replace);
  pkv_meta_bool(r->meta, "pkv.split_at_spaces", r->split);
  pkv_meta_int(r->meta, "pkv.space_prefix", r->prefix);
  PKV_TRY(write_unknown(r));
  PKV_TRY(read_post_processor(r));
  write_tokens(r);
  return write_merges(r);
}

/* Ids that the file can hold at most: the embedding's rows where they are known. */
static size_t room_for(const json_t *root, int32_t rows) {
  if (rows > 0) return rows < PKV_VOCAB_MAX_TOKENS ? (size_t)rows : PKV_VOCAB_MAX_TOKENS;
  size_t most = json_object_size(json_object_get(json_object_get(root, "model"), "vocab"));
  most += json_array_size(json_object_get(root, "added_tokens"));
  most = 2 * most + 65536;
  return most < PKV_VOCAB_MAX_TOKENS ? most : PKV_VOCAB_MAX_TOKENS;
}

pkv_status pkv_folder_read_tokenizer(pkv_meta *meta, const json_t *tokenizer, int32_t rows,
                                     const pkv_allocator *allocator, pkv_error *err) {
  reader r = {.meta = meta, .root = tokenizer, .allocator = *allocator, .err = err};
  r.room = room_for(tokenizer, rows);
  r.tokens = pkv_alloc_zeroed(allocator, r.room, sizeof *r.tokens);
  PKV_CHECK(err, r.tokens, PKV_E_NOMEM, "no memory for %zu tokens", r.room);
  if (rows > 0) r.count = r.room; /* rows that only pad the output are unused tokens */
  const pkv_status status = read_all(&r);
  pkv_free(allocator, r.tokens, r.room * sizeof *r.tokens);
  return status;
}
