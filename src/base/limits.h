/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of what a stranger sends or a stranger's file holds is taken, in one place. Those of a
 * request that a program can see stand in pkv/engine.h (PKV_MAX_STOPS ...). docs/robustness.md
 * names for each the test that goes to the limit and one past it. Those with an option of `pkv
 * serve` are its default; all can be set when building (-DPKV_BODY_CHUNKS=1024).
 */
#ifndef PKV_BASE_LIMITS_H
#define PKV_BASE_LIMITS_H

#include <stddef.h>
#include <stdint.h>

/* --- HTTP ----------------------------------------------------------------------------------- */

#ifndef PKV_HEADER_BYTES /* one request line and its headers; libmicrohttpd gets twice that */
#define PKV_HEADER_BYTES ((size_t)16 << 10)
#endif
#ifndef PKV_HEADERS /* of a request */
#define PKV_HEADERS 100
#endif
#ifndef PKV_BODY_BYTES /* --max-body */
#define PKV_BODY_BYTES 8388608
#endif
#ifndef PKV_BODY_CHUNKS /* of a chunked body; more only of PKV_CHUNK_BYTES each, on average */
#define PKV_BODY_CHUNKS 65536
#endif
#define PKV_CHUNK_BYTES 1024
#ifndef PKV_HEADER_S /* --header-timeout */
#define PKV_HEADER_S 10
#endif
#ifndef PKV_BODY_S /* --body-timeout */
#define PKV_BODY_S 30
#endif
#ifndef PKV_IDLE_S /* --idle-timeout */
#define PKV_IDLE_S 60
#endif
#ifndef PKV_STALL_S /* --stall-timeout */
#define PKV_STALL_S 30
#endif
#ifndef PKV_CONNECTIONS /* --connections */
#define PKV_CONNECTIONS 512
#endif
#ifndef PKV_REQUESTS /* --requests */
#define PKV_REQUESTS 256
#endif
#ifndef PKV_STREAM_WINDOW_BYTES /* of a stream not taken, before its tokens are not computed */
#define PKV_STREAM_WINDOW_BYTES ((size_t)256 << 10)
#endif

/* --- requests ------------------------------------------------------------------------------- */

#ifndef PKV_JSON_DEPTH /* of every JSON text that is read */
#define PKV_JSON_DEPTH 64
#endif
#ifndef PKV_API_VALUES /* of a body, and of what a text in it spells */
#define PKV_API_VALUES 262144
#endif
#ifndef PKV_API_MESSAGES /* of one conversation */
#define PKV_API_MESSAGES 4096
#endif
#ifndef PKV_API_N /* below PKV_MAX_CHOICES: the rest is for lists of prompts */
#define PKV_API_N 16
#endif
#ifndef PKV_API_TOOLS
#define PKV_API_TOOLS 128
#endif
#ifndef PKV_TOOL_NAME /* bytes */
#define PKV_TOOL_NAME 64
#endif

/* --- constraints and templates ---------------------------------------------------------------- */

#ifndef PKV_SCHEMA_BYTES
#define PKV_SCHEMA_BYTES (1 << 18)
#endif
#ifndef PKV_SCHEMA_VALUES
#define PKV_SCHEMA_VALUES 32768
#endif
#ifndef PKV_SCHEMA_DEPTH /* of schemas in each other, by $ref or not */
#define PKV_SCHEMA_DEPTH 128
#endif
#ifndef PKV_SCHEMA_WORK /* schemas looked at, those made by merging included */
#define PKV_SCHEMA_WORK 16000
#endif
#ifndef PKV_GRAMMAR_TEXT_BYTES
#define PKV_GRAMMAR_TEXT_BYTES (1 << 18)
#endif
#ifndef PKV_GRAMMAR_DEPTH /* of parentheses */
#define PKV_GRAMMAR_DEPTH 256
#endif
#ifndef PKV_TEMPLATE_SOURCE_BYTES
#define PKV_TEMPLATE_SOURCE_BYTES 1048576u
#endif
#ifndef PKV_TEMPLATE_NESTING /* in a source: of statements, a bracket counts twice */
#define PKV_TEMPLATE_NESTING 150u
#endif
#ifndef PKV_TEMPLATE_STEPS /* a node evaluated, or 64 bytes moved */
#define PKV_TEMPLATE_STEPS 1000000u
#endif
#ifndef PKV_TEMPLATE_OUTPUT_BYTES
#define PKV_TEMPLATE_OUTPUT_BYTES ((size_t)32 << 20)
#endif
#ifndef PKV_TEMPLATE_MEMORY_BYTES /* of all values that come up */
#define PKV_TEMPLATE_MEMORY_BYTES ((size_t)256 << 20)
#endif
#ifndef PKV_TEMPLATE_DEPTH /* expressions, statements and macro calls within each other */
#define PKV_TEMPLATE_DEPTH 600u
#endif

/* --- model files: and never more than the file has left -------------------------------------- */

#ifndef PKV_GGUF_MAX_STRING
#define PKV_GGUF_MAX_STRING ((uint64_t)16 << 20)
#endif
#ifndef PKV_GGUF_MAX_ELEMENTS /* of an array */
#define PKV_GGUF_MAX_ELEMENTS ((uint64_t)64 << 20)
#endif
#ifndef PKV_GGUF_MAX_ENTRIES /* keys; tensors */
#define PKV_GGUF_MAX_ENTRIES ((uint64_t)65536)
#endif
#ifndef PKV_GGUF_MAX_KEY /* bytes of a key's name */
#define PKV_GGUF_MAX_KEY ((uint64_t)65535)
#endif
#ifndef PKV_GGUF_MAX_NAME /* bytes of a tensor's name */
#define PKV_GGUF_MAX_NAME ((uint64_t)64)
#endif
#ifndef PKV_GGUF_MAX_META /* bytes before the tensors */
#define PKV_GGUF_MAX_META ((size_t)1 << 30)
#endif
#ifndef PKV_SAFETENSORS_MAX_HEADER
#define PKV_SAFETENSORS_MAX_HEADER 100000000u
#endif
#ifndef PKV_SAFETENSORS_MAX_TENSORS
#define PKV_SAFETENSORS_MAX_TENSORS 65536u
#endif
#ifndef PKV_VOCAB_MAX_TOKENS /* 2^22; the largest known vocabularies have 2^18 */
#define PKV_VOCAB_MAX_TOKENS 4194304
#endif
#ifndef PKV_VOCAB_MAX_PIECE /* bytes of one token as spelled in the file */
#define PKV_VOCAB_MAX_PIECE 16384
#endif
#ifndef PKV_SPECIAL_MAX_BYTES /* of a special token: bounds the work at one place of a text */
#define PKV_SPECIAL_MAX_BYTES 256
#endif
#ifndef PKV_PIECE_MAX_BYTES /* of an ordinary token: bounds a look-up; the longest known have 48 */
#define PKV_PIECE_MAX_BYTES 1024
#endif

/* Dimensions of a tensor. It is in the format of the views: not to be set. */
#define PKV_GGUF_MAX_DIMS 4u

/* A number above as text, for the table of options. */
#define PKV_LIMIT_TEXT(limit)   PKV_LIMIT_DIGITS(limit)
#define PKV_LIMIT_DIGITS(limit) #limit

#endif
