/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - libpkv_engine: a model file, its tokenizer, and an engine that generates for many
 * requests at once from one paged cache. Built on pkv.h; the same rules for structs, errors and
 * threads hold.
 */
#ifndef PKV_ENGINE_H
#define PKV_ENGINE_H

#include "pkv/pkv.h"
#include "pkv/sched.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------
 * Model
 * ------------------------------------------------------------------------------------------ */

/* Immutable once open: weights stay in the mapped file. Share freely; outlives every engine made
   from it. */
typedef struct pkv_model pkv_model;

/*
 * Where the weights of a file lie. Copied, they are on huge pages where the system has them, which
 * a CPU reads up to 1.7 times as fast, and what happens to the file no longer matters; opening
 * takes 0.2 to 1 s a GB, and the memory is this process's own. Mapped, they are the system's cache
 * of the file, which processes share; what a device loads from.
 */
typedef enum pkv_weights {
  PKV_WEIGHTS_AUTO = 0, /* copied where they fill no more than half of the memory that is free */
  PKV_WEIGHTS_MAPPED = 1,
  PKV_WEIGHTS_COPIED = 2 /* E_NOMEM where that cannot be */
} pkv_weights;

typedef struct pkv_model_options {
  uint32_t struct_size;
  /* 1: refuse weights that hold NaN or infinity, by tensor name (reads all of them) */
  int32_t check_tensors;
  int32_t tokenizer_only; /* 1: no weights are needed; only the text functions work */
  const pkv_allocator *allocator;
  pkv_weights weights;
} pkv_model_options;
#define PKV_MODEL_OPTIONS_INIT                                                                     \
  { (uint32_t)sizeof(pkv_model_options), 0, 0, NULL, PKV_WEIGHTS_AUTO }

typedef struct pkv_model_info {
  uint32_t struct_size;
  char architecture[32], name[96];
  int32_t layers, width, feed_forward, query_heads, kv_heads, head_dim, vocab, context;
  int64_t parameters, weight_bytes, file_bytes;
  int32_t bos, eos; /* -1 = none */
} pkv_model_info;
#define PKV_MODEL_INFO_INIT                                                                        \
  { (uint32_t)sizeof(pkv_model_info), {0}, {0}, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, -1 }

/* Opens a GGUF file (of a model in shards: any of them) or a folder of safetensors
   (docs/models.md). Untrusted input: anything wrong is E_FORMAT (or E_UNSUPPORTED) with a text
   that names the key or tensor. */
PKV_API PKV_MUST_CHECK pkv_status pkv_model_open(pkv_model **out, const char *path,
                                                 const pkv_model_options *options, pkv_error *err);
/*
 * A model of the shape that a config.json states, of random bf16 matrices: for measuring any shape
 * without a file of it. It has no tokenizer. on_device: the matrices are made on the device of an
 * engine; an engine on the CPU refuses such a model.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_model_open_random(pkv_model **out, const char *config,
                                                        int32_t on_device,
                                                        const pkv_model_options *options,
                                                        pkv_error *err);
PKV_API void pkv_model_close(pkv_model *model); /* NULL is allowed */
/* Fills *out, whatever it held. */
PKV_API void pkv_model_get_info(pkv_model_info *out, const pkv_model *model);
/* 1: this id ends a turn (eos, or the model's end-of-turn token). */
PKV_API int32_t pkv_model_is_end(const pkv_model *model, int32_t token);

/* ------------------------------------------------------------------------------------------
 * Inspecting a model file
 * ------------------------------------------------------------------------------------------ */

/*
 * What is in a GGUF file, also where pkv_model_open refuses it. (A folder of safetensors: what its
 * keys and names would be in GGUF; one that is refused is not visited.) Everything handed to a
 * callback is valid during that call only. Text comes as the file has it: any bytes, not
 * terminated.
 */
typedef struct pkv_inspect_file {
  const char *format; /* "GGUF", "safetensors" */
  uint32_t version, alignment;
  int64_t file_bytes, data_offset; /* where tensor data starts */
  int64_t tensor_bytes;            /* of all tensors, padding not counted */
  int64_t keys, tensors;
  /* What pkv_model_open says to this file (the text that its error has); PKV_OK: it opens, and
     `model` is filled. */
  pkv_status usable;
  const char *problem;
  const pkv_model_info *model; /* NULL where it does not open */
} pkv_inspect_file;

typedef struct pkv_inspect_key {
  int64_t index;
  const char *name;
  size_t name_bytes;
  const char *type;         /* "u32", "string", "array", ... */
  const char *element_type; /* of an array; else as type */
  int64_t count;            /* elements; 1 for a single value */
} pkv_inspect_key;

typedef enum pkv_inspect_kind {
  PKV_INSPECT_INT = 0,
  PKV_INSPECT_UINT = 1, /* u64 only */
  PKV_INSPECT_FLOAT = 2,
  PKV_INSPECT_BOOL = 3, /* as_int is 0 or 1 */
  PKV_INSPECT_TEXT = 4
} pkv_inspect_kind;

typedef struct pkv_inspect_element {
  pkv_inspect_kind kind;
  int64_t as_int;
  uint64_t as_uint;
  double as_float; /* may be NaN or infinite */
  const char *text;
  size_t text_bytes;
} pkv_inspect_element;

typedef struct pkv_inspect_tensor {
  int64_t index;
  const char *name;
  size_t name_bytes;
  const char *type; /* "Q4_1" */
  int32_t dims;
  int64_t extent[4];               /* extent[0] is contiguous; unused ones are 1 */
  int64_t elements, bytes, offset; /* offset in the file */
  int32_t supported;               /* 1: a type that this library computes with */
} pkv_inspect_tensor;

/* Called in this order: file once; then for each key of the file `key` and its first elements; then
   each tensor. Any may be NULL. A value other than 0 ends the visit, which is no error. */
typedef struct pkv_inspector {
  uint32_t struct_size;
  void *user;
  int64_t max_elements; /* of each array; 0 = all */
  int32_t (*file)(void *user, const pkv_inspect_file *file);
  int32_t (*key)(void *user, const pkv_inspect_key *key);
  int32_t (*element)(void *user, const pkv_inspect_key *key, int64_t index,
                     const pkv_inspect_element *element);
  int32_t (*tensor)(void *user, const pkv_inspect_tensor *tensor);
} pkv_inspector;
#define PKV_INSPECTOR_INIT                                                                         \
  { (uint32_t)sizeof(pkv_inspector), NULL, 0, NULL, NULL, NULL, NULL }

/* E_IO, E_FORMAT, E_UNSUPPORTED: not even the table of contents can be read; nothing was
   visited. */
PKV_API PKV_MUST_CHECK pkv_status pkv_model_inspect(const char *path, const pkv_inspector *visitor,
                                                    const pkv_allocator *allocator, pkv_error *err);

/* ------------------------------------------------------------------------------------------
 * Text
 * ------------------------------------------------------------------------------------------ */

/* Add the tokens the file says every prompt starts (ends) with. */
#define PKV_TEXT_ADD_SPECIAL 1u
/* Text that spells a control token becomes that token; else it is ordinary text. */
#define PKV_TEXT_PARSE_SPECIAL 2u

/*
 * Tokens of `bytes` bytes of UTF-8 (malformed bytes become byte tokens). *count is the number
 * needed; when it exceeds `capacity`, nothing useful is written and E_TOO_SMALL comes back: call
 * again. ids may be NULL when capacity is 0. Any thread.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_tokenize(int32_t *ids, size_t capacity, size_t *count,
                                               const pkv_model *model, const char *text,
                                               size_t bytes, uint32_t flags, pkv_error *err);
/*
 * The bytes of one token, borrowed from the model; *bytes may be 0. Control tokens give their text
 * only when `special` is set. Bytes of several tokens may have to be joined before they are UTF-8.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_token_text(const char **text, size_t *bytes,
                                                 const pkv_model *model, int32_t token,
                                                 int32_t special, pkv_error *err);

typedef struct pkv_message {
  const char *role; /* "system", "user", "assistant" */
  const char *content;
} pkv_message;

/*
 * Renders a conversation with the model's chat format and tokenizes it; content never becomes
 * control tokens. add_generation: 1 = end with the opening of an assistant turn. Capacity as in
 * pkv_tokenize. E_UNSUPPORTED: the file has no chat template; E_INVALID: the template refuses this
 * conversation, in its own words; E_FORMAT, E_LIMIT: it cannot be read or carried out. Any thread.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_chat_tokenize(int32_t *ids, size_t capacity, size_t *count,
                                                    const pkv_model *model,
                                                    const pkv_message *messages,
                                                    size_t message_count, int32_t add_generation,
                                                    pkv_error *err);
/*
 * The same for a conversation as OpenAI's chat API has it, one JSON object in UTF-8:
 *   messages  each a role (system, developer, user, assistant, tool) and a content: a text,
 *             or a list of parts of type text, which are joined. An assistant's turn may have
 *             tool_calls, and then no content; arguments that spell a JSON object are shown to the
 *             template as that object. Other members go to the template as they are.
 *   tools     functions that the model may call
 *   chat_template_kwargs  an object; enable_thinking (true or false) is known
 * Other members are ignored; null counts as absent. Nothing in it becomes a control token. Besides
 * what pkv_chat_tokenize says, E_FORMAT: no JSON; E_INVALID: a member is not what it must be, its
 * path is named and nothing of its text; E_UNSUPPORTED: tools, which the template would not show;
 * E_LIMIT: JSON nested deeper than 64.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_chat_tokenize_json(int32_t *ids, size_t capacity,
                                                         size_t *count, const pkv_model *model,
                                                         const char *json, size_t bytes,
                                                         int32_t add_generation, pkv_error *err);

/* How a model writes calls of tools, as its chat template tells. */
typedef enum pkv_tool_style {
  PKV_TOOLS_PLAIN = 0,   /* the template shows no tools: whoever asks has to explain them */
  PKV_TOOLS_TAGGED = 1,  /* <tool_call>{"name": .., "arguments": {..}}</tool_call> (Qwen, Hermes) */
  PKV_TOOLS_LLAMA = 2,   /* {"name": .., "parameters": {..}} and nothing else */
  PKV_TOOLS_MISTRAL = 3, /* [TOOL_CALLS] and a list of {"name": .., "arguments": {..}} */
  PKV_TOOLS_SHOWN = 4    /* shown, in a way that is not known: taken as {"name": .., ...} */
} pkv_tool_style;
/* Any thread. */
PKV_API pkv_tool_style pkv_model_tool_style(const pkv_model *model);

/* ------------------------------------------------------------------------------------------
 * Engine
 * ------------------------------------------------------------------------------------------ */

/* Single-owner. */
typedef struct pkv_engine pkv_engine;

typedef enum pkv_activations {
  /* Fast: products of quantised weights take activations rounded to 8 bits, of BF16 weights to
     bf16. */
  PKV_ACTIVATIONS_I8 = 0,
  PKV_ACTIVATIONS_F32 = 1 /* exact: float activations throughout */
} pkv_activations;

#define PKV_MAX_RANKS 8 /* devices that compute together */

typedef struct pkv_engine_options {
  uint32_t struct_size;
  int32_t threads; /* 0 = one a core */
  pkv_isa isa;
  pkv_dtype kv_dtype;  /* f16 by default */
  int32_t page_tokens; /* 0 = 16 */
  /* Size of the paged cache; 0 = the model's context, or what max_rows of max_seq_len can fill
     where that is less. */
  int64_t cache_tokens;
  int32_t max_rows;      /* sequences in the batch at once; 0 = 32 */
  int32_t max_requests;  /* running and waiting; 0 = 256 */
  int32_t max_seq_len;   /* of one request, prompt and answer; 0 = the model's context */
  int32_t prefill_chunk; /* prompt tokens a step; 0 = 512, on a device 2048 */
  pkv_activations activations;
  pkv_policy policy; /* PKV_POLICY_FIXED with `route` by default */
  /* AUTO (default): shared in steps whose decoding rows share prefixes so that it pays, balanced in
     others; with prefix_sharing 0 balanced. SHARED means the same. */
  pkv_route route;
  /* 1 (default): a request's tokens do not depend on what runs beside it. */
  int32_t batch_invariant;
  int32_t prefix_sharing; /* 1 (default): equal prefixes share pages */
  int32_t route_stats;    /* 1: also count what each route would read (kv_bytes_route) */
  const pkv_allocator *allocator;
  /* 1 (default; needs prefix_sharing): whole pages of ended requests stay in the cache until others
     need the room, least recently used first. 0: only live requests share. */
  int32_t prefix_cache;
  /* Who is admitted next, and whether anybody is (sched.h). FCFS and ALWAYS by default. */
  pkv_sched_order order;
  pkv_sched_policy admission;
  /* Prompt tokens a step while other requests decode: bounds how long their next token takes.
     0 = prefill_chunk. Decoding requests get their token in every step whatever waits. */
  int32_t prefill_beside;
  float k_scale, v_scale; /* of an fp8 cache; 0 = 1 */
  /*
   * PKV_DEVICE_CUDA: weights and cache lie on the device. A 16-bit cache then has the type of the
   * activations (bf16 where the weights are, else f16), `isa` and `activations` do not count,
   * cache_tokens 0 is what is free behind the weights, batch_invariant must be 0 and policy FIXED.
   */
  pkv_device device;
  /* CUDA: so many devices of this host, the first ones that the process sees, compute each layer
     together, at most PKV_MAX_RANKS; 0 = 1. */
  int32_t tensor_parallel;
  /*
   * CUDA: pinned memory of the host, in which a preempted request's pages are kept where copying
   * them out and back is faster than to compute them again; at most what the cache holds. 0 = none.
   * Taken at the start, which takes half a second a GiB; E_NOMEM where it cannot be had.
   */
  int64_t swap_bytes;
  /* 1 (default): a call of pkv_engine_step begins a device's next step before it returns, so that
     the device computes while the caller deals with the events. 0: it waits for the step. */
  int32_t overlap;
  /* CUDA: a file in which it is kept which forms of matrix products are the fastest here, so that
     the next engine need not measure them; made, and written anew, where something was measured.
     One that is damaged or of another device counts as none. NULL = none; outlives the engine. */
  const char *products_file;
} pkv_engine_options;
#define PKV_ENGINE_OPTIONS_INIT                                                                    \
  {                                                                                                \
    (uint32_t)sizeof(pkv_engine_options), 0, PKV_ISA_AUTO, PKV_DTYPE_F16, 16, 0, 0, 0, 0, 0,       \
        PKV_ACTIVATIONS_I8, PKV_POLICY_FIXED, PKV_ROUTE_AUTO, 1, 1, 0, NULL, 1, PKV_SCHED_FCFS,    \
        PKV_SCHED_ALWAYS, 0, 0.0f, 0.0f, PKV_DEVICE_CPU, 0, 0, 1, NULL                             \
  }

/*
 * Everything a step needs is allocated here. The longest sequence is min(max_seq_len, context,
 * cache_tokens): what fits is what is promised (pkv_engine_stats.max_seq_len tells). The model must
 * outlive the engine. With batch_invariant the route must be one that can promise it (balanced,
 * shared).
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_engine_create(pkv_engine **out, const pkv_model *model,
                                                    const pkv_engine_options *options,
                                                    pkv_error *err);
/* Ends what runs, without events. NULL is allowed. */
PKV_API void pkv_engine_destroy(pkv_engine *engine);

#define PKV_MAX_TOP_LOGPROBS 20
#define PKV_MAX_CHOICES      128
#define PKV_MAX_STOPS        16
#define PKV_MAX_STOP_BYTES   256
#define PKV_MAX_LOGIT_BIAS   1024
#define PKV_MAX_CONSTRAINTS  64

/*
 * What an answer's text has to be. Immutable: share freely, also between engines of the model,
 * which has to outlive it. Made on any thread, bounded in time and memory (docs/constraints.md).
 * An answer ends with PKV_FINISH_STOP where its text is complete and nothing can follow, or where
 * the model ends it and it may end. max_tokens may still cut it; one that no token can continue
 * ends with PKV_FINISH_ERROR.
 */
typedef struct pkv_constraint pkv_constraint;
/* One JSON object, nothing else (at most 64 levels, 20 blanks in a row, numbers of 15 digits). */
PKV_API PKV_MUST_CHECK pkv_status pkv_constraint_create_json(pkv_constraint **out,
                                                             const pkv_model *model,
                                                             const pkv_allocator *allocator,
                                                             pkv_error *err);
/*
 * A grammar in llama.cpp's language (GBNF), from its rule `root`. E_FORMAT: not such a grammar,
 * with line and column; E_INVALID: left recursion, or no text satisfies it; E_UNSUPPORTED: rules
 * over tokens; E_LIMIT: too large.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_constraint_create_grammar(pkv_constraint **out,
                                                                const pkv_model *model,
                                                                const char *text, size_t bytes,
                                                                const pkv_allocator *allocator,
                                                                pkv_error *err);
/*
 * One JSON text that satisfies a JSON schema, written with its properties in the schema's order.
 * E_FORMAT: no JSON; E_INVALID: not a schema, or nothing satisfies it; E_UNSUPPORTED: a keyword
 * that is not carried out, by name: none is ignored; E_LIMIT: too large. Errors name places by
 * keyword and number and hold nothing else of the schema.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_constraint_create_schema(pkv_constraint **out,
                                                               const pkv_model *model,
                                                               const char *schema, size_t bytes,
                                                               const pkv_allocator *allocator,
                                                               pkv_error *err);
/* Bytes of the longest text that it allows; -1 = there is none. min_tokens must not exceed it. Any
   thread. */
PKV_API int64_t pkv_constraint_longest(const pkv_constraint *constraint);
/* One more user of it, who destroys it in turn. Any thread. */
PKV_API pkv_constraint *pkv_constraint_retain(pkv_constraint *constraint);
/* Its last user frees it; requests are users until they end. NULL is allowed. Any thread. */
PKV_API void pkv_constraint_destroy(pkv_constraint *constraint);

typedef struct pkv_logit_bias {
  int32_t token;
  float bias; /* added to the logit, -100 .. 100; -100 or less counts as never */
} pkv_logit_bias;

typedef struct pkv_request {
  uint32_t struct_size;
  const int32_t *prompt; /* [prompt_tokens], copied */
  int32_t prompt_tokens; /* >= 1 */
  int32_t max_tokens;    /* generated at most; 0 = only score the prompt (needs `echo`) */
  float temperature;     /* 0 = greedy; tiny values converge to it */
  int32_t top_k;         /* 0 = all */
  float top_p;           /* 0 or 1 = all; applied after temperature and top_k */
  uint64_t seed;         /* a token depends on seed and position, not on what runs beside it */
  /* Raw log-probabilities of the model, before temperature: of the token itself (1), and of the
     best 0 .. 20 (which implies the former). */
  int32_t logprobs, top_logprobs;
  /* 1: events for the prompt's tokens too (with logprobs: a scored prompt). Such a request computes
     its whole prompt itself: it takes no shared prefix. */
  int32_t echo;
  int32_t ignore_end; /* 1: end tokens do not end the request */
  void *user;         /* handed back in events */
  /* 0 = off, else 0 .. 1: a token needs at least this share of the best one's probability; after
     temperature, top_k and top_p. */
  float min_p;
  /* 0 or 1 = none, 0.01 .. 100: divides a positive and multiplies a negative logit of every token
     that the prompt or the answer holds, once each. */
  float repetition_penalty;
  /* -2 .. 2, of the answer's tokens only: presence once a token, frequency for each occurrence. */
  float presence_penalty, frequency_penalty;
  const pkv_logit_bias *logit_bias; /* [logit_bias_count], copied */
  int32_t logit_bias_count;
  int32_t min_tokens; /* end tokens are not sampled, and stop strings not looked for, before */
  /* [stop_count] texts of 1 .. 256 bytes, copied: the answer ends where its text holds one, also
     across tokens. One that is a control token's own text matches that token. */
  const char *const *stop;
  int32_t stop_count;
  /* Answers to this prompt, 0 or 1 = one: one id, each answer with events and an end of its own.
     They share the prompt's pages; answer c draws from (seed, c, position). Counts as n requests
     for max_requests. Not with echo. */
  int32_t n;
  /* Only requests of one salt share pages: a client's own number keeps its prompts from others'
     timing. */
  uint64_t cache_salt;
  uint64_t adapter; /* stands for what else changes K and V; like a salt */
  int32_t priority; /* for orders that know one: lower is more urgent */
  /* Kept until the last event, or NULL. With it, end tokens come only where the text may end, and
     with ignore_end never. At most PKV_MAX_CONSTRAINTS different ones at once (E_LIMIT). */
  const pkv_constraint *constraint;
} pkv_request;
#define PKV_REQUEST_INIT                                                                           \
  {                                                                                                \
    (uint32_t)sizeof(pkv_request), NULL, 0, 16, 0.0f, 0, 0.0f, 0u, 0, 0, 0, 0, NULL, 0.0f, 0.0f,   \
        0.0f, 0.0f, NULL, 0, 0, NULL, 0, 0, 0u, 0u, 0, NULL                                        \
  }

typedef enum pkv_finish {
  PKV_FINISH_NONE = 0,   /* goes on */
  PKV_FINISH_STOP = 1,   /* the model ended, or a stop string came */
  PKV_FINISH_LENGTH = 2, /* max_tokens, or the context is full */
  PKV_FINISH_CANCELLED = 3,
  PKV_FINISH_ERROR = 4 /* logits were not finite; other requests go on */
} pkv_finish;

typedef struct pkv_logprob {
  int32_t token;
  float logprob;
} pkv_logprob;

/* One token of one answer. The last event of an answer carries finish != NONE; its token may then
   be -1. */
typedef struct pkv_event {
  int64_t request;
  void *user;
  int32_t token;       /* -1 = none */
  int32_t position;    /* in the sequence, prompt included */
  int32_t from_prompt; /* 1: an echoed prompt token */
  pkv_finish finish;
  /* Of `token` given what came before; NaN when not computed (first prompt token, not asked). */
  float logprob;
  int32_t top_count;
  pkv_logprob top[PKV_MAX_TOP_LOGPROBS]; /* best first */
  int32_t choice;                        /* 0 .. n - 1 */
  int32_t cached_tokens; /* of the prompt, found in the cache when this answer began */
  int32_t preemptions;   /* of this answer so far */
  /* Which stop string ended the answer (-1 = none), and how many bytes at the end of its text
     (tokens' texts without control tokens) are that string's and not the answer's. */
  int32_t stop_index, stop_bytes;
  /* When the first tokens of this answer's prompt were worked on, monotonic nanoseconds; before
     that it waited, in the queue or for another one's prefix. 0 = never. */
  int64_t started_ns;
} pkv_event;

/*
 * Queues a request. *id >= 1 on success. E_LIMIT: the prompt leaves no
 * room in the longest sequence (a prompt that is only scored may fill it), or max_requests are here
 * already. E_RANGE: a token outside the vocabulary. max_tokens may exceed what is left of the
 * context: the request then ends with PKV_FINISH_LENGTH when the context is full. May allocate.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_engine_submit(int64_t *id, pkv_engine *engine,
                                                    const pkv_request *request, pkv_error *err);
/* Ends all answers of a request with PKV_FINISH_CANCELLED at the next step. An unknown or finished
   id is no error. */
PKV_API void pkv_engine_cancel(pkv_engine *engine, int64_t id);
/* paused 1: the answers of a request get no more tokens until this is called with 0, because their
   reader is behind. They keep row and pages as long as nobody else needs these, also to start:
   paused ones lose theirs first. What comes after is what would have come. Ids as for cancel. */
PKV_API void pkv_engine_pause(pkv_engine *engine, int64_t id, int32_t paused);
/*
 * One step: admit, plan, forward, sample. Every decoding request advances by one token, and
 * prefill_chunk prompt tokens are worked on beside them. Writes up to `capacity` events (at least
 * the engine's max_rows, plus prefill_chunk when a live request echoes), *count of them; events of
 * one request come in order. Allocates nothing. Does nothing when idle.
 *
 * On a device, with options.overlap, the step that a call begins is the next call's: its events
 * come then. Where rows only decode and the device chooses their tokens, the step behind it is
 * begun before these are known. So a pause is heeded by the step behind those that were begun.
 *
 * When pages run out, the youngest running request loses its pages, keeps its place and is computed
 * again later, or on a device gets them back from the host (options.swap_bytes): with
 * batch_invariant its text is the one it would have had. On failure *count still counts the events
 * that were written; the step may be tried again.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_engine_step(pkv_event *events, size_t capacity, size_t *count,
                                                  pkv_engine *engine, pkv_error *err);
PKV_API int32_t pkv_engine_pending(const pkv_engine *engine); /* answers running or waiting */

typedef struct pkv_engine_stats {
  uint32_t struct_size;
  int32_t max_seq_len; /* longest sequence this engine takes, prompt and answer */
  int64_t steps, preemptions;
  int64_t prompt_tokens;        /* of requests when they first ran ... */
  int64_t prompt_tokens_reused; /* ... of which found in the cache or taken over from a live one */
  int64_t prefill_tokens;       /* computed in prefill, again after a preemption included */
  int64_t decode_tokens;        /* computed one a request and step */
  int64_t generated_tokens;
  int64_t prefix_pages_reused;
  int32_t rows_running, rows_waiting;
  int64_t pages_total, pages_in_use, pages_peak, pages_shared;
  size_t cache_bytes;
  /* By pkv_route, with options.route_stats: K and V bytes, padding included, that the decoding rows
     of all steps so far would have read by that route; by shared, what rows share once. */
  int64_t kv_bytes_route[8];
  int64_t shared_steps; /* steps that read shared prefixes once for all (route shared) */
  /* A step that does both is split by its tokens. */
  double prefill_seconds, decode_seconds;
  /* pages_in_use: of live requests. Cached ones are kept for later and evicted when room is needed.
     in use + cached + free = total, always. */
  int64_t pages_cached, pages_free;
  int64_t evictions;   /* pages that left the cache for others */
  int64_t forks;       /* answers that took the prompt's pages from another of the same request */
  int64_t page_copies; /* pages copied because a writer found them shared */
  int64_t admissions, sched_stops;    /* requests started; times that the policy said stop */
  int64_t cancelled, failed, stopped; /* answers by end: cancelled, error, stop */
  int64_t decode_steps;               /* steps with decoding rows */
  int32_t rows_paused;                /* answers in the batch that are paused */
  int32_t rows_deferred;              /* of rows_waiting: paused, so that no order picks them */
  /* Preempted requests whose pages went to the host, and that have got them back; pages copied each
     way; those for which there was no room on the host, or whose pages there were of no use when
     they came back (the ones before them had left the cache): computed again. */
  int64_t swap_outs, swap_ins, swap_pages_out, swap_pages_in, swap_full, swap_drops;
  size_t swap_bytes, swap_used_bytes; /* of the host's memory */
  int64_t ahead_steps; /* of a device: begun before the tokens of the step before were known */
} pkv_engine_stats;
#define PKV_ENGINE_STATS_INIT                                                                      \
  {                                                                                                \
    (uint32_t)sizeof(pkv_engine_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {0}, 0, 0, \
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0                        \
  }

/* Forgets the pages that no live request uses. */
PKV_API void pkv_engine_clear_cache(pkv_engine *engine);
/*
 * Writes the cached pages to a file, which appears whole or not at all, or takes pages from one in
 * place of those that are cached. *pages is their number; of a file with more pages than the cache
 * the most recently used ones. Both need an engine without requests (E_STATE) and with a prefix
 * cache (E_UNSUPPORTED). E_FORMAT: the file is damaged, of another version, model (every weight and
 * setting counts), page or element type, instruction set or activations; the cache is as it was. A
 * checksum finds damage, not intent: K and V are taken as they are.
 */
PKV_API PKV_MUST_CHECK pkv_status pkv_engine_save_cache(int64_t *pages, const pkv_engine *engine,
                                                        const char *path, pkv_error *err);
PKV_API PKV_MUST_CHECK pkv_status pkv_engine_load_cache(int64_t *pages, pkv_engine *engine,
                                                        const char *path, pkv_error *err);
/* Fills a struct that was set to PKV_ENGINE_STATS_INIT. */
PKV_API void pkv_engine_get_stats(pkv_engine_stats *out, const pkv_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
