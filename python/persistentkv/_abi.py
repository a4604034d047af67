# SPDX-License-Identifier: Apache-2.0
"""The C ABI of libpkv for ctypes. Written by tools/gen_python_abi.py; do not edit.

Every pointer is a c_void_p: addresses and byref() alike. Sizes and strides are those of pkv.h.
"""

from ctypes import (
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

ACTIVATIONS_F32 = 1
ACTIVATIONS_I8 = 0
DEVICE_CPU = 0
DEVICE_CUDA = 1
DTYPE_BF16 = 2
DTYPE_F16 = 1
DTYPE_F32 = 0
DTYPE_FP8_E4M3 = 3
ERROR_TEXT_BYTES = 192
E_DEVICE = -11
E_FORMAT = -8
E_INTERNAL = -12
E_INVALID = -1
E_IO = -7
E_LIMIT = -10
E_NOMEM = -2
E_NO_PAGES = -6
E_RANGE = -4
E_STATE = -9
E_TOO_SMALL = -5
E_UNSUPPORTED = -3
FINISH_CANCELLED = 3
FINISH_ERROR = 4
FINISH_LENGTH = 2
FINISH_NONE = 0
FINISH_STOP = 1
INSPECT_BOOL = 3
INSPECT_FLOAT = 2
INSPECT_INT = 0
INSPECT_TEXT = 4
INSPECT_UINT = 1
ISA_AUTO = 0
ISA_AVX2 = 3
ISA_AVX512 = 4
ISA_NEON = 5
ISA_REFERENCE = 1
ISA_SCALAR = 2
LAYOUT_HND = 0
LAYOUT_NHD = 1
LOG_DEBUG = 3
LOG_ERROR = 0
LOG_INFO = 2
LOG_WARN = 1
MAX_CHOICES = 128
MAX_CONSTRAINTS = 64
MAX_LOGIT_BIAS = 1024
MAX_RANKS = 8
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_TOP_LOGPROBS = 20
OK = 0
PLAN_BATCH_INVARIANT = 1
PLAN_ENOUGH_SHARED = 4
PLAN_FEWER_PARTS = 2
POLICY_CALIBRATED = 3
POLICY_FIXED = 0
POLICY_ROOFLINE = 2
POLICY_STATIC = 1
ROPE_ADJACENT = 1
ROPE_HALVES = 0
ROUTE_AUTO = 0
ROUTE_BALANCED = 5
ROUTE_BUCKET_EXACT = 1
ROUTE_BUCKET_PADDED = 2
ROUTE_FLASHINFER = 7
ROUTE_SHARED = 6
ROUTE_SPLIT = 3
ROUTE_WORKQUEUE = 4
SCHED_ACTIVE = 2
SCHED_ADD = 0
SCHED_AGEING_EACH = 0
SCHED_AGEING_OLDEST = 1
SCHED_ALWAYS = 0
SCHED_BLOCKED = 2
SCHED_BY_AGE = 1
SCHED_BY_BYPASSES = 2
SCHED_BY_DEADLINE = 4
SCHED_BY_ORDER = 0
SCHED_BY_WAIT = 3
SCHED_CHT = 3
SCHED_DFS_WEIGHT = 5
SCHED_EMPTY = 3
SCHED_FAULTS_ALL = 127
SCHED_FAULT_ABSOLUTE = 1
SCHED_FAULT_LOST_PREEMPTED = 4
SCHED_FAULT_NO_AGEING = 2
SCHED_FAULT_NO_GUARD = 64
SCHED_FAULT_STALE_HEAP = 32
SCHED_FAULT_STICKY_FLOOR = 8
SCHED_FAULT_TRUST_DIGESTS = 16
SCHED_FCFS = 1
SCHED_HASH_BULK = 0
SCHED_HASH_TOKENWISE = 1
SCHED_LPM = 4
SCHED_MARGINAL = 5
SCHED_MAX_PRIORITIES = 1024
SCHED_MAX_PRIORITY = 1000000
SCHED_ORDERS = 6
SCHED_POLICIES = 6
SCHED_PREEMPTED = 3
SCHED_PRIORITY = 2
SCHED_Q_LEARNING = 4
SCHED_STATIC = 1
SCHED_STATIC_CHAIN = 2
SCHED_STOP = 1
SCHED_TREE = 0
SCHED_UCB = 3
SCHED_UNKNOWN = 0
SCHED_WAITING = 1
SEED_TILE_TOKENS = 32
TABLE_CHAINED = 1
TEXT_ADD_SPECIAL = 1
TEXT_PARSE_SPECIAL = 2
TILE_TOKENS = 64
TOOLS_LLAMA = 2
TOOLS_MISTRAL = 3
TOOLS_PLAIN = 0
TOOLS_SHOWN = 4
TOOLS_TAGGED = 1
VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
WEIGHTS_AUTO = 0
WEIGHTS_COPIED = 2
WEIGHTS_MAPPED = 1


class Error(Structure):
    _fields_ = [
        ("status", c_int32),
        ("where", c_void_p),
        ("text", c_char * 192),
    ]


class Allocator(Structure):
    _fields_ = [
        ("alloc", c_void_p),
        ("free", c_void_p),
        ("ctx", c_void_p),
    ]


class ExecutorOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("isa", c_int32),
        ("threads", c_int32),
        ("allocator", c_void_p),
    ]


class Cache(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_page_stride", c_int64),
        ("k_token_stride", c_int64),
        ("k_head_stride", c_int64),
        ("v_page_stride", c_int64),
        ("v_token_stride", c_int64),
        ("v_head_stride", c_int64),
        ("pages", c_int64),
        ("page_tokens", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("k_head_scale", c_void_p),
        ("v_head_scale", c_void_p),
    ]


class PoolOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("layout", c_int32),
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_tokens", c_int32),
        ("pages", c_int64),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("allocator", c_void_p),
    ]


class PoolStats(Structure):
    _fields_ = [
        ("pages_total", c_int64),
        ("pages_free", c_int64),
        ("pages_in_use", c_int64),
        ("pages_shared", c_int64),
        ("peak_in_use", c_int64),
        ("copies", c_int64),
        ("storage_bytes", c_size_t),
    ]


class Rope(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("pairs", c_int32),
        ("dims", c_int32),
        ("base", c_double),
        ("inverse_frequency", c_void_p),
        ("positions", c_void_p),
    ]


class AppendArgs(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("cache", c_void_p),
        ("tokens", c_int64),
        ("slots", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_token_stride", c_int64),
        ("v_token_stride", c_int64),
        ("dtype", c_int32),
        ("k_head_stride", c_int64),
        ("v_head_stride", c_int64),
        ("rope", c_void_p),
    ]


class Shape(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_tokens", c_int32),
        ("q_len", c_int32),
        ("window", c_int32),
    ]


class PlanOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("route", c_int32),
        ("flags", c_uint32),
        ("parts", c_int32),
        ("splits", c_int32),
        ("bucket_tokens", c_int32),
        ("chunk_tokens", c_int32),
        ("tile_cost", c_uint32),
        ("segment_cost", c_uint32),
        ("node_tile_cost", c_uint32),
        ("node_row_cost", c_uint32),
        ("node_segment_cost", c_uint32),
        ("state_cost", c_uint32),
    ]


class PrefixNode(Structure):
    _fields_ = [
        ("first_row", c_int32),
        ("row_count", c_int32),
        ("first_page", c_int32),
        ("page_count", c_int32),
    ]


class Sharing(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_uint32),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("max_pages", c_int32),
        ("node_count", c_int32),
        ("nodes", c_void_p),
        ("order", c_void_p),
    ]


class PlanStats(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("route", c_int32),
        ("rows", c_int32),
        ("launches", c_int32),
        ("tasks", c_int64),
        ("partial_states", c_int64),
        ("merge_state_bytes", c_int64),
        ("useful_kv_bytes", c_int64),
        ("padded_kv_bytes", c_int64),
        ("max_part_cost", c_int64),
        ("total_cost", c_int64),
        ("plan_bytes", c_size_t),
        ("workspace_bytes", c_size_t),
        ("nodes", c_int64),
        ("unique_kv_bytes", c_int64),
        ("total_kv_bytes", c_int64),
        ("dedup_ratio", c_double),
        ("tile_fill", c_double),
    ]


class Profile(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("name", c_char * 64),
        ("read_gb_s", c_double),
        ("launch_us", c_double),
        ("sms", c_int32),
        ("min_ctas", c_int32),
        ("routes", c_uint32),
        ("layers", c_int32),
        ("model", c_void_p),
    ]


class Choice(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("wanted", c_int32),
        ("route", c_int32),
        ("splits", c_int32),
        ("kind", c_int32),
        ("predicted_us", c_double),
        ("reason", c_char * 160),
    ]


class AttentionArgs(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("plan", c_void_p),
        ("cache", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("max_pages", c_int32),
        ("q_dtype", c_int32),
        ("q", c_void_p),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("out_dtype", c_int32),
        ("out", c_void_p),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse", c_void_p),
        ("lse_token_stride", c_int64),
        ("lse_base2", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class SchedBatch(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("chain_tokens", c_int32),
        ("total_tokens", c_int64),
        ("unique_tokens", c_int64),
        ("common_tokens", c_int64),
    ]


class SchedOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("order", c_int32),
        ("policy", c_int32),
        ("max_requests", c_int32),
        ("max_prompt_tokens", c_int32),
        ("chunk_tokens", c_int32),
        ("page_tokens", c_int32),
        ("pool_pages", c_int32),
        ("bypass_limit", c_int32),
        ("ageing", c_int32),
        ("max_wait_s", c_double),
        ("deadline_slack_s", c_double),
        ("share_weight", c_double),
        ("share_min_tokens", c_int32),
        ("age_tokens_per_s", c_double),
        ("fit_tries", c_int32),
        ("lpm_fallback", c_int32),
        ("lpm_in_batch_tokens", c_int32),
        ("static_new_tokens", c_int32),
        ("chain_loss", c_int32),
        ("chain_loss_crowded", c_int32),
        ("crowd", c_int32),
        ("floor_max", c_int32),
        ("ucb_bonus", c_double),
        ("q_rate", c_double),
        ("q_discount", c_double),
        ("q_explore", c_double),
        ("prior_weight", c_double),
        ("cost", c_void_p),
        ("cost_ctx", c_void_p),
        ("cost_base_us", c_double),
        ("cost_row_us", c_double),
        ("cost_token_us", c_double),
        ("clock", c_void_p),
        ("clock_ctx", c_void_p),
        ("hash", c_int32),
        ("hash_fn", c_void_p),
        ("hash_ctx", c_void_p),
        ("seed", c_uint64),
        ("faults", c_uint32),
        ("allocator", c_void_p),
        ("max_rows", c_int32),
    ]


class SchedRequest(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("prompt_tokens", c_int32),
        ("id", c_uint64),
        ("tokens", c_void_p),
        ("hashes", c_void_p),
        ("hash_count", c_int32),
        ("priority", c_int32),
        ("arrival_ns", c_int64),
        ("deadline_ns", c_int64),
        ("output_tokens", c_int32),
        ("pages", c_int32),
    ]


class SchedPick(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("verdict", c_int32),
        ("reason", c_int32),
        ("forced", c_int32),
        ("id", c_uint64),
        ("prompt_tokens", c_int32),
        ("shared_tokens", c_int32),
        ("new_tokens", c_int32),
        ("new_pages", c_int32),
        ("chain_before", c_int32),
        ("chain_after", c_int32),
        ("waiting_sharers", c_int32),
        ("bypasses", c_int32),
        ("waited_ns", c_int64),
        ("waiting_peers", c_int32),
    ]


class SchedStats(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("waiting", c_int32),
        ("active", c_int32),
        ("preempted", c_int32),
        ("chain_chunks", c_int32),
        ("tree_nodes", c_int32),
        ("total_tokens", c_int64),
        ("unique_tokens", c_int64),
        ("inserted", c_int64),
        ("admitted", c_int64),
        ("finished", c_int64),
        ("cancelled", c_int64),
        ("preempts", c_int64),
        ("returns", c_int64),
        ("rewards", c_int64),
        ("stops", c_int64),
        ("by_reason", c_int64 * 5),
        ("max_bypasses", c_int64),
        ("max_wait_ns", c_int64),
        ("sum_wait_ns", c_int64),
        ("shared_tokens", c_int64),
        ("new_tokens", c_int64),
        ("collisions", c_int64),
        ("heap_stale", c_int64),
        ("memory_bytes", c_int64),
        ("used_bytes", c_int64),
        ("peak_used_bytes", c_int64),
        ("common_tokens", c_int64),
    ]


class SchedEntry(Structure):
    _fields_ = [
        ("id", c_uint64),
        ("state", c_int32),
        ("priority", c_int32),
        ("prompt_tokens", c_int32),
        ("shared_tokens", c_int32),
        ("waiting_since_ns", c_int64),
    ]


class ModelOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("check_tensors", c_int32),
        ("tokenizer_only", c_int32),
        ("allocator", c_void_p),
        ("weights", c_int32),
    ]


class ModelInfo(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("architecture", c_char * 32),
        ("name", c_char * 96),
        ("layers", c_int32),
        ("width", c_int32),
        ("feed_forward", c_int32),
        ("query_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("context", c_int32),
        ("parameters", c_int64),
        ("weight_bytes", c_int64),
        ("file_bytes", c_int64),
        ("bos", c_int32),
        ("eos", c_int32),
    ]


class InspectFile(Structure):
    _fields_ = [
        ("format", c_void_p),
        ("version", c_uint32),
        ("alignment", c_uint32),
        ("file_bytes", c_int64),
        ("data_offset", c_int64),
        ("tensor_bytes", c_int64),
        ("keys", c_int64),
        ("tensors", c_int64),
        ("usable", c_int32),
        ("problem", c_void_p),
        ("model", c_void_p),
    ]


class InspectKey(Structure):
    _fields_ = [
        ("index", c_int64),
        ("name", c_void_p),
        ("name_bytes", c_size_t),
        ("type", c_void_p),
        ("element_type", c_void_p),
        ("count", c_int64),
    ]


class InspectElement(Structure):
    _fields_ = [
        ("kind", c_int32),
        ("as_int", c_int64),
        ("as_uint", c_uint64),
        ("as_float", c_double),
        ("text", c_void_p),
        ("text_bytes", c_size_t),
    ]


class InspectTensor(Structure):
    _fields_ = [
        ("index", c_int64),
        ("name", c_void_p),
        ("name_bytes", c_size_t),
        ("type", c_void_p),
        ("dims", c_int32),
        ("extent", c_int64 * 4),
        ("elements", c_int64),
        ("bytes", c_int64),
        ("offset", c_int64),
        ("supported", c_int32),
    ]


class Inspector(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("user", c_void_p),
        ("max_elements", c_int64),
        ("file", c_void_p),
        ("key", c_void_p),
        ("element", c_void_p),
        ("tensor", c_void_p),
    ]


class Message(Structure):
    _fields_ = [
        ("role", c_void_p),
        ("content", c_void_p),
    ]


class EngineOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("threads", c_int32),
        ("isa", c_int32),
        ("kv_dtype", c_int32),
        ("page_tokens", c_int32),
        ("cache_tokens", c_int64),
        ("max_rows", c_int32),
        ("max_requests", c_int32),
        ("max_seq_len", c_int32),
        ("prefill_chunk", c_int32),
        ("activations", c_int32),
        ("policy", c_int32),
        ("route", c_int32),
        ("batch_invariant", c_int32),
        ("prefix_sharing", c_int32),
        ("route_stats", c_int32),
        ("allocator", c_void_p),
        ("prefix_cache", c_int32),
        ("order", c_int32),
        ("admission", c_int32),
        ("prefill_beside", c_int32),
        ("k_scale", c_float),
        ("v_scale", c_float),
        ("device", c_int32),
        ("tensor_parallel", c_int32),
        ("swap_bytes", c_int64),
        ("overlap", c_int32),
        ("products_file", c_void_p),
    ]


class LogitBias(Structure):
    _fields_ = [
        ("token", c_int32),
        ("bias", c_float),
    ]


class Request(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("prompt", c_void_p),
        ("prompt_tokens", c_int32),
        ("max_tokens", c_int32),
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("seed", c_uint64),
        ("logprobs", c_int32),
        ("top_logprobs", c_int32),
        ("echo", c_int32),
        ("ignore_end", c_int32),
        ("user", c_void_p),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("logit_bias", c_void_p),
        ("logit_bias_count", c_int32),
        ("min_tokens", c_int32),
        ("stop", c_void_p),
        ("stop_count", c_int32),
        ("n", c_int32),
        ("cache_salt", c_uint64),
        ("adapter", c_uint64),
        ("priority", c_int32),
        ("constraint", c_void_p),
    ]


class Logprob(Structure):
    _fields_ = [
        ("token", c_int32),
        ("logprob", c_float),
    ]


class Event(Structure):
    _fields_ = [
        ("request", c_int64),
        ("user", c_void_p),
        ("token", c_int32),
        ("position", c_int32),
        ("from_prompt", c_int32),
        ("finish", c_int32),
        ("logprob", c_float),
        ("top_count", c_int32),
        ("top", Logprob * 20),
        ("choice", c_int32),
        ("cached_tokens", c_int32),
        ("preemptions", c_int32),
        ("stop_index", c_int32),
        ("stop_bytes", c_int32),
        ("started_ns", c_int64),
    ]


class EngineStats(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("max_seq_len", c_int32),
        ("steps", c_int64),
        ("preemptions", c_int64),
        ("prompt_tokens", c_int64),
        ("prompt_tokens_reused", c_int64),
        ("prefill_tokens", c_int64),
        ("decode_tokens", c_int64),
        ("generated_tokens", c_int64),
        ("prefix_pages_reused", c_int64),
        ("rows_running", c_int32),
        ("rows_waiting", c_int32),
        ("pages_total", c_int64),
        ("pages_in_use", c_int64),
        ("pages_peak", c_int64),
        ("pages_shared", c_int64),
        ("cache_bytes", c_size_t),
        ("kv_bytes_route", c_int64 * 8),
        ("shared_steps", c_int64),
        ("prefill_seconds", c_double),
        ("decode_seconds", c_double),
        ("pages_cached", c_int64),
        ("pages_free", c_int64),
        ("evictions", c_int64),
        ("forks", c_int64),
        ("page_copies", c_int64),
        ("admissions", c_int64),
        ("sched_stops", c_int64),
        ("cancelled", c_int64),
        ("failed", c_int64),
        ("stopped", c_int64),
        ("decode_steps", c_int64),
        ("rows_paused", c_int32),
        ("rows_deferred", c_int32),
        ("swap_outs", c_int64),
        ("swap_ins", c_int64),
        ("swap_pages_out", c_int64),
        ("swap_pages_in", c_int64),
        ("swap_full", c_int64),
        ("swap_drops", c_int64),
        ("swap_bytes", c_size_t),
        ("swap_used_bytes", c_size_t),
        ("ahead_steps", c_int64),
    ]


STRUCTS = {
    "pkv_error": Error,
    "pkv_allocator": Allocator,
    "pkv_executor_options": ExecutorOptions,
    "pkv_cache": Cache,
    "pkv_pool_options": PoolOptions,
    "pkv_pool_stats": PoolStats,
    "pkv_rope": Rope,
    "pkv_append_args": AppendArgs,
    "pkv_shape": Shape,
    "pkv_plan_options": PlanOptions,
    "pkv_prefix_node": PrefixNode,
    "pkv_sharing": Sharing,
    "pkv_plan_stats": PlanStats,
    "pkv_profile": Profile,
    "pkv_choice": Choice,
    "pkv_attention_args": AttentionArgs,
    "pkv_sched_batch": SchedBatch,
    "pkv_sched_options": SchedOptions,
    "pkv_sched_request": SchedRequest,
    "pkv_sched_pick": SchedPick,
    "pkv_sched_stats": SchedStats,
    "pkv_sched_entry": SchedEntry,
    "pkv_model_options": ModelOptions,
    "pkv_model_info": ModelInfo,
    "pkv_inspect_file": InspectFile,
    "pkv_inspect_key": InspectKey,
    "pkv_inspect_element": InspectElement,
    "pkv_inspect_tensor": InspectTensor,
    "pkv_inspector": Inspector,
    "pkv_message": Message,
    "pkv_engine_options": EngineOptions,
    "pkv_logit_bias": LogitBias,
    "pkv_request": Request,
    "pkv_logprob": Logprob,
    "pkv_event": Event,
    "pkv_engine_stats": EngineStats,
}

# name: (result, arguments)
FUNCTIONS = {
    "pkv_status_name": (c_char_p, [c_int32]),
    "pkv_status_text": (c_char_p, [c_int32]),
    "pkv_version": (c_char_p, []),
    "pkv_version_number": (c_int32, []),
    "pkv_log_set": (None, [c_void_p, c_void_p]),
    "pkv_dtype_name": (c_char_p, [c_int32]),
    "pkv_dtype_bytes": (c_size_t, [c_int32]),
    "pkv_isa_name": (c_char_p, [c_int32]),
    "pkv_executor_create": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_executor_destroy": (None, [c_void_p]),
    "pkv_executor_isa": (c_int32, [c_void_p]),
    "pkv_executor_threads": (c_int32, [c_void_p]),
    "pkv_pool_create": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_pool_wrap": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p, c_void_p]),
    "pkv_pool_destroy": (None, [c_void_p]),
    "pkv_pool_cache": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p]),
    "pkv_pool_alloc": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pkv_pool_retain": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pkv_pool_release": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pkv_pool_refcount": (c_int32, [c_void_p, c_int32]),
    "pkv_pool_get_stats": (None, [c_void_p, c_void_p]),
    "pkv_table_create": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "pkv_table_destroy": (None, [c_void_p]),
    "pkv_table_extend": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "pkv_table_truncate": (c_int32, [c_void_p, c_int32, c_int32, c_void_p]),
    "pkv_table_fork": (c_int32, [c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "pkv_table_attach": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p]),
    "pkv_table_slots": (c_int32, [c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p]),
    "pkv_table_seq_len": (c_int32, [c_void_p, c_int32]),
    "pkv_table_row": (c_void_p, [c_void_p, c_int32]),
    "pkv_table_stride": (c_int64, [c_void_p]),
    "pkv_append": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_route_name": (c_char_p, [c_int32]),
    "pkv_plan_size": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_void_p,
        ],
    ),
    "pkv_plan_build": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_plan_build_shared": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_plan_get_stats": (c_int32, [c_void_p, c_void_p, c_int32, c_void_p]),
    "pkv_policy_name": (c_char_p, [c_int32]),
    "pkv_policy_choose": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_int32,
            c_void_p,
            c_int32,
            c_int32,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_attention_run": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_merge_states": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_int64,
            c_int32,
            c_int32,
            c_void_p,
        ],
    ),
    "pkv_device_alloc": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "pkv_device_free": (None, [c_void_p, c_void_p]),
    "pkv_device_copy": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]),
    "pkv_device_synchronize": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_device_parts": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_void_p]),
    "pkv_device_plan_create": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
            c_void_p,
        ],
    ),
    "pkv_device_plan_destroy": (None, [c_void_p]),
    "pkv_device_plan_build": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p]),
    "pkv_device_plan_build_shared": (
        c_int32,
        [
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_device_plan_upload": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_device_plan_download": (
        c_int32,
        [
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_device_plan_fault": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_device_plan_set_overlap": (None, [c_void_p, c_int32]),
    "pkv_device_plan_set_fused": (None, [c_void_p, c_int32]),
    "pkv_device_attention": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_device_append": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_sched_order_name": (c_char_p, [c_int32]),
    "pkv_sched_policy_name": (c_char_p, [c_int32]),
    "pkv_sched_create": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_sched_destroy": (None, [c_void_p]),
    "pkv_sched_insert": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "pkv_sched_insert_before": (c_int32, [c_void_p, c_void_p, c_uint64, c_void_p]),
    "pkv_sched_best": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "pkv_sched_admit": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "pkv_sched_finish": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "pkv_sched_preempt": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "pkv_sched_return": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "pkv_sched_cancel": (c_int32, [c_void_p, c_uint64, c_void_p]),
    "pkv_sched_reward": (c_int32, [c_void_p, c_int32, c_double, c_void_p]),
    "pkv_sched_get_state": (c_int32, [c_void_p, c_uint64]),
    "pkv_sched_get_stats": (None, [c_void_p, c_void_p]),
    "pkv_sched_snapshot": (c_int32, [c_void_p, c_int32, c_void_p]),
    "pkv_sched_save_learner": (c_int32, [c_void_p, c_char_p, c_void_p]),
    "pkv_sched_load_learner": (c_int32, [c_void_p, c_char_p, c_void_p]),
    "pkv_sched_digests": (c_size_t, [c_void_p, c_void_p, c_size_t, c_size_t, c_int32]),
    "pkv_model_open": (c_int32, [c_void_p, c_char_p, c_void_p, c_void_p]),
    "pkv_model_open_random": (c_int32, [c_void_p, c_char_p, c_int32, c_void_p, c_void_p]),
    "pkv_model_close": (None, [c_void_p]),
    "pkv_model_get_info": (None, [c_void_p, c_void_p]),
    "pkv_model_is_end": (c_int32, [c_void_p, c_int32]),
    "pkv_model_inspect": (c_int32, [c_char_p, c_void_p, c_void_p, c_void_p]),
    "pkv_tokenize": (
        c_int32,
        [
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_char_p,
            c_size_t,
            c_uint32,
            c_void_p,
        ],
    ),
    "pkv_token_text": (c_int32, [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "pkv_chat_tokenize": (
        c_int32,
        [
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_void_p,
            c_size_t,
            c_int32,
            c_void_p,
        ],
    ),
    "pkv_chat_tokenize_json": (
        c_int32,
        [
            c_void_p,
            c_size_t,
            c_void_p,
            c_void_p,
            c_char_p,
            c_size_t,
            c_int32,
            c_void_p,
        ],
    ),
    "pkv_model_tool_style": (c_int32, [c_void_p]),
    "pkv_engine_create": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_engine_destroy": (None, [c_void_p]),
    "pkv_constraint_create_json": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_constraint_create_grammar": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_char_p,
            c_size_t,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_constraint_create_schema": (
        c_int32,
        [
            c_void_p,
            c_void_p,
            c_char_p,
            c_size_t,
            c_void_p,
            c_void_p,
        ],
    ),
    "pkv_constraint_longest": (c_int64, [c_void_p]),
    "pkv_constraint_retain": (c_void_p, [c_void_p]),
    "pkv_constraint_destroy": (None, [c_void_p]),
    "pkv_engine_submit": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "pkv_engine_cancel": (None, [c_void_p, c_int64]),
    "pkv_engine_pause": (None, [c_void_p, c_int64, c_int32]),
    "pkv_engine_step": (c_int32, [c_void_p, c_size_t, c_void_p, c_void_p, c_void_p]),
    "pkv_engine_pending": (c_int32, [c_void_p]),
    "pkv_engine_clear_cache": (None, [c_void_p]),
    "pkv_engine_save_cache": (c_int32, [c_void_p, c_void_p, c_char_p, c_void_p]),
    "pkv_engine_load_cache": (c_int32, [c_void_p, c_void_p, c_char_p, c_void_p]),
    "pkv_engine_get_stats": (None, [c_void_p, c_void_p]),
}
