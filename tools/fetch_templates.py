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
import subprocess
import sys

ROOT = os.path.normpath(os.path.join(os.path.abspath(__file__), "../.."))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import compare_llamacpp  # noqa: E402
from gen_template_golden import GOLDEN, fnv, read  # noqa: E402

FOLDER = os.path.join(ROOT, ".cache/templates")
MODEL = os.path.join(ROOT, ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


def of_model():
    """The test model's template, as our own program shows it."""
    words = [os.path.join(ROOT, "build/release/pkv"), "inspect", "--full", "--json", MODEL]
    if not (os.access(words[0], os.X_OK) and os.path.isfile(MODEL)):
        return None
    shown = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    keys = {entry["name"]: entry["value"] for entry in shown["keys"]}
    return keys.get("tokenizer.chat_template")


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
