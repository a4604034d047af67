/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of this room share: the syntax tree, values, the state of one rendering. Functions
 * that can fail return false after they have filled the state's error; only the first one counts.
 */
#ifndef PKV_TEMPLATE_TEMPLATE_PARTS_H
#define PKV_TEMPLATE_TEMPLATE_PARTS_H

#include <string.h>

#include "template/template.h"

/* ------------------------------------------------------------------------------------------
 * Memory: taken in chunks, given back all at once
 * ------------------------------------------------------------------------------------------ */

typedef struct tpl_arena {
  pkv_allocator allocator;
  struct tpl_chunk *top;
  size_t used, limit; /* bytes taken, rounded up to 16 */
  bool over;          /* the last NULL was for the limit */
} tpl_arena;

void pkv_tpl_arena_init(tpl_arena *a, size_t limit, const pkv_allocator *allocator);
void pkv_tpl_arena_deinit(tpl_arena *a);
/* Aligned to 16, not zeroed; NULL beyond the limit or when there is no memory. */
void *pkv_tpl_arena_take(tpl_arena *a, size_t count, size_t size);

typedef struct tpl_span {
  const char *p;
  size_t n;
} tpl_span;

static inline bool tpl_same(tpl_span a, tpl_span b) {
  return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}
static inline bool tpl_is(tpl_span a, const char *word) {
  return a.n == strlen(word) && memcmp(a.p, word, a.n) == 0;
}

/* ------------------------------------------------------------------------------------------
 * The syntax tree
 * ------------------------------------------------------------------------------------------ */

typedef enum tpl_kind {
  /* expressions */
  TPL_CONST_NONE,
  TPL_CONST_BOOL,  /* whole */
  TPL_CONST_INT,   /* whole */
  TPL_CONST_FLOAT, /* real */
  TPL_CONST_TEXT,  /* text */
  TPL_NAME,        /* text */
  TPL_LIST,        /* list */
  TPL_TUPLE,       /* list */
  TPL_DICT,        /* list of TPL_PAIR */
  TPL_PAIR,        /* a: b */
  TPL_ATTR,        /* a.text */
  TPL_ITEM,        /* a[b] */
  TPL_SLICE,       /* a[b:c:d] */
  TPL_CALL,        /* a(list) */
  TPL_FILTER,      /* a|text(list); a NULL: of the block's text */
  TPL_TEST,        /* a is text(list) */
  TPL_KEYWORD,     /* text=a */
  TPL_SPREAD,      /* *a; whole 2: **a */
  TPL_NOT,         /* a */
  TPL_NEGATE,      /* a */
  TPL_PLUS,        /* a */
  TPL_AND,         /* a, b */
  TPL_OR,          /* a, b */
  TPL_BINARY,      /* a op b */
  TPL_COMPARE,     /* a, then list of TPL_OPERAND */
  TPL_OPERAND,     /* op a */
  TPL_COND,        /* b if a else c; c may be NULL */
  /* statements */
  TPL_DATA,   /* text */
  TPL_OUTPUT, /* a */
  TPL_IF,     /* a, list; b: TPL_IF or TPL_SCOPE that follows, or NULL */
  TPL_FOR,    /* for a in b if c, list; d: TPL_SCOPE of the else, or NULL */
  TPL_SET,    /* a = b */
  TPL_BLOCK,  /* a = text of list, through the filter b if there is one; a NULL: written */
  TPL_MACRO,  /* text(b: chain of TPL_PARAM), list */
  TPL_PARAM,  /* text = a or NULL */
  TPL_BODY,   /* call(b: params) a, list */
  TPL_SCOPE,  /* list, in a scope of its own if whole is 1 */
  TPL_BREAK,
  TPL_CONTINUE
} tpl_kind;

/* Operators of two characters; those of one are that character. */
enum { TPL_EQ = 256, TPL_NE, TPL_LE, TPL_GE, TPL_FLOOR, TPL_POW, TPL_IN, TPL_NOT_IN };

typedef struct tpl_node {
  tpl_kind kind;
  int op;
  uint32_t at; /* offset in the source */
  tpl_span text;
  int64_t whole;
  double real;
  struct tpl_node *a, *b, *c, *d, *list, *next;
} tpl_node;

struct pkv_template {
  pkv_allocator allocator;
  tpl_arena arena;
  tpl_span source;
  tpl_node *body;
};

/* "line L, column C" of an offset in the source, both from 1. */
void pkv_tpl_place(char *out, size_t size, tpl_span source, size_t at);

/* ------------------------------------------------------------------------------------------
 * Reading a source
 * ------------------------------------------------------------------------------------------ */

typedef enum tpl_token_kind {
  TPL_T_NAME,
  TPL_T_INT,
  TPL_T_FLOAT,
  TPL_T_TEXT,
  TPL_T_OP,
  TPL_T_CLOSE /* of the tag */
} tpl_token_kind;

typedef struct tpl_token {
  tpl_token_kind kind;
  int op;
  size_t at, end; /* in the source */
  tpl_span text;  /* a name, or a literal's text */
  int64_t whole;
  double real;
} tpl_token;

typedef struct tpl_reader {
  pkv_template *t;
  tpl_span source;
  size_t at;         /* data: the next byte; in a tag: behind `token` */
  bool variable;     /* the tag is {{ */
  uint32_t brackets; /* open ones in the tag, up to token's end */
  bool line_starts;  /* the last tag took the newline behind it */
  uint32_t depth;
  tpl_token token;
  pkv_error *err;
  pkv_status status;
} tpl_reader;

bool pkv_tpl_refuse(tpl_reader *r, size_t at, pkv_status status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
tpl_node *pkv_tpl_node(tpl_reader *r, tpl_kind kind, size_t at); /* NULL: refused */
/* The next data and the opening of the tag behind it; false with status PKV_OK at the end. */
bool pkv_tpl_read_data(tpl_reader *r, tpl_span *data);
bool pkv_tpl_next(tpl_reader *r);                 /* to the next token of the tag */
bool pkv_tpl_peek(tpl_reader *r, tpl_token *out); /* the one behind it */
bool pkv_tpl_close(tpl_reader *r); /* the token must be the tag's end; leaves the tag */
bool pkv_tpl_skip_raw(tpl_reader *r, tpl_span *data); /* in {% raw: to behind its {% endraw %} */
static inline bool tpl_at_op(const tpl_reader *r, int op) {
  return r->token.kind == TPL_T_OP && r->token.op == op;
}
static inline bool tpl_at_name(const tpl_reader *r, const char *name) {
  return r->token.kind == TPL_T_NAME && tpl_is(r->token.text, name);
}
bool pkv_tpl_expect(tpl_reader *r, int op);
tpl_node *pkv_tpl_read_expression(tpl_reader *r);
/* a, b: a tuple where there is a comma. no_if: leaves `if` behind it alone. */
tpl_node *pkv_tpl_read_tuple(tpl_reader *r, bool no_if);
tpl_node *pkv_tpl_read_target(tpl_reader *r, bool with_namespace);
/* Behind the name of a filter block or a set block: name(args)|name... on a NULL operand. */
tpl_node *pkv_tpl_read_filters(tpl_reader *r, tpl_node *operand, bool first_named);
tpl_node *pkv_tpl_read_postfix(tpl_reader *r, tpl_node *node);
tpl_node *pkv_tpl_read_primary(tpl_reader *r);

/* ------------------------------------------------------------------------------------------
 * Values
 * ------------------------------------------------------------------------------------------ */

typedef enum tpl_type {
  TPL_V_UNDEFINED, /* str: its name */
  TPL_V_NONE,
  TPL_V_BOOL,
  TPL_V_INT,
  TPL_V_FLOAT,
  TPL_V_TEXT,
  TPL_V_LIST,
  TPL_V_TUPLE,
  TPL_V_DICT,
  TPL_V_NAMESPACE,
  TPL_V_MACRO,
  TPL_V_FUNCTION,
  TPL_V_METHOD,
  TPL_V_LOOP
} tpl_type;

/* Immutable. marks, where there are any: a byte each, 1 = trusted; else `trusted` is for all. */
typedef struct tpl_text {
  const char *p;
  size_t n;
  const uint8_t *marks;
  bool trusted;
} tpl_text;

typedef struct tpl_value {
  tpl_type type;
  bool trusted; /* of numbers: their digits */
  union {
    int64_t whole;
    double real;
    const tpl_text *text;
    struct tpl_list *list;
    struct tpl_dict *dict;
    struct tpl_macro *macro;
    struct tpl_method *method;
    struct tpl_loop *loop;
  };
} tpl_value;

typedef struct tpl_list {
  tpl_value *v;
  size_t n, capacity;
} tpl_list;

typedef struct tpl_entry {
  tpl_value key, value;
} tpl_entry;

typedef struct tpl_dict {
  tpl_entry *v;
  size_t n, capacity;
} tpl_dict;

typedef struct tpl_method {
  tpl_value self;
  tpl_span name;
} tpl_method;

typedef struct tpl_loop {
  const tpl_value *items;
  size_t n, index;
  bool has_last; /* changed() was asked */
  tpl_list last;
} tpl_loop;

typedef struct tpl_variable {
  tpl_span name;
  tpl_value value;
  struct tpl_variable *next;
} tpl_variable;

typedef struct tpl_scope {
  struct tpl_scope *parent;
  tpl_variable *first;
} tpl_scope;

typedef struct tpl_macro {
  tpl_span name;
  const tpl_node *params, *body; /* chains */
  tpl_scope *scope;              /* where it was defined */
} tpl_macro;

/* Arguments of a call, evaluated. */
typedef struct tpl_args {
  tpl_list positional;
  tpl_dict named; /* keys are texts */
} tpl_args;

/* A text that grows; marks come up when its parts differ. */
typedef struct tpl_builder {
  char *p;
  uint8_t *marks;
  size_t n, capacity, limit; /* limit 0: none but the memory's */
  bool trusted;
} tpl_builder;

typedef struct tpl_run {
  const pkv_template *t;
  tpl_arena arena;
  uint64_t steps, steps_limit;
  uint32_t depth, depth_limit, loop_depth;
  int64_t now;
  const tpl_node *at; /* for errors */
  tpl_scope *globals;
  tpl_builder *out;
  enum { TPL_GO, TPL_BROKE, TPL_CONTINUED } flow;
  pkv_error *err;
  pkv_status status;
} tpl_run;

bool pkv_tpl_fail(tpl_run *r, pkv_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool pkv_tpl_work(tpl_run *r, size_t bytes); /* charges a step for every 64 bytes */
void *pkv_tpl_take(tpl_run *r, size_t count, size_t size);

bool pkv_tpl_put(tpl_run *r, tpl_builder *b, const tpl_text *text);
bool pkv_tpl_put_bytes(tpl_run *r, tpl_builder *b, const char *p, size_t n, bool trusted);
bool pkv_tpl_built(tpl_run *r, const tpl_builder *b, tpl_value *out);

/* Texts. Offsets are bytes; characters are code points. */
bool pkv_tpl_text(tpl_run *r, tpl_value *out, const char *p, size_t n, bool trusted);
bool pkv_tpl_part(tpl_run *r, tpl_value *out, const tpl_text *s, size_t from, size_t to);
bool pkv_tpl_all_trusted(const tpl_text *s);
size_t pkv_tpl_char(const char *p, size_t n, uint32_t *code); /* bytes of the first; n > 0 */
size_t pkv_tpl_chars(const char *p, size_t n);
size_t pkv_tpl_encode(char *out, uint32_t code); /* at most 4 bytes */
bool pkv_tpl_is_space(uint32_t code);
/* The stretch without the characters of `set` (NULL: blanks) on its left and right. */
void pkv_tpl_strip(size_t *from, size_t *to, const tpl_text *s, const tpl_text *set, bool left,
                   bool right);
bool pkv_tpl_find(const tpl_text *s, size_t from, const tpl_text *what, size_t *at);

static inline tpl_value tpl_none(void) {
  return (tpl_value){.type = TPL_V_NONE, .trusted = true};
}
static inline tpl_value tpl_bool(bool b) {
  return (tpl_value){.type = TPL_V_BOOL, .trusted = true, .whole = b};
}
static inline tpl_value tpl_int(int64_t i, bool trusted) {
  return (tpl_value){.type = TPL_V_INT, .trusted = trusted, .whole = i};
}
static inline tpl_value tpl_float(double d, bool trusted) {
  return (tpl_value){.type = TPL_V_FLOAT, .trusted = trusted, .real = d};
}
static inline bool tpl_is_number(const tpl_value *v) {
  return v->type == TPL_V_BOOL || v->type == TPL_V_INT || v->type == TPL_V_FLOAT;
}
static inline bool tpl_is_sequence(const tpl_value *v) {
  return v->type == TPL_V_LIST || v->type == TPL_V_TUPLE;
}
static inline bool tpl_is_whole(const tpl_value *v) {
  return v->type == TPL_V_BOOL || v->type == TPL_V_INT;
}
tpl_value pkv_tpl_undefined(tpl_run *r, tpl_span name);
const char *pkv_tpl_type_name(const tpl_value *v);
bool pkv_tpl_truth(const tpl_value *v);
bool pkv_tpl_equal(tpl_run *r, const tpl_value *a, const tpl_value *b, bool *equal);
/* <0, 0, >0; E_FORMAT for what has no order. fold: texts by their lower case. */
bool pkv_tpl_order(tpl_run *r, const tpl_value *a, const tpl_value *b, bool fold, int *order);
bool pkv_tpl_contains(tpl_run *r, const tpl_value *where, const tpl_value *what, bool *found);
bool pkv_tpl_new_list(tpl_run *r, tpl_value *out, tpl_type type, size_t capacity);
bool pkv_tpl_push(tpl_run *r, tpl_list *list, tpl_value v);
bool pkv_tpl_new_dict(tpl_run *r, tpl_value *out, size_t capacity);
bool pkv_tpl_set_entry(tpl_run *r, tpl_dict *dict, tpl_value key, tpl_value v);
const tpl_value *pkv_tpl_entry(const tpl_dict *dict, tpl_span key);
/* What a loop goes over: elements, keys, characters. */
bool pkv_tpl_items(tpl_run *r, const tpl_value *v, tpl_list *out);
/* As Python's str and repr. */
bool pkv_tpl_put_value(tpl_run *r, tpl_builder *b, const tpl_value *v);
bool pkv_tpl_put_repr(tpl_run *r, tpl_builder *b, const tpl_value *v, bool trusted);
bool pkv_tpl_to_text(tpl_run *r, tpl_value *out, const tpl_value *v);
size_t pkv_tpl_float_text(char out[40], double d);
/* Whether no part of it comes from the variables. */
bool pkv_tpl_value_trusted(tpl_run *r, const tpl_value *v);
bool pkv_tpl_fold(tpl_run *r, tpl_value *out, const tpl_text *s, bool upper);

/* ------------------------------------------------------------------------------------------
 * Evaluating
 * ------------------------------------------------------------------------------------------ */

bool pkv_tpl_eval(tpl_run *r, tpl_scope *scope, const tpl_node *node, tpl_value *out);
bool pkv_tpl_eval_args(tpl_run *r, tpl_scope *scope, const tpl_node *list, tpl_args *out);
bool pkv_tpl_exec(tpl_run *r, tpl_scope *scope, const tpl_node *list);
bool pkv_tpl_set(tpl_run *r, tpl_scope *scope, tpl_span name, tpl_value v);
tpl_scope *pkv_tpl_scope(tpl_run *r, tpl_scope *parent); /* NULL: failed */
bool pkv_tpl_enter(tpl_run *r);                          /* one level deeper, one step */
bool pkv_tpl_attribute(tpl_run *r, tpl_value *out, const tpl_value *v, tpl_span name);
bool pkv_tpl_item(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_value *key);
bool pkv_tpl_slice(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_value bounds[3]);
bool pkv_tpl_binary(tpl_run *r, tpl_value *out, int op, const tpl_value *a, const tpl_value *b);
bool pkv_tpl_call(tpl_run *r, tpl_value *out, const tpl_value *f, const tpl_args *args);
bool pkv_tpl_call_macro(tpl_run *r, tpl_value *out, const tpl_macro *m, const tpl_args *args);
bool pkv_tpl_call_function(tpl_run *r, tpl_value *out, tpl_span name, const tpl_args *args);
bool pkv_tpl_is_function(tpl_span name);
/* Whether Python's object of that type has a method of that name. */
bool pkv_tpl_has_method(const tpl_value *v, tpl_span name);
bool pkv_tpl_call_method(tpl_run *r, tpl_value *out, const tpl_value *self, tpl_span name,
                         const tpl_args *args);
bool pkv_tpl_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                    const tpl_args *args);
bool pkv_tpl_test(tpl_run *r, bool *out, tpl_span name, const tpl_value *v, const tpl_args *args);
/* Arguments by the names of the parameters, separated by blanks; NULL where none is given. At most
   TPL_SLOTS of them. */
#define TPL_SLOTS 6
bool pkv_tpl_bind(tpl_run *r, const tpl_value *slots[TPL_SLOTS], const char *params,
                  const tpl_args *args);
bool pkv_tpl_want_text(tpl_run *r, const tpl_value *v, const char *what, const tpl_text **out);
bool pkv_tpl_want_int(tpl_run *r, const tpl_value *v, const char *what, int64_t absent,
                      int64_t *out);
/* The families of filters, each by name; *found says whether it has that one. */
bool pkv_tpl_text_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                         const tpl_args *args, bool *found);
bool pkv_tpl_list_filter(tpl_run *r, tpl_value *out, tpl_span name, const tpl_value *v,
                         const tpl_args *args, bool *found);
bool pkv_tpl_tojson(tpl_run *r, tpl_value *out, const tpl_value *v, const tpl_args *args);
bool pkv_tpl_replace(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_text *from,
                     const tpl_text *to, int64_t most);
bool pkv_tpl_join(tpl_run *r, tpl_value *out, const tpl_list *list, const tpl_text *between,
                  bool only_texts);
bool pkv_tpl_capital(tpl_run *r, tpl_value *out, const tpl_text *s, bool every_word);
bool pkv_tpl_format(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_args *args);
bool pkv_tpl_percent(tpl_run *r, tpl_value *out, const tpl_text *s, const tpl_list *args);
/* Not empty, and only blanks (s), digits (d), letters (a), or the last two (n). */
bool pkv_tpl_only(const tpl_text *s, int kind);
bool pkv_tpl_strftime(tpl_run *r, tpl_value *out, const tpl_text *format);

#endif
