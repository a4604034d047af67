#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts the chat templates that tests/golden/chat_templates.json knows into .cache/templates.

    tools/fetch_templates.py

They are their makers', so none is in the tree. Most lie in the Python source package of llama.cpp
that bench/compare_llamacpp.py builds its peer from (37 MB, fetched once), the test model's in its
GGUF file. Each is checked by the hash in the golden file; what is found nowhere is named.
"""

import json
import os
import struct
import sys

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import compare_llamacpp  # noqa: E402
from gen_template_golden import GOLDEN, fnv, read  # noqa: E402

FOLDER = os.path.join(ROOT, ".cache/templates")
MODEL = os.path.join(ROOT, ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def of_model():
    """The test model's template, from its metadata: works before anything is built."""
    if not os.path.isfile(MODEL):
        return None
    with open(MODEL, "rb") as file:

        def number(form):
            return struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]

        def string():
            return file.read(number("Q"))

        def skip(kind):
            if kind == STRING:
                string()
            elif kind == ARRAY:
                inner, count = number("I"), number("Q")
                if inner in SIZES:
                    file.seek(SIZES[inner] * count, os.SEEK_CUR)
                else:
                    for _ in range(count):
                        skip(inner)
            else:
                file.seek(SIZES[kind], os.SEEK_CUR)

        file.seek(16)  # magic, version, tensors
        for _ in range(number("Q")):
            name, kind = string(), number("I")
            if name == b"tokenizer.chat_template" and kind == STRING:
                return string().decode()
            skip(kind)
    return None


def main():
    cache = os.path.join(ROOT, ".cache/llama.cpp")
    os.makedirs(cache, exist_ok=True)
    os.makedirs(FOLDER, exist_ok=True)
    source = os.path.join(compare_llamacpp.fetch_source(cache), "models/templates")
    missing = []
    for entry in json.loads(read(GOLDEN))["shipped"]:
        name = entry["name"]
        path = os.path.join(source, name + ".jinja")
        text = read(path) if os.path.isfile(path) else None
        if name.startswith("SmolLM2-135M"):
            text = of_model()
        if text is None or fnv(text) != entry["hash"]:
            missing.append(name)
            continue
        with open(os.path.join(FOLDER, name + ".jinja"), "w", encoding="utf-8", newline="") as file:
            file.write(text)
    print(f"{FOLDER}: all but {', '.join(missing) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
