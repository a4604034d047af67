#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizer.json files of each kind, and the ids that the reference package gives.

    python3 tests/tools/make_tokenizers.py

Needs tokenizers (PyPI). Writes tests/data/tokenizers/<kind>/tokenizer.json, trained on made-up
text, and tests/golden/tokenizer_json.json: 500 strings, and for each kind the ids of all of them
with special tokens parsed and added. The same numbers come out each time.
"""
import json
import os
import random
import shutil

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers import processors, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDERS = os.path.join(HERE, "..", "data", "tokenizers")
GOLDEN = os.path.join(HERE, "..", "golden", "tokenizer_json.json")

WORDS = """the of and to in is you that it he was for on are as with his they at be this have from
or had by but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him into time has look two
more write go see number no way could people my than first water been call who oil its now find long
down day did get come made may part over new sound take only little work know place year live back
over und nicht Straße für über größer Köln élève garçon où naïve façade señor mañana ação coração
привет мир который слово работа Москва человек 日本 東京 こんにちは 世界 ありがとう 中文 你好 模型 한국어
안녕하세요 मराठी नमस्ते שלום مرحبا ไทย Ελληνικά Ωμέγα được không Việt 🙂 👍🏽 👨‍👩‍👧 ½ ² ٣ Ⅷ""".split()
GLUE = [" ", " ", " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n ", "\xa0", "\u3000", "-",
        "_", "/", ".", ", ", "; ", "'", "\"", "(", ")", "...", "!?", "\u2019", "\u2581"]
ODD = ["don't", "WE'LL", "it's", "I'M", "they've", "you'd", "'s", "'\u017f", "x=1;",
       "{\"a\": [1, 2]}", "0123456789", "3.14159", "1,000,000", "2025-11-30",
       "http://a.b/c?d=e&f", "def f(x):", "    return x", "e\u0301le\u0300ve",
       "A\u030angstro\u0308m", "\u1112\u1161\u11ab\u1100\u116e\u11a8", "q\u0323\u0307",
       "q\u0307\u0323", "\u212b", "\u0958", "\ufb01", "\u1e9b\u0323", "a\u200db", "<s>", "</s>",
       "<|user|>", "<|end|>", "<tool>", "<tools>", "<unk>", "<0x0A>", "\x01", "\x7f",
       "\U0001f468\u200d\U0001f4bb", "\ufffd", "\ufeff", "\xc4\xd6\xdc\xdf", "\u02bcn",
       "\u0130i\u0307", "\ufdfa", "\U0001d518\U0001d52b\U0001d526", "\u0301x"]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")


def text(rng, least, most):
    out = []
    for _ in range(rng.randint(least, most)):
        r = rng.random()
        out.append(rng.choice(ODD) if r < 0.2 else rng.choice(WORDS))
        if r < 0.05:
            out[-1] = out[-1].upper()
        out.append(rng.choice(GLUE) if rng.random() < 0.5 else " ")
    return "".join(out)


def strings():
    rng = random.Random(20251130)
    found = ["", " ", "  ", "\n", "a", " a", "a ", "\u2581", " \u2581a", "\u0301", "<s>", "<s> a",
             "a<s>", "<tool> <tool>", "<tool>a", "\r", "\t\t", "0", "   9",
             "\U0001f642\U0001f642\U0001f642", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
             "                    "]
    while len(found) < 500:
        s = text(rng, 1, 7)
        if rng.random() < 0.5:
            s = s.strip(" ")
        if rng.random() < 0.1:
            s = " " * rng.randint(1, 4) + s
        found.append(s)
    return found


def corpus():
    rng = random.Random(7)
    return [" ".join(rng.choice(WORDS) for _ in range(30)) for _ in range(400)] + [
        text(rng, 5, 20).replace("<", "") for _ in range(200)]


def by_bytes(split, normalizer=None, ignore_merges=False, bos=None):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = split
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=620, show_progress=False, initial_alphabet=pre.ByteLevel.alphabet()))
    t.add_special_tokens(["<s>", "</s>", "<|user|>", "<|end|>"])
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tools>", normalized=False)])
    plain = processors.ByteLevel(trim_offsets=False)
    t.post_processor = plain
    if bos:
        t.post_processor = processors.Sequence([plain, processors.TemplateProcessing(
            single=bos + " $A", pair=bos + " $A " + bos + " $B:1",
            special_tokens=[(bos, t.token_to_id(bos))])])
    return t


def by_characters(normalizer, split, fallback=True, ends="<s>", fuse=True):
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = ["<0x%02X>" % i for i in range(256)] if fallback else []
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse, byte_fallback=fallback))
    if normalizer:
        t.normalizer = normalizer
    # Trained on words, as SentencePiece's merges come about; the model's own cuts are set after.
    t.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    t.train_from_iterator([s.replace("<", "") for s in corpus()], trainers.BpeTrainer(
        vocab_size=640 + len(bytes_), show_progress=False, special_tokens=special + bytes_,
        limit_alphabet=150))
    whole = json.loads(t.to_str())
    whole["pre_tokenizer"] = json.loads(split.__getstate__()) if split else None
    # Byte names are ordinary vocabulary, not added tokens.
    whole["added_tokens"] = [a for a in whole["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(whole))
    t.add_special_tokens([AddedToken("<|user|>", normalized=False, special=True),
                          AddedToken("<|end|>", normalized=False, special=True)])
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tools>", normalized=False),
                  AddedToken("\n\n", normalized=False)])
    items = [(s, t.token_to_id(s)) for s in ("<s>", "</s>")]
    single = {"<s>": "<s> $A", "both": "<s> $A </s>", "": "$A"}[ends]
    t.post_processor = processors.TemplateProcessing(
        single=single, pair="$A $B:1", special_tokens=items)
    return t


def kinds():
    under = normalizers.Replace(" ", "\u2581")
    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), under])
    return {
        "gpt2": by_bytes(pre.ByteLevel(add_prefix_space=False)),
        "smollm": by_bytes(pre.Sequence([pre.Digits(individual_digits=True),
                                         pre.ByteLevel(add_prefix_space=False)])),
        "llama3": by_bytes(pre.Sequence([pre.Split(Regex(LLAMA3), "isolated"),
                                         pre.ByteLevel(add_prefix_space=False, use_regex=False)]),
                           ignore_merges=True, bos="<s>"),
        "qwen2": by_bytes(pre.Sequence([pre.Split(Regex(QWEN2), "isolated"),
                                        pre.ByteLevel(add_prefix_space=False, use_regex=False)]),
                          normalizer=normalizers.NFC()),
        "llama2": by_characters(prepend, None),
        "gemma": by_characters(under, pre.Split(" ", "merged_with_previous"), fuse=False),
        "mistral": by_characters(None, pre.Metaspace(prepend_scheme="first", split=False),
                                 ends="both"),
        "metaspace": by_characters(None, pre.Metaspace(prepend_scheme="always", split=True),
                                   fallback=False, ends=""),
    }


def main():
    shutil.rmtree(FOLDERS, ignore_errors=True)
    found = strings()
    golden = {"strings": found, "ids": {}}
    for name, t in kinds().items():
        os.makedirs(os.path.join(FOLDERS, name))
        with open(os.path.join(FOLDERS, name, "tokenizer.json"), "w") as f:
            f.write(t.to_str(pretty=False) + "\n")
        golden["ids"][name] = [t.encode(s).ids for s in found]
    with open(GOLDEN, "w") as f:
        json.dump(golden, f, separators=(",", ":"), ensure_ascii=True)
        f.write("\n")


main()
