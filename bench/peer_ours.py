# SPDX-License-Identifier: Apache-2.0
"""libpkv and the null read as contenders of compare_peers.py, through ctypes.

The structs come from python/persistentkv/_abi.py, which is written from the public headers.
"""

import ctypes
import importlib.util
import os

import numpy as np
import torch
from peer_cells import HEAD_DIM, KV_HEADS, PAGE, QUERY_HEADS
from peer_kernels import Contender

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))


def load_abi(path=None):
    path = path or os.path.join(ROOT, "python/persistentkv/_abi.py")
    spec = importlib.util.spec_from_file_location("pkv_abi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stream():
    return torch.cuda.current_stream().cuda_stream


class Library:
    """One executor on the current device. call() raises RuntimeError with the library's text."""

    def __init__(self, path, abi=None, segment_cost=0):
        self.abi, self.segment_cost = load_abi(abi), segment_cost
        self.dll = ctypes.CDLL(path)
        for name, (result, arguments) in self.abi.FUNCTIONS.items():
            if function := getattr(self.dll, name, None):
                function.restype, function.argtypes = result, arguments
        self.error = self.abi.Error()
        options = self.sized(self.abi.ExecutorOptions, device=self.abi.DEVICE_CUDA)
        self.executor = ctypes.c_void_p()
        self.call("pkv_executor_create", ctypes.byref(self.executor), ctypes.byref(options))

    def sized(self, kind, **fields):
        value = kind(**fields)
        value.struct_size = ctypes.sizeof(kind)
        return value

    def call(self, name, *arguments):
        if getattr(self.dll, name)(*arguments, ctypes.byref(self.error)) != self.abi.OK:
            raise RuntimeError(f"{name}: {self.error.text.decode()}")

    @property
    def version(self):
        return self.dll.pkv_version().decode()


def dtype_of(abi, batch):
    return abi.DTYPE_F16 if batch.dtype == torch.float16 else abi.DTYPE_BF16


def cache_of(contender, library, layer):
    """pkv_cache of a layer, in the contender's layout."""
    k, v = contender.pair(layer)
    page, first, second, _ = k.stride()
    token, head = (first, second) if contender.layout == "nhd" else (second, first)
    return library.sized(
        library.abi.Cache, dtype=dtype_of(library.abi, contender.batch), k=k.data_ptr(),
        v=v.data_ptr(), k_page_stride=page, k_token_stride=token, k_head_stride=head,
        v_page_stride=page, v_token_stride=token, v_head_stride=head,
        pages=contender.batch.pages, page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
    )  # fmt: skip


class Ours(Contender):
    """A route of libpkv with the plan made on the device, for all layers of the batch."""

    plan_in_graph = True

    def __init__(self, name, batch, layout, library, route):
        super().__init__(name, batch, layout)
        abi, self.library, self.plan_handle = library.abi, library, ctypes.c_void_p()
        dtype = dtype_of(abi, batch)
        shape = library.sized(abi.Shape, query_heads=QUERY_HEADS, kv_heads=KV_HEADS,
                              head_dim=HEAD_DIM, page_tokens=PAGE, q_len=1)  # fmt: skip
        options = library.sized(abi.PlanOptions, route=getattr(abi, "ROUTE_" + route.upper()))
        if route == "balanced":
            options.segment_cost = library.segment_cost
        self.shape, self.options = shape, options
        library.call("pkv_device_plan_create", ctypes.byref(self.plan_handle), library.executor,
                     ctypes.byref(shape), ctypes.byref(options), dtype, batch.rows,
                     batch.cell.longest)  # fmt: skip
        self.overlap(True)  # as the layers of a step
        self.layers = [self._arguments(layer, dtype) for layer in range(batch.layers)]
        self.lens = batch.seq_len.data_ptr()

    def _arguments(self, layer, dtype):
        b, library = self.batch, self.library
        cache = cache_of(self, library, layer)
        arguments = library.sized(
            library.abi.AttentionArgs, cache=ctypes.addressof(cache), max_pages=b.width,
            block_table=b.bare_table.data_ptr(), q=b.q.data_ptr(), q_dtype=dtype,
            out=self.out.data_ptr(), out_dtype=dtype,
        )  # fmt: skip
        return arguments, cache

    def plan(self):
        self.library.call("pkv_device_plan_build", self.plan_handle, self.batch.rows, self.lens,
                          stream())  # fmt: skip

    def run(self, layer):
        self.library.call("pkv_device_attention", self.library.executor, self.plan_handle,
                          ctypes.byref(self.layers[layer][0]), stream())  # fmt: skip

    def overlap(self, on):
        """Whether launches from now on may begin before the one ahead of them has ended."""
        self.library.dll.pkv_device_plan_set_overlap(self.plan_handle, 2 * int(on))

    def close(self):
        self.library.dll.pkv_device_plan_destroy(self.plan_handle)
        self.plan_handle = None


class OursShared(Ours):
    """The route shared: what rows share is found by the device in the block table, each step."""

    def __init__(self, name, batch, layout, library, route):
        super().__init__(name, batch, layout, library, route)
        self.sharing = library.sized(library.abi.Sharing, block_table=batch.bare_table.data_ptr(),
                                     max_pages=batch.width)  # fmt: skip

    def plan(self):
        self.library.call("pkv_device_plan_build_shared", self.plan_handle, self.batch.rows,
                          self.lens, ctypes.byref(self.sharing), stream())  # fmt: skip


class NullRead(Contender):
    """What every row (every node, where rows share) owns, read once through a table by the
    benchmark's own kernel; `waves` blocks a multiprocessor. Its out means nothing."""

    LAYOUTS = {"hnd": 0, "nhd": 1}

    def __init__(self, name, batch, layout, library, path, waves):
        super().__init__(name, batch, layout)
        number, address = ctypes.c_int32, ctypes.c_void_p
        self.function = ctypes.CDLL(path).pkv_meter_null_read
        self.function.argtypes = [address, address, address, ctypes.c_int64, address, address,
                                  number, ctypes.c_int64, *[number] * 5, address, number,
                                  address]  # fmt: skip
        pages = [mine for level in batch.node_pages for mine in level]
        lens = [tokens for level in batch.cell.levels for _, _, tokens in level]
        table = np.full((len(pages), max(len(mine) for mine in pages)), -1, np.int32)
        for row, mine in enumerate(pages):
            table[row, : len(mine)] = mine
        starts = np.cumsum([0] + [len(mine) for mine in pages]).astype(np.int32)
        arrays = (table, np.array(lens, np.int32), starts, np.zeros(1, np.int32))
        self.tensors = [torch.from_numpy(x).to(batch.device) for x in arrays]
        table_at, lens_at, starts_at, sink_at = (x.data_ptr() for x in self.tensors)
        self.arguments = (
            table_at, table.shape[1], lens_at, starts_at, len(pages), int(starts[-1]), KV_HEADS,
            HEAD_DIM, PAGE, self.LAYOUTS[layout], dtype_of(library.abi, batch), sink_at, waves,
        )  # fmt: skip

    def run(self, layer):
        k, v = self.pair(layer)
        status = self.function(k.data_ptr(), v.data_ptr(), *self.arguments, stream())
        if status:
            raise RuntimeError(f"null read: CUDA error {status}")
