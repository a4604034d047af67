# SPDX-License-Identifier: Apache-2.0
"""Decode attention straight on paged KV caches: the Python side of libpkv.

    import numpy as np, persistentkv as pkv

    decode = pkv.BatchDecode(kv_layout="HND")
    decode.plan(block_tables=tables, seq_lens=lengths, num_qo_heads=32, num_kv_heads=8,
                head_dim=128, page_size=16)
    out, lse = decode.run(q, (k_pages, v_pages), return_lse=True)
    print(decode.explain())

NumPy arrays and CPU tensors are computed on the CPU; CUDA tensors of torch on their device and its
current stream, when the library was built with CUDA. torch is not needed, and never imported first.
The examples in examples/python/ are complete programs.
"""

from ._engine_text import ToolCall
from ._lib import lib
from .batch import BatchAttention
from .cache import append, append_paged_kv_cache
from .decode import BatchDecode, BatchDecodeWithPagedKVCacheWrapper
from .engine import Choice, Completion, Engine, Piece, Token
from .errors import (
    DeviceError,
    InvalidArgument,
    NotSupported,
    OutOfMemory,
    OutOfRange,
    PkvError,
    WrongState,
)
from .executor import Executor, default_executor
from .merge import merge_state, merge_states
from .plans import Explanation
from .sched import Scheduler, digests

__version__ = lib.version

__all__ = [
    "BatchAttention",
    "BatchDecode",
    "BatchDecodeWithPagedKVCacheWrapper",
    "Choice",
    "Completion",
    "DeviceError",
    "Engine",
    "Executor",
    "Explanation",
    "InvalidArgument",
    "NotSupported",
    "OutOfMemory",
    "OutOfRange",
    "Piece",
    "PkvError",
    "Scheduler",
    "Token",
    "ToolCall",
    "WrongState",
    "append",
    "append_paged_kv_cache",
    "default_executor",
    "digests",
    "lib",
    "merge_state",
    "merge_states",
]
