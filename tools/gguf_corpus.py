#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes seeds of the fuzz targets: small GGUF files, good ones and ones wrong in one place.

    tools/gguf_corpus.py gguf fuzz/corpus/gguf      files of all kinds
    tools/gguf_corpus.py model fuzz/corpus/model    whole models of a few KB

The same call gives the same files. What the fuzzer finds is kept beside them under other names.
"""
import os
import random
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
    spaced = ["<unk>", "<s>", "<0x0A>", "\u2581", "a", "\u2581a", "ab", "\n\n"]
    scores = [arch, key("tokenizer.ggml.model", STRING, "llama"),
              array("tokenizer.ggml.tokens", STRING, spaced),
              array("tokenizer.ggml.scores", F32, [0.0, 0.0, 0.0, -9.0, -8.0, -1.0, -2.0, -3.0]),
              array("tokenizer.ggml.token_type", I32, [2, 3, 6, 1, 1, 1, 1, 4]),
              key("tokenizer.ggml.bos_token_id", U32, 1),
              key("tokenizer.ggml.unknown_token_id", U32, 0)]
    blocks = [("q4_0", 2, 18), ("q4_1", 3, 20), ("q8_0", 8, 34)]
    mixed = [tensor("f", [4, 3], 0, 0), tensor("scalar", [], 0, 64),
             tensor("late", [32, 2], 8, 256), tensor("early", [32], 2, 128)]
    yield "empty", file()
    yield "every_type", file(every)
    yield "lists", file(lists)
    yield "vocabulary", file(vocabulary)
    yield "scores", file(scores)
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


# Type number: (elements of a block, bytes of a block).
WEIGHTS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
           12: (256, 144), 13: (256, 176), 14: (256, 210), 30: (1, 2)}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "\u0120", "\u010a",
          "ab", "d"]


def noise(kind, elements, rng):
    """Weights of about +-0.25 as the file has them."""
    block, size = WEIGHTS[kind]
    out = b""
    for _ in range(elements // block):
        value = rng.uniform(-0.25, 0.25)
        if kind == 0:
            out += struct.pack("<f", value)
        elif kind == 1:
            out += struct.pack("<e", value)
        elif kind == 30:
            out += struct.pack("<f", value)[2:]
        elif kind == 14:
            scales = bytes(rng.randrange(256) for _ in range(16))
            out += rng.randbytes(192) + scales + struct.pack("<e", 0.25 / 4096)
        elif kind in (12, 13):
            out += struct.pack("<ee", 0.25 / 1024, 0.25 / 64) + rng.randbytes(size - 4)
        else:
            scales = struct.pack("<ee", 0.25 / (127 if kind == 8 else 16), -0.25)
            scales = scales if kind in (3, 7) else scales[:2]
            out += scales + rng.randbytes(size - len(scales))
    return out


def model(kind, width=32, heads=2, kv_heads=1, ffn=32, layers=1, vocab=10, extra=(), tied=True,
          dim=None, arch="llama"):
    """A llama model with a tokenizer; norms are ones. Rows that are no whole blocks of `kind` are
    Q8_0."""
    rng = random.Random(kind)
    extra = [*extra, *([key(f"{arch}.attention.key_length", U32, dim)] if dim else [])]
    dim = dim or width // heads
    keys = [key("general.architecture", STRING, arch), key(f"{arch}.block_count", U32, layers),
            key(f"{arch}.embedding_length", U32, width),
            key(f"{arch}.feed_forward_length", U32, ffn),
            key(f"{arch}.context_length", U32, 64), key(f"{arch}.attention.head_count", U32, heads),
            key(f"{arch}.attention.head_count_kv", U32, kv_heads),
            key(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5),
            key("tokenizer.ggml.model", STRING, "gpt2"),
            key("tokenizer.ggml.pre", STRING, "smollm"),
            array("tokenizer.ggml.tokens", STRING,
                  [TOKENS[i] if i < len(TOKENS) else f"u{i}" for i in range(vocab)]),
            array("tokenizer.ggml.token_type", I32,
                  [3 if i < 3 else 1 if i < len(TOKENS) else 5 for i in range(vocab)]),
            array("tokenizer.ggml.merges", STRING, ["a b"]),
            key("tokenizer.ggml.eos_token_id", U32, 2), *extra]
    shapes = [("token_embd.weight", width, vocab), ("output_norm.weight", width, 0)]
    shapes += [] if tied else [("output.weight", width, vocab)]
    for i in range(layers):
        shapes += [(f"blk.{i}.{name}.weight", inputs, outputs) for name, inputs, outputs in (
            ("attn_norm", width, 0), ("attn_q", width, dim * heads),
            ("attn_k", width, dim * kv_heads), ("attn_v", width, dim * kv_heads),
            ("attn_output", dim * heads, width), ("ffn_norm", width, 0), ("ffn_gate", width, ffn),
            ("ffn_up", width, ffn), ("ffn_down", ffn, width))]
        if arch == "gemma3":
            shapes += [(f"blk.{i}.{name}.weight", size, 0) for name, size in (
                ("attn_q_norm", dim), ("attn_k_norm", dim), ("post_attention_norm", width),
                ("post_ffw_norm", width))]
    table, data = [], b""
    for name, inputs, outputs in shapes:
        data += bytes(-len(data) % 32)
        extents = [inputs, outputs] if outputs else [inputs]
        used = kind if inputs % WEIGHTS[kind][0] == 0 else 8
        table.append(tensor(name, extents, used if outputs else 0, len(data)))
        ones = struct.pack("<f", 1.0) * inputs
        data += noise(used, inputs * outputs, rng) if outputs else ones
    return file(keys, table) + data


def models():
    """Whole models: they open and run."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"
    yield "f32", model(0, width=8, heads=1, ffn=8)
    yield "f16", model(1, width=16, ffn=8, tied=False)
    yield "bf16", model(30, width=24, heads=3, kv_heads=3, ffn=8, vocab=12)
    yield "q4_0", model(2)
    yield "q4_1", model(3, layers=2)
    yield "q5_0", model(6)
    yield "q5_1", model(7, heads=4, kv_heads=2)
    yield "q8_0", model(8, tied=False)
    for name, kind in (("q4_k", 12), ("q5_k", 13), ("q6_k", 14)):
        yield name, model(kind, width=256, heads=1, ffn=32, dim=32)
    yield "gemma3", model(8, layers=7, arch="gemma3",
                          extra=[key("gemma3.attention.sliding_window", U32, 32)])
    yield "scaled", model(0, width=8, heads=1, ffn=8,
                          extra=[key("llama.rope.scaling.type", STRING, "linear"),
                                 key("llama.rope.scaling.factor", F32, 4.0)])
    yield "chat", model(0, width=8, heads=1, ffn=8,
                        extra=[key("tokenizer.chat_template", STRING, template),
                               key("tokenizer.ggml.bos_token_id", U32, 1),
                               key("tokenizer.ggml.add_bos_token", BOOL, 1)])


def main():
    kinds = {"gguf": (("good_", good), ("bad_", bad)), "model": (("good_", models),)}
    if len(sys.argv) != 3 or sys.argv[1] not in kinds:
        sys.exit("usage: tools/gguf_corpus.py gguf|model FOLDER")
    os.makedirs(sys.argv[2], exist_ok=True)
    for prefix, files in kinds[sys.argv[1]]:
        for name, content in files():
            with open(os.path.join(sys.argv[2], prefix + name), "wb") as out:
                out.write(content)


if __name__ == "__main__":
    main()
