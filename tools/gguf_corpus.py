#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of fuzz_gguf: small GGUF files, good ones and ones that are wrong in one place.

    tools/gguf_corpus.py fuzz/corpus/gguf

The same call gives the same files. What the fuzzer finds is kept beside them under other names.
"""
import os
import struct
import sys

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B",
           U64: "<Q", I64: "<q", F64: "<d"}


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    return text(value) if kind == STRING else struct.pack(FORMATS[kind], value)


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + scalar(kind, value)


def array(name, kind, values):
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(values))
    return head + b"".join(scalar(kind, v) for v in values)


def raw_key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name, extents, kind, offset, dims=None):
    count = len(extents) if dims is None else dims
    shape = b"".join(struct.pack("<Q", e) for e in extents)
    return text(name) + struct.pack("<I", count) + shape + struct.pack("<IQ", kind, offset)


def file(keys=(), tensors=(), data=0, version=3, align=32, key_count=None, tensor_count=None):
    counts = (len(tensors) if tensor_count is None else tensor_count,
              len(keys) if key_count is None else key_count)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + bytes(range(256)) * (data // 256) + bytes(data % 256)


def good():
    """Files that open."""
    arch = key("general.architecture", STRING, "llama")
    every = [key("a", U8, 1), key("b", I8, -1), key("c", U16, 2), key("d", I16, -2),
             key("e", U32, 3), key("f", I32, -3), key("g", F32, 0.5), key("h", BOOL, 1),
             key("i", STRING, "text"), key("j", U64, 4), key("k", I64, -4), key("l", F64, 1.5)]
    lists = [array("s", STRING, ["a", "", "ccc"]), array("n", I32, [1, -2, 3]),
             array("f", F32, [1.0, 2.0]), array("b", BOOL, [0, 1]), array("z", U64, [])]
    vocabulary = [arch, key("tokenizer.ggml.model", STRING, "gpt2"),
                  array("tokenizer.ggml.tokens", STRING, ["<|end|>", "a", "b", "ab"]),
                  array("tokenizer.ggml.token_type", I32, [3, 1, 1, 1]),
                  array("tokenizer.ggml.merges", STRING, ["a b"]),
                  key("tokenizer.ggml.eos_token_id", U32, 0)]
    blocks = [("q4_0", 2, 18), ("q4_1", 3, 20), ("q8_0", 8, 34)]
    mixed = [tensor("f", [4, 3], 0, 0), tensor("scalar", [], 0, 64),
             tensor("late", [32, 2], 8, 256), tensor("early", [32], 2, 128)]
    yield "empty", file()
    yield "every_type", file(every)
    yield "lists", file(lists)
    yield "vocabulary", file(vocabulary)
    yield "version_2", file([arch], version=2)
    yield "one_float", file([arch], [tensor("t", [4], 0, 0)], 16)
    yield "scalar", file([], [tensor("t", [], 0, 0)], 4)
    yield "four_dims", file([], [tensor("t", [2, 3, 2, 2], 24, 0)], 24)
    yield "mixed", file([arch], mixed, 256 + 68)
    yield "k_quant", file([], [tensor("t", [256, 2], 12, 0)], 288)
    yield "align_8", file([key("general.alignment", U32, 8)], [tensor("t", [2], 0, 8)], 16, align=8)
    yield "align_256", file([key("general.alignment", U32, 256)], [tensor("t", [2], 0, 0)], 8,
                            align=256)
    yield "shard", file([key("split.no", U16, 1), key("split.count", U16, 3)],
                        [tensor("t", [4], 0, 0)], 16)
    for name, kind, size in blocks:
        yield name, file([], [tensor("t", [32, 3], kind, 0)], 3 * size)
    yield "names", file([key(b"\x1b[31m\x00\xff", U8, 1)], [tensor(b"n\x00\x80", [1], 24, 0)], 1)


def bad():
    """Files that are wrong in one place."""
    huge = (1 << 64) - 1
    yield "magic_only", b"GGUF"
    yield "version_1", file(version=1)
    yield "big_endian", file(version=0x03000000)
    yield "many_tensors", file(tensor_count=0x0400000000000001)
    yield "many_keys", file(key_count=0x2AAAAAAAAAAAAAAB)
    yield "key_length", file([struct.pack("<Q", huge) + b"abc"])
    yield "string_length", file([raw_key("k", STRING, struct.pack("<Q", 1 << 63))])
    yield "array_count", file([raw_key("k", ARRAY, struct.pack("<IQ", STRING, 1 << 61))])
    yield "array_nested", file([raw_key("k", ARRAY, struct.pack("<IQ", ARRAY, 1))])
    yield "array_type", file([raw_key("k", ARRAY, struct.pack("<IQ", 255, 1))])
    yield "bool_2", file([raw_key("k", BOOL, b"\x02")])
    yield "key_twice", file([key("k", U8, 1), key("k", U8, 2)])
    yield "tensor_twice", file([], [tensor("t", [8], 0, 0), tensor("t", [8], 0, 32)], 64)
    yield "dims_5", file([], [tensor("t", [1] * 5, 0, 0)], 4)
    yield "dims_huge", file([], [tensor("t", [1], 0, 0, dims=0xFFFFFFFF)], 4)
    yield "extent_0", file([], [tensor("t", [4, 0], 0, 0)], 16)
    yield "size_wraps", file([], [tensor("t", [256, 1 << 55], 12, 0)], 144)
    yield "sum_wraps", file([], [tensor("a", [0x7FFFFFFFFFFFFFC0], 24, 0),
                                 tensor("b", [0x7FFFFFFFFFFFFFC0], 24, 0x7FFFFFFFFFFFFFC0)], 64)
    yield "type_removed", file([], [tensor("t", [32], 31, 0)], 32)
    yield "type_negative", file([], [tensor("t", [32], 0xFFFFFFFF, 0)], 32)
    yield "row_not_blocks", file([], [tensor("t", [16, 2], 2, 0)], 18)
    yield "behind_file", file([], [tensor("t", [16], 0, 32)], 64)
    yield "overlap", file([], [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)], 64)
    yield "unaligned", file([], [tensor("t", [1], 24, 17)], 64)
    yield "align_13", file([key("general.alignment", U32, 13)], [tensor("t", [2], 0, 0)], 8)
    yield "align_u64", file([key("general.alignment", U64, 32)], [tensor("t", [2], 0, 0)], 8)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: tools/gguf_corpus.py FOLDER")
    os.makedirs(sys.argv[1], exist_ok=True)
    for prefix, files in (("good_", good()), ("bad_", bad())):
        for name, content in files:
            with open(os.path.join(sys.argv[1], prefix + name), "wb") as out:
                out.write(content)


if __name__ == "__main__":
    main()
